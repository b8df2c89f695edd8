"""Parts of SVG pictures, and the fonts and colours that they share."""

from __future__ import annotations

from html import escape

SANS = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
INK, FAINT, LINE, PAPER = "#1f2937", "#6b7280", "#d1d5db", "#ffffff"
BLUE, GREEN, AMBER, RED, GREY = "#2563eb", "#15803d", "#b45309", "#b91c1c", "#9ca3af"


def text(x: float, y: float, words: str, *, color: str = INK, size: int = 13, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" font-size="{size}" text-anchor="{anchor}">{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, color: str, extra: str = "") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{color}"{extra}/>'


def line(x1: float, y1: float, x2: float, y2: float, color: str, extra: str = "") -> str:
    return f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{color}" fill="none"{extra}/>'


def picture(width: float, height: float, title: str, parts: list[str], font: str = SANS, paper: str = PAPER) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'width="{width:g}" height="{height:g}" font-family="{escape(font)}">\n<title>{escape(title)}</title>\n'
    )
    frame = rect(0.5, 0.5, width - 1, height - 1, paper, f' rx="8" stroke="{LINE}"')
    return head + "\n".join([frame, *parts]) + "\n</svg>\n"
