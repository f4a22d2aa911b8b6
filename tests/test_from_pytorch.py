"""Every expression of docs/from_pytorch.md runs as it is printed."""

import functools
import pathlib
import re
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import jaxcomm
from tests.slow import slow

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "from_pytorch.md"


class Line(NamedTuple):
    """An expression of the column "here", and what it stands beside."""

    theirs: str
    code: str
    replicated: bool

    def __repr__(self) -> str:
        return self.theirs


def lines() -> list[Line]:
    found = []
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        local = section.startswith("torchft")
        for row in re.findall(r"^\| (.*) \|$", section, re.MULTILINE)[1:]:
            theirs, here, _ = re.split(r" \| ?", row + " | ", maxsplit=2)
            codes = [code for code in re.findall(r"`([^`]+)`", here) if "(" in code]
            tx = [code for code in codes if code != "jaxcomm.replicate(params, mesh)"]
            assert len(tx) <= 1, row
            found += [Line(theirs, code, local or len(codes) > 1) for code in tx]
    return found


LINES = lines()


@functools.cache
def names() -> dict[str, Any]:
    """The names that the block of the page defines."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    definitions, calls = block.split("\nparams, opt_state, metrics = ")
    assert "train(" in calls
    namespace: dict[str, Any] = {}
    exec(definitions, namespace)
    return namespace


def arguments(line: Line) -> tuple[Any, Any]:
    """The transformation, and its parameters."""
    params = jax.tree.map(lambda x: x.copy(), names()["params"])  # A step donates them.
    replicated = jaxcomm.replicate(params, names()["mesh"]) if line.replicated else params
    return eval(line.code, dict(names())), replicated


def test_the_page_has_lines_of_every_section() -> None:
    assert len(LINES) >= 20 and any(line.replicated for line in LINES)


@pytest.mark.parametrize("line", LINES, ids=repr)
def test_lines_are_traced(line: Line) -> None:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        tx, params = arguments(line)
        mesh, batch = names()["mesh"], names()["batch"]
        metrics = "own" if "noop" in line.theirs else "mean"
        step = jaxcomm.make_step(names()["loss_fn"], tx, mesh, metrics=metrics)
        state = jax.eval_shape(lambda params: jaxcomm.init(tx, params, mesh), params)
        sent = jaxcomm.wire.account(step, params, state, batch).bytes_per_worker
        assert (sent == 0) == ("noop" in line.theirs)


@pytest.mark.parametrize("line", [LINES[0], *map(slow, LINES[1:])], ids=repr)
def test_lines_run(line: Line) -> None:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        tx, params = arguments(line)
        _, _, metrics = names()["train"](tx, params)
        assert np.isfinite(metrics["loss"])
