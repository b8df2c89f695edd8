"""Types of options and arguments: JSON text, files and standard input, durations, and single parameters."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from celery_durable import values
from celery_durable.errors import DurationInvalid


class JsonInput(click.ParamType[Any]):
    """JSON itself, ``@file``, or ``-`` for standard input."""

    name = "JSON|@file|-"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read and parse the JSON text."""
        if not isinstance(value, str):
            return value
        if value == "-":
            return self._parse(sys.stdin.read(), "standard input", param, ctx)
        if not value.startswith("@"):
            return self._parse(value, repr(value), param, ctx)
        try:
            text = Path(value[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            self.fail(f"{value[1:]} cannot be read: {exc}", param, ctx)
        return self._parse(text, value[1:], param, ctx)

    def _parse(self, text: str, where: str, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return _load(text)
        except ValueError as exc:
            self.fail(f"{where} is not JSON ({exc}). A text needs quotes inside the shell's: '\"text\"'", param, ctx)


class DurationInput(click.ParamType[timedelta]):
    """Seconds as a number, or a text such as ``5 minutes``."""

    name = "DURATION"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        """Parse the duration; fails if it is out of range."""
        try:
            seconds: Any = float(value)
        except (TypeError, ValueError):
            seconds = value
        try:
            return values.parse_duration(seconds)
        except (DurationInvalid, OverflowError) as exc:
            self.fail(str(exc), param, ctx)


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
