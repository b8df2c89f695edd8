"""The engine's own connections to a database of Django's settings.

They are made from the parameters that Django's backend computes, so OPTIONS, service files and backends that compute
passwords apply. They are not Django's connections: claims and leases do not depend on what the application does with
those, and need READ COMMITTED and a lock timeout.
"""

from __future__ import annotations

import functools
from typing import Any

import sqlalchemy as sa
from django.db import connections
from sqlalchemy import event, exc

from celery_durable.contrib.django.joined_engine import find_driver
from celery_durable.store.engine import drivers

_PLACE = ("host", "port", "dbname", "database", "db", "user", "username", "password", "passwd", "unix_socket")
"""Parameters that SQLAlchemy takes from the URL. Django's replace them at each connect: tests switch the database."""
_DJANGOS_OWN = ("cursor_factory", "context", "prepare_threshold", "conv", "charset", "init_command", "detect_types")
"""Parameters by which Django changes what its own cursors return or send, and `init_command`, which `drivers` runs."""


def make_own_engine(alias: str, *, prepared_statements: bool, keeps_connections: bool = True) -> sa.Engine:
    """Make the engine of the store on the database of this alias."""
    init_command = connections[alias].settings_dict.get("OPTIONS", {}).get("init_command")
    engine = drivers.make_engine(_make_url(alias), prepared_statements=prepared_statements, init_command=init_command)
    event.listen(engine, "do_connect", functools.partial(_set_parameters, alias), insert=True)

    @event.listens_for(engine, "connect")
    def remember_place(_: Any, record: Any) -> None:
        record.info["place"] = _find_place(alias)

    @event.listens_for(engine, "checkout")
    def refuse_other_place(_: Any, record: Any, __: Any) -> None:
        if record.info["place"] != _find_place(alias):  # a test runner has switched the database
            raise exc.DisconnectionError

    if not keeps_connections:
        event.listen(engine, "checkin", lambda _, record: record.invalidate())
    return engine


def _make_url(alias: str) -> sa.URL:
    """The URL that names the database in errors and in comparisons."""
    wrapper = connections[alias]
    settings = wrapper.settings_dict
    url = sa.URL.create(find_driver(wrapper), database=str(settings["NAME"]) or None)
    if wrapper.vendor == "sqlite":
        return url
    return url.set(host=settings["HOST"] or None, port=int(settings["PORT"]) if settings["PORT"] else None)


def _find_place(alias: str) -> tuple[Any, ...]:
    settings = connections[alias].settings_dict
    return settings["HOST"], settings["PORT"], settings["NAME"]


def _set_parameters(alias: str, _dialect: Any, _record: Any, args: list[Any], params: dict[str, Any]) -> None:
    """Replace what SQLAlchemy took from the URL by the parameters of Django's settings as they are now."""
    ours = {name: value for name, value in params.items() if name not in _PLACE}
    # A new wrapper: the thread's own may be in use, and computing parameters changes its attributes.
    djangos = connections.create_connection(alias).get_connection_params()
    djangos = {name: value for name, value in djangos.items() if name not in _DJANGOS_OWN}
    if "options" in ours and "options" in djangos:
        djangos["options"] = f"{ours['options']} {djangos['options']}"
    if "timeout" in ours:  # SQLite's wait for its lock
        djangos["timeout"] = max(ours["timeout"], djangos.get("timeout", 0))
    args.clear()
    params.clear()
    params.update(ours | djangos)
