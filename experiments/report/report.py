"""The report of a study's record, and of a folder that has a README only."""

import base64
import html
import math
import re
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from experiments.cli.errors import ExperimentError
from experiments.report.charts import charts
from experiments.report.page import figures, page, table
from experiments.study import readme
from experiments.study.claims import Results
from experiments.study.columns import Table
from experiments.study.json_files import read_utf8
from experiments.study.study import Study

FILE = "report.html"
RAW = ("metrics.jsonl", "table.csv")
MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")
_FACTS = ("command", "commit", "python", "jax", "devices")


def _number(value: Any) -> float | None:
    """What sorts a cell: a number, or the center of an estimate."""
    value = value[0] if isinstance(value, tuple) and value else value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and not math.isnan(value) else None


def _table(specification: Table, results: Results) -> str:
    columns = [column for column in specification.columns if column.heading]
    rows = [
        [(column.cell(line[column.name]), _number(line[column.name])) for column in columns]
        for line in results.lines
    ]
    return table([str(column.heading) for column in columns], rows)


def _claims(results: Results) -> str:
    """Every claim with its outcome, and its findings."""
    found = [] if results.are_stated or not results.judgements else [f"<p>{readme.UNSTATED}</p>"]
    rows = []
    for each in results.judgements:
        text = MARKDOWN.renderInline(each.claim.text)
        if not each.findings:
            rows.append(
                f"<tr><td class='text'>{text}</td><td></td><td>not tested</td><td></td></tr>"
            )
        for finding in each.findings:
            kind = {"holds": "holds", "does not hold": "fails"}.get(finding.outcome, "")
            rows.append(
                f"<tr><td class='text'>{text}</td><td>{html.escape(finding.where)}</td>"
                f"<td class='{kind}'>{finding.outcome}</td>"
                f"<td>{html.escape(finding.numbers)}</td></tr>"
            )
    if rows:
        heads = "".join(f"<th scope='col'>{name}</th>"
                        for name in ("claim", "setting", "outcome", "numbers"))  # fmt: skip
        listed = "\n".join(rows)
        summary = "".join(f"<li>{MARKDOWN.renderInline(each.claim.text)} "
                          f"<strong>{each.summary}</strong></li>"
                          for each in results.judgements)  # fmt: skip
        found.append(f"<h2>Claims</h2>\n<ul>{summary}</ul><table id='claims'><thead><tr>{heads}"
                     f"</tr></thead><tbody>\n{listed}\n</tbody></table>")  # fmt: skip
    return "\n".join(found)


def _files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in RAW if (folder / name).exists()}


def of_study(study: Study, results: Results, folder: Path) -> str:
    """The report of a record, from its files."""
    drawn = [chart for figure in study.figures for chart in charts(figure, results) if chart.rows]
    parts = {
        readme.TABLE: f"<h2>Table</h2>\n{_table(study.table, results)}",
        readme.CLAIMS: _claims(results),
        readme.FIGURES: "<h2>Figures</h2>\n" + figures(drawn) if drawn else "",
        readme.PROVENANCE: "",
        readme.TUNING: html.escape(readme.describe_tuning(results.rows, study.table.by)),
    }
    paragraphs = [*study.prose(results)]
    paragraphs += [part for part in readme.ORDER if part not in paragraphs]
    body = "\n".join(parts.get(each) or ("" if each in parts else MARKDOWN.render(each))
                     for each in paragraphs)  # fmt: skip
    (first, *_) = readme.read_environment(results.environment)
    facts = {name: first[name] for name in _FACTS if name in first}
    question = readme.question(study, results)
    return page(question, facts, body, drawn, _files(folder))


def of_text(folder: Path) -> str:
    """The report of a folder that no study wrote: the tables and the prose of its README.

    Raises:
      ExperimentError: If the folder has no page in Markdown.
    """
    pages = [path for name in ("README.md", "*.md") for path in sorted(folder.glob(name))]
    if not pages:
        raise ExperimentError(f"{folder} is not a record: it has no README.md.")
    heading, _, text = read_utf8(pages[0]).partition("\n")
    body = re.sub(
        r'<img src="([\w.-]+\.png)"', lambda link: _image(folder, link), MARKDOWN.render(text)
    )
    body = re.sub(
        r'<a href="(?!https?:)[^"]*">(.*?)</a>', r"\1", body
    )  # The page may lie anywhere.
    facts: dict[str, str] = {}
    if (folder / "environment.txt").exists():
        (first, *_) = readme.read_environment(read_utf8(folder / "environment.txt"))
        facts = {name: first[name] for name in _FACTS if name in first}
    return page(heading.removeprefix("# "), facts, body, [], _files(folder))


def _image(folder: Path, link: re.Match[str]) -> str:
    content = base64.b64encode((folder / link[1]).read_bytes()).decode()
    return f'<img src="data:image/png;base64,{content}"'
