"""Restarting from a step, retrying and forking, as operators do."""

from __future__ import annotations

import pytest

from tests.support.world import Instance


@pytest.fixture
def ran() -> list[str]:
    return []


def say(ran: list[str], what: str) -> str:
    ran.append(what)
    return what


def rewind(instance: Instance, step: str) -> int:
    """Restart from a step, and remember the run that ends, which must never change again (I11)."""
    world, before = instance.world, instance.row.run_number
    number = world.operations.rewind.restart(instance.workflow, instance.id, from_step=step)
    world.prior_runs[instance.workflow, instance.id, before] = world.recorded(instance, before)
    return number


def retry(instance: Instance) -> int:
    world, before = instance.world, instance.row.run_number
    number = world.operations.rewind.retry(instance.workflow, instance.id)
    world.prior_runs[instance.workflow, instance.id, before] = world.recorded(instance, before)
    return number


def fork(instance: Instance, step: str, id: str = "f-1") -> Instance:
    return instance.world.instance(
        instance.workflow, instance.world.operations.rewind.fork(instance.workflow, instance.id, step, id=id)
    )
