"""Plant stuck situations and write what the pages say of them: `python -m tests.dashboard.stuck FOLDER [NAME ...]`.

Each one gets a folder with a number, which tells nothing: the complaint, and the texts of all pages that two clicks
from the first one reach. `truth.md` has the causes and the remedies.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.dashboard.stuck.reading import read_world
from tests.dashboard.stuck.situations import SITUATIONS, Situation, open_world


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
    with tempfile.TemporaryDirectory() as folder, open_world(Path(folder)) as world:
        situation.plant(world)
        texts, _ = read_world(chromium, world, situation.shows, picture=out / "home.png")
    for name, text in texts.items():
        (out / name).write_text(text)
    (out / "complaint.txt").write_text(situation.complaint + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
