"""The checker of prose and names finds faults, and skips code, equations and tables."""

import pathlib
from types import ModuleType

import pytest

from tests.programs import program


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    return program("check_prose")


def faults(checker: ModuleType, tmp_path: pathlib.Path, name: str, text: str) -> list[str]:
    checker.ROOT = tmp_path
    (tmp_path / name).write_text(text)
    return [fault.split(":", 1)[1] for fault in checker.faults(tmp_path / name)]


def test_docstrings_and_comments_of_python(checker: ModuleType, tmp_path: pathlib.Path) -> None:
    text = '"""One line.\n\nThe codec tells nothing.\n"""\n\ntold = "told"  # Drawn anew.\n'
    assert faults(checker, tmp_path, "a.py", text) == [
        "3: 'tells': write report, return or pass",
        "6: 'anew': write again",
    ]


def test_code_equations_and_tables_are_not_prose(
    checker: ModuleType, tmp_path: pathlib.Path
) -> None:
    text = '"""`told`.\n\n.. math:: told\n   anew\n\n>>> told\nanew\n"""\n'
    assert faults(checker, tmp_path, "a.py", text) == []
    text = "# Told\n\n| told |\n|---|\n\n```python\ntold\n```\n\nAll is `told`.\n"
    assert faults(checker, tmp_path, "a.md", text) == []


def test_names_of_functions_and_classes(checker: ModuleType, tmp_path: pathlib.Path) -> None:
    text = "def test_nobody_waits(): ...\n\n\nclass TwoRooms:\n    async def _apart(self): ...\n"
    assert faults(checker, tmp_path, "a.py", text) == [
        "1: 'nobody' in a name: write no worker, all workers",
        "4: 'Rooms' in a name: write capacity, or space",
        "5: 'apart' in a name: write separate, independent or distance",
    ]
    assert faults(checker, tmp_path, "b.py", "def headroom(part): ...\n") == []


def test_a_long_sentence(checker: ModuleType, tmp_path: pathlib.Path) -> None:
    most = checker.MOST_WORDS
    sentence = " ".join(["word"] * most)
    assert faults(checker, tmp_path, "a.md", f"Short. {sentence}.\n") == []
    (fault,) = faults(checker, tmp_path, "a.md", f"Short. {sentence} word.\n\nShort.\n")
    assert fault == f"1: a sentence of {most + 1} words, at most {most}"
