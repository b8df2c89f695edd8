"""Steps whose work is done elsewhere: by Celery tasks (`step.task`, `step.map`) and child workflows (`step.child`)."""
