"""`manage.py check` says what is wrong with the settings, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, _state
from django.conf import settings
from django.core.checks import CheckMessage
from django.db import connections

from celery_durable import Durable
from celery_durable.contrib.django import checks, wiring
from celery_durable.errors import ConfigInvalid
from celery_durable.store.schema.tables import REVISION
from tests.contrib.django import site
from tests.contrib.django.workflows import wait
from tests.support.databases import on_databases

database = on_databases("sqlite")


@pytest.fixture
def make_project(alias: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes the Celery app of the project, as `proj/celery.py` does."""
    monkeypatch.setattr(settings, "CELERY_DURABLE_APP", "tests.contrib.django.site:app", raising=False)
    monkeypatch.setattr(settings, "CELERY_DURABLE_DATABASE", alias, raising=False)
    apps: list[Celery] = []

    def make(**options: Any) -> Durable:
        app = Celery("proj", broker="memory://", set_as_current=False)
        app.conf.update(options)
        monkeypatch.setattr(site, "app", app)
        durable = Durable(app)
        durable.internals.registry.add(wait.definition)
        apps.append(app)
        return durable

    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "proj.settings")
    yield make
    for app in apps:
        vars(app)["durable"].close()
        app.close()


def find() -> list[tuple[str | None, str, str | None]]:
    return [_describe(each) for each in checks.check_settings()]


def _describe(message: CheckMessage) -> tuple[str | None, str, str | None]:
    return message.id, str(message.msg), message.hint


def test_a_project_in_order_has_no_warning(make_project: Any) -> None:
    make_project()
    assert find() == []


def test_an_app_that_was_made_before_the_settings_were_named(
    make_project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE")
    make_project()
    assert find() == [
        (
            "celery_durable.W006",
            "The Celery app 'proj' was made before DJANGO_SETTINGS_MODULE was set: Celery does not close the "
            "connections of tasks.",
            'Call os.environ.setdefault("DJANGO_SETTINGS_MODULE", "proj.settings") before Celery(...).',
        )
    ]


def test_a_project_without_a_celery_app(make_project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_project().app
    monkeypatch.setattr(_state, "default_app", None)
    monkeypatch.setattr(_state._tls, "current_app", None)
    fallback: Any = _state.get_current_app()
    monkeypatch.setattr(site, "app", fallback)
    fallback.durable = vars(made)["durable"]
    fallback.durable.internals.celery_app = fallback
    assert find() == [
        (
            "celery_durable.W006",
            "The project has no Celery app: workflows use Celery's default app, which has no settings.",
            "Import the app of proj/celery.py in proj/__init__.py, or name it in CELERY_DURABLE_APP.",
        )
    ]


def test_requests_that_are_atomic_on_another_database_alone(
    alias: str, make_project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_project()
    monkeypatch.setitem(connections.settings, "default", connections.settings["default"] | {"ATOMIC_REQUESTS": True})
    assert find() == [
        (
            "celery_durable.W007",
            "ATOMIC_REQUESTS is set for 'default', but workflows are in the database 'sqlite': a workflow that a view "
            "starts stays if the view fails.",
            "Set DATABASES['sqlite'][\"ATOMIC_REQUESTS\"] = True, or start workflows in transaction.on_commit.",
        )
    ]
    monkeypatch.setitem(connections[alias].settings_dict, "ATOMIC_REQUESTS", True)
    assert find() == []


def test_an_alias_that_does_not_exist(make_project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make_project()
    monkeypatch.setattr(settings, "CELERY_DURABLE_DATABASE", "replica")
    ((id_, message, hint),) = find()
    assert (id_, message) == ("celery_durable.E003", "CELERY_DURABLE_DATABASE = 'replica' is not in DATABASES.")
    assert str(hint).startswith("Use one of: ")


@pytest.mark.parametrize("url", ["postgresql://eve:secret@db/shop", "eve:secret@db"])
def test_a_url_beside_the_alias(make_project: Any, url: str) -> None:
    durable = make_project(CELERY_DURABLE_DATABASE_URL=url)
    assert find() == [
        (
            "celery_durable.E001",
            "The database of CELERY_DURABLE_DATABASE_URL and the database 'sqlite' of Django may be two databases.",
            "Leave out CELERY_DURABLE_DATABASE_URL, and name the alias in CELERY_DURABLE_DATABASE.",
        )
    ]
    wiring.attach(durable)
    with pytest.raises(ConfigInvalid) as refused:
        _ = durable.internals.store
    assert str(refused.value) == (
        "Setting CELERY_DURABLE_DATABASE_URL='***' cannot be used: leave it out: the workflows are in the database "
        "'sqlite' of DATABASES (CELERY_DURABLE_DATABASE)"
    )


def test_a_setting_that_cannot_be_used(alias: str, make_project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections[alias].settings_dict, "DISABLE_SERVER_SIDE_CURSORS", True)
    make_project(durable_lease_second=5)
    assert [(id_, sentence) for id_, sentence, _ in find()] == [
        ("celery_durable.E004", "There is no setting durable_lease_second. Did you mean durable_lease_seconds?")
    ]


def test_a_pooler_and_prepared_statements(alias: str, make_project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make_project()
    monkeypatch.setitem(connections[alias].settings_dict, "DISABLE_SERVER_SIDE_CURSORS", True)
    assert [id_ for id_, _, _ in find()] == ["celery_durable.W003"]
    make_project(durable_prepared_statements=False)
    assert find() == []


def test_a_database_without_tables_is_migrated_by_its_alias(alias: str, make_project: Any, tmp_path: Path) -> None:
    """`migrate` without `--database` makes the tables in "default"."""
    make_project(durable_database_url=f"sqlite:///{tmp_path}/empty.sqlite3")
    assert [_describe(each) for each in checks.check_database([alias])] == [
        (
            "celery_durable.W002",
            f"The tables of workflows do not exist; this version needs revision {REVISION}.",
            "Run: python manage.py migrate --database sqlite. "
            "If it finds nothing to apply, run: python manage.py durable migrate",
        )
    ]


@pytest.mark.parametrize(
    ("database", "name", "wrong"), [("postgresql", "PORT", "1"), ("mariadb", "NAME", "absent")], indirect=["database"]
)
def test_a_database_that_cannot_be_used(
    alias: str, make_project: Any, monkeypatch: pytest.MonkeyPatch, name: str, wrong: str
) -> None:
    wiring.attach(make_project(durable_database_url=None))
    monkeypatch.setitem(connections.settings[alias], name, wrong)
    ((id_, message, hint),) = [_describe(each) for each in checks.check_database([alias])]
    assert (id_, hint) == (
        "celery_durable.E005",
        f"Is the server of DATABASES[{alias!r}] running, and is this entry right? Then run this again.",
    )
    assert message.startswith(f"The database {alias!r} cannot be used: ")
