"""`tools/public_names.py` prints every public name; docs/from_pytorch.md names what exists."""

import inspect
import pathlib
import pkgutil
import re
import runpy
from types import ModuleType

import pytest

import jaxcomm
from jaxcomm import aggregation, gossip, scheduling, synchronization, training
from jaxcomm.compression import quantizers, sparsifiers

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "from_pytorch.md").read_text(encoding="utf-8")
CALLABLES = [
    f"{module.__name__}.{name}"
    for module in (jaxcomm, gossip, scheduling, synchronization, synchronization.events)
    for name in module.__all__
    if not isinstance(getattr(module, name), ModuleType)
]
# The keys that the pages and the docstrings promise.
KEYS = {"loss", "weight", "compression_error", "density", "residual_norm", "levels", "overflow"}
KEYS |= {"union_density", "unpeeled", "ratio", "skipped_steps", "skipped_exchanges", "disagreement"}


def keywords() -> set[str]:
    """The keywords of all public functions."""
    modules = (jaxcomm, aggregation, quantizers, sparsifiers, training)
    made = [getattr(module, name) for module in modules for name in module.__all__]
    functions = filter(inspect.isfunction, made)
    return {name for function in functions for name in inspect.signature(function).parameters}


def test_renamed_options_exist() -> None:
    _, section = PAGE.split("\n## Other names\n")
    rows = re.findall(r"^\| .* \| (.*) \|$", section, re.MULTILINE)
    codes = [code for row in rows for code in re.findall(r"`([^`]+)`", row)]
    options = (ROOT / "jaxcomm" / "launch" / "_command_line.py").read_text(encoding="utf-8")
    known = keywords()
    for code in codes:
        if code.startswith("--"):
            assert f'"{code[2:]}"' in options, code
        elif code.endswith("="):
            assert code[:-1] in known, code
        elif not code.startswith("python -m "):
            pkgutil.resolve_name(f"jaxcomm.{code.removeprefix('jaxcomm.')}")
    assert len(codes) > 40


def test_the_axis_is_the_first_argument_or_a_keyword() -> None:
    modules = (jaxcomm, aggregation, gossip, synchronization, training)
    made = {getattr(module, name) for module in modules for name in module.__all__}
    for each in filter(inspect.isfunction, made):
        parameters = inspect.signature(each).parameters
        if axis := parameters.get("axis_name"):
            first, *others = parameters.values()
            alone = axis is first and {p.kind for p in others} <= {axis.KEYWORD_ONLY}
            assert alone or axis.kind is axis.KEYWORD_ONLY, each


@pytest.mark.slow
def test_the_list_of_names(capsys: pytest.CaptureFixture[str]) -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "public_names.py"))
    tool["main"]()
    lines = capsys.readouterr().out.splitlines()
    named = {re.split(r"[(:]", line)[0] for line in lines}
    assert set(CALLABLES) <= named and "pallas_kernels.pack.unpack" in named
    assert "jaxcomm.mean(axis_name, wire_dtype, block_size)" in lines
    assert set(tool["reported_keys"]()) >= KEYS
