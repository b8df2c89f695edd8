"""Reads pages as a person does who has nothing but a screen: their text, where links lead, and what buttons say."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery_durable import Durable
from celery_durable.dashboard.local import LocalServer
from tests.dashboard.stuck.shop import build
from tests.dashboard.stuck.situations import World

_MAX_PAGES = 60
_PATIENCE_SECONDS = 120.0
_LINK = re.compile(r" -> (\S+)\]")
_TEXT = """
() => {
  const lines = [];
  let line = "";
  const flush = () => { if (line.trim()) lines.push(line.replace(/\\s+/g, " ").trim()); line = ""; };
  const walk = (node) => {
    if (node.nodeType === Node.TEXT_NODE) { line += node.textContent; return; }
    if (node.nodeType !== Node.ELEMENT_NODE || node.hidden) return;
    const name = node.tagName.toLowerCase(), style = getComputedStyle(node);
    if (["script", "style", "head"].includes(name) || style.display === "none") return;
    if (name === "br") return flush();
    if (name === "svg") { line += node.ariaLabel ? ` [bar: ${node.ariaLabel}] ` : ""; return; }
    if (name === "input") { line += ` [field: ${node.value || node.placeholder || node.type}] `; return; }
    if (name === "select") { line += ` [choice: ${[...node.options].map((each) => each.text).join(" / ")}] `; return; }
    const isInline = style.display.startsWith("inline") || style.position === "absolute";
    const isBlock = !isInline && !["td", "th"].includes(name);
    if (isBlock) flush();
    if (name === "h1" || name === "h2" || name === "h3") line += "#".repeat(+name[1]) + " ";
    if (name === "li") line += "- ";
    if (name === "td" || name === "th") line += " | ";
    if (name === "summary") line += "[fold] ";
    if (name === "a" || name === "button") line += " [";
    node.childNodes.forEach(walk);
    if (name === "time") line += ` (${node.title || node.dateTime})`;
    if (name === "a") line += ` -> ${node.href.split("#")[0]}] `;
    if (name === "button") line += " (button)] ";
    if (isBlock || name === "tr") flush();
  };
  document.querySelectorAll("details").forEach((each) => { each.open = true; });
  walk(document.body);
  flush();
  return lines.join("\\n") + "\\n";
}
"""


def read_world(
    chromium: Any, world: World, shows: Sequence[str], *, picture: Path | None = None
) -> tuple[dict[str, str], bool]:
    """Read the pages that two clicks from the first one reach, until one of them shows all of this, or for two minutes.

    Returns their texts by the names of files, and whether one does.
    """
    with _serve(world) as link:
        page = chromium.new_context(viewport={"width": 1280, "height": 900}).new_page()
        page.goto(link)
        home, end, is_shown = page.url, time.monotonic() + _PATIENCE_SECONDS, False
        while not is_shown and time.monotonic() < end:
            texts = _read_pages(page, home)
            is_shown = any(all(each in text for each in shows) for text in texts.values())
        if picture is not None:
            page.goto(home)
            page.screenshot(path=picture, full_page=True)
        page.context.close()
    return texts, is_shown


@contextmanager
def _serve(world: World) -> Iterator[str]:
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


def _read_pages(page: Any, home: str) -> dict[str, str]:
    names, texts = {home: "home.txt"}, dict[str, str]()
    for clicks in range(3):
        for address in [each for each in names if each not in texts]:
            page.goto(address)
            texts[address] = page.evaluate(_TEXT)
        for link in [each for text in texts.values() for each in _LINK.findall(text)] if clicks < 2 else []:
            if len(names) < _MAX_PAGES:
                names.setdefault(link, f"page{len(names):02}.txt")
    return {names[address]: _LINK.sub(lambda to: _lead(names.get(to[1])), text) for address, text in texts.items()}


def _lead(name: str | None) -> str:
    """How a link ends. A page that is further away has no name."""
    return f" -> {name}]" if name else "]"
