"""What `dir()` shows to users. A public attribute is a promise: nobody may add one by accident."""

from __future__ import annotations

from celery_durable import Durable
from celery_durable.testing import DurableHarness

ATTACHING = {"app", "init_app", "close", "engine", "migrate"}
DEFINITIONS = {"workflow", "outbound", "register", "autodiscover", "on_loop_start", "on_loop_stop"}
INSTANCES = {"workflows", "limits", "service", "client", "tick"}
ANSWERS = {"sign_answer", "answer_signed", "aanswer_signed", "open_question", "aopen_question"}
TOPICS = {"emit", "aemit", "waiters", "awaiters", "waits", "awaits"}
INTERNALS = {"internals"}
"""All parts of the engine are behind this one attribute, so that they can change in every release."""


def test_durable_has_these_public_members_and_no_others() -> None:
    members = {name for name in dir(Durable()) if not name.startswith("_")}
    assert members == ATTACHING | DEFINITIONS | INSTANCES | ANSWERS | TOPICS | INTERNALS


RUN = {"run_until_idle", "advance", "advance_to", "tick", "deliver", "run_concurrently", "next_due"}
WORKFLOWS = {"create", "instance", "workflow", "deploy", "emit"}
RUNNERS = {"runner", "second_runner", "restart_runner"}
OUTBOUND = {"outbound", "drain_outbox"}
DATABASE = {"engine", "session", "create_tables", "close"}


def test_the_harness_has_these_public_members_beside_its_groups() -> None:
    """What a test replaces is in ``harness.mocks``, what it breaks in ``harness.faults``."""
    members = {name for name in dir(DurableHarness) if not name.startswith("_")}
    assert members == RUN | WORKFLOWS | RUNNERS | OUTBOUND | DATABASE
