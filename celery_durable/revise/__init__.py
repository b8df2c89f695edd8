"""Operations that change what a run has recorded: restart, rewind, fork, retry, skip a step or set its result.

They use the core, and nothing in the core uses them.
"""
