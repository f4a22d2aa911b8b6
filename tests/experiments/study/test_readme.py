"""The README of a study: what it says of its commands, and where its claims are placed."""

import dataclasses

from experiments.study.claims import Claim, Finding, Judgement, Results
from experiments.study.columns import Column, Table, key
from experiments.study.groups import mean_of
from experiments.study.readme import (
    UNSTATED,
    describe_tuning,
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
    """Is it better?"""


def test_a_readme_has_all_parts_without_prose_and_claims_no_foresight() -> None:
    table = Table(("method",), (key("method"), Column("loss", mean_of("loss"), ".1f")))
    study = Study("toy", Config, lambda config: [], lambda config, setting: None, table)
    rows = [make_row("run", {"method": "mean", "seed": 0}, {"loss": 1.0})]
    judged = Judgement(
        Claim("It is better.", lambda results: []), [Finding("ring", "holds", "x 1")]
    )
    results = Results(Config(), rows, table.lines(rows), FIRST, (judged,), True)
    question, command, seeds, claim, finding, shown = write(study, results).split("\n\n")
    assert question == "# Is it better?"
    assert command.startswith("Command: `python -m experiments toy`, at commit abc; python 3.13, ")
    assert seeds == "Every line of the table is over 1 seed."
    assert claim == "Claim: It is better. Outcome: holds in 1 of 1 setting."
    assert finding == "- ring: x 1: holds."
    assert shown == "| method | loss |\n| --- | ---: |\n| mean | 1.0 |\n"
    older = write(study, dataclasses.replace(results, are_stated=False)).split("\n\n")
    assert older[older.index(UNSTATED) + 1] == claim


def test_the_provenance_has_the_commits_of_all_commands() -> None:
    once, twice = provenance(FIRST), provenance(f"{FIRST}\n{SECOND}")
    assert "at commit abc; python 3.13, jax 0.12; unknown devices, 2 CPUs." in once
    assert "at commit abc, resumed at def, with uncommitted changes; python 3.13" in twice
    assert provenance(f"{FIRST}\n{FIRST}") == once
    assert [each["commit"][:3] for each in read_environment(f"{FIRST}\n{SECOND}")] == ["abc", "def"]


def test_the_tuning_reports_unlike_numbers_of_seeds_and_trials() -> None:
    runs, trials = (("mean", 0), ("top", 0), ("top", 1)), (("mean", 1), ("top", 1), ("top", 2))
    rows = [
        make_row("run", {"method": name, "seed": seed}, {"at_edge": "rate" * (name == "top")})
        for name, seed in runs
    ]
    rows += [make_row("trial", {"method": name, "seed": 2}, {"rate": n}) for name, n in trials]
    described = describe_tuning(rows, ["method"])
    assert described.startswith(
        "Every line of the table is over 1 to 2 seeds. The tuning took 1 to 2"
    )
    assert described.endswith("3 in total. At an end of the tried values: top (rate).")
