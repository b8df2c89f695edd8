"""`celery-durable dashboard`: serves the web pages of a database, without the app."""

from __future__ import annotations

from typing import Annotated

import click

from celery_durable.cli.command import Output, command
from celery_durable.cli.errors import CliError
from celery_durable.cli.inputs import Option


@command("dashboard --database-url postgresql+psycopg://reader@db/shop")
def stored_dashboard(
    console: Output,
    database_url: Annotated[
        str, Option("--database-url", envvar="DURABLE_DATABASE_URL", required=True, help="As durable_database_url.")
    ],
    schema: Annotated[str | None, Option("--schema", help="As durable_database_schema.")],
    table_prefix: Annotated[str, Option("--table-prefix", default="", help="As durable_table_prefix.")],
    port: Annotated[
        int, Option("-p", "--port", type=click.IntRange(0, 65535), default=5556, help="The port; 0: any free one.")
    ],
) -> None:
    """Serve the dashboard of a database, for reading only.

    Use it if the app is not on this machine. It needs the database and no broker, and a user who may only read is
    enough. It listens on 127.0.0.1 only. The link that it prints works once. The password may come from the environment
    variable DURABLE_DATABASE_URL, so that no other user sees it.
    """
    from celery import Celery

    from celery_durable.app import Durable
    from celery_durable.cli.backends.stored import reaching_database
    from celery_durable.cli.commands.dashboard import open_server, serve
    from celery_durable.errors import SchemaOutdated
    from celery_durable.store.migrations import migrate

    app = Celery(set_as_current=False)
    app.conf.update(
        durable_database_url=database_url, durable_database_schema=schema, durable_table_prefix=table_prefix
    )
    durable = Durable(app)
    try:
        with reaching_database():
            migrate.check_revision(durable.internals.store)
    except SchemaOutdated as exc:
        raise CliError(
            str(exc).partition(". ")[0] + ".",
            "Migrate it with the app, or use the version of celery-durable of the app.",
        ) from exc
    serve(console, open_server(durable, port=port, read_only=True, has_broker=False))
