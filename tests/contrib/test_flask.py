"""celery_durable.contrib.flask: app contexts in bodies, db.session as the step's, settings, commands and errors."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery, current_app, signals
from celery._state import _set_current_app, set_default_app
from flask import Flask, g
from flask import current_app as current_flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from celery_durable import Durable, Retries, Step, StepConfig, StepTx, WorkflowEvent, durable_step
from celery_durable.contrib.flask import FlaskDurable
from celery_durable.errors import ConfigInvalid, NotConfigured, SchemaOutdated
from tests.support.embedded import until, worker

on_sqlite = pytest.mark.parametrize("database", ["sqlite"], indirect=True)
pytestmark = pytest.mark.filterwarnings("ignore:You're running the worker with superuser privileges")


@signals.setup_logging.connect
def _leave_logging_alone(**_: Any) -> None:
    """An embedded worker would set the root logger's level for all tests after it."""


class Base(DeclarativeBase):
    pass


db = SQLAlchemy(model_class=Base)


class Booking(db.Model):  # type: ignore[name-defined]
    __tablename__ = "app_booking"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(sa.String(50), unique=True)


MakeFlask = Callable[..., Flask]


@pytest.fixture
def make_flask(store_url: str) -> Iterator[MakeFlask]:
    made: list[Flask] = []

    def make(**config: Any) -> Flask:
        unique = uuid.uuid4().hex[:8]
        app = Flask(f"shop-{unique}")
        app.config.from_mapping(
            {
                "CELERY": {
                    "broker_url": "memory://",
                    "task_default_queue": f"celery-{unique}",
                    "broker_transport_options": {"polling_interval": 0.01},
                },
                "SQLALCHEMY_DATABASE_URI": store_url,
                "DURABLE_QUEUE": f"durable-{unique}",
                "DURABLE_POLL_SECONDS": 0.02,
                "DURABLE_DISPATCHER": "worker",
                "NAME": unique,
                **config,
            }
        )
        db.init_app(app)
        with app.app_context():
            db.drop_all()
            db.create_all()
        FlaskDurable(db=db).init_app(app)
        made.append(app)
        return app

    before = current_app._get_current_object()
    yield make
    for app in made:
        app.extensions["celery_durable"].close()
        app.extensions["celery"].close()
        with app.app_context():
            db.drop_all()
            db.engine.dispose()
    set_default_app(before)
    _set_current_app(before)


@pytest.fixture
def flask(make_flask: MakeFlask) -> Flask:
    return make_flask()


@pytest.fixture
def durable(flask: Flask) -> Durable:
    return flask.extensions["celery_durable"]


def names(flask: Flask) -> list[str]:
    with flask.app_context():
        return sorted(db.session.scalars(sa.select(Booking.name)))


def run(durable: Durable, workflow: Any) -> Any:
    """An instance of this workflow, which has ended in this process."""
    instance = workflow.create(id="o-1")
    while not instance.status().status.is_terminal:
        durable.tick()
    return instance


def book(tx: StepTx, name: str) -> str:
    db.session.add(Booking(name=name))
    return str(current_flask.config["NAME"])


# --- app contexts -------------------------------------------------------------------------------


@on_sqlite
@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_each_body_has_an_app_context_of_its_own_on_every_thread(flask: Flask, durable: Durable, pool: str) -> None:
    together = threading.Barrier(3)

    def look() -> list[Any]:
        assert "mark" not in g
        g.mark = True
        together.wait(20)
        return [current_flask.config["NAME"], threading.get_ident()]

    @durable.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> Any:
        alone = step.do("alone", lambda: [current_flask.config["NAME"], threading.get_ident(), "mark" in g])
        branches = step.gather(*(step.submit(f"branch {n}", look) for n in range(3)))
        return {"here": current_flask.config["NAME"], "alone": alone, "branches": branches}

    with worker(flask.extensions["celery"], pool=pool):
        output = order.create().result("30 seconds")
    name = flask.config["NAME"]
    assert (output["here"], output["alone"][0], output["alone"][2]) == (name, name, False)
    assert [each[0] for each in output["branches"]] == [name] * 3
    assert len({each[1] for each in output["branches"]}) == 3


@on_sqlite
def test_two_applications_of_a_process_keep_their_workflows_apart(make_flask: MakeFlask) -> None:
    first, second = make_flask(), make_flask()
    seen = []
    for flask in (first, second):
        durable = flask.extensions["celery_durable"]

        @durable.workflow
        def order(event: WorkflowEvent[Any], step: Step) -> Any:
            branches = [step.submit(f"branch {n}", lambda: current_flask.config["NAME"]) for n in range(2)]
            return [current_flask.config["NAME"], *step.gather(*branches)]

        order.create(id=f"o-{flask.config['NAME']}")
        durable.tick()
        seen.append(order.get(f"o-{flask.config['NAME']}").result())
    assert seen == [[flask.config["NAME"]] * 3 for flask in (first, second)]


@on_sqlite
def test_a_task_of_the_application_runs_in_an_app_context(flask: Flask) -> None:
    celery: Celery = flask.extensions["celery"]
    seen: list[str] = []

    @celery.task(name="look", shared=False)
    def look() -> None:
        seen.append(current_flask.config["NAME"])

    with worker(celery):
        look.delay()
        until(lambda: seen)
    assert seen == [flask.config["NAME"]]


# --- db.session ---------------------------------------------------------------------------------


def test_what_a_body_adds_to_db_session_is_committed_with_its_step(flask: Flask, durable: Durable) -> None:
    @durable.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> Any:
        step.do("book alone", book, "alone")
        return step.gather(*(step.submit(f"book {n}", book, f"branch {n}") for n in range(3)))

    assert run(durable, order).result() == [flask.config["NAME"]] * 3
    assert names(flask) == ["alone", "branch 0", "branch 1", "branch 2"]


def test_db_session_is_the_session_of_the_step(
    flask: Flask, durable: Durable, caplog: pytest.LogCaptureFixture
) -> None:
    def compare(tx: StepTx) -> bool:
        return db.session() is tx.session

    @durable.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> Any:
        return [step.do("alone", compare), *step.gather(step.submit("a", compare), step.submit("b", compare))]

    assert run(durable, order).result() == [True, True, True]
    # The end of a body's context does not close what the step has yet to commit.
    assert "is left out" not in caplog.text


def test_what_a_failed_attempt_adds_is_gone(flask: Flask, durable: Durable) -> None:
    attempts: list[int] = []

    def flaky(tx: StepTx) -> None:
        attempts.append(tx.attempt)
        db.session.add(Booking(name=f"attempt {tx.attempt}"))
        db.session.flush()
        if tx.attempt == 1:
            raise ValueError("no")

    @durable.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None:
        step.do("flaky", StepConfig(retries=Retries(limit=1, delay=0)), flaky)
        step.gather(step.submit("f", StepConfig(retries=0), flaky), step.submit("g", lambda: None))

    run(durable, order)
    assert names(flask) == ["attempt 2"]


# SQLite has one writer: nothing supersedes a body that holds its lock.
@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_what_a_superseded_body_adds_is_gone(flask: Flask, durable: Durable) -> None:
    def book_and_lose(tx: StepTx) -> None:
        db.session.add(Booking(name="lost"))
        thread = threading.Thread(target=order.get("o-1").terminate)
        thread.start()
        thread.join(30)

    @durable.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None:
        step.do("book", book_and_lose)

    assert run(durable, order).status().status == "terminated"
    assert names(flask) == []


def test_without_the_steps_transaction_a_body_commits_for_itself(flask: Flask, durable: Durable) -> None:
    @durable_step(orm=False)
    def own(tx: StepTx) -> bool:
        db.session.add(Booking(name=f"own {tx.attempt}"))
        db.session.commit()
        return db.session() is tx.session

    @durable.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> Any:
        return step.do("own", own)

    assert run(durable, order).result() is False
    assert names(flask) == ["own 1"]


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_many_branches_leave_no_connection_behind(flask: Flask, durable: Durable) -> None:
    def use(tx: StepTx, n: int) -> None:
        db.session.add(Booking(name=f"branch {n}"))

    def read(n: int) -> int:
        return db.session.scalar(sa.select(sa.func.count()).select_from(Booking)) or 0

    @durable.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None:
        for turn in range(5):
            step.gather(*(step.submit(f"{turn}.{n}", use, 10 * turn + n) for n in range(4)))
            step.gather(*(step.submit(f"read {turn}.{n}", read, n) for n in range(4)))

    run(durable, order)
    assert len(names(flask)) == 20
    with flask.app_context():
        pool: Any = db.engine.pool
        assert pool.checkedout() <= 1  # the engine's own, which the thread of the pass keeps for a while
        assert db.session.registry.registry == {}


def test_an_instance_is_created_with_the_views_rows(flask: Flask, durable: Durable) -> None:
    @durable.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None: ...

    @flask.post("/orders/<name>/<int:keep>")
    def place(name: str, keep: int) -> str:
        db.session.add(Booking(name=name))
        order.create(id=name, session=db.session)  # type: ignore[arg-type]
        if keep:
            db.session.commit()
        return "placed"

    client = flask.test_client()
    assert client.post("/orders/a/1").text == client.post("/orders/b/0").text == "placed"
    assert [each.id for each in order.list().items] == names(flask) == ["a"]


# --- settings, commands, errors -----------------------------------------------------------------


@on_sqlite
def test_settings_come_from_the_configuration(make_flask: MakeFlask, store_url: str) -> None:
    flask = make_flask(DURABLE_MAX_BATCH=7)
    durable = flask.extensions["celery_durable"]
    assert durable.internals.settings.max_batch == 7
    with flask.app_context():
        assert durable.engine.pool is db.engine.pool


@on_sqlite
def test_workflows_may_be_in_another_database(make_flask: MakeFlask, store_url: str, tmp_path: Any) -> None:
    flask = make_flask(SQLALCHEMY_DATABASE_URI=f"sqlite:///{tmp_path}/app.sqlite3", DURABLE_DATABASE_URL=store_url)
    assert str(flask.extensions["celery_durable"].engine.url) == store_url


@on_sqlite
def test_a_celery_app_of_the_application_is_used(store_url: str) -> None:
    flask = Flask("own")
    flask.extensions["celery"] = celery = Celery("own", broker="memory://", set_as_current=False)
    celery.conf.durable_database_url = store_url
    extension = FlaskDurable(flask)
    with flask.app_context():
        assert extension.durable is flask.extensions["celery_durable"]
        assert extension.durable.app is celery
    with pytest.raises(NotConfigured) as raised:
        _ = extension.durable
    assert str(raised.value) == (
        "FlaskDurable.durable needs a Durable, and there is none here. Use it in an app context, "
        "`with app.app_context():`, of an application to which init_app(app) has attached one."
    )
    with pytest.raises(ConfigInvalid):
        extension.init_app(flask)
    flask.extensions["celery_durable"].close()
    celery.close()


@on_sqlite
def test_flask_durable_has_every_command(flask: Flask, durable: Durable) -> None:
    @durable.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None: ...

    run = flask.test_cli_runner(catch_exceptions=False).invoke
    assert run(args=["durable", "start", "order", "--id", "o-1"]).exit_code == 0
    assert run(args=["durable", "ls", "-o", "tsv"]).output.startswith("order\to-1\tactive\t")
    missing = run(args=["durable", "show", "order", "o-2"])
    assert missing.exit_code == 3
    assert "hint: List its instances: flask durable ls --workflow order" in missing.output
    assert "Usage: flask durable ls [OPTIONS]" in (shown := run(args=["durable", "ls", "--help"]).output)
    assert " flask durable ls -w order\n" in shown
    assert " flask durable show order order-42\n" in run(args=["durable", "--help"]).output


@on_sqlite
def test_errors_are_answered_as_by_the_http_api(flask: Flask, durable: Durable) -> None:
    @durable.workflow
    def order(event: WorkflowEvent[Any], step: Step) -> None: ...

    @flask.post("/orders/<id>")
    def create(id: str) -> str:
        return order.create(id=id).id

    @flask.post("/orders/<id>/end")
    def end(id: str) -> str:
        order.get(id).terminate()
        return "ended"

    @flask.get("/broken")
    def broken() -> None:
        raise SchemaOutdated(None, "0002")

    @flask.get("/unknown")
    def unknown() -> None:
        durable.workflows["mystery"].create()

    client = flask.test_client()
    assert client.post("/orders/o-1").text == "o-1"
    client.post("/orders/o-1/end")
    answers = [client.post(path) for path in ("/orders/o-2/end", "/orders/o-1", "/orders/o-1/end", "/orders/a%20b")]
    assert [(each.status_code, each.get_json(force=True)["code"]) for each in answers] == [
        (404, "INSTANCE_NOT_FOUND"),
        (409, "INSTANCE_ID_ALREADY_EXISTS"),
        (409, "INSTANCE_TERMINAL"),
        (400, "INVALID_INSTANCE_ID"),
    ]
    assert {each.mimetype for each in answers} == {"application/problem+json"}
    assert client.get("/unknown").get_json(force=True)["message"] == "No workflow is registered as 'mystery'."
    assert client.get("/broken").status_code == 500
