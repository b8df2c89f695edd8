"""``manage.py durable VERB``: the commands of ``celery -A proj durable`` in a Django project."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from django.core.management.base import BaseCommand

from celery_durable.contrib.django import wiring


class Command(BaseCommand):
    """Hands its arguments over to the command line of this package."""

    help = "Commands for durable workflows: ls, show, explain, retry, send-event and others."
    requires_system_checks = ()

    def run_from_argv(self, argv: list[str]) -> None:
        """Run the command line. The commands read their options by themselves."""
        _load_group().main(args=argv[2:], prog_name=f"{argv[0]} durable", obj=_Context())

    def handle(self, *args: Any, **_: Any) -> None:
        """Serve ``call_command("durable", ...)``."""
        _load_group().main(args=list(args), prog_name="manage.py durable", obj=_Context(), standalone_mode=False)


def _load_group() -> Any:
    """Load the commands as `celery` does: they are a plugin of its command line."""
    [entry] = entry_points(group="celery.commands", name="durable")
    return entry.load()


class _Context:
    """What ``celery`` passes to the commands of a plugin. ``name`` is what the user types before the verb."""

    name = "python manage.py durable"
    no_color = False

    def __init__(self) -> None:
        self.app = wiring.find_app()
