"""Every public name is on a page, and `tools/public_names.py` prints it."""

import inspect
import pathlib
import re
import runpy
from types import ModuleType

import pytest

import jaxcomm
from jaxcomm import aggregation, gossip, scheduling, synchronization, training

ROOT = pathlib.Path(__file__).parent.parent
PAGES = "".join((ROOT / "docs" / page).read_text() for page in ("names.md", "methods.md"))
CALLABLES = [
    f"{module.__name__}.{name}"
    for module in (jaxcomm, gossip, scheduling, synchronization, synchronization.events)
    for name in module.__all__
    if not isinstance(getattr(module, name), ModuleType)
]
# The keys that the pages and the docstrings promise.
KEYS = {"loss", "weight", "compression_error", "density", "residual_norm", "levels", "overflow"}
KEYS |= {"union_density", "unpeeled", "ratio", "skipped_steps", "skipped_exchanges", "disagreement"}


def test_every_public_name_is_on_a_page() -> None:
    words = set(re.findall(r"\w+", PAGES))
    assert [name for name in CALLABLES if name.rsplit(".")[-1] not in words] == []


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
