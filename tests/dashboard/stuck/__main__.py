"""Plant stuck situations and write what the pages say of them: `python -m tests.dashboard.stuck FOLDER [NAME ...]`.

Each one gets a folder with a number, which tells nothing: the complaint, and the texts of all pages that two clicks
from the first one reach. `truth.md` has the causes and the remedies.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery_durable import Durable
from celery_durable.dashboard.local import LocalServer
from tests.dashboard.stuck.reading import read_pages
from tests.dashboard.stuck.shop import build
from tests.dashboard.stuck.situations import SITUATIONS, Situation, World, open_world

_CHECK_MS = 12_000
"""The first page is read again after this time, as it reads itself again."""


def main(out: Path, *names: str) -> None:
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for number, situation in _number():
            if not names or situation.name in names:
                print(f"{number:02} {situation.name}", flush=True)
                _write(chromium, situation, out / f"{number:02}")
        chromium.close()
    (out / "truth.md").write_text(_tell_truth())


def _tell_truth() -> str:
    return "\n".join(
        f"## {number:02} {one.name}\n\nCause: {one.cause}\n\nRemedy: {one.remedy}\n" for number, one in _number()
    )


def _number() -> list[tuple[int, Situation]]:
    return list(enumerate(sorted(SITUATIONS, key=lambda one: one.complaint), 1))


def _write(chromium: Any, situation: Situation, out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder, open_world(Path(folder) / situation.name) as world:
        situation.plant(world)
        with serve(world) as link:
            page = chromium.new_context(viewport={"width": 1280, "height": 900}).new_page()
            page.goto(link)
            page.wait_for_timeout(_CHECK_MS)
            page.screenshot(path=out / "home.png", full_page=True)
            for name, text in read_pages(page, page.url).items():
                (out / name).write_text(text)
            page.context.close()
    (out / "complaint.txt").write_text(situation.complaint + "\n")


@contextmanager
def serve(world: World) -> Iterator[str]:
    """Serve the pages, by an application of the same settings as the worker's, and return their address."""
    app = build(world.broker.url, world.database_url, is_off=world.is_off)
    durable: Durable = vars(app)["durable"]
    server = LocalServer(durable, port=0, read_only=False)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server.link
    finally:
        server.stop()
        thread.join()
        durable.close()
        app.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
