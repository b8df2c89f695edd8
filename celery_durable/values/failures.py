"""What an exception of an author's code means: its name and text, and whether another attempt may follow (LAW 9).

Any exception counts, not only an `Exception`; `tasks.stopping` sorts out what stops a process from outside.
"""

from __future__ import annotations

from celery_durable.errors import NonRetryableError, ValueRefused


def describe_error(error: BaseException) -> tuple[str, str]:
    """The name and the text by which it is recorded."""
    return error.name if isinstance(error, NonRetryableError) else type(error).__name__, get_error_text(error)


def get_error_text(error: BaseException) -> str:
    """``str(error)``, or a note that there is none."""
    try:
        return str(error)
    except Exception as exc:  # noqa: BLE001  # an error whose text fails is an error all the same
        return f"(its __str__ raised {type(exc).__name__})"


def forbids_retry(error: BaseException) -> bool:
    """Whether another attempt is no use: it says so, it is called so, or it is a value that we refuse."""
    return isinstance(error, (NonRetryableError, ValueRefused)) or type(error).__name__ == NonRetryableError.__name__
