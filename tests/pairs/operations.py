"""All operations on an instance, from which the pairs are made. Add a line for each new operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from celery_durable.store.runs import sweeps

if TYPE_CHECKING:
    from tests.pairs.matrix import Participant


@dataclass(frozen=True)
class Operation:
    """An operation that its own process runs by ``work``. It waits at ``gate`` before the pair starts.

    ``is_pass``: the operation is the commit of a pass after the gate, in workflow ``flow``. ``is_grouped``: this commit
    is in a group. The others describe the state that the operation needs. ``needs_claim``: a worker holds a claim.
    ``needs_due``: the instance's timer has fired. ``needs_sent``: the messages have left the outbox. ``answers``: which
    item of the map step it answers, any ("item") or the last open one ("last"). ``needs_messages``: it is about the
    instance's messages, which workflow ``nap`` has not.
    """

    name: str
    work: Callable[[Participant], Any]
    gate: str | None = None
    flow: str | None = None
    is_pass: bool = False
    is_grouped: bool = False
    needs_claim: bool = False
    needs_due: bool = False
    needs_sent: bool = False
    answers: str | None = None
    needs_messages: bool = False


def _pass(name: str, gate: str, flow: str) -> Operation:
    return Operation(name, _advance, gate=gate, flow=flow, is_pass=True)


def _advance(participant: Participant) -> str:
    return participant.process.advance(participant.ref)


def _release_dead(participant: Participant) -> Any:
    claim = participant.pair_run.claim
    assert claim is not None
    grace = participant.process.settings.grace
    task_id = "task"

    return participant.process.store.transact(
        lambda tx: sweeps.release_dead_claim(tx, participant.ref, task_id=task_id, grace=grace)
    )


OPERATIONS = (
    Operation("claim", _advance, needs_due=True),
    _pass("step", "charge", "gather"),
    Operation("group", _advance, gate="charge", flow="grouped", is_pass=True, is_grouped=True),
    _pass("session", "book", "gather"),
    _pass("suspend", "unwound", "gather"),
    _pass("sleep", "unwound", "nap"),
    _pass("race", "charge", "race"),
    _pass("settle", "end", "race"),
    Operation("answer task", lambda participant: participant.answer("pairs.ship"), needs_messages=True),
    Operation("answer item", lambda participant: participant.answer("pairs.page"), answers="item", needs_messages=True),
    Operation("last answer", lambda participant: participant.answer("pairs.page"), answers="last", needs_messages=True),
    Operation(
        "loss of a task", lambda participant: participant.lose("pairs.ship"), needs_sent=True, needs_messages=True
    ),
    Operation(
        "loss of an item", lambda participant: participant.lose("pairs.page"), needs_sent=True, needs_messages=True
    ),
    Operation("send_event", lambda participant: participant.send_event()),
    Operation("pause", lambda participant: participant.call("lifecycle.pause")),
    Operation("resume", lambda participant: participant.call("lifecycle.resume")),
    Operation(
        "set_result", lambda participant: participant.call("interventions.set_result", "ok", "by hand", by="eve")
    ),
    Operation("cancel", lambda participant: participant.call("lifecycle.cancel")),
    Operation("terminate", lambda participant: participant.call("lifecycle.terminate")),
    Operation("family retry", lambda participant: participant.call("families.retry"), flow="family"),
    Operation("end of a child", lambda participant: participant.process.advance(participant.kid), flow="family"),
    Operation("restart", lambda participant: participant.restart()),
    Operation("queue", lambda participant: participant.queue()),
    Operation("renewal", lambda participant: participant.pair_run.owner.renew(), needs_claim=True),
    Operation("sweep", lambda participant: participant.process.sweeper.sweep(), needs_due=True),
    Operation("release_dead_claim", _release_dead, needs_claim=True),
    Operation("outbox take", lambda participant: participant.process.outbox.sweep(), needs_messages=True),
    Operation(
        "outbox finish", lambda participant: participant.process.outbox.sweep(), gate="sent", needs_messages=True
    ),
)
