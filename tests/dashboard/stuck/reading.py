"""Reads pages as a person does who has nothing but a screen: their text, where links lead, and what buttons say."""

from __future__ import annotations

from typing import Any
from urllib.parse import urljoin, urlsplit

_MAX_PAGES = 60
_TEXT = """
(number) => {
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
    if (name === "a") { const to = number[node.href.split("#")[0]]; line += to === undefined ? "]" : ` -> ${to}] `; }
    if (name === "button") line += " (button)] ";
    if (isBlock || name === "tr") flush();
  };
  document.querySelectorAll("details").forEach((each) => { each.open = true; });
  walk(document.body);
  flush();
  return lines.join("\\n") + "\\n";
}
"""


def read_pages(page: Any, home: str, *, clicks: int = 2) -> dict[str, str]:
    """Return the texts of the pages that so many clicks from the first one reach, by the names of files."""
    origin = urlsplit(home).netloc
    names, found = {home: "home.txt"}, [home]
    links: dict[str, list[str]] = {}
    level = [home]
    for _ in range(clicks):
        following = []
        for address in level:
            links[address] = _find_links(page, address, origin)
            for link in links[address]:
                if link not in names and len(names) < _MAX_PAGES:
                    names[link] = f"page{len(names):02}.txt"
                    following.append(link)
        found += following
        level = following
    texts = {}
    for address in found:
        page.goto(address)
        texts[names[address]] = page.evaluate(_TEXT, names)
    return texts


def _find_links(page: Any, address: str, origin: str) -> list[str]:
    page.goto(address)
    hrefs = page.eval_on_selector_all("a[href]", "all => all.map((each) => each.href.split('#')[0])")
    found = [urljoin(address, each) for each in hrefs]
    return list(dict.fromkeys(each for each in found if urlsplit(each).netloc == origin))
