"""``celery -A tests.smoke.asking``: workflows whose async steps ask a server, over the one client of their process."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from celery import Celery

from celery_durable import Retries, Step, StepConfig, StepTimeout, WorkflowEvent
from tests.smoke import dying, flows
from tests.smoke.config import Config


class Clients:
    """The client of this process."""

    server: httpx.AsyncClient


def process_id() -> str:
    """Name this process, also if its number was another one's before."""
    started_at = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return f"{os.getpid()}-{started_at}"


async def ask(url: str) -> dict[str, Any]:
    """Ask the server, and say what this process has at that moment."""
    response = await Clients.server.get(url, headers={"X-Process": process_id()})
    response.raise_for_status()
    return {
        "process": process_id(),
        "loop": id(asyncio.get_running_loop()),
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "sockets": _count_sockets(),
    }


def _count_sockets() -> int:
    return sum(_is_socket(each) for each in Path("/proc/self/fd").iterdir())


def _is_socket(descriptor: Path) -> bool:
    try:
        return str(descriptor.readlink()).startswith("socket:")
    except OSError:  # that of the listing itself
        return False


async def hang() -> float:
    """Wait until it is cancelled; says how long after the timeout of 200 ms that was."""
    began = time.monotonic()
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        _late.append(time.monotonic() - began - 0.2)
        raise
    raise AssertionError


_late: list[float] = []


def build(config: Config) -> Celery:
    """The application of the smoke tests, `asks`, `hangs` and `crowd`."""
    app = flows.build(config)
    durable = vars(app)["durable"]

    @durable.on_loop_start
    async def open_client() -> None:
        Clients.server = httpx.AsyncClient(limits=httpx.Limits(keepalive_expiry=None))

    @durable.on_loop_stop
    async def close_client() -> None:
        await Clients.server.aclose()
        config.path(f"closed-{process_id()}").touch()

    @durable.workflow(name="asks")
    def asks(event: WorkflowEvent[dict[str, Any]], step: Step) -> list[dict[str, Any]]:
        found = []
        for number in range(event.payload["passes"]):
            found.append(step.do(f"ask {number}", ask, event.payload["url"]))
            step.sleep(f"rest {number}", 0.01)
        return found

    @durable.workflow(name="hangs")
    def hangs(event: WorkflowEvent[None], step: Step) -> list[float]:
        """How late an async function is cancelled: alone, and in a branch."""
        step.do("open the client", asyncio.sleep, 0)  # which takes longer than the timeout
        config = StepConfig(timeout=0.2, retries=Retries(limit=0))
        late = []
        for name in ("alone", "branch"):
            try:
                if name == "alone":
                    step.do(name, config, hang)
                else:
                    step.gather(step.submit(name, config, hang), step.submit("other", lambda: 1))
            except StepTimeout:
                late.append(step.do(f"{name} was late", _late.pop))
        return late

    return app


if "DURABLE_SMOKE" in os.environ:
    app = dying.make_app(build)
