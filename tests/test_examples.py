"""The programs of docs/examples/: what each prints, and the lines that it marks."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxcomm
from tests.compiled import UNKEPT

ROOT = Path(jaxcomm.__file__).parents[1]
FOLDER = ROOT / "docs" / "examples"
PROGRAMS = sorted(FOLDER.glob("*.py"))
LAUNCH = ("-m", "jaxcomm.launch", "--processes", "2", "--")
MARK = "  # jaxcomm"
RESULT = re.compile(r"(\w+): ([\d,]+) bytes per worker and step, loss ([\d.]+) to ([\d.]+)")


@pytest.mark.slow
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_examples_train_and_send_less_than_the_mean(path: Path) -> None:
    before = LAUNCH if path.stem.endswith("_processes") else ()
    process = subprocess.run(
        [sys.executable, *before, str(path.relative_to(ROOT))],
        cwd=ROOT,
        env={**os.environ, **UNKEPT, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert (process.returncode, process.stderr) == (0, "")
    results = {name: numbers for name, *numbers in RESULT.findall(process.stdout)}
    assert len(results) == 2, process.stdout
    sent = {name: int(number.replace(",", "")) for name, (number, _, _) in results.items()}
    last = {name: float(loss) for name, (_, _, loss) in results.items()}
    (method,) = results.keys() - {"mean"}
    assert 0 < sent[method] < 0.3 * sent["mean"]
    assert all(last[name] < 0.1 * float(results[name][1]) for name in results)
    assert last[method] < 2 * last["mean"]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_the_marks_of_examples(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    documentation = ast.get_docstring(tree)
    lines = text.splitlines()
    marked = [line for line in lines if line.endswith(MARK)]
    (stated,) = re.findall(r"^(\d+) lines differ from the ordinary program", documentation, re.M)
    assert int(stated) == len(marked) <= 15 and len(lines) <= 80
    assert f" docs/examples/{path.name}" in documentation
    code = lines[tree.body[0].end_lineno :]
    assert all("jaxcomm" not in line or line.endswith(MARK) for line in code)
    assert not re.search(r"jaxcomm[\w.]*\._", text)
    row = f"| [`{path.name}`]({path.name}) |"
    page = (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
    (row,) = [line for line in page if line.startswith(row)]
    assert f"| {stated} |" in row


def test_there_are_seven_examples() -> None:
    assert len(PROGRAMS) == 7
