"""What `dir()` shows to users. A public attribute is a promise: nobody may add one by accident."""

from __future__ import annotations

from celery_durable import Durable

ATTACHING = {"app", "init_app", "close", "engine", "migrate"}
DEFINITIONS = {"workflow", "outbound", "register", "autodiscover"}
INSTANCES = {"workflows", "service", "emit", "waiters", "tick"}
INTERNALS = {"internals"}
"""All parts of the engine are behind this one attribute, so that they can change in every release."""


def test_durable_has_these_public_members_and_no_others() -> None:
    members = {name for name in dir(Durable()) if not name.startswith("_")}
    assert members == ATTACHING | DEFINITIONS | INSTANCES | INTERNALS
