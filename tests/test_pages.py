"""Every example on the pages that show code runs, and prints what the page says."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

from tests.programs import program

run_readme = program("run_readme")
ROOT = pathlib.Path(__file__).parents[1]
# The examples of docs/contributing are modules of the library: `test_contributing.py` runs those.
PAGES = [
    str(page.relative_to(ROOT))
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "contributing" not in page.parts
    and any(block.run for block in run_readme.python_blocks(page.read_text(encoding="utf-8")))
]


NEED_RAY = ["docs/tutorials/asynchronous.md"]
RAY = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no Ray"),
    pytest.mark.xdist_group("ray"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=RAY if page in NEED_RAY else []) for page in PAGES]
)
def test_page(page: str) -> None:
    command = [sys.executable, ROOT / "tools" / "run_readme.py", page]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
