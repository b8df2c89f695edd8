"""The statements of most passes, compiled by a worker before its pool forks: to compile them takes 10 ms of CPU."""

from __future__ import annotations

from celery_durable.store import claims, releases, step_rows
from celery_durable.store.dialects import POSTGRESQL
from celery_durable.store.engine import Store


def compile_for_passes(store: Store) -> None:
    """Compile the statements that claim and load a run, record a finished step, and end the run.

    Only for PostgreSQL: SQLAlchemy compiles for MariaDB as it finds the server when it connects.
    """
    if store.database is POSTGRESQL:
        for each in (claims.claim_run, *step_rows.choose_hot_statements(), *releases.HOT_STATEMENTS):
            store.compiled(each)
