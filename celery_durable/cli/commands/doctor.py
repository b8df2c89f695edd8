"""`doctor`: finds problems of an installation and says how to fix them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from celery_durable import doctor as checks
from celery_durable.cli.backends.stored import attached_durable, stored_durable
from celery_durable.cli.command import Output, command, json_option, output_option
from celery_durable.cli.errors import REFUSED, app_name
from celery_durable.cli.inputs import Context
from celery_durable.cli.output.console import Styled
from celery_durable.errors import DurableError
from celery_durable.testing import databases

_STYLES = {"OK": "green", "WARN": "yellow", "FAIL": "red"}


@command("doctor", "doctor --json", options=[output_option, json_option])
def doctor(ctx: Context, console: Output) -> None:
    """Check configuration, servers and processes.

    Use it after a deploy, and when instances do not move. It changes nothing. Each finding is OK, WARN or FAIL, and
    says how to fix the problem. The exit code is 1 if there is a FAIL. In a pipe: level, subject, sentence, remedy.
    """
    found: list[checks.Finding] = []
    for each in _check(ctx):
        finding = dataclasses.replace(each, remedy=each.remedy.replace("<your app>", app_name(ctx)))
        found.append(finding)
        if not console.is_json:  # as it is found: a check may take seconds
            _print(console, finding)
    if console.is_json:
        console.print_json([dataclasses.asdict(each) for each in found])
    if any(each.level is checks.Level.FAIL for each in found):
        ctx.exit(REFUSED)


def _check(ctx: Context) -> Iterator[checks.Finding]:
    try:
        durable = attached_durable(ctx)
        durable.app.loader.import_default_modules()
        if databases.DEV_FILE.exists() and databases.is_without_store(durable):
            durable = stored_durable(ctx)
    except DurableError as exc:  # settings are validated at first use
        yield checks.Finding(checks.Level.FAIL, "configuration", str(exc), "Set it as the message says.")
    else:
        yield from checks.check_all(durable)


def _print(console: Output, finding: checks.Finding) -> None:
    level, about = finding.level, finding.about
    if not console.is_for_people:
        console.print_record(level, about, finding.sentence, finding.remedy)
        return
    console.print_line(Styled(level, _STYLES[level], 4), Styled(about, "bold", 18), finding.sentence)
    if finding.remedy:
        console.print_line(Styled(f"Fix: {finding.remedy}", "dim"), indent=7)
