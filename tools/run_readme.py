"""Run the Python examples of Markdown files.

    python tools/run_readme.py [FILE ...]      # README.md when no file is named

The ```python blocks of one file run in order, in one namespace, in a fresh process with 8 fake CPU
devices; a block opened by ```python no-run is skipped. A block ```text printed is what the block
before it must print, with `...` for any text, as in a doctest. Other blocks are not run.
"""

import contextlib
import doctest
import io
import os
import subprocess
import sys
import tempfile
import time
import traceback
import types
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DEVICES = "--xla_force_host_platform_device_count"


class Block(NamedTuple):
    line: int  # of its first line of code, from 1
    code: str
    run: bool
    printed: str | None = None  # what it must print, or None if the page does not show it


def python_blocks(text: str) -> list[Block]:
    """The ```python blocks of a Markdown text, with what they print.

    ValueError if a fence is never closed, or if an output belongs to no block.
    """
    blocks: list[Block] = []
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        indent = len(line) - len(line.lstrip(" "))
        fence = line.lstrip(" ")
        ticks = len(fence) - len(fence.lstrip("`"))
        info = fence[ticks:].split()
        if ticks < 3 or "`" in fence[ticks:]:
            continue
        code = []
        for _, inner in lines:
            if inner.strip(" ") == "`" * max(ticks, len(inner.strip(" "))):
                break
            code.append(inner[min(indent, len(inner) - len(inner.lstrip(" "))) :])
        else:
            raise ValueError(f"line {number}: a fence is opened and never closed")
        if info[:1] == ["python"]:
            blocks.append(Block(number + 1, "\n".join(code) + "\n", "no-run" not in info[1:]))
        elif info[:2] == ["text", "printed"]:
            if not blocks or not blocks[-1].run or blocks[-1].printed is not None:
                raise ValueError(f"line {number}: no block that runs precedes this output")
            blocks[-1] = blocks[-1]._replace(printed="\n".join(code) + "\n")
    return blocks


def require_printed(block: Block, output: str) -> None:
    """Raises an AssertionError that shows the difference if a block printed something else."""
    checker, example = doctest.OutputChecker(), doctest.Example(block.code, block.printed or "")
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if block.printed is not None and not checker.check_output(block.printed, output, options):
        shown = checker.output_difference(example, output, options | doctest.REPORT_NDIFF)
        raise AssertionError(f"the page shows another output\n{shown}")


def run_blocks(path: Path, name: str) -> int:
    """Run the blocks of one file in this process; 0 when all of them ran."""
    try:
        blocks = python_blocks(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        print(f"{name}: {error}", flush=True)
        return 1
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    started = time.perf_counter()
    for block in filter(lambda block: block.run, blocks):
        first = next((line.strip() for line in block.code.splitlines() if line.strip()), "")
        print(f"{name}:{block.line}: {first}", flush=True)
        begun = time.perf_counter()
        try:
            # Blank lines before the code give tracebacks the line numbers of the file.
            code = compile("\n" * (block.line - 1) + block.code, str(path), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as output:
                try:
                    exec(code, vars(module))
                finally:
                    sys.__stdout__.write(output.getvalue())
            require_printed(block, output.getvalue())
        except BaseException as error:
            traceback.print_exc()
            frames = traceback.extract_tb(error.__traceback__)
            line = next(
                (frame.lineno for frame in frames if frame.filename == str(path)), block.line
            )
            kind = type(error).__name__
            print(f"{name}:{line}: the block of line {block.line} failed with {kind}: {error}")
            return 1
        print(f"    ran in {time.perf_counter() - begun:.1f} s", flush=True)
    ran = sum(block.run for block in blocks)
    seconds = time.perf_counter() - started
    print(f"{name}: {ran} blocks ran in {seconds:.1f} s, {len(blocks) - ran} passed over (no-run)")
    return 0


def environment() -> dict[str, str]:
    """The caller's environment, with 8 fake CPU devices unless it names another number."""
    env = dict(os.environ)
    flags = env.get("XLA_FLAGS", "")
    if DEVICES not in flags:
        env["XLA_FLAGS"] = f"{flags} {DEVICES}=8".strip()
    env.setdefault("JAX_PLATFORMS", "cpu")
    env["NPROC"] = "16"  # sizes XLA's thread pool; a smaller one can deadlock
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    return env


def main(names: list[str]) -> int:
    failed = []
    for name in names or [str(ROOT / "README.md")]:
        path = Path(name).resolve()
        shown = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else name
        command = [sys.executable, "-u", __file__, "--inside", str(path), shown]
        with tempfile.TemporaryDirectory() as folder:  # files that an example writes are discarded
            code = subprocess.run(command, env=environment(), cwd=folder).returncode
        if code < 0:
            print(f"{shown}: the process was ended by signal {-code}", flush=True)
        if code:
            failed.append(shown)
    if failed:
        print("failed: " + ", ".join(failed))
    return bool(failed)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        sys.exit(run_blocks(Path(sys.argv[2]), sys.argv[3]))
    sys.exit(main(sys.argv[1:]))
