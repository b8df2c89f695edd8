"""What may happen to an instance at any time: the table from which pairs are made. A new verb needs its line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from celery_durable.store import sweeps

if TYPE_CHECKING:
    from tests.pairs.matrix import Role


@dataclass(frozen=True)
class Operation:
    """``work`` is done by a process of its own; a ``gate`` is where it stands before the pair begins.

    ``is_pass``: it is what a pass commits after its gate, in workflow ``flow``. ``needs_claim``: a pass is under way.
    ``needs_due``: the instance's timer has fired. ``needs_sent``: the messages have left the outbox.
    ``answers``: "item" or "last", of the map.
    """

    name: str
    work: Callable[[Role], Any]
    gate: str | None = None
    flow: str | None = None
    is_pass: bool = False
    needs_claim: bool = False
    needs_due: bool = False
    needs_sent: bool = False
    answers: str | None = None


def _pass(name: str, gate: str, flow: str) -> Operation:
    return Operation(name, _advance, gate=gate, flow=flow, is_pass=True)


def _advance(role: Role) -> str:
    return role.party.advance(role.ref)


def _release_dead(role: Role) -> Any:
    claim = role.scene.claim
    assert claim is not None
    grace = role.party.settings.grace
    task_id = "task@" + role.scene.owner.name
    return role.party.store.transact(lambda tx: sweeps.release_dead_claim(tx, role.ref, task_id=task_id, grace=grace))


OPERATIONS = (
    Operation("claim", _advance, needs_due=True),
    _pass("step", "charge", "gather"),
    _pass("session", "book", "gather"),
    _pass("suspend", "unwound", "gather"),
    _pass("race", "charge", "race"),
    _pass("settle", "end", "race"),
    Operation("answer task", lambda role: role.answer("pairs.ship")),
    Operation("answer item", lambda role: role.answer("pairs.page"), answers="item"),
    Operation("last answer", lambda role: role.answer("pairs.page"), answers="last"),
    Operation("loss of a task", lambda role: role.lose("pairs.ship"), needs_sent=True),
    Operation("loss of an item", lambda role: role.lose("pairs.page"), needs_sent=True),
    Operation("send_event", lambda role: role.send_event()),
    Operation("pause", lambda role: role.verb("pause")),
    Operation("resume", lambda role: role.verb("resume")),
    Operation("set_result", lambda role: role.verb("set_result", "ok", "by hand", by="eve")),
    Operation("terminate", lambda role: role.verb("terminate")),
    Operation("restart", lambda role: role.restart()),
    Operation("renewal", lambda role: role.scene.owner.renew(), needs_claim=True),
    Operation("sweep", lambda role: role.party.sweeper.sweep(), needs_due=True),
    Operation("release_dead_claim", _release_dead, needs_claim=True),
    Operation("outbox take", lambda role: role.party.outbox.sweep()),
    Operation("outbox finish", lambda role: role.party.outbox.sweep(), gate="sent"),
)
