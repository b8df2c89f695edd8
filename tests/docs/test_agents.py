"""The page for coding agents: its mistakes end as it says, and its repairs can be typed."""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from typing import Any

import pytest
from celery import Celery

from celery_durable import Step, StepConfig, WorkflowEvent
from celery_durable.testing import DurableHarness
from tests.docs.blocks import ROOT
from tests.docs.test_console import check_celery

PAGE = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
MISTAKES = re.findall(r"^\| `([^`]+)` \| `(\w+: [^`]+)` \|", PAGE, re.MULTILINE)


async def score(text: str) -> int:
    return len(text)


def refund(payment: str) -> None: ...


@Celery("shop", set_as_current=False).task(name="shop.pack")
def pack(item: str) -> None: ...


NAMES = {"suppress": suppress, "score": score, "refund": refund, "pack": pack}


@pytest.mark.parametrize(("code", "text"), MISTAKES, ids=[text.partition(":")[0] for _, text in MISTAKES])
def test_a_mistake_ends_with_the_error_that_the_page_shows(code: str, text: str) -> None:
    def workflow(event: WorkflowEvent[Any], step: Step) -> None:  # the page's code has only a step
        exec(code, NAMES | {"step": step})  # the page's own code

    settings = {"durable_step_defaults": StepConfig(retries=0)}
    with DurableHarness([workflow], settings=settings) as harness:
        handle = harness.create(workflow)
        harness.advance("2 days")
        assert handle.error is not None
        assert f"{handle.error.name}: {handle.error.message}".startswith(text)


def test_the_repairs_of_the_page_can_be_typed() -> None:
    repairs = PAGE.partition("To repair, ")[2].partition("\n## ")[0]
    commands = re.findall(r"`([a-z-]+ [^`]+)`", repairs)
    assert len(commands) > 10
    for command in commands:
        check_celery("durable", shlex.split(command))
