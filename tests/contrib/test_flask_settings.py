"""Settings in the configuration of a Flask application: errors name them as they are written there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from flask import Flask

from celery_durable import Durable
from celery_durable.app.internals import Internals
from celery_durable.contrib.flask import FlaskDurable
from celery_durable.errors import ConfigInvalid, SettingUnknown


def attach(celery_conf: dict[str, Any], **config: Any) -> Internals:
    durable: Durable = make_flask(celery_conf, **config).extensions["celery_durable"]
    return durable.internals


def make_flask(celery_conf: dict[str, Any], **config: Any) -> Flask:
    flask = Flask("shop")
    celery = flask.extensions["celery"] = Celery("shop", broker="memory://", set_as_current=False)
    celery.conf.update(celery_conf)
    flask.config.from_mapping(config)
    FlaskDurable(flask)
    return flask


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("DURABLE_LEASE", 30, "There is no setting DURABLE_LEASE. Did you mean DURABLE_LEASE_SECONDS?"),
        ("DURABLE_DATABASE", "orders", "There is no setting DURABLE_DATABASE. Did you mean DURABLE_DATABASE_URL?"),
        ("DURABLE_APP", "shop:app", "There is no setting DURABLE_APP. Remove it."),
        ("DURABLE_SWEEP_BATCH", 0, "Setting DURABLE_SWEEP_BATCH=0 cannot be used: use a whole number above 0"),
        (
            "DURABLE_QUEUE",
            "",
            "Setting DURABLE_QUEUE='' cannot be used: use text of 1 to 255 characters without control characters",
        ),
    ],
)
def test_a_wrong_setting_is_named_as_in_the_configuration(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        _ = attach({}, **{key: value}).settings
    assert str(refused.value) == message


def test_a_wrong_setting_of_celery_keeps_its_name() -> None:
    with pytest.raises(ConfigInvalid) as refused:
        _ = attach({"durable_sweep_batch": 0}, DURABLE_MAX_LOGS=9).settings
    assert refused.value.setting == "durable_sweep_batch"


NO_URL = "it is no URL such as postgresql+psycopg://user@host/db"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            None,
            "Setting DURABLE_DATABASE_URL=None cannot be used: set it to your database, for example "
            "postgresql+psycopg://user@host/db",
        ),
        ("nonsense", f"Setting DURABLE_DATABASE_URL='***' cannot be used: {NO_URL}"),
    ],
)
def test_a_wrong_url_is_named_as_in_the_configuration(url: str | None, message: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        _ = attach({}, DURABLE_DATABASE_URL=url).store
    assert str(refused.value) == message


def test_a_wrong_url_of_a_replica_is_named_as_in_the_configuration(tmp_path: Path) -> None:
    internals = attach(
        {}, DURABLE_DATABASE_URL=f"sqlite:///{tmp_path}/shop.sqlite3", DURABLE_READ_DATABASE_URL="nonsense"
    )
    with pytest.raises(ConfigInvalid) as refused:
        _ = internals.read_store
    assert str(refused.value) == f"Setting DURABLE_READ_DATABASE_URL='***' cannot be used: {NO_URL}"
    internals.close()


def test_a_command_without_a_url_says_how_to_get_a_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = make_flask({}, DURABLE_DATABASE_URL=None).test_cli_runner().invoke(args=["durable", "ls"])
    assert done.output.startswith("error: durable_database_url is not set.\nhint: Set it, for example ")
    assert done.exit_code == 1


def test_an_unknown_setting_keeps_its_error_when_the_database_is_opened() -> None:
    with pytest.raises(SettingUnknown):
        _ = attach({}, DURABLE_DATABASE="orders").store
