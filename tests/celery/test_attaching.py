"""What Durable adds to a Celery app, whenever it is attached and however the app is configured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from kombu import Exchange, Queue

from celery_durable import Durable
from celery_durable.errors import ConfigInvalid
from celery_durable.tasks import ADVANCE, SWEEP
from tests.celery.conftest import MakeApp

# Containers run tests as root, and Celery says so.
pytestmark = pytest.mark.filterwarnings("ignore:You're running the worker with superuser privileges")


def consumed(app: Celery, **options: Any) -> set[str]:
    """What a `celery worker` with these options would consume."""
    app.conf.update(worker_hijack_root_logger=False, worker_redirect_stdouts=False)
    made = app.Worker(pool="solo", loglevel="critical", quiet=True, **options)
    return set(made.app.amqp.queues.consume_from)


def before(make: MakeApp, **settings: Any) -> Celery:
    app = make(**settings)
    Durable(app)
    return app


def after(make: MakeApp, **settings: Any) -> Celery:
    app = make(**settings)
    assert not app.conf.task_always_eager  # it is configured by being read
    Durable().init_app(app)
    return app


def between(make: MakeApp, **settings: Any) -> Celery:
    """The app is read, gets its Durable, and is configured anew."""
    app = make()
    assert not app.conf.task_always_eager
    Durable(app)
    names = {"task_default_queue": app.conf.task_default_queue, "durable_queue": app.conf.durable_queue}
    app.config_from_object({**{key: app.conf[key] for key in ("durable_database_url",)}, **names, **settings})
    return app


def late(make: MakeApp, **settings: Any) -> Celery:
    """Everything is assigned to the conf after it was read."""
    app = make()
    Durable(app)
    assert not app.conf.task_always_eager
    app.conf.task_queues = None
    app.conf.update(settings)
    return app


@pytest.fixture(params=[before, after, between, late])
def attached(request: pytest.FixtureRequest, make_app: MakeApp) -> Callable[..., Celery]:
    return lambda **settings: request.param(make_app, **settings)


# --- queues -------------------------------------------------------------------------------------


def test_a_plain_worker_consumes_the_durable_queue_beside_its_own(attached: Callable[..., Celery]) -> None:
    app = attached()
    assert consumed(app) == {app.conf.task_default_queue, app.conf.durable_queue}


def test_dash_q_decides_what_is_consumed(attached: Callable[..., Celery]) -> None:
    app = attached()
    assert consumed(app, queues=app.conf.task_default_queue) == {app.conf.task_default_queue}


def test_dash_q_can_name_the_durable_queue_alone(attached: Callable[..., Celery]) -> None:
    app = attached()
    assert consumed(app, queues=[app.conf.durable_queue]) == {app.conf.durable_queue}


def test_queues_of_the_application_are_kept(attached: Callable[..., Celery]) -> None:
    mine = [Queue("mine", Exchange("topics", "topic"), routing_key="mine.#"), Queue("other")]
    app = attached(task_queues=mine)
    assert consumed(app) == {"mine", "other", app.conf.durable_queue}
    assert app.amqp.queues["mine"].exchange == Exchange("topics", "topic")
    assert app.amqp.queues["mine"].routing_key == "mine.#"


def test_queues_of_the_application_are_kept_in_their_dict_form(attached: Callable[..., Celery]) -> None:
    app = attached(task_queues={"mine": {"exchange": "mine", "routing_key": "mine.it"}})
    assert consumed(app) == {"mine", app.conf.durable_queue}
    assert app.amqp.queues["mine"].routing_key == "mine.it"
    ours = app.amqp.queues[app.conf.durable_queue]
    assert (ours.exchange.name, ours.routing_key) == (ours.name, ours.name)


@pytest.mark.parametrize("form", [list, dict])
def test_a_durable_queue_that_the_application_declares_itself_is_left_as_it_is(make_app: MakeApp, form: type) -> None:
    mine = {"x-message-ttl": 5000}
    queues = (
        [Queue("d", Exchange("d"), routing_key="d", queue_arguments=mine)]
        if form is list
        else {"d": {"exchange": "d", "queue_arguments": mine}}
    )
    app = make_app(durable_queue="d", task_queues=queues)
    Durable(app)
    assert consumed(app) == {"d"}
    assert app.amqp.queues["d"].queue_arguments == mine


def test_the_default_queue_stays_what_celery_would_have_made_of_it(make_app: MakeApp) -> None:
    settings = {"task_default_exchange": "x", "task_default_exchange_type": "topic", "task_default_routing_key": "k"}
    plain, with_durable = make_app(**settings), make_app(**settings)
    Durable(with_durable)
    ours, theirs = (one.amqp.queues[one.conf.task_default_queue] for one in (with_durable, plain))
    assert ours.as_dict() | {"name": None} == theirs.as_dict() | {"name": None}


@pytest.mark.parametrize("queues", [None, [Queue("mine")], {"mine": {}}], ids=["none", "list", "dict"])
def test_under_a_quorum_default_the_durable_queue_is_one(make_app: MakeApp, queues: Any) -> None:
    app = make_app(task_default_queue_type="quorum", task_default_exchange_type="topic", task_queues=queues)
    Durable(app)
    assert app.amqp.queues[app.conf.durable_queue].queue_arguments == {"x-queue-type": "quorum"}
    if queues is None:
        assert app.amqp.queues[app.conf.task_default_queue].queue_arguments == {"x-queue-type": "quorum"}


def test_the_queue_is_there_although_the_app_published_before_it_got_its_durable(make_app: MakeApp) -> None:
    app = make_app()
    app.send_task("anything")
    Durable(app)
    assert consumed(app) == {app.conf.task_default_queue, app.conf.durable_queue}


def test_settings_may_come_from_a_namespace(make_app: MakeApp, store_url: str) -> None:
    app = Celery("namespaced", broker="memory://", set_as_current=False)
    durable = Durable(app)
    app.config_from_object(
        {"CELERY_DURABLE_DATABASE_URL": store_url, "CELERY_DURABLE_QUEUE": "flow"}, namespace="CELERY"
    )
    assert consumed(app) == {"celery", "flow"}
    assert durable.settings.database_url == store_url
    assert app.conf.beat_schedule[SWEEP]["options"] == {"queue": "flow"}


def test_a_setting_that_is_assigned_late_counts(make_app: MakeApp) -> None:
    app = make_app()
    durable = Durable(app)
    assert not app.conf.task_always_eager
    app.conf.durable_lease_seconds = 7.0
    assert durable.settings.lease_seconds == 7.0


# --- beat's schedule ----------------------------------------------------------------------------


def test_beat_is_given_the_sweep(attached: Callable[..., Celery]) -> None:
    app = attached()
    assert app.conf.beat_schedule[SWEEP]["task"] == SWEEP


def test_beat_keeps_the_entries_of_the_application(attached: Callable[..., Celery]) -> None:
    mine = {"task": "mine", "schedule": 60}
    app = attached(beat_schedule={"mine": mine})
    assert app.conf.beat_schedule["mine"] == mine


def test_without_a_dispatcher_beat_is_given_nothing(make_app: MakeApp) -> None:
    app = make_app(durable_dispatcher="none")
    Durable(app)
    assert app.conf.beat_schedule == {}


# --- one app, another, and the wrong one --------------------------------------------------------


def test_an_app_without_durable_is_left_alone(make_app: MakeApp) -> None:
    plain, with_durable = make_app(), make_app()
    Durable(with_durable)
    assert ADVANCE in with_durable.tasks
    assert ADVANCE not in plain.tasks
    assert SWEEP not in plain.tasks
    assert (plain.conf.task_queues, plain.conf.beat_schedule) == (None, {})


def test_attaching_the_same_durable_again_changes_nothing(app: Celery) -> None:
    durable = Durable(app)
    durable.init_app(app)
    assert app.durable is durable


def test_a_second_durable_on_one_app_is_refused(app: Celery) -> None:
    first = Durable(app)
    with pytest.raises(ConfigInvalid) as refused:
        Durable(app)
    assert str(refused.value) == (
        f"Setting app.durable={first!r} cannot be used: the app has a Durable already; its tasks serve only one"
    )


def test_a_worker_refuses_to_start_under_a_setting_that_does_not_exist(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(durable_leese_seconds=3)
    Durable(app)
    made = app.WorkController(pool="solo", loglevel="critical")
    made.start()
    assert made.exitcode
    assert "There is no setting durable_leese_seconds. Did you mean durable_lease_seconds?" in caplog.text
