"""What a worker logs about each message while the database is away."""

from __future__ import annotations

import logging

import pytest
import sqlalchemy as sa

from celery_durable import Durable, Step, WorkflowEvent
from celery_durable.tasks import ADVANCE, DELIVER, SWEEP
from tests.smoke.fault_proxy import FaultProxy, Mode
from tests.support.celery_apps import MakeApp
from tests.support.embedded import until, worker


@pytest.mark.slow  # a pass waits for its database for 20 s
@pytest.mark.parametrize("database", [pytest.param("postgresql", marks=pytest.mark.gate), "mariadb"], indirect=True)
def test_a_task_that_the_database_refuses_has_no_traceback(
    make_app: MakeApp, store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = sa.make_url(store_url)
    proxy = FaultProxy((url.host or "127.0.0.1", url.port or 0))
    through = url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
    app = make_app(durable_database_url=through, durable_dispatcher="none")
    durable = Durable(app)

    @durable.workflow(name="order")
    def order(event: WorkflowEvent[None], step: Step) -> str:
        return "paid"

    try:
        with worker(app, queues=[app.conf.durable_queue]), caplog.at_level(logging.INFO):
            assert order.create(id="o-1").result(timeout=30) == "paid"
            proxy.set(Mode.REFUSE)
            app.send_task(ADVANCE, ("order", "o-2", 1), queue=app.conf.durable_queue)
            app.send_task(SWEEP, queue=app.conf.durable_queue)
            app.send_task(DELIVER, ("e-1",), queue=app.conf.durable_queue)
            until(lambda: len([each for each in caplog.records if "raised expected" in each.getMessage()]) == 3)
            proxy.set(Mode.PASS)
            assert order.create(id="o-3").result(timeout=30) == "paid"
    finally:
        proxy.close()
    lines = [each for each in caplog.records if each.name == "celery.app.trace" and each.levelno > logging.INFO]
    assert lines == []
    warnings = {each.getMessage().partition(" The database: ")[0]: each.exc_info for each in caplog.records}
    assert warnings["A pass of order/o-2#1 ended early, and a sweep will find its run again."] is None
    assert warnings["A sweep ended early, and the next one will repeat it."] is None
    assert warnings["The delivery of event e-1 ended early, and a sweep will repeat it."] is None
    expected = [each for each in caplog.records if "raised expected" in each.getMessage()]
    assert [each.exc_info for each in expected] == [None, None, None]
    for each in expected:
        assert "StoreUnavailable('The database could not do this now: " in each.getMessage()
