"""What every verb shares: its examples, the way to the app's Durable, refusals as two lines and an exit code."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import IO, Any

import click

from celery_durable.app import Durable
from celery_durable.cli import embedded
from celery_durable.cli.screen import clean
from celery_durable.errors import DurableError, InstanceAlreadyExists, InstanceTerminal
from celery_durable.store import migrate, sweeps
from celery_durable.store.engine import Store

REFUSED, NOT_FOUND, UNREACHABLE, INTERRUPTED = 1, 3, 4, 130
_YOUR_APP = "<your app>"


class Refusal(click.ClickException):
    """The verb was not done: ``error:`` says why, ``hint:`` what to do, on standard error."""

    exit_code: int  # type: ignore[misc]  # click reads it from the exception, not from its class

    def __init__(self, error: str, hint: str = "", *, exit_code: int = REFUSED) -> None:
        super().__init__(error)
        self.hint, self.exit_code = hint, exit_code
        ctx = click.get_current_context(silent=True)
        self._color = False if ctx is not None and getattr(ctx.obj, "no_color", False) else None
        self._app = _YOUR_APP if ctx is None else app_name(ctx)

    def show(self, file: IO[Any] | None = None) -> None:
        """Say it, in click's place."""
        file = sys.stderr if file is None else file
        for label, look, text in (("error:", "red", self.message), ("hint:", "cyan", self.hint)):
            if text:
                said = clean(text.replace(_YOUR_APP, self._app))
                click.echo(f"{click.style(label, fg=look, bold=True)} {said}", file=file, color=self._color)


class Verb(click.Command):
    """A command of ours. ``examples``: what follows ``celery -A proj durable`` in its help."""

    def __init__(self, *args: Any, examples: Sequence[str], **kwargs: Any) -> None:
        lines = "".join(f"  celery -A proj durable {example}\n" for example in examples)
        kwargs["epilog"] = f"\b\nExamples:\n{lines}"
        super().__init__(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run it; an error of ours becomes a Refusal."""
        try:
            return super().invoke(ctx)
        except DurableError as exc:
            raise refusal_of(exc) from exc
        except KeyboardInterrupt:
            click.echo("Interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except Exception as exc:
            if Store.is_transient(exc):
                raise _unreachable(exc) from exc
            raise


def refusal_of(exc: DurableError) -> Refusal:
    """An error of ours as people meet it: its first sentence, the rest as the hint, its kind as the exit code."""
    error, _, hint = re.sub(r"(?<=[.!?])\s+(?=[^\W\d_])", "\n", str(exc), count=1).partition("\n")
    match exc:  # two whose advice is for people who write Python
        case InstanceTerminal():
            hint = f"To begin a new run of it: celery -A {_YOUR_APP} durable restart {_target(exc)}"
        case InstanceAlreadyExists():
            hint = f"Use another --id, or look at this one: celery -A {_YOUR_APP} durable show {_target(exc)}"
    codes = {404: NOT_FOUND, 408: UNREACHABLE}
    return Refusal(error, hint, exit_code=codes.get(exc.http_status, REFUSED))


def _target(exc: InstanceTerminal | InstanceAlreadyExists) -> str:
    return shlex.join([exc.workflow, exc.instance_id])


def app_name(ctx: click.Context) -> str:
    """What the user called his app, for the commands we suggest."""
    given = ctx.find_root().params.get("app")
    return given if isinstance(given, str) else _YOUR_APP


def command_line(ctx: click.Context, rest: str) -> str:
    """A command that the user can copy."""
    return f"celery -A {app_name(ctx)} durable {rest}"


def attached_durable(ctx: click.Context) -> Durable:
    """The Durable of the app named by -A."""
    app = ctx.obj.app
    found = getattr(app, "durable", None)
    if found is None:
        app.loader.import_default_modules()  # it may be attached in a module that only workers import
        found = getattr(app, "durable", None)
    if isinstance(found, Durable):
        return found
    if ctx.find_root().params.get("app") is None and app.main == "default":
        raise Refusal(
            "No Celery app was named, so there is no database to look into.",
            f"Name it before the verb: celery -A proj durable {ctx.info_name} (or set CELERY_APP=proj)",
            exit_code=click.UsageError.exit_code,
        )
    raise Refusal(
        f"The Celery app {app.main!r} has no Durable.",
        "Attach one where the app is made: from celery_durable import Durable; durable = Durable(app)",
    )


def open_durable(ctx: click.Context) -> Durable:
    """The Durable of the app named by -A, with its database reached and its tables up to date."""
    durable = stored_durable(ctx)
    with reaching_database():
        migrate.check(durable.store)
    return durable


def stored_durable(ctx: click.Context) -> Durable:
    """The Durable of the app named by -A, with a database: its own, or else that of `durable dev` in this directory."""
    durable = attached_durable(ctx)
    with reaching_database():
        if embedded.is_without_store(durable):
            if not embedded.DEV_FILE.exists():
                raise Refusal(
                    "durable_database_url is not set.",
                    "Set it, for example app.conf.durable_database_url = 'postgresql+psycopg://user@host/db', or try "
                    "SQLite in this directory: celery -A <your app> durable dev",
                )
            embedded.join_dev_store(durable)
            click.echo(f"durable_database_url is not set: using ./{embedded.DEV_FILE} of `durable dev`", err=True)
    return durable


@contextmanager
def reaching_database() -> Iterator[None]:
    """Turn what the first connection may raise into a refusal: many drivers, many errors, one meaning."""
    try:
        yield
    except (DurableError, click.ClickException):
        raise
    except ModuleNotFoundError as exc:
        raise Refusal(
            f"The database driver is not installed: {exc}.",
            'Install it, for example pip install "celery-durable[postgres]" or "celery-durable[mysql]"',
        ) from exc
    except Exception as exc:
        if getattr(exc, "orig", None) is None:  # no driver was asked
            raise Refusal(f"durable_database_url cannot be used: {exc}") from exc
        raise _unreachable(exc) from exc


def _unreachable(exc: Exception) -> Refusal:
    answer = getattr(exc, "orig", None) or exc
    hint = "Is the server running, and is durable_database_url right?"
    return Refusal(f"The database cannot be reached: {answer}", hint, exit_code=UNREACHABLE)


def database_now(durable: Durable) -> datetime:
    """The database's time, by which everything shown was written."""
    return durable.store.read(sweeps.next_poll)[1]
