"""What Durable adds to a Celery app, whenever it is attached and however the app is configured."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from celery.app.amqp import AMQP
from celery.exceptions import QueueNotFound
from celery.utils.imports import symbol_by_name
from kombu import Exchange, Queue

from celery_durable import Durable, Step, WorkflowEvent
from celery_durable.errors import ConfigInvalid
from celery_durable.tasks import ADVANCE, SWEEP
from celery_durable.tasks.queues import DurableAMQP, ensure_queue
from tests.support.celery_apps import MakeApp
from tests.support.embedded import messages

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
    for queue in (app.conf.task_default_queue, app.conf.durable_queue):
        assert consumed(app, queues=queue) == {queue}


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
    assert durable.internals.settings.database_url == store_url
    assert app.conf.beat_schedule[SWEEP]["options"] == {"queue": "flow"}


def test_a_setting_that_is_assigned_late_counts(make_app: MakeApp) -> None:
    app = make_app()
    durable = Durable(app)
    assert not app.conf.task_always_eager
    app.conf.durable_lease_seconds = 7.0
    assert durable.internals.settings.lease_seconds == 7.0


# --- queues, whenever they are assigned ---------------------------------------------------------


def test_a_client_publishes_where_queues_were_assigned_late_and_missing_ones_are_not_made(make_app: MakeApp) -> None:
    """Neither a web process nor beat starts a worker, which is not needed to make the queue known."""
    app = make_app()
    durable = Durable(app)

    @durable.workflow
    def order(event: WorkflowEvent[None], step: Step) -> None: ...

    assert not app.conf.task_always_eager  # configured
    app.conf.task_queues = [Queue("mine"), Queue(app.conf.task_default_queue)]  # without it Celery 5.5 sends nothing
    app.conf.task_create_missing_queues = False
    order.create(id="1")
    (message,) = messages(app)
    assert message.headers["task"] == ADVANCE
    with pytest.raises(QueueNotFound):
        app.send_task("anything", queue="missing")


def test_the_configuration_of_the_application_is_left_alone(make_app: MakeApp) -> None:
    app = make_app()
    Durable(app)
    assert app.conf.task_queues is None
    app.conf.task_default_queue = "chosen-late"
    assert consumed(app) == {"chosen-late", app.conf.durable_queue}


def test_a_process_whose_queues_were_replaced_gets_ours_when_it_publishes(make_app: MakeApp) -> None:
    app = make_app()
    Durable(app)
    app.amqp.queues.clear()
    ensure_queue(app, app.conf.durable_queue)
    ours = app.amqp.queues[app.conf.durable_queue]
    assert (ours.exchange.name, ours.routing_key) == (ours.name, ours.name)


class OwnAMQP(AMQP):
    def Queues(self, *args: Any, **kwargs: Any) -> Any:  # Celery's name
        return super().Queues([Queue("from-own-class")], **kwargs)


def test_an_application_with_a_class_of_its_own_for_amqp_keeps_it(make_app: MakeApp) -> None:
    app = make_app()
    app.amqp_cls = OwnAMQP
    Durable(app)
    assert isinstance(app.amqp, OwnAMQP)
    assert consumed(app) == {"from-own-class", app.conf.durable_queue}


def test_an_application_on_spawned_processes_can_still_be_pickled(make_app: MakeApp) -> None:
    app = make_app()
    Durable(app)
    unpickled = pickle.loads(pickle.dumps(app.amqp_cls))
    assert isinstance(symbol_by_name(unpickled)(app), DurableAMQP)


# --- routes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "route",
    [{"queue": "x"}, {"exchange": "x", "routing_key": "x"}, {"queue": "x", "priority": 9}, "x"],
    ids=["queue", "exchange", "priority", "name"],
)
def test_a_catch_all_route_does_not_catch_beats_sweeps(make_app: MakeApp, route: Any) -> None:
    app = make_app(task_routes={"*": route}, durable_dispatcher="beat")
    Durable(app)
    entry = app.conf.beat_schedule[SWEEP]
    app.tasks[entry["task"]].apply_async(**entry["options"])  # as beat does
    (message,) = messages(app)
    assert (message.headers["task"], message.properties["priority"]) == (SWEEP, 0)
    assert message.delivery_info["routing_key"] == app.conf.durable_queue


# --- beat's schedule ----------------------------------------------------------------------------


@pytest.mark.parametrize("attach", [before, after])
def test_beat_is_given_the_sweep(make_app: MakeApp, attach: Callable[..., Celery]) -> None:
    app = attach(make_app, durable_dispatcher="beat")
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


def test_what_is_no_app_is_refused() -> None:
    with pytest.raises(ConfigInvalid) as refused:
        Durable("shop")  # type: ignore[arg-type]
    assert str(refused.value) == "Setting Durable(app)='shop' cannot be used: pass the Celery app"


# --- content ------------------------------------------------------------------------------------

CONTENT = "Setting accept_content=['yaml'] cannot be used: add 'json', in which the messages of workflows are written"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"accept_content": ["yaml"]}, CONTENT),
        (
            {"durable_leese_seconds": 3},
            "There is no setting durable_leese_seconds. Did you mean durable_lease_seconds?",
        ),
    ],
)
def test_a_worker_refuses_to_start_under_settings_that_cannot_be_used(
    make_app: MakeApp, caplog: pytest.LogCaptureFixture, settings: dict[str, Any], said: str
) -> None:
    app = make_app(**settings)
    Durable(app)
    made = app.WorkController(pool="solo", loglevel="critical")
    made.start()
    assert made.exitcode
    assert said in caplog.text


def test_the_first_use_is_refused_where_workers_would_throw_our_messages_away(make_app: MakeApp) -> None:
    app = make_app(accept_content=["yaml"])
    durable = Durable(app)
    app.send_task("anything", serializer="yaml")  # the application's own affair
    with pytest.raises(ConfigInvalid) as refused:
        durable.internals.operations.queries.list()
    assert str(refused.value) == CONTENT


@pytest.mark.parametrize("accepted", [None, ["application/json"], {"json", "pickle"}], ids=["none", "type", "set"])
def test_content_that_includes_json_is_accepted(make_app: MakeApp, accepted: Any) -> None:
    assert Durable(make_app(accept_content=accepted)).internals.settings.queue
