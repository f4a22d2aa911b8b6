"""The README of a study: what it says of its commands, and where its claims are placed."""

from experiments.study.readme import (
    provenance,
    read_environment,
)

FIRST = "command: python -m experiments toy\ncommit: abc\npython: 3.13\njax: 0.12\nCPU count: 2\n"
SECOND = FIRST.replace("abc", "def, with uncommitted changes")


def test_the_provenance_has_the_commits_of_all_commands() -> None:
    once, twice = provenance(FIRST), provenance(f"{FIRST}\n{SECOND}")
    assert "at commit abc; python 3.13, jax 0.12; unknown devices, 2 CPUs." in once
    assert "at commit abc, resumed at def, with uncommitted changes; python 3.13" in twice
    assert provenance(f"{FIRST}\n{FIRST}") == once
    assert [each["commit"][:3] for each in read_environment(f"{FIRST}\n{SECOND}")] == ["abc", "def"]
