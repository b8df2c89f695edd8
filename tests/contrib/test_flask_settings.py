"""Settings in the configuration of a Flask application: errors name them as they are written there."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from flask import Flask

from celery_durable.contrib.flask import FlaskDurable
from celery_durable.errors import ConfigInvalid


def read_settings(celery_conf: dict[str, Any], **config: Any) -> Any:
    flask = Flask("shop")
    celery = flask.extensions["celery"] = Celery("shop", broker="memory://", set_as_current=False)
    celery.conf.update(celery_conf)
    flask.config.from_mapping(config)
    FlaskDurable(flask)
    return flask.extensions["celery_durable"].internals.settings


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
        read_settings({}, **{key: value})
    assert str(refused.value) == message


def test_a_wrong_setting_of_celery_keeps_its_name() -> None:
    with pytest.raises(ConfigInvalid) as refused:
        read_settings({"durable_sweep_batch": 0}, DURABLE_MAX_LOGS=9)
    assert refused.value.setting == "durable_sweep_batch"
