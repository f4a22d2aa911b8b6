"""The slow tests that a change selects."""

import pathlib
import subprocess

import pytest

from tests.cases import CASES, FAMILIES
from tests.cases._gossip import GOSSIP
from tests.cases._local import LOCAL
from tests.changed import PACKAGES, ROOT, changed_since, chosen_rows, imports, made_of, mirrored


def test_a_file_of_a_few_rows_asks_for_those() -> None:
    own, _ = chosen_rows(FAMILIES, {"jaxcomm/compression/codes/_rans.py"})
    assert own == {"rans"}
    own, shared = chosen_rows(FAMILIES, {"jaxcomm/compression/quantizers/_adaptive_levels.py"})
    assert own == {"adaptive_levels"} and not shared


def test_rows_of_gossip_and_of_local_steps_are_asked_for_too() -> None:
    changed = {"jaxcomm/gossip/_compressed.py", "jaxcomm/synchronization/_local_sgd.py"}
    own, _ = chosen_rows([GOSSIP, LOCAL], changed)
    assert own == {"choco_sgd", "choco_sgd_over_matcha", "deep_squeeze", "slowmo"}


@pytest.mark.parametrize("file", ["jaxcomm/_units.py", "tests/workers.py"])
def test_a_shared_file_asks_for_one_row_of_each_family(file: str) -> None:
    own, shared = chosen_rows(FAMILIES, {file})
    assert not own and shared == {family[0].name for family in FAMILIES}


def test_every_row_is_made_of_something_and_texts_of_nothing() -> None:
    assert all(made_of(case.make()) & imports().keys() for case in CASES)
    assert chosen_rows(FAMILIES, {"README.md", "docs/guide.md"}) == (set(), set())
    assert not mirrored("README.md") and not mirrored("tools/find_python")


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("jaxcomm/_noise.py", "tests/test_noise.py"),
        ("jaxcomm/aggregation/_majority_vote.py", "tests/aggregation/test_majority_vote.py"),
        ("jaxcomm/gossip/_push.py", "tests/gossip"),
        ("experiments/training/train.py", "tests/experiments"),
        ("pallas_kernels/pack/api.py", "tests/pallas_kernels/pack"),
        ("tests/wire/test_account.py", "tests/wire/test_account.py"),
    ],
)
def test_what_is_not_in_the_table_is_tested_by_the_folder_of_its_name(
    file: str, tests: str
) -> None:
    assert mirrored(file) == {tests}


def test_every_folder_of_the_packages_has_one_of_tests() -> None:
    for file in imports():
        for named in mirrored(file):
            assert (ROOT / named).exists(), file
    assert {pathlib.PurePath(file).parts[0] for file in imports()} == {*PACKAGES}


def test_revisions() -> None:
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("no checkout")
    assert isinstance(changed_since("HEAD"), set)
    with pytest.raises(pytest.UsageError, match="no_such_revision"):
        changed_since("no_such_revision")
