"""`init`: writes a first workflow and its test, and prints the next commands."""

from __future__ import annotations

import importlib.util
import keyword
from pathlib import Path
from typing import Annotated, Any

import click

from celery_durable.app import Durable
from celery_durable.cli.command import Output, command
from celery_durable.cli.errors import CliError, app_name
from celery_durable.cli.inputs import Context
from celery_durable.cli.output.console import Styled

_APP = """\
from celery import Celery
from celery_durable import Durable, EventTimeout, Step, WorkflowEvent, durable_workflow
from pydantic import BaseModel

app = Celery("{module}")
durable = Durable(app)
"""
_NO_APP = """\
from celery_durable import EventTimeout, Step, WorkflowEvent, durable_workflow
from pydantic import BaseModel
"""
_WORKFLOW = '''\
"""A first workflow: an order that is charged once, and then waits for an approval."""

{head}

class Order(BaseModel):
    order_id: str
    cents: int


class Approval(BaseModel):
    by: str


def charge(order_id: str, cents: int) -> str:
    """Called at least once. Its result is recorded once, and then not computed again."""
    return f"payment-{{order_id}}"


@durable_workflow
def order(event: WorkflowEvent[Order], step: Step) -> str:
    this = event.payload
    payment = step.do("charge card", charge, this.order_id, this.cents)
    step.log.info("charged", payment=payment)
    try:
        answer = step.wait_for_event("wait for approval", "approval", timeout="24 hours", schema=Approval)
    except EventTimeout:
        return "expired"
    return f"shipped, approved by {{answer.payload.by}}"
'''
_TEST = '''\
"""Tests of the first workflow, without broker and server. The test moves the time."""

from celery_durable.testing import DurableHarness

from {module} import Approval, Order, order


def test_an_order_that_is_approved_is_shipped() -> None:
    with DurableHarness([order]) as harness:
        handle = harness.create(order, Order(order_id="42", cents=1999))
        harness.run_until_idle()
        handle.send_event("approval", Approval(by="eve"))
        harness.run_until_idle()
        assert handle.result() == "shipped, approved by eve"


def test_an_order_that_nobody_approves_expires() -> None:
    with DurableHarness([order]) as harness:
        charging = harness.mocks.mock_step_result("charge card", "payment-1")
        handle = harness.create(order, Order(order_id="42", cents=1999))
        harness.advance("25 hours")
        assert handle.result() == "expired"
        assert charging.calls == 1
'''


@command("init", "init orders")
def init(
    ctx: Context, console: Output, module: Annotated[str | None, click.argument("module", required=False)]
) -> None:
    """Write a first workflow and its test.

    Use it to get started. Without -A it also writes an app, into shop.py. With -A it writes only the workflow, into
    workflows.py. MODULE changes the name. It overwrites no file, and prints what to type next. In a pipe: action
    (wrote, do), then the file or the command.
    """
    app = _named_app(ctx)
    name = module or ("shop" if app is None else "workflows")
    files = _files(name, _NO_APP if app is not None else _APP)
    _check_can_write(app, name, files)
    for path, text in files.items():
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    for path in files:
        console.print_entry(["Wrote" if console.is_for_people else "wrote", Styled(str(path), "bold")])
    if console.is_for_people:
        console.print_blank_line()
    for what, words in _next_steps(name, app, app_name(ctx) if app is not None else name):
        if console.is_for_people:
            console.print_line(Styled(what, "dim"))
            console.print_line(words, indent=2)
        else:
            console.print_record("do", words)


def _named_app(ctx: click.Context) -> Any:
    """Return the app given by -A; None without -A."""
    app = ctx.obj.app
    return None if ctx.find_root().params.get("app") is None and app.main == "default" else app


def _files(module: str, head: str) -> dict[Path, str]:
    text = _WORKFLOW.format(head=head.format(module=module))
    return {Path(f"{module}.py"): text, Path(f"test_{module}.py"): _TEST.format(module=module)}


def _check_can_write(app: Any, module: str, files: dict[Path, str]) -> None:
    if not module.isidentifier() or keyword.iskeyword(module):
        raise click.BadParameter(f"{module!r} cannot be a module name: use letters, digits and _")
    for path in files:
        if path.exists():
            raise CliError(f"{path} exists already.", "Give another name: celery durable init orders")
    if importlib.util.find_spec(module) is not None:
        raise CliError(
            f"A module {module!r} exists already, and the new file would hide it.",
            "Give another name: celery durable init orders",
        )
    durable = getattr(app, "durable", None)
    if isinstance(durable, Durable):
        app.loader.import_default_modules()
        if "order" in durable.workflows:
            raise CliError(
                "The app has a workflow 'order' already.", "List its instances: celery -A <your app> durable ls"
            )


def _next_steps(module: str, app: Any, name: str) -> list[tuple[str, str]]:
    """Return pairs of a purpose and the command to type."""
    attach = [] if app is None or isinstance(getattr(app, "durable", None), Durable) else [
        ("Where you create the app:", "from celery_durable import Durable; durable = Durable(app)")
    ]  # fmt: skip
    load = [] if app is None else [("Add to the app's settings:", f'imports = ["{module}"]')]
    command = f"celery -A {name} durable"
    return [
        *attach,
        *load,
        ("Run it without any server:", f"{command} dev"),
        ("In a second terminal:", f"{command} start order -P order_id=42 -P cents:=1999 --id order-42"),
        ("Why does it wait?", f"{command} explain order/order-42"),
        ("Approve it:", f"""{command} send-event order order-42 approval --payload '{{"by": "eve"}}'"""),
        ("Test it:", f"python -m pytest test_{module}.py"),
    ]
