"""What is recorded of an exception in user code: its name and text, and whether another attempt may follow (LAW 9).

This includes exceptions that are not an `Exception`. `tasks.stopping` recognizes those that stop the process.
"""

from __future__ import annotations

from celery_durable.errors import DefinitionInvalid, NonRetryableError, ValueRefused


def describe_error(error: BaseException) -> tuple[str, str]:
    """Return the name and the text that are recorded for an error."""
    return error.name if isinstance(error, NonRetryableError) else type(error).__name__, get_error_text(error)


def get_error_text(error: BaseException) -> str:
    """Return ``str(error)``, or a note if its ``__str__`` raises."""
    try:
        return str(error)
    except Exception as exc:  # noqa: BLE001  # the error is recorded even if its text cannot be built
        return f"(its __str__ raised {type(exc).__name__})"


def forbids_retry(error: BaseException) -> bool:
    """Return whether no further attempt is made after this error.

    True for NonRetryableError, for any class of that name, for ValueRefused and for DefinitionInvalid.
    """
    is_final = isinstance(error, (NonRetryableError, ValueRefused, DefinitionInvalid))
    return is_final or type(error).__name__ == NonRetryableError.__name__
