"""The rows of runs: claims, steps, map items, messages, and what is due."""
