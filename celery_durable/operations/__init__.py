"""Operations on instances from outside a pass: create, send events, control, emit, answer, delete.

Each checks its input, runs one transaction, and wakes the workers. Without the database it raises StoreUnavailable. If
the broker is down, work is delayed, but no call fails (LAW 1).
"""
