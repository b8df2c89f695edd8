"""`init`: writes a first workflow and its test, and prints the next commands."""

from __future__ import annotations

import importlib.util
import keyword
from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated, Any

import click

from celery_durable.app import Durable
from celery_durable.cli.command import Output, command
from celery_durable.cli.errors import CliError, app_name
from celery_durable.cli.inputs import Context
from celery_durable.cli.output.console import Styled

_GIVE_ANOTHER_NAME = "Give another name: celery durable init orders"


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
    imports = _fill("imports_and_app" if app is None else "imports", module=name)
    files = {
        Path(f"{name}.py"): _fill("workflow", imports=imports),
        Path(f"test_{name}.py"): _fill("test", module=name),
    }
    _check_can_write(app, name, files)
    for path, text in files.items():
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    for path in files:
        console.print_entry(["Wrote" if console.is_for_people else "wrote", Styled(str(path), "bold")])
    if console.is_for_people:
        click.echo()
    for what, words in _next_steps(name, app, app_name(ctx) if app is not None else name):
        if console.is_for_people:
            if what:
                console.print_line(Styled(what, "dim"))
            console.print_line(words, indent=2)
        else:
            console.print_record("do", words)


def _named_app(ctx: click.Context) -> Any:
    app = ctx.obj.app
    return None if ctx.find_root().params.get("app") is None and app.main == "default" else app


def _fill(template: str, **words: str) -> str:
    text = resources.files("celery_durable.cli").joinpath("templates", f"{template}.txt").read_text(encoding="utf-8")
    return Template(text).substitute(words)


def _check_can_write(app: Any, module: str, files: dict[Path, str]) -> None:
    if not module.isidentifier() or keyword.iskeyword(module):
        raise click.BadParameter(f"{module!r} cannot be a module name: use letters, digits and _")
    for path in files:
        if path.exists():
            raise CliError(f"{path} exists already.", _GIVE_ANOTHER_NAME)
    if importlib.util.find_spec(module) is not None:
        raise CliError(f"A module {module!r} exists already, and the new file would hide it.", _GIVE_ANOTHER_NAME)
    durable = getattr(app, "durable", None)
    if isinstance(durable, Durable):
        app.loader.import_default_modules()
        if "order" in durable.workflows:
            raise CliError(
                "The app has a workflow 'order' already.", "List its instances: celery -A <your app> durable ls"
            )


def _next_steps(module: str, app: Any, name: str) -> list[tuple[str, str]]:
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
        ("Test it:", "python -m pip install pytest"),
        ("", f"python -m pytest test_{module}.py"),
    ]
