"""StepTx: what a body writes, creates and sends commits with its step, or not at all."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from celery_durable import NonRetryableError, Retries, Step, StepConfig, StepFailed, StepTx, WorkflowEvent
from celery_durable.errors import InstanceTerminal, StepTxMisuse
from tests.engine.world import World, insert_name, ledger, names

ONCE_MORE = StepConfig(retries=Retries(limit=1, delay=1))


def test_what_the_session_writes_commits_with_the_step(world: World) -> None:
    seen = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.do("book", world.book, event.instance_id, event.run_number)

    instance = order.create()
    world.worker.runtime.at["after-body"] = lambda: seen.append((world.booked(), instance.statuses()))
    world.run_until_idle()
    assert seen == [([], {})]
    assert (world.booked(), instance.statuses()) == (["book"], {"book": "completed"})


def test_what_the_session_of_a_failed_attempt_wrote_is_gone(world: World) -> None:
    def book(tx: StepTx, instance: str, run: int) -> None:
        world.book(tx, instance, run)
        tx.session.flush()
        if tx.attempt == 1:
            raise ValueError("after the write")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("book", ONCE_MORE, book, event.instance_id, event.run_number)

    instance = order.run()
    assert world.booked() == []
    world.run_after(1)
    assert instance.status == "complete"
    assert world.booked() == ["book"]


def test_a_result_that_cannot_be_stored_rolls_the_session_back(world: World) -> None:
    def book(tx: StepTx, instance: str, run: int) -> object:
        world.book(tx, instance, run)
        return object()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("book", book, event.instance_id, event.run_number)

    assert order.run().error.startswith("NotSerializable: Result of step 'book' cannot be stored as JSON: ")
    assert world.booked() == []


def test_several_session_steps_follow_each_other_in_one_pass(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        for n in range(3):
            step.do(f"book {n}", world.book, event.instance_id, event.run_number)
        return step.do("count", lambda tx: tx.session.scalar(sa.select(sa.func.count()).select_from(ledger)))

    assert order.run().output == 3


def test_the_session_sees_its_own_writes_and_is_one_for_the_attempt(world: World) -> None:
    def book(tx: StepTx) -> int:
        assert tx.session is tx.session
        insert_name("a")(tx.session)
        return tx.session.scalar(sa.select(sa.func.count()).select_from(names))

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.do("count", book)

    assert order.run().output == 1


def test_a_savepoint_may_be_used(world: World) -> None:
    def book(tx: StepTx) -> str:
        insert_name("kept")(tx.session)
        try:
            with tx.session.begin_nested():
                insert_name("kept")(tx.session)
        except sa.exc.IntegrityError:
            return "the second was refused"
        return "both were taken"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        return step.do("book names", StepConfig(retries=0), book)

    world.exempt["I1"] = "this body books elsewhere"
    assert order.run().output == "the second was refused"
    assert world.names() == ["kept"]


@pytest.mark.parametrize("method", ["commit", "rollback", "close", "begin", "reset", "invalidate"])
def test_ending_the_session_oneself_is_refused(world: World, method: str) -> None:
    def book(tx: StepTx, instance: str, run: int) -> None:
        world.book(tx, instance, run)
        getattr(tx.session, method)()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("book", book, event.instance_id, event.run_number)

    instance = order.run()
    assert instance.error == (
        f"StepTxMisuse: tx.session.{method}() in step 'book': the session commits with the step's record. "
        "Return to commit, raise to roll back, use tx.session.begin_nested() for a savepoint."
    )
    assert instance.step("book").attempts == 1
    assert world.booked() == []


@pytest.mark.parametrize("method", ["commit", "rollback", "close", "begin"])
@pytest.mark.parametrize("register", ["mutate", "on_terminal_error"])
def test_ending_it_in_a_write_that_was_put_off_is_refused(world: World, register: str, method: str) -> None:
    def work(tx: StepTx) -> None:
        tx.mutate(insert_name("written"))
        getattr(tx, register)(lambda session: getattr(session, method)())
        if register == "on_terminal_error":
            raise NonRetryableError("the card is stolen")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("work", work)

    text = f"tx.session.{method}() in step 'work': the session commits with the step's record. "
    instance = order.run()
    if register == "mutate":
        assert instance.error.startswith(f"StepTxMisuse: {text}")
    else:
        assert instance.error == "NonRetryableError: the card is stolen"
        assert text in instance.lines()[0]
    assert instance.step("work").attempts == 1
    assert world.names() == []


def test_a_write_that_was_put_off_may_use_a_savepoint(world: World) -> None:
    def write(session) -> None:
        with session.begin_nested():
            insert_name("a")(session)
        savepoint = session.begin_nested()
        insert_name("b")(session)
        savepoint.rollback()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("work", lambda tx: tx.mutate(write))

    assert order.run().status == "complete"
    assert world.names() == ["a"]


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_on_sqlite_nothing_else_durable_is_written_while_the_session_is_open(world: World) -> None:
    def book(tx: StepTx, instance: str, run: int) -> None:
        world.book(tx, instance, run)
        world.worker.store.transact(lambda _: None)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("book", book, event.instance_id, event.run_number)

    assert order.run().error == (
        "StepTxMisuse: tx.session holds SQLite's only write lock until its step ends, so this thread cannot write "
        "anything else durable meanwhile. Use tx.create(), tx.send_event() or session=tx.session."
    )
    assert world.booked() == []


# --- mutate -------------------------------------------------------------------------------------


def test_mutations_run_at_the_commit_and_in_order(world: World) -> None:
    ran = []

    def work(tx: StepTx) -> str:
        tx.mutate(lambda session: ran.append("one") or insert_name("one")(session))
        tx.mutate(lambda session: ran.append("two") or insert_name("two")(session))
        ran.append("body")
        return "done"

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        result = step.do("work", work)
        step.sleep("rest", 60)
        return result

    instance = order.run()
    world.run_after(60)
    assert instance.output == "done"
    assert ran == ["body", "one", "two"]
    assert world.names() == ["one", "two"]


def test_mutations_of_a_failed_attempt_are_discarded(world: World) -> None:
    def work(tx: StepTx) -> None:
        tx.mutate(insert_name(f"attempt {tx.attempt}"))
        if tx.attempt == 1:
            raise ValueError("no")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("work", ONCE_MORE, work)

    order.run()
    world.run_after(1)
    assert world.names() == ["attempt 2"]


def test_mutations_join_the_session_when_there_is_one(world: World) -> None:
    def work(tx: StepTx) -> None:
        tx.mutate(lambda session: session.execute(sa.update(names).values(name="changed")))
        insert_name("new")(tx.session)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("work", work)

    assert order.run().status == "complete"
    assert world.names() == ["changed"]


def test_a_mutation_that_raises_fails_the_attempt_and_leaves_nothing(world: World) -> None:
    def work(tx: StepTx) -> None:
        tx.mutate(insert_name(f"attempt {tx.attempt}"))
        tx.mutate(lambda _: 1 / (tx.attempt - 1))

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("work", ONCE_MORE, work)

    instance = order.run()
    assert (instance.step("work").status, world.names()) == ("waiting", [])
    assert instance.step("work").error.name == "ZeroDivisionError"
    world.run_after(1)
    assert world.names() == ["attempt 2"]


# --- unique violations --------------------------------------------------------------------------


def violate_in_the_body(tx: StepTx) -> None:
    insert_name("taken")(tx.session)


def violate_by_mutation(tx: StepTx) -> None:
    tx.mutate(insert_name("taken"))


def violate_at_the_flush(tx: StepTx) -> None:
    tx.session.connection()
    tx.mutate(insert_name("taken"))


@pytest.mark.parametrize("violate", [violate_in_the_body, violate_by_mutation, violate_at_the_flush])
def test_a_unique_violation_fails_the_step_for_good(world: World, violate) -> None:
    with world.store.engine.begin() as connection:
        connection.execute(sa.insert(names).values(name="taken"))

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.do("take", violate)
        except StepFailed as exc:
            return [exc.error_name, exc.attempts, exc.error_message]

    instance = order.run()
    name, attempts, message = instance.output
    assert (name, attempts) == ("StepCommitConflict", 1)
    assert message.startswith("The writes of step 'take' violate a constraint: ")
    assert "author_names" in message
    assert world.names() == ["taken"]


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
@pytest.mark.parametrize("with_session", [True, False])
def test_a_deferred_unique_violation_fails_the_step_for_good(world: World, with_session: bool) -> None:
    with world.store.engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE IF EXISTS author_slots")
        connection.exec_driver_sql("CREATE TABLE author_slots (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        connection.exec_driver_sql("INSERT INTO author_slots VALUES (1)")

    def take(session) -> None:
        session.execute(sa.text("INSERT INTO author_slots VALUES (1)"))

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("take", lambda tx: take(tx.session) if with_session else tx.mutate(take))

    instance = order.run()
    assert instance.error.startswith("StepCommitConflict: The writes of step 'take' violate a constraint: ")
    assert instance.step("take").attempts == 1
    with world.store.engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE author_slots")


def test_another_database_error_is_tried_again(world: World) -> None:
    def read(tx: StepTx) -> None:
        tx.session.execute(sa.text("SELECT * FROM nowhere" if tx.attempt == 1 else "SELECT 1"))

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("read", ONCE_MORE, read)

    instance = order.run()
    assert instance.step("read").status == "waiting"
    world.run_after(1)
    assert instance.status == "complete"


# --- on_terminal_error --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "written"),
    [(None, []), (NonRetryableError("no"), ["told at 1"]), (ValueError("no"), ["told at 2"])],
)
def test_what_is_to_be_written_on_a_terminal_error_is_written_with_the_failure(world: World, error, written) -> None:
    def work(tx: StepTx) -> None:
        tx.on_terminal_error(insert_name(f"told at {tx.attempt}"))
        if error is not None:
            raise error

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        try:
            step.do("work", ONCE_MORE, work)
        except StepFailed:
            pass

    instance = order.run()
    assert world.names() == written[: isinstance(error, NonRetryableError)]  # never for a failure that is tried again
    world.run_after(1)
    assert instance.status == "complete"
    assert world.names() == written


def test_a_terminal_write_that_fails_does_not_hide_the_failure(world: World) -> None:
    def work(tx: StepTx) -> None:
        tx.on_terminal_error(lambda _: 1 / 0)
        raise NonRetryableError("the card is stolen")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("work", work)

    instance = order.run()
    assert instance.error == "NonRetryableError: the card is stolen"
    assert [(line.level, line.category, line.message) for line in instance.logs()] == [
        ("error", "system", "on_terminal_error of step 'work' failed: ZeroDivisionError('division by zero')")
    ]


# --- create and send_event ----------------------------------------------------------------------


@pytest.fixture
def child(world: World):
    @world.workflow
    def child(event: WorkflowEvent, step: Step):
        return [event.payload, step.wait_for_event("approval", "approval").payload]

    return child


def test_an_instance_that_a_step_creates_is_there_with_the_step(world: World, child) -> None:
    seen = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        one = step.do("start", lambda tx: [tx.create(child, {"n": 1}, id="c-1"), tx.create(child)])
        step.sleep("rest", 60)
        return one

    instance = order.create()
    world.worker.runtime.at["after-body"] = lambda: seen.append(world.operations.queries.list("child").items)
    world.run_until_idle()
    assert seen == [()]
    world.run_after(60)
    first, second = instance.output
    assert first == "c-1"
    assert {item.id for item in world.operations.queries.list("child").items} == {first, second}
    for made in instance.output:
        child.of(made).send("approval", made)
    world.run_until_idle()
    assert child.of(first).output == [{"n": 1}, first]
    assert child.of(second).output == [None, second]


def test_an_instance_that_a_failed_attempt_would_have_created_is_not_there(world: World, child) -> None:
    def start(tx: StepTx) -> None:
        tx.create(child, id=f"c-{tx.attempt}")
        if tx.attempt == 1:
            raise ValueError("no")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("start", ONCE_MORE, start)

    order.run()
    world.run_after(1)
    assert [item.id for item in world.operations.queries.list("child").items] == ["c-2"]


def test_a_created_instance_remembers_the_step_that_made_it(world: World, child) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("start", lambda tx: tx.create(child, id="c-1"))

    instance = order.run()
    row = child.of("c-1").row
    assert (row.parent_pk, row.parent_run_number, row.parent_step_key) == (instance.row.id, 1, "start")


def test_an_event_that_a_step_sends_wakes_its_target_with_the_step(world: World, child) -> None:
    target = child.run("p", id="c-1")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("tell", lambda tx: tx.send_event(child, "c-1", "approval", {"from": tx.name}))

    order.run()
    assert target.output == ["p", {"from": "tell"}]


def test_an_event_that_a_failed_attempt_would_have_sent_is_not_sent(world: World, child) -> None:
    target = child.run(id="c-1")

    def tell(tx: StepTx) -> None:
        tx.send_event(child, "c-1", "approval", tx.attempt)
        if tx.attempt == 1:
            raise ValueError("no")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("tell", ONCE_MORE, tell)

    order.run()
    assert target.events() == []
    world.run_after(1)
    assert target.events() == [("approval", 2, "approval")]


def test_a_step_can_create_an_instance_and_send_it_its_first_event(world: World, child) -> None:
    def start(tx: StepTx) -> None:
        made = tx.create(child, id="c-1")
        tx.send_event(child, made, "approval", "at once")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("start", start)

    order.run()
    assert child.of("c-1").output == [None, "at once"]


def test_a_step_can_send_an_event_to_its_own_instance(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("tell", lambda tx: tx.send_event(order, event.instance_id, "note", "to self"))
        return step.wait_for_event("read", "note").payload

    assert order.run().output == "to self"


def test_steps_that_send_events_to_older_and_newer_instances_do_not_deadlock(world: World, child) -> None:
    older = child.run(id="older")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def tell(tx: StepTx) -> None:
            for target in ("newer", "older"):
                tx.send_event(child, target, "approval", target)

        step.wait_for_event("go", "go")
        step.do("tell", tell)

    instance = order.run()
    newer = child.run(id="newer")
    instance.send("go")
    world.run_until_idle()
    assert (older.output[1], newer.output[1]) == ("older", "newer")


@pytest.mark.parametrize("with_session", [True, False])
@pytest.mark.parametrize(
    ("what", "error"),
    [
        (
            lambda tx, child: tx.send_event(child, "nobody", "approval"),
            "InstanceNotFound: Workflow 'child' has no instance 'nobody'. "
            "List its instances: celery -A <your app> durable ls --workflow child",
        ),
        (
            lambda tx, child: tx.send_event(child, "ended", "approval"),
            "InstanceTerminal: Cannot send an event to instance 'ended' of workflow 'child': it is terminated. Use "
            "restart() to start a new run.",
        ),
        (
            lambda tx, child: tx.send_event(child, "ended", "no spaces"),
            "InvalidEventType: Event type 'no spaces' is not allowed: use 1 to 100 of the characters a-z A-Z 0-9 _ - "
            "and do not begin with '-'.",
        ),
        (
            lambda tx, child: tx.send_event(child, "NUL \x00", "approval"),
            "InvalidInstanceId: Instance id 'NUL \\x00' is not allowed: use 1 to 255 of the characters a-z A-Z 0-9 _ - "
            "and do not begin with '-'.",
        ),
        (
            lambda tx, child: tx.send_event(child, "live", "approval", id="x" * 256),
            f"NameInvalid: Event id '{'x' * 116}... is not allowed: use text of 1 to 255 characters without control "
            "characters.",
        ),
        (
            lambda tx, child: tx.send_event(child, "live", "approval", id=""),
            "NameInvalid: Event id '' is not allowed: use text of 1 to 255 characters without control characters.",
        ),
        (
            lambda tx, child: tx.create(child, id=""),
            "InvalidInstanceId: Instance id '' is not allowed: use 1 to 100 of the characters a-z A-Z 0-9 _ - and do "
            "not begin with '-'.",
        ),
        (
            lambda tx, child: tx.create(child, id="ended"),
            "InstanceAlreadyExists: Workflow 'child' already has an instance 'ended'. Use another id, "
            'create(..., if_exists="return") to get the existing one, or restart() to run it again.',
        ),
        (
            lambda tx, child: tx.create(child, id="no spaces"),
            "InvalidInstanceId: Instance id 'no spaces' is not allowed: use 1 to 100 of the characters a-z A-Z 0-9 _ - "
            "and do not begin with '-'.",
        ),
    ],
    ids=["nobody", "ended", "event type", "odd id", "event id", "no event id", "no id", "exists", "instance id"],
)
def test_what_cannot_be_sent_or_created_fails_the_step_for_good(
    world: World, child, with_session: bool, what, error: str
) -> None:
    ended, live = child.run(id="ended"), child.run(id="live")
    ended.terminate()

    def work(tx: StepTx) -> None:
        tx.mutate(insert_name("written"))
        if with_session:
            tx.session.connection()
        what(tx, child)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("work", work)

    instance = order.run()
    assert instance.error == error
    assert instance.step("work").attempts == 1
    assert world.names() == []
    assert live.events() == []


def test_params_that_do_not_fit_fail_the_step_for_good(world: World) -> None:
    @world.workflow
    def child(event: WorkflowEvent[int], step: Step):
        pass

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("start", lambda tx: tx.create(child, "seven", id="c-1"))

    instance = order.run()
    assert instance.error == (
        "WorkflowParamsInvalid: Parameters of workflow 'child' for instance 'c-1' are not valid: "
        "$: Input should be a valid integer, unable to parse string as an integer."
    )
    assert instance.step("start").attempts == 1


def test_the_operations_can_join_the_session_of_a_step(world: World, child) -> None:
    target = child.run(id="c-1")

    def tell(tx: StepTx) -> None:
        world.operations.events.send("child", "c-1", "approval", tx.attempt, session=tx.session)
        if tx.attempt == 1:
            raise ValueError("no")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("tell", ONCE_MORE, tell)

    order.run()
    assert target.events() == []
    world.run_after(1)
    assert target.output == [None, 2]


# --- idempotency keys ---------------------------------------------------------------------------


def test_the_idempotency_key_is_one_for_all_attempts_and_differs_between_steps_and_runs(world: World) -> None:
    keys: dict[tuple[str, int], set[str]] = {}

    def charge(tx: StepTx, run: int) -> None:
        keys.setdefault((tx.name, run), set()).add(tx.idempotency_key)
        if tx.attempt == 1:
            raise ValueError("no")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        for name in ("a", "b"):
            step.do(name, ONCE_MORE, charge, event.run_number)

    instance = order.run()
    for _ in range(2):
        world.run_after(1)
    assert instance.status == "complete"
    instance.restart()
    for _ in range(3):
        world.run_after(1)
    assert instance.status == "complete"
    assert [len(found) for found in keys.values()] == [1, 1, 1, 1]
    assert len(set.union(*keys.values())) == 4


def test_a_step_that_repeats_has_a_key_for_each_occurrence(world: World) -> None:
    keys = []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        for n in range(2):
            step.do("charge", StepConfig(repeat=True), lambda tx, n: keys.append(tx.idempotency_key), n)

    order.run()
    assert len(set(keys)) == 2


def test_misuse_is_not_retried_and_terminal_errors_are_what_they_are(world: World) -> None:
    assert issubclass(StepTxMisuse, NonRetryableError)
    assert not issubclass(InstanceTerminal, NonRetryableError)  # from a handle inside a body it may well pass
