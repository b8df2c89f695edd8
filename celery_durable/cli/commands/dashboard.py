"""`dashboard`: serves the web pages on this machine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import click

from celery_durable.app import Durable
from celery_durable.cli.backends.stored import OpenDurable
from celery_durable.cli.command import Output, command
from celery_durable.cli.errors import CliError
from celery_durable.cli.inputs import Option
from celery_durable.cli.output.console import Console, Styled

if TYPE_CHECKING:  # the pages need packages of an extra
    from celery_durable.dashboard.local import LocalServer

PORT = 5556
Port = Annotated[
    int, Option("-p", "--port", type=click.IntRange(0, 65535), default=PORT, help="The port; 0: any free one.")
]


@command("dashboard", "dashboard --port 8000 --read-only")
def dashboard(
    durable: OpenDurable,
    console: Output,
    port: Port,
    read_only: Annotated[bool, Option("--read-only", help="Show no buttons, and refuse every change.")],
) -> None:
    """Serve the dashboard on this machine.

    Use it to see what needs attention, and to repair it, in a browser. It listens on 127.0.0.1 only. The link that it
    prints works once: the browser that opens it stays logged in until the command ends.
    """
    durable.app.loader.import_default_modules()
    serve(console, open_server(durable, port=port, read_only=read_only))


def serve(console: Console, server: LocalServer) -> None:
    """Print the link, and serve until the user stops it."""
    console.print_line(Styled("dashboard", "dim", 9), server.link)
    console.print_line(Styled("stop", "dim", 9), "Ctrl-C")
    server.run()


def open_server(durable: Durable, *, port: int, **options: Any) -> LocalServer:
    """Return a server of the pages that listens; raises CliError. ``options``: those of `LocalServer`."""
    try:
        from celery_durable.dashboard.local import LocalServer
    except ModuleNotFoundError as exc:
        raise CliError(
            f"The dashboard needs {exc.name}, which is not installed.",
            'Install the extra that brings it: pip install "celery-durable[dashboard]"',
        ) from exc
    try:
        return LocalServer(durable, port=port, **options)
    except OSError as exc:
        raise CliError(
            f"Port {port} of this machine cannot be used: {os.strerror(exc.errno or 0)}.",
            "Choose another, or any free one: --port 0",
        ) from exc
