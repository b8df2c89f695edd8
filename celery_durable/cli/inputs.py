"""What commands take: types of options and arguments, and the parameters that several commands have.

A command declares its parameters as annotations of its function, such as ``run: RunNumber``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import click

from celery_durable.conditions import read_duration
from celery_durable.errors import ValueRefused
from celery_durable.model import LogLevel, Status


@dataclass(frozen=True, slots=True)
class Given:
    """Annotates a parameter that the user does not type: ``get`` returns its value."""

    get: Callable[[click.Context], Any]


Context = Annotated[click.Context, Given(lambda ctx: ctx)]


class JsonInput(click.ParamType[Any]):
    """JSON itself, ``@file``, or ``-`` for standard input."""

    name = "JSON|@file|-"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        text, source = value, repr(value)
        if value == "-":
            text, source = sys.stdin.read(), "standard input"
        elif value.startswith("@"):
            source = value[1:]
            try:
                text = Path(source).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as exc:
                self.fail(f"{source} cannot be read: {exc}", param, ctx)
        try:
            return _load(text)
        except ValueError as exc:
            self.fail(f"{source} is not JSON ({exc}). A text needs quotes inside the shell's: '\"text\"'", param, ctx)


class DurationInput(click.ParamType[timedelta]):
    """Seconds as a number, or a text such as ``5 minutes``."""

    name = "DURATION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        try:
            return read_duration(value)
        except ValueRefused as exc:
            self.fail(str(exc), param, ctx)


class WordInput(click.Choice[str]):
    """A word of an enumeration."""

    def __init__(self, words: Iterable[Status | LogLevel]) -> None:
        self._by_text = {str(word): word for word in words}
        super().__init__(list(self._by_text))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self._by_text[super().convert(value, param, ctx)]


_SETTINGS_BY_TYPE: dict[Any, dict[str, Any]] = {
    Any: {"type": JsonInput(), "metavar": JsonInput.name},
    LogLevel: {"type": WordInput(LogLevel)},
    Path: {"type": click.Path(path_type=Path)},
    Status: {"type": WordInput(Status)},
    bool: {"is_flag": True},
    int: {"type": int},
    timedelta: {"type": DurationInput()},
}


class Option:
    """Annotates a parameter that is an option; the type decides the ``settings`` of click.option that are not given."""

    def __init__(self, *names: str, help: str, **settings: Any) -> None:
        self._names = names
        self._settings = {"help": help, "show_default": "default" in settings or None, **settings}

    def declare(self, annotated: Any) -> Callable[[Any], Any]:
        value_type, *_ = get_args(annotated) or (annotated,)
        settings = {"multiple": get_origin(annotated) is tuple, **_SETTINGS_BY_TYPE.get(value_type, {})}
        return click.option(*self._names, **settings | self._settings)


def label_option(help: str) -> Option:
    """Declare the option for labels."""
    return Option("--label", "labels", metavar="NAME=VALUE", help=help)


Workflow = Annotated[str, click.argument("workflow")]
InstanceId = Annotated[str, click.argument("id")]
OptionalWorkflow = Annotated[str | None, click.argument("workflow", required=False)]
OptionalId = Annotated[str | None, click.argument("id", required=False)]
Step = Annotated[str, click.argument("step")]
RunNumber = Annotated[
    int | None, Option("--run", type=click.IntRange(1), help="The number of the run; the current one by default.")
]
ExportedFiles = Annotated[
    tuple[Path, ...],
    Option("--file", "files", help="A file with runs that `export` printed; repeatable. No database is used."),
]
OfWorkflow = Annotated[str | None, Option("-w", "--workflow", help="Only instances of this workflow.")]
OfStatus = Annotated[Status | None, Option("-s", "--status", help="Only instances with this status.")]
Payload = Annotated[Any, Option("--payload", help="The payload as JSON, from a file, or from standard input.")]
PageLimit = Annotated[int, Option("--limit", type=click.IntRange(1, 1000), default=25, help="Maximum number of rows.")]
RowLimit = Annotated[int, Option("--limit", type=click.IntRange(1, 10000), default=100, help="Maximum number of rows.")]
Cursor = Annotated[str | None, Option("--cursor", help="The cursor that the previous page printed.")]


def merged_params(given: Any, singles: Sequence[str]) -> Any:
    """Merge each ``-P`` into ``--params``. Returns None if neither was given; raises BadParameter."""
    if not singles:
        return given
    if given is not None and not isinstance(given, dict):
        raise click.BadParameter("needs --params to be a JSON object", param_hint="-P")
    merged: dict[str, Any] = dict(given or {})
    keys: set[str] = set()
    for single in singles:
        name, equals, text = single.partition("=")
        is_json = name.endswith(":")
        key = name.removesuffix(":")
        if not equals or not key:
            raise click.BadParameter(f"{single!r} is neither key=text nor key:=JSON", param_hint="-P")
        if key in keys:
            raise click.BadParameter(f"{key!r} is given twice", param_hint="-P")
        keys.add(key)
        try:
            merged[key] = _load(text) if is_json else text
        except ValueError as exc:
            raise click.BadParameter(
                f"{key}:={text} is not JSON ({exc}); for text: {key}=...", param_hint="-P"
            ) from exc
    return merged


def _load(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")
