"""The runner of the pages compares what a block prints with what the page shows."""

import pathlib
import sys
from types import ModuleType

import pytest

from tests.programs import program


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    return program("run_readme")


def page(code: str, printed: str) -> str:
    return f"# A page\n\n```python\n{code}\n```\n\n```text printed\n{printed}\n```\n"


EQUAL = ["loss 0.25", "loss ...", "...0.25", "loss   0.25"]
OTHERS = ["loss 0.26", "loss", "loss 0.25\nloss 0.25", "loss ...6"]


@pytest.mark.parametrize("printed", [*EQUAL, *OTHERS])
def test_the_output_is_compared(
    runner: ModuleType,
    printed: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Dots stand for any text; a failure shows both."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # restored at the end
    path = tmp_path / "page.md"
    path.write_text(page('print("loss", 0.25)', printed))
    assert runner.run_blocks(path, "page.md") == (printed in OTHERS)
    shown = capfd.readouterr().out
    if printed in EQUAL:
        assert "page.md: 1 blocks ran" in shown
    else:
        assert "page.md:4: the block of line 4 failed with AssertionError: the page shows" in shown
        assert all(line in shown for line in [*printed.splitlines(), "loss 0.25"])


def test_a_block_without_an_output_may_print_anything(runner: ModuleType) -> None:
    (block,) = runner.python_blocks("```python\nprint(1)\n```\n```text\n2\n```\n")
    assert block.printed is None
    runner.require_printed(block, "1\n")


@pytest.mark.parametrize(
    "text, line",
    [
        ("```text printed\n1\n```\n", 1),  # of no block
        ("```python no-run\nprint(1)\n```\n```text printed\n1\n```\n", 4),  # of one that is skipped
        (page("print(1)", "1") + "```text printed\n1\n```\n", 10),  # the second of one block
    ],
)
def test_an_output_of_no_block_is_an_error(runner: ModuleType, text: str, line: int) -> None:
    with pytest.raises(ValueError, match=f"line {line}: no block that runs precedes this output"):
        runner.python_blocks(text)


def test_a_fence_that_is_never_closed_is_an_error(runner: ModuleType) -> None:
    with pytest.raises(ValueError, match="line 2: a fence is opened and never closed"):
        runner.python_blocks("\n```python\nprint(1)\n")
