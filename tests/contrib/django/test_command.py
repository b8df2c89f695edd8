"""``manage.py durable``: the command line in a Django project."""

from __future__ import annotations

from typing import Any

import pytest

from celery_durable.contrib.django.management.commands.durable import Command
from celery_durable.testing import DurableHarness
from tests.contrib.django.site import site, users

__all__ = ["site", "users"]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("arguments", "usage", "example"),
    [
        ([], "manage.py durable [OPTIONS] COMMAND [ARGS]...", "python manage.py durable show order order-42"),
        (["ls"], "manage.py durable ls [OPTIONS]", "python manage.py durable ls -w order"),
    ],
)
def test_help_shows_the_command_that_the_user_types(
    site: DurableHarness, arguments: list[str], usage: str, example: str, capsys: pytest.CaptureFixture[Any]
) -> None:
    with pytest.raises(SystemExit):
        Command().run_from_argv(["manage.py", "durable", *arguments, "--help"])
    shown = capsys.readouterr().out
    assert f"Usage: {usage}\n" in shown
    assert f" {example}\n" in shown
    assert "celery -A" not in shown
    assert "durable_database_url" not in shown
