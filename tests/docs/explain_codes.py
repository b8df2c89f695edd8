"""The table of explain's codes in docs/how-to/debugging.md: ``python -m tests.docs.explain_codes`` writes it."""

from __future__ import annotations

import re
from pathlib import Path

from celery_durable.insight.explain.codes import MEANINGS, Code

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "debugging.md"
HEAD = "| Code | Cause | Remedy |\n|---|---|---|\n"
SECTIONS = {
    Code.WAITING_EVENT: "#the-event-does-nothing",
    Code.WAITING_TASKS: "#the-task-does-not-answer",
    Code.TASK_NOT_CONSUMED: "#the-task-does-not-answer",
    Code.DUE_NOT_DISPATCHED: "#no-dispatcher",
    Code.DISPATCHED_NOT_CLAIMED: "#no-worker",
    Code.NOT_REGISTERED: "#no-code",
    Code.POOL_UNSUPPORTED: "existing-app.md#processes",
    Code.STEP_LIMIT: "#it-ended-errored",
    Code.NONDETERMINISTIC: "#it-ended-errored",
    Code.OUTCOME_UNKNOWN: "../explanation/failures.md#an-attempt-whose-end-is-unknown",
    Code.FAILED: "#it-ended-errored",
}


def build_table() -> str:
    """Return the table as Markdown."""
    return HEAD + "".join(
        f"| {code} | {meaning.cause} | {meaning.remedy}{_link(code)} |\n" for code, meaning in MEANINGS.items()
    )


def _link(code: Code) -> str:
    return f" [More]({SECTIONS[code]})." if code in SECTIONS else ""


def insert_table(page: str) -> str:
    """Return the page with the current table in the place of the old one."""
    return re.sub(r"\| Code \| .*\n(\|.*\n)+", lambda _: build_table(), page, count=1)


if __name__ == "__main__":
    PAGE.write_text(insert_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
