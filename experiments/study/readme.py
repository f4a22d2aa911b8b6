"""The README of a record, from the record alone."""

import inspect
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from experiments.study import table as tables
from experiments.study.claims import Results
from experiments.study.columns import MISSING
from experiments.study.study import Study
from experiments.study.tidy import Row, is_missing, of_kind

TABLE, CLAIMS, FIGURES = "{table}", "{claims}", "{figures}"
PROVENANCE, TUNING = "{provenance}", "{tuning}"
"""Paragraphs that the prose of a study places among its own. Those that it omits follow at the end,
so that no study omits a claim."""

UNSTATED = "This record has no `claims.md`: it is older than the statement of claims before a run."

ORDER = (PROVENANCE, TUNING, CLAIMS, TABLE, FIGURES)


def read_environment(text: str) -> list[dict[str, str]]:
    """The facts of an `environment.txt`, one dictionary per command that wrote to the record."""
    return [
        dict(line.split(": ", 1) for line in part.splitlines() if ": " in line)
        for part in text.strip().split("\n\n")
    ]


def provenance(text: str) -> str:
    """The command, commit, versions and machine of a record.

    Args:
      text: The text of `environment.txt`.
    """
    first, *resumed = read_environment(text)
    packages = ", ".join(f"{name} {first[name]}" for name in ("python", "jax") if name in first)
    commits = list(dict.fromkeys(each.get("commit", "unknown") for each in (first, *resumed)))
    again = f", resumed at {' and '.join(commits[1:])}" if len(commits) > 1 else ""
    return (
        f"Command: `{first.get('command', 'unknown')}`, at commit {commits[0]}{again}; {packages}; "
        f"{first.get('devices', 'unknown devices')}, {first.get('CPU count', '?')} CPUs. All "
        "versions are in `environment.txt`, every setting in `config.json`, every raw metric in "
        "`metrics.jsonl`."
    )


def fact_table(rows: Sequence[Row], about: str) -> str:
    """A table of the facts of one kind, with all their columns.

    Args:
      rows: The rows of the record.
      about: The kind, such as `"density"`.
    """

    def show(value: Any) -> str:
        if isinstance(value, list):
            return " x ".join(map(show, value)) or MISSING
        return (
            MISSING if is_missing(value) else f"{value:.4g}" if type(value) is float else f"{value}"
        )

    facts = [
        {
            name: show(value)
            for name, value in row.items()
            if name not in ("schema", "kind", "about")
        }
        for row in rows
        if row.get("about") == about
    ]
    names = [*dict.fromkeys(itertools.chain(*facts))]
    cells = [[fact.get(name, MISSING) for name in names] for fact in facts]
    return tables.to_markdown([name.replace("_", " ") for name in names], cells).rstrip("\n")


def _plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def describe_tuning(rows: Sequence[Row], keys: Sequence[str]) -> str:
    """The number of seeds, the number of trials, and choices at the edge of their grid.

    Args:
      rows: The rows of the record.
      keys: The keys of a setting.
    """
    runs, trials = of_kind(rows, "run"), of_kind(rows, "trial")
    seeds = sorted({*Counter(tuple(run[name] for name in keys) for run in runs).values()})
    text = f"Every line of the table is over {' to '.join(map(str, seeds[:1] + seeds[1:][-1:]))} "
    text += "seed." if seeds == [1] else "seeds."
    if not trials:
        return text
    counts = sorted(Counter(tuple(row[name] for name in keys) for row in trials).values())
    each = _plural(counts[0], "trial") if counts[0] == counts[-1] else (
        f"{counts[0]} to {_plural(counts[-1], 'trial')}"
    )  # fmt: skip
    text += (
        f" The tuning took {each} per setting, on validation data and with other seeds: "
        f"{len(trials):,} in total."
    )
    edges = {
        ", ".join(str(run[name]) for name in keys): run["at_edge"]
        for run in runs
        if run.get("at_edge")
    }
    listed = "; ".join(f"{where} ({names})" for where, names in edges.items())
    return text + (f" At an end of the tried values: {listed}." if listed else "")


def question(study: Study, results: Results) -> str:
    """The question of a study, which is the heading of its records."""
    return (inspect.getdoc(results.config) or study.name).splitlines()[0]


def write(study: Study, results: Results) -> str:
    """The text of the README."""
    claims = [judgement.markdown for judgement in results.judgements]
    parts = {
        TABLE: study.table.to_markdown(results.lines).rstrip("\n"),
        CLAIMS: "\n\n".join(([] if results.are_stated or not claims else [UNSTATED]) + claims),
        FIGURES: "\n\n".join(f"![{figure.caption}]({figure.file})" for figure in study.figures),
        PROVENANCE: provenance(results.environment),
        TUNING: describe_tuning(results.rows, study.table.by),
    }
    paragraphs = [*study.prose(results)]
    paragraphs += [part for part in ORDER if part not in paragraphs]
    shown = [parts.get(paragraph, paragraph) for paragraph in paragraphs]
    return "\n\n".join([f"# {question(study, results)}", *filter(None, shown)]) + "\n"
