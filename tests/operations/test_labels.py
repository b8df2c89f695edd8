"""Labels: what instances are found by, from their creation, from their steps, and until they are deleted."""

from __future__ import annotations

from datetime import timedelta

import pytest

from celery_durable import CreateOptions, NonRetryableError, Retries, Step, StepConfig, WorkflowEvent
from celery_durable.errors import InvalidLabel, TooManyLabels
from celery_durable.model import Status
from celery_durable.service import Service
from tests.support.flows import flow_of
from tests.support.labelled import found, labels_of, order, rows, statements
from tests.support.world import FlowControl, World, insert_name, on_one_database

__all__ = ["order"]
everywhere = pytest.mark.parametrize("database", ["sqlite", "postgresql", "mariadb"], indirect=True)
ONCE_MORE = StepConfig(retries=Retries(limit=1, delay=1))
MOST = {f"n{number}": "x" for number in range(16)}


# --- created with -------------------------------------------------------------------------------


@everywhere
def test_an_instance_is_created_with_labels_and_found_by_all_that_are_asked_for(
    world: World, order: FlowControl
) -> None:
    one = order.create(id="o-1", labels={"tenant": "acme", "stage": "new"})
    order.create(id="o-2", labels={"tenant": "acme"})
    order.create(id="o-3", labels={"tenant": "globex", "stage": "new"})
    order.create(id="o-4")
    assert labels_of(one) == {"stage": "new", "tenant": "acme"}
    assert labels_of(order.of("o-4")) == {}
    assert found(world, labels={"tenant": "acme"}) == ["o-2", "o-1"]
    assert found(world, labels={"tenant": "acme", "stage": "new"}) == ["o-1"]
    assert found(world, labels={"stage": "new"}) == ["o-3", "o-1"]
    assert found(world, None, labels={"tenant": "globex"}) == ["o-3"]
    assert found(world, labels={"tenant": "globex", "stage": "old"}) == []
    assert found(world, "refund", labels={"tenant": "acme"}) == []
    assert found(world, labels={}) == ["o-4", "o-3", "o-2", "o-1"]
    world.operations.lifecycle.pause("order", "o-1")
    assert found(world, labels={"tenant": "acme"}, status=Status.PAUSED) == ["o-1"]


@everywhere
def test_names_and_values_are_told_apart_to_the_last_blank(world: World, order: FlowControl) -> None:
    written = ["acme", "ACME", "acmé", "acme ", " acme", "a=c", "ącme 🎁", "x" * 255]
    for number, value in enumerate(written):
        order.create(id=f"o-{number}", labels={"tenant": value})
    order.create(id="other", labels={"Tenant": "acme"})
    for number, value in enumerate(written):
        assert found(world, labels={"tenant": value}) == [f"o-{number}"]
        assert labels_of(order.of(f"o-{number}")) == {"tenant": value}
    both = order.create(id="both", labels={"a": "1", "A": "2"})
    assert labels_of(both) == {"a": "1", "A": "2"}


@everywhere
def test_a_member_of_an_enum_of_text_is_its_text(world: World, order: FlowControl) -> None:
    order.create(id="o-1", labels={"was": Status.PAUSED})
    assert found(world, labels={"was": "paused"}) == found(world, labels={"was": Status.PAUSED}) == ["o-1"]
    assert labels_of(order.of("o-1")) == {"was": "paused"}


@everywhere
def test_a_list_by_labels_goes_on_page_by_page(world: World, order: FlowControl) -> None:
    for number in range(7):
        order.create(id=f"o-{number}", labels={"parity": "odd" if number % 2 else "even", "tenant": "acme"})
    pages, cursor = [], None
    while True:
        page = world.operations.queries.list(
            "order", labels={"tenant": "acme", "parity": "even"}, cursor=cursor, limit=2
        )
        pages.append([item.id for item in page.items])
        assert all(item.labels == {"parity": "even", "tenant": "acme"} for item in page.items)
        order.create(id=f"late-{len(pages)}", labels={"parity": "even", "tenant": "acme"})
        cursor = page.cursor
        if cursor is None:
            break
    assert pages == [["o-6", "o-4"], ["o-2", "o-0"]]


@everywhere
def test_a_batch_has_labels_for_each(world: World, order: FlowControl) -> None:
    batch = [CreateOptions("o-1", None, {"tenant": "acme"}), CreateOptions("o-2"), CreateOptions("o-3", labels=MOST)]
    assert world.operations.create.batch("order", batch) == ["o-1", "o-2", "o-3"]
    assert [labels_of(order.of(f"o-{n}")) for n in (1, 2, 3)] == [{"tenant": "acme"}, {}, MOST]
    again = [CreateOptions("o-1", None, {"tenant": "globex"})]
    assert world.operations.create.batch("order", again) == []
    assert labels_of(order.of("o-1")) == {"tenant": "acme"}


@everywhere
def test_labels_commit_or_roll_back_with_the_callers_own_session(world: World, order: FlowControl) -> None:
    with world.session() as session:
        insert_name("a")(session)
        world.operations.create.instance("order", id="gone", labels={"tenant": "acme"}, session=session)
        session.rollback()
    assert (found(world), rows(world)) == ([], 0)
    with world.session() as session:
        Service(lambda: world.operations).create_instance(
            "order", id="kept", labels={"tenant": "acme"}, session=session
        )
        session.commit()
    assert found(world, labels={"tenant": "acme"}) == ["kept"]


def test_an_existing_instance_keeps_its_labels(world: World, order: FlowControl) -> None:
    one = order.create(id="o-1", labels={"tenant": "acme"})
    order.create(id="o-1", labels={"tenant": "globex"}, if_exists="return")
    assert labels_of(one) == {"tenant": "acme"}


# --- again --------------------------------------------------------------------------------------


@everywhere
def test_restart_rewind_and_retry_keep_labels_and_a_fork_copies_them(world: World) -> None:
    failing = [True]

    def work(tx) -> None:
        if failing:
            raise NonRetryableError("not yet")

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("label", lambda tx: tx.set_labels({"stage": "new" if event.run_number == 1 else "again"}))
        step.do("work", work)

    instance = order.run(labels={"tenant": "acme"})
    first = {"stage": "new", "tenant": "acme"}
    assert (instance.status, labels_of(instance)) == ("errored", first)
    failing.clear()
    world.operations.rewind.retry("order", "i-1")
    world.run_until_idle()
    assert (instance.status, labels_of(instance)) == ("complete", first)  # its step was kept
    world.operations.rewind.fork("order", "i-1", "work", id="f-1")
    fork = order.of("f-1")
    assert labels_of(fork) == first
    world.run_until_idle()
    world.operations.rewind.restart("order", "i-1", from_step="work")
    world.run_until_idle()
    assert labels_of(instance) == first
    instance.restart()
    assert labels_of(instance) == first
    world.run_until_idle()
    assert (labels_of(instance), labels_of(fork)) == ({"stage": "again", "tenant": "acme"}, first)


@everywhere
def test_restart_or_create_labels_what_it_creates(world: World, order: FlowControl) -> None:
    begin = world.operations.create.restart_or_create
    assert begin("order", id="o-1", labels={"tenant": "acme"}).outcome == "created"
    world.run_until_idle()
    assert begin("order", id="o-1", labels={"tenant": "globex"}).outcome == "restarted"
    assert begin("order", id="o-1", labels={"tenant": "globex"}).outcome == "unchanged"
    assert labels_of(order.of("o-1")) == {"tenant": "acme"}


@everywhere
def test_labels_are_deleted_with_their_instance(world: World) -> None:
    order = flow_of(world, lambda step: None, retention="1 day")
    order.run(id="gone", labels=MOST)
    world.advance(timedelta(hours=12))
    order.run(id="kept", labels={"tenant": "acme"})
    world.advance(timedelta(hours=12))
    assert (world.delete_expired(), rows(world)) == (1, 1)
    assert world.operations.retention.prune(older_than="1 second") == 1
    assert rows(world) == 0
    world.accepted.clear()


# --- refusals -----------------------------------------------------------------------------------

NAME_RULE = "use 1 to 64 of the characters a-z A-Z 0-9 _ - and do not begin with '-'"
TYPE_RULE = "it is of type int; pass text (str)"
VALUE_RULE = "use text of 1 to 255 characters without control characters"


REFUSED = [
    ({"ten ant": "a"}, f"Label name 'ten ant' is not allowed: {NAME_RULE}."),
    ({"": "a"}, f"Label name '' is not allowed: {NAME_RULE}."),
    ({"-a": "a"}, f"Label name '-a' is not allowed: {NAME_RULE}."),
    ({"tenant\n": "a"}, f"Label name 'tenant\\n' is not allowed: {NAME_RULE}."),
    ({"x" * 65: "a"}, f"Label name '{'x' * 65}' is not allowed: {NAME_RULE}."),
    ({7: "a"}, f"Label name 7 is not allowed: {TYPE_RULE}."),
    ({"tenant": ""}, f"Label 'tenant' with the value '' is not allowed: {VALUE_RULE}."),
    ({"tenant": 7}, f"Label 'tenant' with the value 7 is not allowed: {TYPE_RULE}."),
    ({"tenant": "a\x00"}, f"Label 'tenant' with the value 'a\\x00' is not allowed: {VALUE_RULE}."),
    ({"tenant": "a\tb"}, f"Label 'tenant' with the value 'a\\tb' is not allowed: {VALUE_RULE}."),
    ({"tenant": "\ud800"}, f"Label 'tenant' with the value '\\ud800' is not allowed: {VALUE_RULE}."),
    (["tenant"], "A set of labels like ['tenant'] is not allowed: pass a mapping of names to values."),
    (
        MOST | {"another": "x"},
        "17 labels are too many: an instance may have 16. Remove one with tx.set_labels({name: None}), or keep "
        "data that you do not search for in the parameters.",
    ),
]


@on_one_database
def test_labels_that_cannot_be_are_refused_before_anything_is_written(world: World, order: FlowControl) -> None:
    operations = world.operations
    for labels, message in REFUSED:
        for refuse in (
            lambda labels: operations.create.instance("order", id="o-1", labels=labels),
            lambda labels: operations.create.batch("order", [CreateOptions("o-1"), CreateOptions("o-2", None, labels)]),
            lambda labels: operations.create.restart_or_create("order", id="o-1", labels=labels),
            lambda labels: operations.queries.list("order", labels=labels),
        ):
            with pytest.raises((InvalidLabel, TooManyLabels)) as caught:
                refuse(labels)
            assert str(caught.value) == message
    assert (found(world), world.messages, rows(world)) == ([], [], 0)


@on_one_database
def test_none_takes_away_only_in_a_step(world: World, order: FlowControl) -> None:
    with pytest.raises(InvalidLabel, match="Label 'tenant' with the value None is not allowed"):
        order.create(labels={"tenant": None})


@everywhere
def test_a_step_that_would_set_too_many_fails_for_good_and_sets_none(world: World) -> None:
    ran = []

    def work(tx) -> None:
        ran.append(tx.attempt)
        tx.mutate(insert_name("written"))
        tx.set_labels({"n0": None, "a": "1", "b": "2"})

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("work", work)

    instance = order.run(labels=MOST)
    assert instance.error == (
        "TooManyLabels: 17 labels are too many: an instance may have 16. Remove one with tx.set_labels({name: "
        "None}), or keep data that you do not search for in the parameters."
    )
    assert (ran, world.names(), labels_of(instance)) == ([1], [], MOST)


def test_a_step_may_exchange_labels_at_the_limit(world: World, order: FlowControl) -> None:
    instance = order.run([{"n0": None, "other": "y"}], labels=MOST)
    assert labels_of(instance) == {name: value for name, value in MOST.items() if name != "n0"} | {"other": "y"}


def test_what_a_step_sets_is_checked_where_it_says_so(world: World, order: FlowControl) -> None:
    for number, labels in enumerate(({"ten ant": "a"}, {"tenant": 7}, {"tenant": "\x7f"}, "tenant")):
        instance = order.run([labels], id=f"o-{number}")
        assert instance.error.startswith("InvalidLabel: ")
        assert (instance.step("set 0").attempts, labels_of(instance)) == (1, {})


def test_what_a_step_creates_is_checked_where_it_says_so(world: World, order: FlowControl) -> None:
    @world.workflow
    def parent(event: WorkflowEvent, step: Step):
        step.do("create", lambda tx: tx.create(order, id="child", labels={"tenant": ""}))

    assert parent.run().error.startswith("InvalidLabel: Label 'tenant' with the value '' is not allowed")
    assert found(world) == []


# --- their cost ---------------------------------------------------------------------------------


@everywhere
def test_who_has_no_labels_pays_nothing_for_them(world: World) -> None:
    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        step.do("plain", lambda: 1)
        step.do("write", lambda tx: tx.mutate(insert_name(event.instance_id)))
        step.do("set nothing", lambda tx: tx.set_labels({}))

    with statements(world.store.engine, world.worker.store.engine) as sent:
        order.run(id="plain")
        world.operations.create.batch("order", [CreateOptions("batch")])
        world.operations.rewind.restart("order", "plain")
    assert len(sent) > 10
    assert [statement for statement in sent if "label" in statement] == []
