"""The search for tasks that were lost with a worker, a machine or a queue; it finds them without a write per task."""
