"""`doctor`: finds problems of an installation and says how to fix them."""

from __future__ import annotations

import dataclasses

from celery_durable import doctor as checks
from celery_durable.cli.backends.stored import attached_durable
from celery_durable.cli.command import Output, command, json_option, output_option
from celery_durable.cli.errors import REFUSED, app_name
from celery_durable.cli.inputs import Context
from celery_durable.cli.output.console import Styled
from celery_durable.errors import DurableError

_STYLES = {"OK": "green", "WARN": "yellow", "FAIL": "red"}


@command("doctor", "doctor --json", options=[output_option, json_option])
def doctor(ctx: Context, console: Output) -> None:
    """Check configuration, servers and processes.

    Use it after a deploy, and when instances do not move. It changes nothing. Each finding is OK, WARN or FAIL, and
    says how to fix the problem. The exit code is 1 if there is a FAIL. In a pipe: level, subject, sentence, remedy.
    """
    try:
        durable = attached_durable(ctx)
        durable.app.loader.import_default_modules()
    except DurableError as exc:  # settings are validated at first use
        findings = [checks.Finding(checks.Level.FAIL, "configuration", str(exc), "Set it as the message says.")]
    else:
        findings = list(checks.check_all(durable))
    findings = [dataclasses.replace(each, remedy=each.remedy.replace("<your app>", app_name(ctx))) for each in findings]
    if console.is_json:
        console.print_json([dataclasses.asdict(each) for each in findings])
    for each in findings if not console.is_json else []:
        if not console.is_for_people:
            console.print_record(each.level, each.about, each.sentence, each.remedy)
            continue
        console.print_line(Styled(each.level, _STYLES[each.level], 4), Styled(each.about, "bold", 18), each.sentence)
        if each.remedy:
            console.print_line(Styled(f"Fix: {each.remedy}", "dim"), indent=7)
    if any(each.level is checks.Level.FAIL for each in findings):
        ctx.exit(REFUSED)
