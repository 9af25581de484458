"""A page of tables, pictures and texts as one file: nothing in it is fetched from anywhere, and nothing in it runs."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
th, td { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }
th { border-bottom: 1px solid #999; } td { border-bottom: 1px solid #eee; font-variant-numeric: tabular-nums; }
pre { background: #f6f6f6; padding: 1rem; white-space: pre-wrap; } img { max-width: 100%; } h2 { margin-top: 2rem; }
@media (prefers-color-scheme: dark) {
  body { background: #181818; color: #ddd; } pre { background: #242424; } td { border-color: #333; } img { background: #fff; }
}
"""
HEAD = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>{style}</style></head><body>
<h1>{title}</h1>
"""


class Page:
    """Sections of a page, put together as they come."""

    def __init__(self, title: str) -> None:
        self._parts = [HEAD.format(title=escape(title), style=STYLE)]

    def section(self, title: str, note: str = "") -> None:
        """Begin a section."""
        self._parts.append(f"<h2>{escape(title)}</h2>\n" + (f"<p>{escape(note)}</p>\n" if note else ""))

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table with a line of names above it."""
        lines = [f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>"]
        lines += [f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
        self._parts.append(f"<table>\n{chr(10).join(lines)}\n</table>\n")

    def picture(self, png: bytes, words: str) -> None:
        """A picture, with words for those who do not see it."""
        self._parts.append(f'<img alt="{escape(words)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">\n')

    def text(self, title: str, text: str) -> None:
        """A text as it was written."""
        self._parts.append(f"<h3>{escape(title)}</h3>\n<pre>{escape(text)}</pre>\n")

    def data(self, name: str, record: str) -> None:
        """JSON for programs that read the page."""
        safe = record.replace("<", "\\u003c")
        self._parts.append(f'<script type="application/json" id="{escape(name)}">{safe}</script>\n')

    def render(self) -> str:
        """The whole file."""
        return "".join(self._parts) + "</body></html>\n"
