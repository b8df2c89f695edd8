"""Commands: declared by functions, with examples in their help."""

from __future__ import annotations

import difflib
import functools
import itertools
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import click

from celery_durable.cli import program_name
from celery_durable.cli.backends.backend import Backend, Connection
from celery_durable.cli.errors import INTERRUPTED, NOT_FOUND, CliError, command_line, convert_error
from celery_durable.cli.inputs import Given, Option
from celery_durable.cli.output.console import Console, Format
from celery_durable.errors import DurableError


def command(*examples: str, options: Sequence[Callable[..., Any]] = ()) -> Callable[[Callable[..., Any]], Command]:
    """Make a command of a function, with its name, docstring and annotated parameters. ``options`` follow these."""

    def declare(fn: Callable[..., Any]) -> Command:
        hints = get_type_hints(fn, include_extras=True)
        annotated = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Annotated}
        sources = {name: each.get for name, (_, each) in annotated.items() if isinstance(each, Given)}
        decorators = [
            each.declare(value_type) if isinstance(each, Option) else each
            for name, (value_type, each) in annotated.items()
            if name not in sources
        ]

        @functools.wraps(fn)
        def run(**values: Any) -> None:
            ctx = click.get_current_context()
            fn(**{name: get(ctx) for name, get in sources.items()}, **values)

        for decorate in reversed([*decorators, *options]):
            decorate(run)
        return click.command(cls=Command, examples=examples)(run)

    return declare


def open_backend(ctx: click.Context, *, needs_database: bool = True) -> Backend:
    """Return the backend of this program: the database of the app given by -A, or the HTTP API."""
    return _connection(ctx).open(needs_database=needs_database)


def _connection(ctx: click.Context) -> Connection:
    if isinstance(ctx.obj, Connection):
        return ctx.obj
    from celery_durable.cli.backends.stored import StoreConnection

    return StoreConnection(ctx)


OpenBackend = Annotated[Backend, Given(open_backend)]
Output = Annotated[Console, Given(Console.from_context)]


def _choose_format(ctx: click.Context, _: click.Parameter, value: str | bool | None) -> None:
    if value:
        ctx.meta[Console.FORMAT] = Format.JSON if value is True else Format(value)


output_option = click.option(
    "-o",
    "--output",
    type=click.Choice([str(each) for each in Format]),
    expose_value=False,
    callback=_choose_format,
    help="The format; by default a table on a terminal, and tsv in a pipe.",
)
json_option = click.option("--json", is_flag=True, expose_value=False, callback=_choose_format, help="Like -o json.")


_TARGET = re.compile(r"(?P<workflow>[^/]+)/(?P<id>[^/#]+)(#(?P<run>[0-9]+))?")
_RUNS = "celery_durable.runs"
"""The runs that the user named to a command without --run."""


class Command(click.Command):
    """A command with ``examples`` in its help. Help puts the name of the program before each of them."""

    def __init__(self, *args: Any, examples: Sequence[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words. An instance may be named as it is printed: WORKFLOW/ID or WORKFLOW/ID#RUN."""
        by_name = {each.name: each for each in self.params}
        arguments = [each.name for each in self.params if isinstance(each, click.Argument)]
        if arguments[:1] == ["workflow"] and "id" in by_name:
            args = self._split_targets(ctx, args, by_name)
        return super().parse_args(ctx, args)

    def _split_targets(self, ctx: click.Context, args: list[str], by_name: Mapping[str, Any]) -> list[str]:
        """Return the words with WORKFLOW ID [--run RUN] for WORKFLOW/ID[#RUN].

        If several are named, those of another workflow than the first stay WORKFLOW/ID. `start` has the option --id.
        """
        has_several, is_option = by_name["id"].nargs == -1, isinstance(by_name["id"], click.Option)
        found = list(self._find_positions(args))[: None if has_several else 1]
        if not found or "/" not in args[found[0]]:
            return args
        workflow, ids, run = _split_targets(ctx, [args[position] for position in found], has_run="run" in by_name)
        split, options = list(args), [] if run is None else ["--run", run]
        for position, instance_id in zip(found, ids, strict=True):
            split[position] = instance_id
        if is_option:
            options += ["--id", split.pop(found[0])]
        split.insert(found[0], workflow)
        return [*options, *split]

    def _find_positions(self, args: list[str]) -> Iterator[int]:
        """Yield the positions of the words that are neither options nor values of options."""
        options = [each for each in self.params if isinstance(each, click.Option)]
        with_value = {name for each in options if not each.is_flag for name in each.opts}
        is_value, is_end = False, False
        for position, word in enumerate(args):
            if is_value:
                is_value = False
            elif word == "--":
                is_end = True
            elif word.startswith("-") and not is_end:
                is_value = word in with_value
            else:
                yield position

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        name = program_name(ctx)
        formatter.write_paragraph()
        formatter.write("  Examples:\n")
        for example in self.examples:
            formatter.write(f"    {name} {example}\n")

    def invoke(self, ctx: click.Context) -> Any:
        try:
            for workflow, instance_id, run in ctx.meta.get(_RUNS, ()):
                _check_is_current(open_backend(ctx), workflow, instance_id, run)
            return super().invoke(ctx)
        except DurableError as exc:
            _connection(ctx).explain(exc)
            raise _name_unknown_workflow(ctx, convert_error(exc)) from exc
        except CliError as exc:
            raise _name_unknown_workflow(ctx, exc) from exc
        except KeyboardInterrupt:
            click.echo("Interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as exc:
            _connection(ctx).explain(exc)
            raise


def _split_targets(ctx: click.Context, names: Sequence[str], *, has_run: bool) -> tuple[str, list[str], str | None]:
    """Return the workflow, the ids and the run of names such as WORKFLOW/ID#RUN; other workflows stay WORKFLOW/ID."""
    first, ids, shown_run = "", [], None
    for name in names:
        target = _TARGET.fullmatch(name)
        if target is None:
            raise click.UsageError(f"{name!r} is not WORKFLOW/ID.", ctx)
        workflow, instance_id, run = target["workflow"], target["id"], target["run"]
        first = first or workflow
        ids.append(instance_id if workflow == first else f"{workflow}/{instance_id}")
        if run is not None and has_run:
            shown_run = run
        elif run is not None:
            ctx.meta.setdefault(_RUNS, []).append((workflow, instance_id, int(run)))
    return first, ids, shown_run


def _check_is_current(backend: Backend, workflow: str, instance_id: str, run: int) -> None:
    """Raise CliError if the user named another run than the current one, on which the command works."""
    current = backend.read_snapshot(workflow, instance_id).run_number
    if run != current:
        raise CliError(
            f"Run {run} is not the current run of {workflow}/{instance_id}, which is {current}.",
            f"This command works on the current run: name {workflow}/{instance_id}",
        )


def _name_unknown_workflow(ctx: click.Context, error: CliError) -> CliError:
    """Return an error that suggests a similar workflow, if what the user named was not found and is not known."""
    name = str(ctx.params.get("workflow") or "")
    if error.exit_code != NOT_FOUND or not name:
        return error
    known = [each.name for each in open_backend(ctx).workflows()]
    if name in known:
        return error
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    return CliError(
        f"The app knows no workflow {name!r}.",
        f"{hint}To list them: {command_line(ctx, _connection(ctx).list_workflows)}",
        exit_code=NOT_FOUND,
    )


def convert_arguments_to_options(command: Command, group: str, name: str) -> Command:
    """Return the command with options: ``show order o-1`` becomes ``instances get --workflow order --id o-1``."""
    arguments = [param for param in command.params if isinstance(param, click.Argument)]
    options = {param.name: _make_option(param) for param in arguments}
    params = [options.get(param.name, param) for param in command.params]

    def rewrite_example(example: str) -> str:
        _, *words = shlex.split(example)
        given = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
        remaining = words[len(given) :]
        option_words = (
            word for argument, value in zip(arguments, given, strict=False) for word in (f"--{argument.name}", value)
        )
        return f"{group} {name} {shlex.join([*option_words, *remaining])}".rstrip()

    examples = [
        rewrite_example(example) for example in command.examples if "--where" not in example and "/" not in example
    ]
    return Command(name, callback=command.callback, params=params, help=command.help, examples=examples)


_SHORT_OPTIONS = {"workflow": "-w", "id": "-i", "type": "-t"}


class _WorkflowOption(click.Option):
    """`--workflow`, which the user may leave out if each `--id` is WORKFLOW/ID or WORKFLOW/ID#RUN."""

    def handle_parse_result(self, ctx: click.Context, opts: Any, args: list[str]) -> tuple[Any, list[str]]:
        """Read the workflow from `--id`. The other options read what this eager one leaves in ``opts``."""
        if self.name not in opts and "id" in opts:
            given, has_run = opts["id"], any(each.name == "run" for each in ctx.command.params)
            names = [given] if isinstance(given, str) else given
            opts[self.name], ids, run = _split_targets(ctx, names, has_run=has_run)
            opts["id"] = ids[0] if isinstance(given, str) else ids
            if run is not None:
                opts.setdefault("run", run)
        return super().handle_parse_result(ctx, opts, args)


def _make_option(argument: click.Argument) -> click.Option:
    name = argument.name or ""
    short = [] if name not in _SHORT_OPTIONS else [_SHORT_OPTIONS[name]]
    is_workflow = name == "workflow"
    return (_WorkflowOption if is_workflow else click.Option)(
        [f"--{name}", *short],
        is_eager=is_workflow,
        required=argument.required,
        type=argument.type,
        multiple=argument.nargs == -1,
        help=_OPTION_HELP.get(name),
    )


_OPTION_HELP = {
    "workflow": "The workflow's name.",
    "id": "The instance's id; without --workflow: WORKFLOW/ID.",
    "type": "The type of the event.",
    "step": "The step's key: its name, or name and number if the step is repeated.",
    "value": "The result as JSON, from a file, or from standard input.",
}
