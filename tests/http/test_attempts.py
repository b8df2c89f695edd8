"""Failed attempts over HTTP: a KeyError three frames deep is found by file and line."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from celery_durable import Completed, LinearStep, Retries, Step, StepConfig, WorkflowEvent
from celery_durable.definitions import define_linear
from tests.http.conftest import Shop
from tests.support.three_frames import FILE, LINE, charge


@pytest.fixture
def failed(shop: Shop) -> Shop:
    """A workflow of each kind whose step "charge card" has failed twice."""

    @shop.durable.workflow(name="function")
    def order(event: WorkflowEvent[None], step: Step) -> None:
        step.do("charge card", StepConfig(retries=Retries(limit=1, delay=60)), charge, {})

    steps = [LinearStep("charge card", max_attempts=2, delay=60)]
    definition = define_linear("linear", module=__name__, version=1, steps=steps)
    definition.handlers["charge card"] = lambda ctx: Completed(charge({}))
    shop.durable.internals.registry.add(definition)
    for kind in ("function", "linear"):
        shop.durable.internals.operations.create.instance(kind, None, id="i-1")
        for _ in range(2):
            shop.work()
            shop.clock.advance(60)
    return shop


@pytest.mark.parametrize("kind", ["function", "linear"])
def test_the_history_has_the_attempts_page_by_page(failed: Shop, api: TestClient, kind: str) -> None:
    path = f"/workflows/{kind}/instances/i-1/history"
    first = api.get(path, params={"includeAttempts": True, "pageSize": 1}).json()
    (found,) = first["attempts"]
    assert (found["file"], found["line"], found["attempt"], found["outcome"]) == (FILE, LINE, 1, "failed")
    assert found["error"] == {"name": "KeyError", "message": "'total'"}
    assert found["traceback"].splitlines()[-1] == "KeyError: 'total'"
    assert found["stepKey"] == first["steps"][0]["stepKey"]
    assert first["attemptsHasNextPage"] is True
    more = {"includeAttempts": True, "pageSize": 1, "attemptsCursor": first["attemptsCursor"]}
    second = api.get(path, params=more).json()
    assert [each["attempt"] for each in second["attempts"]] == [2]
    assert second["attemptsHasNextPage"] is False


def test_the_history_has_no_attempts_unless_asked_for(failed: Shop, api: TestClient) -> None:
    assert "attempts" not in api.get("/workflows/function/instances/i-1/history").json()


def test_the_explanation_names_the_place(failed: Shop, api: TestClient) -> None:
    assert f"Raised at {FILE}:{LINE}." in api.get("/workflows/function/instances/i-1/explain").json()["sentence"]
