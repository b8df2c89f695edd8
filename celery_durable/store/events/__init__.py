"""The events of runs: sent events, emissions to topics, answers of tasks and children."""
