"""One self-contained HTML file: it holds everything, and its policy forbids all requests."""

import base64
import functools
import gzip
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vl_convert

from experiments.report.chart import Chart

FOLDER = Path(__file__).parent
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:"
)


@functools.cache
def library() -> str:
    """Vega, Vega-Lite and Vega-Embed, packed."""
    return packed(vl_convert.javascript_bundle().encode())


def packed(content: bytes) -> str:
    """Compressed bytes as text; the same for the same content."""
    return base64.b64encode(gzip.compress(content, mtime=0)).decode()


def table(headings: Sequence[str], rows: Sequence[Sequence[tuple[str, Any]]]) -> str:
    """A table of `(text, the number that sorts it, or None)`."""
    head = "".join(f"<th scope='col'>{html.escape(each)}</th>" for each in headings)
    lines = []
    for row in rows:
        cells = []
        for text, value in row:
            data = "" if value is None else f" data-value='{float(value)!r}'"
            cells.append(f"<td{data}>{html.escape(text)}</td>".replace("inf'", "Infinity'"))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def figures(charts: Sequence[Chart], first: int = 0) -> str:
    """Places for charts, from number `first` on."""
    found = []
    for place, chart in enumerate(charts, first):
        caption = html.escape(chart.caption)
        note = f"<p class='note'>Numbers: {html.escape(chart.note)}.</p>" if chart.note else ""
        found.append(
            f"<figure id='chart-{place}'><figcaption>{caption}</figcaption>"
            f"<div class='chart' role='img' aria-label='{caption}'></div>{note}</figure>"
        )
    return "\n".join(found)


def page(
    title: str,
    facts: Mapping[str, str],
    body: str,
    charts: Sequence[Chart],
    files: Mapping[str, bytes],
) -> str:
    """The text of the file.

    Args:
      title: The heading.
      facts: Where the record is from, such as the command and the commit.
      body: HTML.
      charts: The charts, for which `body` has places.
      files: Files to download, by name.
    """
    about = "".join(f"<dt>{html.escape(name)}</dt><dd><code>{html.escape(fact)}</code></dd>"
                    for name, fact in facts.items())  # fmt: skip
    data: dict[str, str] = {}
    if charts:
        listed = json.dumps(
            [{"spec": each.spec, "rows": each.rows} for each in charts], allow_nan=False
        )
        data = {"library": library(), "charts": packed(listed.encode())}
    buttons = []
    for place, (name, content) in enumerate(files.items()):
        data[f"file-{place}"] = packed(content)
        buttons.append(
            f"<button data-of='file-{place}' data-name='{html.escape(name)}'>"
            f"Download {html.escape(name)}, {len(content):,} bytes</button>"
        )
    stored = "\n".join(f"<script type='text/plain' id='{name}'>{text}</script>"
                       for name, text in data.items())  # fmt: skip
    script, style = (
        (FOLDER / f"page.{kind}").read_text(encoding="utf-8") for kind in ("js", "css")
    )
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>\n"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        f"<title>{html.escape(title)}</title>\n<style>\n{style}</style></head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n<dl>{about}</dl>\n{body}\n<h2>Raw data</h2>\n"
        f"<p>{' '.join(buttons)}</p>\n{stored}\n<script>\n{script}</script>\n</body></html>\n"
    )
