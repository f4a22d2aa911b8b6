"""The README of a study: the order of its paragraphs, its provenance and its tuning."""

import dataclasses
from typing import Any

import pytest

from experiments.study.claims import Claim, Finding, Judgement, Results
from experiments.study.columns import Column, Table, key
from experiments.study.groups import mean_of
from experiments.study.readme import (
    CLAIMS,
    FIGURES,
    TABLE,
    UNSTATED,
    describe_tuning,
    fact_table,
    provenance,
    read_environment,
    write,
)
from experiments.study.study import Study
from experiments.study.tidy import make_row

FIRST = "command: python -m experiments toy\ncommit: abc\npython: 3.13\njax: 0.12\nCPU count: 2\n"
SECOND = FIRST.replace("abc", "def, with uncommitted changes")


@dataclasses.dataclass(frozen=True)
class Config:
    """Is it better?

    More text.
    """


@dataclasses.dataclass(frozen=True)
class Figure:
    file: str = "loss.png"
    caption: str = "Loss against steps"


def row(kind: Any, method: str, seed: int, **values: Any) -> dict[str, Any]:
    return make_row(kind, {"method": method, "seed": seed}, values)


def text(are_stated: bool = True, claimed: bool = True, **options: Any) -> list[str]:
    """The paragraphs of a README."""
    table = Table(("method",), (key("method"), Column("loss", mean_of("loss"), ".1f")))
    study = Study(
        "toy",
        Config,
        lambda config: [],
        lambda config, setting: None,
        table,
        figures=(Figure(),),
        **options,
    )
    rows = [row("run", "mean", 0, loss=1.0)]
    claim = Claim("It is better.", lambda results: [])
    judgement = Judgement(claim, [Finding("ring", "holds", "ratio 0.5")])
    judgements = (judgement,) if claimed else ()
    results = Results(Config(), rows, table.lines(rows), FIRST, judgements, are_stated)
    return write(study, results).split("\n\n")


def test_a_readme_has_all_parts_without_prose() -> None:
    question, command, seeds, claim, finding, table, figure = text()
    assert question == "# Is it better?"
    assert command.startswith("Command: `python -m experiments toy`, at commit abc; python 3.13, ")
    assert seeds == "Every line of the table is over 1 seed."
    assert claim == "Claim: It is better. Outcome: holds in 1 of 1 setting."
    assert finding == "- ring: ratio 0.5: holds."
    assert table == "| method | loss |\n| --- | ---: |\n| mean | 1.0 |"
    assert figure == "![Loss against steps](loss.png)\n"


def test_a_table_of_facts_has_all_their_columns() -> None:
    facts = (("density", {"leaf": "a", "shape": [3, 4], "own_part": 0.123456}),
             ("density", {"leaf": "b", "ms": float("nan")}), ("bytes", {"leaf": "c"}))  # fmt: skip
    rows = [make_row("fact", {"about": about}, values) for about, values in facts]
    assert fact_table(rows, "density").splitlines()[2:] == [
        "| a | 3 x 4 | 0.1235 | - |",
        "| b | - | - | - |",
    ]


def test_prose_places_the_parts_and_omits_none() -> None:
    paragraphs = text(prose=lambda results: ["Setup.", TABLE, f"{len(results.rows)} row.", FIGURES])
    assert paragraphs[1] == "Setup." and paragraphs[2].startswith("| method")
    assert paragraphs[3] == "1 row." and paragraphs[4].startswith("![Loss")
    assert paragraphs[5].startswith("Command") and paragraphs[7].startswith("Claim: It is better.")
    assert CLAIMS not in "".join(paragraphs) and len(paragraphs) == 9


def test_the_readme_of_an_older_record_does_not_claim_foresight() -> None:
    old, new = text(are_stated=False), text()
    added = [paragraph for paragraph in old if paragraph not in new]
    assert added == [UNSTATED] and old[old.index(UNSTATED) + 1].startswith("Claim: ")
    assert UNSTATED not in text(are_stated=False, claimed=False)


def test_the_provenance_has_the_commits_of_all_commands() -> None:
    once, twice = provenance(FIRST), provenance(f"{FIRST}\n{SECOND}")
    assert "at commit abc; python 3.13, jax 0.12; unknown devices, 2 CPUs." in once
    assert "at commit abc, resumed at def, with uncommitted changes; python 3.13" in twice
    assert provenance(f"{FIRST}\n{FIRST}") == once
    assert [each["commit"][:3] for each in read_environment(f"{FIRST}\n{SECOND}")] == ["abc", "def"]


@pytest.mark.parametrize(
    ("extended", "edge", "expected"),
    [
        (0, "", "took 2 trials per setting, on validation data and with other seeds: 4 in total."),
        (1, "rate", "took 2 to 3 trials per setting, on validation data and with other seeds: 5 in "
                    "total. At an end of the tried values: top (rate)."),
    ],
)  # fmt: skip
def test_the_tuning_reports_its_trials_and_edges(extended: int, edge: str, expected: str) -> None:
    rows = [row("run", name, seed, at_edge=each) for name, each in (("mean", ""), ("top", edge))
            for seed in (0, 1)]  # fmt: skip
    rows += [row("trial", method, 2, rate=n) for method in ("mean", "top") for n in (1, 2)]
    rows += [row("trial", "top", 2, rate=n) for n in range(3, 3 + extended)]
    described = describe_tuning(rows, ["method"])
    assert described.startswith("Every line of the table is over 2 seeds. ")
    assert expected in described
    partial = describe_tuning(rows[1:], ["method"])
    assert partial.startswith("Every line of the table is over 1 to 2 seeds.")
