"""Takes the pictures of the dashboard in docs/pictures: `python -m tests.docs.screens`, with a chromium installed."""

from __future__ import annotations

import shutil
import tempfile
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

from celery import Celery
from playwright.sync_api import sync_playwright

from celery_durable import CreateOptions, Durable, NonRetryableError, Retries, Step, StepConfig, WorkflowEvent
from celery_durable.dashboard.local import LocalServer
from celery_durable.store import heartbeats
from celery_durable.store.heartbeats import HeartbeatUpdate
from tests.conftest import MovableRuntime

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
SHOTS = {
    "dashboard.png": "",
    "dashboard-instance.png": "workflows/order/instances/order-42",
}


class Clock(MovableRuntime):
    """A clock that also measures how long steps took."""

    def monotonic(self) -> float:
        return self.now_us / 1_000_000


class Shop:
    """A shop on a clock that its steps move: some orders wait, some invoices fail."""

    def __init__(self, folder: Path) -> None:
        self.clock = Clock()
        app = Celery("shop", broker="memory://", set_as_current=False)
        app.conf.update(durable_database_url=f"sqlite:///{folder}/shop.sqlite3", worker_enable_remote_control=False)
        self.durable = Durable(app, runtime=self.clock)
        self.durable.migrate()
        self._add_workflows()

    def _add_workflows(self) -> None:
        patient = StepConfig(retries=Retries(limit=5, delay="20 seconds", backoff="constant"))
        attempts: list[str] = []

        def take(seconds: float) -> None:
            self.clock.advance(seconds)

        def charge(order: str) -> str:
            take(4)
            attempts.append(order)
            if len(attempts) < 3:
                raise TimeoutError("the bank did not answer in 4 s")
            return "payment 1"

        def compute_tax() -> None:
            raise ConnectionRefusedError("tax.internal:8443 refuses connections")

        def deliver(address: str) -> None:
            raise NonRetryableError(f"{address} does not exist", name="MailboxUnknown")

        @self.durable.workflow(name="order")
        def order(event: WorkflowEvent[None], step: Step) -> None:
            step.do("reserve stock", take, 3)
            step.do("charge card", patient, charge, event.instance_id)
            step.do("print label", take, 6)
            step.wait_for_event("approval", "approval", ask="Ship 3 parcels to Ada?", to="warehouse")

        @self.durable.workflow(name="invoice")
        def invoice(event: WorkflowEvent[None], step: Step) -> None:
            step.do("compute tax", StepConfig(retries=Retries(limit=1, delay=0)), compute_tax)

        @self.durable.workflow(name="newsletter")
        def newsletter(event: WorkflowEvent[str], step: Step) -> None:
            step.do("deliver", deliver, event.payload)

    def work(self) -> None:
        for _ in range(40):
            self.durable.tick(max_instances=1000)
            self.clock.advance(1)

    def live(self) -> None:
        """Let it have a day, in whose end one worker is silent."""
        flows = self.durable.workflows
        flows["order"].create(None, id="order-42", labels={"tenant": "acme"})
        self.work()
        flows["order"].create_batch([CreateOptions(id=f"order-{number}") for number in range(43, 61)])
        flows["invoice"].create_batch([CreateOptions(id=f"invoice-{number}") for number in range(312)])
        flows["newsletter"].create("ada@example.org", id="mail-7")
        self.work()
        with self.durable.app.connection_for_write() as connection:  # no worker takes these messages
            connection.default_channel.queue_purge("durable")
        own = {"queues": ["durable"], "workflows": sorted(flows)}
        self.beat("worker", "celery@web-2", **own)
        self.clock.advance(55)
        self.beat("worker", "celery@web-1", **own)
        self.beat("dispatcher", "beat@web-1", swept_ago=timedelta(0))

    def beat(self, kind: Any, node: str, **given: Any) -> None:
        update = HeartbeatUpdate(id=node, kind=kind, node=node, pid=1, **given)
        self.durable.internals.store.transact(lambda tx: heartbeats.upsert(tx, update))


def main() -> None:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        shop = Shop(Path(folder))
        shop.live()
        server = LocalServer(shop.durable, port=0, read_only=False)
        thread = threading.Thread(target=server.run)
        thread.start()
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1000, "height": 600}, color_scheme="light")
        page.goto(server.link)
        page.wait_for_timeout(5000)  # the checks of the servers
        home = page.url
        for name, address in SHOTS.items():
            page.goto(home + address)
            page.screenshot(path=FOLDER / name, full_page=True)
        browser.close()
        server.stop()
        thread.join()


if __name__ == "__main__":
    main()
