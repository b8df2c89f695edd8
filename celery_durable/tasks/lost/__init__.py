"""Tasks of steps that were lost with a worker, a machine or a queue: found without a write per task, and sent again."""
