"""What the documentation names exists: settings with their defaults, errors, commands, links, and it builds."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import celery.exceptions
import fastapi
from celery.app.control import Control
from django.db import transaction

import celery_durable
from celery_durable import Step, StepTx, dashboard, errors, http, testing
from celery_durable.cli import durable
from celery_durable.config import Settings
from celery_durable.contrib import fastapi as contrib_fastapi
from celery_durable.contrib import flask as contrib_flask
from celery_durable.contrib import pydantic_ai as contrib_pydantic_ai
from celery_durable.handles import Workflow, WorkflowInstance
from celery_durable.insight.explain.codes import MEANINGS, Code
from celery_durable.testing import (
    Barrier,
    DurableHarness,
    Faults,
    HarnessInstance,
    Messages,
    Mocks,
    scenario,
    strategies,
)
from tests.docs.blocks import PAGES, ROOT, page_name
from tests.docs.explain_codes import insert_table

DEBUGGING = ROOT / "docs" / "how-to" / "debugging.md"
OWNERS: dict[str, tuple[object, ...]] = {
    "agents.md": (contrib_pydantic_ai, DurableHarness, HarnessInstance, Mocks),
    "cancel.md": (celery_durable.CurrentStep,),
    "dashboard.md": (dashboard,),
    "http.md": (http, celery_durable.Durable),
    "fastapi.md": (fastapi, contrib_fastapi),
    "django.md": (transaction, testing),
    "flask.md": (contrib_flask.FlaskDurable,),
    "testing.md": (testing, strategies, DurableHarness, HarnessInstance, Messages, Barrier, Faults, Mocks, scenario),
}
"""What else has the methods that a page names."""
TEXT = {page: re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL) for page in PAGES}


def test_the_table_of_settings_is_the_dataclass() -> None:
    rows = re.findall(
        r"^\| `durable_(\w+)` \| `(.+?)` \| (.+?) \|$", TEXT[ROOT / "docs" / "reference" / "settings.md"], re.MULTILINE
    )
    documented = [(name, ast.literal_eval(default)) for name, default, _ in rows]
    assert documented == [(field.name, field.default) for field in dataclasses.fields(Settings)]
    assert [type(default) for _, default in documented] == [type(f.default) for f in dataclasses.fields(Settings)]


def test_pages_name_only_settings_errors_verbs_and_methods_that_exist() -> None:
    unknown = {page_name(page): list(unknown_names(page)) for page in PAGES}
    assert {page: names for page, names in unknown.items() if names} == {}


def unknown_names(page: Path) -> Iterator[str]:
    text = TEXT[page]
    settings = {field.name for field in dataclasses.fields(Settings)}
    known = settings | {"workflow", "step", "harness", "store", "golden"}
    yield from set(re.findall(r"`durable_(\w+)`", text)) - known
    yield from set(re.findall(r"`(?:celery -A proj )?durable ([\w-]+)", text)) - set(durable.list_commands(None))
    given = set(inspect.signature(StepTx).parameters) | {"log"}
    for owner, name in re.findall(r"`(step|tx)\.(\w+)", text):
        if not hasattr(Step if owner == "step" else StepTx, name) and name not in given:
            yield f"{owner}.{name}"
    owners = (celery_durable, Workflow, WorkflowInstance, Step, StepTx, celery.exceptions, Control)
    owners += OWNERS.get(page.name, ())
    for name in re.findall(r"`(\w+)\(", text):
        if name != "fn" and not any(hasattr(owner, name) for owner in owners):
            yield name
    attributes = {"clock", "attempts", "durable", "faults", "journal", "messages", "mocks", "outbox"}
    for name in re.findall(r"`harness\.(\w+)", text):
        if name not in attributes and not hasattr(DurableHarness, name):
            yield name


def test_the_tables_of_errors_name_errors() -> None:
    cells = re.findall(r"^\| (`[A-Z]\w+`(?:, `[A-Z]\w+`)*)", TEXT[DEBUGGING], re.MULTILINE)
    names = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert len(names) > 25
    for name in names:
        assert issubclass(getattr(errors, name), errors.DurableError), name


def test_the_table_of_codes_is_that_of_the_code() -> None:
    """``make codes`` writes it."""
    assert list(MEANINGS) == list(Code)
    assert insert_table(TEXT[DEBUGGING]) == TEXT[DEBUGGING]


def test_every_error_that_people_meet_is_in_the_tables() -> None:
    """Left out: bases, and those that say all there is to say at the line that made the mistake."""
    left_out = {"DurableError", "NonRetryableError", "RunNotFound", "StepCancelled", "StepFailed", "EventTimeout"}
    named = {*re.findall(r"`(\w+)`", TEXT[DEBUGGING]), *left_out}
    for found in vars(errors).values():
        if inspect.isclass(found) and issubclass(found, errors.DurableError) and found.__name__ not in named:
            assert issubclass(found, (errors.ValueRefused, errors.DefinitionInvalid)), found


def test_the_names_that_comments_and_tests_use_are_on_the_page_about_the_inside() -> None:
    page = TEXT[ROOT / "docs" / "design.md"]
    code = "\n".join(path.read_text() for room in ("celery_durable", "tests") for path in (ROOT / room).rglob("*.py"))
    laws = set(re.findall(r"^\*\*(LAW \w+)\.", page, re.MULTILINE))
    assert laws >= set(re.findall(r"\bLAW \d\w?", code))
    assert set(re.findall(r"\bI\d+", page)) >= set(re.findall(r"\"(I\d+)", code))
