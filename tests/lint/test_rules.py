"""The linter finds planted mistakes at their line, and nothing in code that is right."""

from __future__ import annotations

import textwrap

import pytest

from celery_durable.lint import RULES, check
from tests.docs.blocks import ROOT
from tests.lint.planted import INNOCENT, MISTAKES

MODULE = """\
from celery_durable import StepConfig, durable_workflow
{module}

def charge():
    pass


@durable_workflow
def order(event, step):
{body}
"""


def module_of(body: str, above: str = "") -> str:
    return MODULE.format(module=above, body=textwrap.indent(body, "    "))


@pytest.mark.parametrize("code", [rule.code for rule in RULES])
def test_the_planted_mistakes_of_a_rule_are_found_where_they_are(code: str) -> None:
    texts = [module_of(each.body, each.module) for each in MISTAKES if each.code == code]
    assert texts
    for text in texts:
        [line] = [number for number, each in enumerate(text.splitlines(), start=1) if "# PLANTED" in each]
        assert [(each.code, each.line) for each in check(text)] == [(code, line)], text


def test_code_that_is_right_is_left_alone() -> None:
    found = {name: check(module_of(body, above)) for name, above, body in INNOCENT}
    assert found == {name: [] for name, *_ in INNOCENT}


def test_a_finding_says_what_is_wrong_and_what_to_write_instead() -> None:
    [found] = check(module_of("at = time.time()", "import time"))
    assert (found.line, found.column) == (10, 10)
    assert found.sentence == "Workflow code of 'order' calls time.time(), which returns another time on each pass."
    assert found.remedy == "Use step.now(), or read the clock in a step."


@pytest.mark.parametrize(
    "workflow",
    [
        "@durable.workflow\ndef order(event, s):\n    s.do('a', len)\n    time.time()",
        "@durable.workflow(name='order')\ndef order(event, s):\n    time.time()",
        "def order(event, step):\n    step.sleep('nap', 5)\n    time.time()",
        "def part(step: Step):\n    time.time()",
        "class Orders:\n    def run(self, at: 'Step'):\n        time.time()",
        "def helper():\n    return time.time()\ndef order(event, step: Step):\n    helper()",
        "def order(event, step: Step):\n    def helper():\n        return time.time()\n    helper()",
        "def order(event, step: Step):\n    sorted(event.payload, key=lambda n: time.time())",
        "async def order(event, step: Step):\n    time.time()",
    ],
)
def test_workflow_code_is_recognized(workflow: str) -> None:
    assert [each.code for each in check(f"import time\nfrom celery_durable import Step\n{workflow}")] == ["CD101"]


@pytest.mark.parametrize(
    "other",
    [
        "@durable_step\ndef read():\n    return time.time()",
        "def report(step: int):\n    return time.time() + step",
        "def charge(tx: StepTx):\n    return time.time()",
        "def create():\n    order.create(str(time.time()))",
    ],
)
def test_other_code_may_do_what_it_likes(other: str) -> None:
    assert check(f"import time\nfrom celery_durable import StepTx, durable_step\n{other}") == []


def test_an_async_workflow_awaits_its_steps() -> None:
    found = check("from celery_durable import Step\nasync def order(event, step: Step):\n    at = step.do('a', len)\n")
    assert [each.sentence for each in found] == ["Workflow 'order' does not await step.do()."]
    assert (
        check("from celery_durable import Step\nasync def order(event, step: Step):\n    await step.do('a', len)\n")
        == []
    )


@pytest.mark.parametrize("comment", ["# noqa", "# noqa: CD101", "# NOQA: E501, CD101", "# reason  # noqa: CD1"])
def test_a_comment_allows_a_mistake(comment: str) -> None:
    assert check(module_of(f"at = time.time()  {comment}", "import time")) == []
    assert check(module_of(f"at = time.time(\n)  {comment}", "import time")) == []


@pytest.mark.parametrize(
    "line", ["at = time.time()  # noqa: CD102", "at = time.time(), '# noqa'", "# noqa\nat = time.time()"]
)
def test_a_comment_for_something_else_allows_nothing(line: str) -> None:
    assert [each.code for each in check(module_of(line, "import time"))] == ["CD101"]


def test_a_file_that_is_not_python_is_a_finding() -> None:
    [found] = check("def order(event, step):\n  step.do(\n")
    assert (found.line, found.column, found.code) == (2, 10, "CD001")
    assert found.sentence == "This is not Python that can be read: '(' was never closed."
    [found] = check("a = 1\0")
    assert found.code == "CD001"


def test_the_page_lists_each_rule() -> None:
    page = (ROOT / "docs" / "reference" / "lint.md").read_text(encoding="utf-8")
    for rule in RULES:
        assert f"| {rule.code} |" in page
