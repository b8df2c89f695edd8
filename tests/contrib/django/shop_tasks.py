"""Tasks of Django, for the tests of the backend."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import django

task = import_module("django.tasks" if django.VERSION >= (6, 0) else "django_tasks").task


@task()
def add(a: int, *, b: int = 0) -> dict[str, int]:
    return {"sum": a + b}


@task(queue_name="media")
async def resize(size: int) -> int:
    return size


@task(takes_context=True)
def show_context(context: Any) -> list[Any]:
    return [context.task_result.id, context.attempt, str(context.task_result.status)]


@task()
def fail(how: str) -> None:
    raise {"ValueError": ValueError, "SystemExit": SystemExit}[how]("no paper")


@task()
def fail_in_lines() -> None:
    raise ValueError("no paper \x00\nFor more, see the manual.")


@task(takes_context=True)
def show_enqueued_at(context: Any) -> str:
    return str(context.task_result.enqueued_at.isoformat())


@task()
def return_a_function() -> Any:
    return lambda: None


@task(backend="priorities", priority=100)
def urgent() -> None:
    """Nothing to do."""
