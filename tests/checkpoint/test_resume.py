"""Save, stop, restore, continue: bit-equal to the run that never stopped, for every row."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType

import jaxcomm
from jaxcomm.checkpoint import Checkpoints
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import top_k
from tests.cases._gossip import GOSSIP, GossipCase
from tests.cases._local import LOCAL, LocalCase
from tests.checkpoint.sequences import Event
from tests.checkpoint.stress import Method, batch_of, given
from tests.checkpoint.trees import assert_equal
from tests.slow import slow

WORKERS = 8
STEPS = 7
SAVED = 4


def check(start: Any, step: Any, directory: pathlib.Path) -> None:
    """`step` takes a state and the number of the step; a second run begins, and restores."""

    def run(state: Any, first: int) -> Any:
        for number in range(first, STEPS):
            if number == SAVED and first == 0:
                checkpoints.save(SAVED, state)
            state = step(state, number)
        return state

    with jax.numpy_dtype_promotion("standard"):
        with Checkpoints(directory) as checkpoints:
            expected = run(start(), 0)
        with Checkpoints(directory) as checkpoints:
            restored = checkpoints.restore(start())
        assert restored.step == SAVED
        assert_equal(run(restored.state, SAVED), expected)


def check_row(family: str, name: str, directory: pathlib.Path) -> None:
    method = Method(family, name, WORKERS, on_mesh=False)
    step = lambda state, number: method.step(state, Event("step", number, WORKERS))  # noqa: E731
    check(method.start, step, directory)


@pytest.mark.parametrize(
    "case", [case if case.name == "matcha" else slow(case) for case in GOSSIP], ids=repr
)
def test_gossip(case: GossipCase, tmp_path: pathlib.Path) -> None:
    check_row("gossip", case.name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", LOCAL, ids=lambda case: case.name)
def test_local_steps(case: LocalCase, tmp_path: pathlib.Path) -> None:
    """In the middle of a period."""
    check_row("local", case.name, tmp_path)


@pytest.mark.parametrize("kind", [AxisType.Auto, slow(AxisType.Explicit)], ids=str)
def test_owners_of_slices_on_a_mesh(kind: AxisType, tmp_path: pathlib.Path) -> None:
    """A key, residuals of senders and owners, moments in slices, and a window half full."""
    mesh = jax.make_mesh((WORKERS,), ("data",), axis_types=(kind,))
    codec = error_feedback(top_k(k=3))
    tx = jaxcomm.accumulate(jaxcomm.sharded_server(optax.adam(0.1), codec, codec), every=3)
    update = jaxcomm.make_step(lambda p, b: jnp.zeros(()), tx, mesh, gradients=given)

    def start() -> Any:
        params = {"kernel": jnp.ones((6, 2), jnp.bfloat16), "bias": jnp.ones(2)}
        return {"params": params, "opt_state": jaxcomm.init(tx, params, mesh)}

    def step(state: Any, number: int) -> Any:
        batch = batch_of(Event("step", number, WORKERS))
        batch["kernel"] = batch["kernel"].astype(jnp.bfloat16)
        params, opt_state, _ = update(state["params"], state["opt_state"], batch)
        return {"params": params, "opt_state": opt_state}

    check(start, step, tmp_path)
