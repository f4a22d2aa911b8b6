"""The notebooks run, print what they store, and are short."""

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.compiled import UNKEPT

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
CODE_CELLS, WORDS, LINES = 10, 350, 8

# Runs the cells that it reads, in one namespace, and writes a list of what each printed.
RUN = """
import contextlib, io, json, sys
variables, printed = {"__name__": "__main__"}, []
for code in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(code, variables)
    printed.append(output.getvalue())
json.dump(printed, sys.stdout)
"""


def cells(path: pathlib.Path, kind: str) -> list[dict[str, Any]]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def stored(cell: dict[str, Any]) -> str:
    """What the notebook says that a cell printed."""
    assert all(output["name"] == "stdout" for output in cell["outputs"])
    return "".join(line for output in cell["outputs"] for line in output["text"])


def test_there_are_two_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["diloco", "getting_started"]


@EACH
def test_it_is_short(path: pathlib.Path) -> None:
    code = cells(path, "code")
    prose = "".join("".join(cell["source"]) + "\n" for cell in cells(path, "markdown"))
    assert len(code) <= CODE_CELLS and len(prose.split()) <= WORDS
    assert all(len(stored(cell).splitlines()) <= LINES for cell in code)
    for target in re.findall(r"\]\(([^)#:]+)\)", prose):
        assert (path.parent / target).is_file(), target


@EACH
def test_devices_are_made_before_jax_is_imported(path: pathlib.Path) -> None:
    first, *others = ["".join(cell["source"]) for cell in cells(path, "code")]
    assert "XLA_FLAGS" in first and "pip" in first and 'find_spec("jaxcomm") is None' in first
    assert not re.search(r"^(import|from) .*jax", first, re.M) and "import jax" in others[0]


@pytest.mark.slow
@EACH
def test_it_prints_what_it_stores(path: pathlib.Path) -> None:
    code = cells(path, "code")
    process = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(["".join(cell["source"]) for cell in code]),
        cwd=ROOT,
        env={**os.environ, **UNKEPT, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == [stored(cell) for cell in code]
