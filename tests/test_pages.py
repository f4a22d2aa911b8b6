"""Every example on the pages that show code runs, and prints what the page says."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [
    "README.md",
    *(f"docs/{name}.md" for name in ("index", "guide", "from_pytorch", "kernels", "wire")),
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs" / "tutorials").glob("*.md"))),
]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_page(page: str) -> None:
    command = [sys.executable, ROOT / "tools" / "run_readme.py", page]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
