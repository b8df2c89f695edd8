"""Bodies on several threads publish side by side."""

from __future__ import annotations

import threading

from celery_durable import Retries, Step, StepConfig, StepTx, WorkflowEvent
from tests.support.databases import on_databases
from tests.support.publishing import published
from tests.support.world import World, insert_name

database = on_databases("sqlite", "postgresql", "mariadb")
LONG = 10


def test_branches_publish_side_by_side(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"
    together = threading.Barrier(4)

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def work(name: int) -> None:
            together.wait(LONG)
            for number in range(50):
                step.publish(f"branch {name}", number)
                step.publish("shared", f"{name}/{number}")

        step.gather(*(step.submit(f"work {name}", work, name) for name in range(4)))

    found = published(order.run())
    shared = found.pop("shared")
    assert found == {f"branch {name}": 49 for name in range(4)}
    assert shared.endswith("/49")


def test_a_body_beside_one_that_writes_is_not_held_up(world: World) -> None:
    world.exempt["I4"] = "branches end in any order"
    has_written, has_published = threading.Event(), threading.Event()

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def write(tx: StepTx) -> None:
            insert_name("ada")(tx.session)
            step.publish("write", 1)
            has_written.set()
            assert has_published.wait(LONG)

        def publish() -> None:
            assert has_written.wait(LONG)
            step.publish("publish", 1)
            has_published.set()

        step.gather(step.submit("write", write), step.submit("publish", publish))

    instance = order.run()
    assert instance.status == "complete"
    assert published(instance) == {"write": 1, "publish": 1}


def test_a_body_that_is_watched_because_of_its_timeout_publishes_until_it_is_left_behind(world: World) -> None:
    is_left_behind, said = threading.Event(), []

    @world.workflow
    def order(event: WorkflowEvent, step: Step):
        def work() -> None:
            step.publish("state", "works")
            try:
                assert is_left_behind.wait(LONG)
                step.publish("state", "too late")
            except BaseException as exc:
                said.append(type(exc).__name__)
                raise
            finally:
                has_ended.set()

        step.do("work", StepConfig(timeout=0.05, retries=Retries(limit=1, delay=60)), work)

    has_ended = threading.Event()
    instance = order.create()
    driver = threading.Thread(target=world.run_until_idle)  # not the main thread: no signal can interrupt the body
    driver.start()
    driver.join(LONG)
    is_left_behind.set()
    assert has_ended.wait(LONG)
    assert said == ["StepInterrupted"]
    assert instance.step("work").error.name == "StepTimeout"
    assert published(instance) == {"state": "works"}
