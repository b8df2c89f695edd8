from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery

from celery_durable.config import Settings, read_settings
from celery_durable.errors import ConfigInvalid, SettingUnknown
from celery_durable.store.schema.tables import build_tables
from celery_durable.values import PayloadLimits, Retries, StepConfig, StepPolicy


def app(namespace: str | None = None, **conf: Any) -> Celery:
    made = Celery("shop", set_as_current=False)
    made.config_from_object(type("Conf", (), conf) if namespace else conf, namespace=namespace)
    return made


def test_without_settings_every_default_holds() -> None:
    assert read_settings({}) == Settings()
    assert read_settings(app().conf) == Settings()


def test_each_field_is_set_under_its_name() -> None:
    for field in dataclasses.fields(Settings):
        if field.type in ("int", "float"):
            other: Any = getattr(Settings(), field.name) / 2
            other = int(other) if field.type == "int" else other
        else:
            others = {
                "bool": not getattr(Settings(), field.name),
                "Switch": False,
                "Dispatcher": "both",
                "OnLost": "fail",
                "Tracebacks": "none",
                "StepConfig | None": StepConfig(retries=1),
                "float | None": 3.0,
                "str | None": "other" * 8,
            }
            other = others.get(str(field.type), "other")
        found = read_settings(app(**{f"durable_{field.name}": other}).conf)
        assert found == dataclasses.replace(Settings(), **{field.name: other})
        assert found != Settings()


@pytest.mark.parametrize(
    ("namespace", "prefix"), [(None, "durable_"), ("CELERY", "CELERY_DURABLE_"), ("SHOP_TASKS", "SHOP_TASKS_DURABLE_")]
)
def test_settings_are_found_under_the_namespace_of_the_app(namespace: str | None, prefix: str) -> None:
    conf = app(namespace, **{f"{prefix}queue".upper() if namespace else f"{prefix}queue": "slow"}).conf
    assert read_settings(conf).queue == "slow"


def test_settings_may_be_written_in_capitals_or_set_later() -> None:
    assert read_settings({"DURABLE_QUEUE": "slow"}).queue == "slow"
    assert read_settings({"CELERY_DURABLE_QUEUE": "slow"}).queue == "slow"
    late = app()
    late.conf.durable_queue = "slow"
    assert read_settings(late.conf).queue == "slow"


def test_settings_of_others_are_left_alone() -> None:
    conf = app(control_queue_durable=True, task_default_queue="x", shop_durable_goods=3).conf
    assert read_settings(conf) == Settings()


def test_settings_of_django_are_left_to_its_integration() -> None:
    found = read_settings(app("CELERY", CELERY_DURABLE_APP="shop.celery:app", CELERY_DURABLE_DATABASE="orders").conf)
    assert found == Settings()


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("durable_leese_seconds", "There is no setting durable_leese_seconds. Did you mean durable_lease_seconds?"),
        (
            "CELERY_DURABLE_DATABSE_URL",
            "There is no setting CELERY_DURABLE_DATABSE_URL. Did you mean CELERY_DURABLE_DATABASE_URL?",
        ),
        ("DURABLE_LEASE", "There is no setting DURABLE_LEASE. Did you mean DURABLE_LEASE_SECONDS?"),
        ("durable_lease", "There is no setting durable_lease. Did you mean durable_lease_seconds?"),
        ("durable_zzz", "There is no setting durable_zzz. Remove it."),
        ("durable_database", "There is no setting durable_database. Did you mean durable_database_url?"),
        ("DURABLE_APP", "There is no setting DURABLE_APP. Remove it."),
    ],
)
def test_a_setting_that_does_not_exist_is_told_without_its_value(key: str, message: str) -> None:
    with pytest.raises(SettingUnknown) as refused:
        read_settings({key: "postgresql://shop:secret@host/shop"})
    assert str(refused.value) == message
    assert refused.value.setting == key
    assert isinstance(refused.value, ConfigInvalid)


WHOLE, SECONDS = "use a whole number above 0", "use a number of seconds above 0, up to a hundred years"
PREFIX = "use up to 33 characters, without %, ` and control characters"


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("max_steps", 0, WHOLE),
        ("max_steps", 1.5, WHOLE),
        ("max_steps", "7", WHOLE),
        ("max_steps", True, WHOLE),
        ("max_steps", None, WHOLE),
        ("lease_seconds", 0, SECONDS),
        ("lease_seconds", float("nan"), SECONDS),
        ("lease_seconds", float("inf"), SECONDS),
        ("lease_seconds", "30", SECONDS),
        ("lease_seconds", True, SECONDS),
        ("worker_lost_seconds", 4.9, "use at least 5: a worker reports every two seconds"),
        ("lease_seconds", timedelta(30), SECONDS),
        ("prepared_statements", 1, "use True or False"),
        ("prepared_statements", "off", "use True or False"),
        ("table_prefix", None, "use text"),
        ("table_prefix", "50%_", PREFIX),
        ("table_prefix", "shop`", PREFIX),
        ("table_prefix", "shop\n", PREFIX),
        ("table_prefix", "\0", PREFIX),
        ("table_prefix", "x" * 34, PREFIX),
        ("queue", 3, "use text"),
        ("queue", "a\n", "use text of 1 to 255 characters without control characters"),
        ("database_schema", 3, "use text, or None"),
        ("database_schema", "a%b", "use a schema without % in its name"),
        ("database_url", b"sqlite://", "use text, or None"),
        ("dispatcher", "cron", "use one of beat, worker, both, none"),
        ("dispatcher", [], "use one of beat, worker, both, none"),
        ("step_defaults", {"retries": 1}, "use a StepConfig, or None"),
        ("max_step_name", 257, "the column holds 256 characters"),
        ("max_payload_depth", 201, "pydantic reads JSON of up to 200 levels"),
        ("stall_seconds", 4e9, f"{SECONDS}, or None"),
        ("grace_seconds", 1e300, SECONDS),
        ("poll_seconds", 10**30, SECONDS),
    ],
)
def test_a_value_that_cannot_work_is_refused(name: str, value: Any, remedy: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        read_settings({f"durable_{name}": value})
    assert str(refused.value) == f"Setting durable_{name}={value!r} cannot be used: {remedy}"


@pytest.mark.parametrize(
    ("namespace", "key"), [(None, "durable_lease_seconds"), ("CELERY", "CELERY_DURABLE_LEASE_SECONDS")]
)
def test_a_setting_with_a_wrong_value_is_named_as_it_is_written(namespace: str | None, key: str) -> None:
    with pytest.raises(ConfigInvalid) as refused:
        read_settings(app(namespace, **{key: 0}).conf)
    assert str(refused.value) == f"Setting {key}=0 cannot be used: {SECONDS}"
    assert (refused.value.setting, refused.value.value, refused.value.remedy) == (key, 0, SECONDS)


@pytest.mark.parametrize("queue", ["", "x" * 256])
def test_the_queue_must_fit_its_column(queue: str) -> None:
    with pytest.raises(ConfigInvalid):
        read_settings({"durable_queue": queue})


@pytest.mark.parametrize(("given", "most"), [({}, 1800.0), ({"DURABLE_REDISPATCH_MAX_SECONDS": 20}, 20)])
def test_the_first_redispatch_is_not_later_than_the_longest(given: dict[str, Any], most: float) -> None:
    assert read_settings({"DURABLE_REDISPATCH_SECONDS": most, **given}).redispatch_seconds == most
    with pytest.raises(ConfigInvalid) as refused:
        read_settings({"DURABLE_REDISPATCH_SECONDS": most + 1, **given})
    assert str(refused.value) == (
        f"Setting DURABLE_REDISPATCH_SECONDS={most + 1} cannot be used: "
        f"use at most durable_redispatch_max_seconds, which is {most}"
    )


def test_a_longest_redispatch_below_the_default_of_the_first_needs_no_other_setting() -> None:
    assert read_settings({"durable_redispatch_max_seconds": 4}).redispatch_max_seconds == 4


def test_every_length_of_time_is_at_most_a_hundred_years() -> None:
    lengths = [name for name in Settings.__dataclass_fields__ if name.endswith("_seconds")]
    assert len(lengths) > 8
    for name in lengths:
        longest = {f"durable_{each}": 100 * 365 * 86400 for each in (name, "redispatch_max_seconds")}
        assert getattr(read_settings(longest), name) == 100 * 365 * 86400
        with pytest.raises(ConfigInvalid) as refused:
            read_settings({f"durable_{name}": 100 * 365 * 86400 + 1})
        assert "up to a hundred years" in str(refused.value)


def test_the_longest_prefix_of_tables_fits_the_names_of_all_databases() -> None:
    prefix = read_settings({"durable_table_prefix": "x" * 33}).table_prefix
    tables = build_tables(prefix=prefix).metadata.tables.values()
    names = [named.name for table in tables for named in (table, *table.indexes, *table.constraints) if named.name]
    assert max(map(len, names)) == 63  # PostgreSQL's limit; MariaDB allows one character more


def test_the_longest_names_that_settings_allow_fit_their_columns() -> None:
    tables = build_tables()
    columns = {
        "max_workflow_name": (255, tables.instance.c.workflow),
        "max_instance_id": (255, tables.instance.c.instance_id),
        "max_event_type": (255, tables.event.c.type),
        "max_step_name": (256, tables.step.c.name),
        "max_log_category": (255, tables.log.c.category),
    }
    for name, (longest, column) in columns.items():
        read_settings({f"durable_{name}": longest})
        with pytest.raises(ConfigInvalid):
            read_settings({f"durable_{name}": longest + 1})
        assert getattr(column.type, "length", None) == longest


def test_a_whole_number_is_a_number_of_seconds() -> None:
    found = read_settings({"durable_lease_seconds": 9, "durable_max_sleep_seconds": 60})
    assert (found.lease, found.max_sleep) == (timedelta(seconds=9), timedelta(minutes=1))


def test_limits_and_defaults_are_handed_out_as_their_users_take_them() -> None:
    found = Settings(max_payload_bytes=10, max_payload_depth=3, step_defaults=StepConfig(Retries(limit=1)))
    assert found.limits == PayloadLimits(size_bytes=10, depth=3)
    assert found.step_policy == StepPolicy(max_attempts=2)
    assert Settings().step_policy == StepPolicy()
