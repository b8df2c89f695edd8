"""`lint`: finds mistakes in workflows by reading their source."""

from __future__ import annotations

import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import click

from celery_durable.cli.command import Output, command, json_option, output_option
from celery_durable.cli.errors import REFUSED, CliError
from celery_durable.cli.inputs import Context
from celery_durable.cli.output.console import Console, Styled
from celery_durable.lint import Finding, check

_FIELDS = ("line", "column", "code", "sentence", "remedy")
_NO_SOURCES = {"__pycache__", "build", "dist", "node_modules", "site-packages", "venv"}


@command("lint", "lint shop/workflows.py billing", "lint -o json", options=[output_option, json_option])
def lint(
    ctx: Context,
    console: Output,
    paths: Annotated[tuple[Path, ...], click.argument("paths", nargs=-1, type=click.Path(path_type=Path))],
) -> None:
    """Find mistakes in workflows by reading their source.

    Use it in CI, in an editor, or as a pre-commit hook. It runs no code, and needs no app and no database. It reads
    files and folders, by default the current one, and finds what a replay repeats or what differs between passes.
    `# noqa: CD101` at the end of a line allows a finding. The exit code is 1 if there are findings. In a pipe: file,
    line, column, code, sentence, remedy.
    """
    files = list(_find_files(paths or (Path(),)))
    found = [(path, finding) for path in files for finding in check(_read(path))]
    if console.is_json:
        console.print_json([_document(path, finding) for path, finding in found])
    for path, finding in found if not console.is_json else []:
        _show(console, path, finding)
    console.print_note(f"{_count(len(found), 'finding')} in {_count(len(files), 'file')}")
    if found:
        ctx.exit(REFUSED)


def _find_files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield files that are named, and the Python files of folders, without hidden folders and installed packages."""
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        for child in sorted(path.iterdir()):
            if child.is_dir() and not child.is_symlink():
                if not child.name.startswith(".") and child.name not in _NO_SOURCES:
                    yield from _find_files([child])
            elif child.suffix == ".py" and child.is_file():
                yield child


def _read(path: Path) -> str:
    try:
        with tokenize.open(path) as file:  # in the encoding that the file declares
            return file.read()
    except FileNotFoundError as exc:
        raise CliError(f"{path} does not exist.", "Name a file or a folder that exists.") from exc
    except (OSError, SyntaxError, UnicodeDecodeError) as exc:
        raise CliError(f"{path} cannot be read: {exc}", "Leave it out, or make it readable as UTF-8.") from exc


def _show(console: Console, path: Path, finding: Finding) -> None:
    if console.is_for_people:
        place = f"{path}:{finding.line}:{finding.column}:"
        console.print_line(Styled(place, "bold"), Styled(finding.code, "red"), finding.sentence)
        console.print_line(Styled(f"Fix: {finding.remedy}", "dim"), indent=2)
    else:
        console.print_record(*map(str, _document(path, finding).values()))


def _document(path: Path, finding: Finding) -> dict[str, object]:
    return {"path": str(path), **{name: getattr(finding, name) for name in _FIELDS}}


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
