"""Save, stop, restore, continue: bit-equal to the run that never stopped, for every row."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomm
from jaxcomm.checkpoint import Checkpoints
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import top_k
from tests.cases._gossip import GossipCase, gossip_rows
from tests.cases._local import LocalCase, local_rows
from tests.checkpoint.trees import assert_equal

WORKERS = 8
STEPS = 7
SAVED = 4


def start() -> Any:
    rng = np.random.default_rng(0)
    return {"a": jnp.asarray(rng.normal(size=(4, 2)), jnp.float32), "b": jnp.ones(4, jnp.bfloat16)}


def batches() -> Any:
    rng = np.random.default_rng(1)
    shapes = {"a": (4, 2), "b": (4,)}
    return {k: np.float32(rng.normal(size=(STEPS, WORKERS, *s))) for k, s in shapes.items()}


def given(loss_fn: Any, params: Any, batch: Any) -> Any:
    """The gradients are the batch."""
    del loss_fn
    gradients = jax.tree.map(lambda x, p: x[0].astype(p.dtype), batch, params)
    return jnp.zeros((), jnp.float32), gradients


def check(tx: Any, step: Any, begin: Any, directory: pathlib.Path) -> None:
    """`begin` makes parameters; a second run begins as if anew, then restores."""

    def state_of(params: Any, opt_state: Any) -> dict[str, Any]:
        return {"params": params, "opt_state": opt_state}

    def run(state: dict[str, Any], first: int, last: int, checkpoints: Any = None) -> Any:
        for number in range(first, last):
            batch = jax.tree.map(lambda x, i=number: x[i], batches())
            params, opt_state, _ = step(state["params"], state["opt_state"], batch)
            state = state_of(params, opt_state)
            if checkpoints and number + 1 == SAVED:
                checkpoints.save(SAVED, state)
        return state

    with jax.numpy_dtype_promotion("standard"):
        with Checkpoints(directory) as checkpoints:
            expected = run(state_of(*begin()), 0, STEPS, checkpoints)
        with Checkpoints(directory) as checkpoints:
            restored = checkpoints.restore(state_of(*begin()))
        assert restored.step == SAVED
        assert_equal(run(restored.state, SAVED, STEPS), expected)


def simulated(tx: Any, own: bool, directory: pathlib.Path) -> None:
    step = jaxcomm.simulate(lambda p, b: jnp.zeros(()), tx, WORKERS, gradients=given)

    def begin() -> Any:
        params = jaxcomm.replicate(start(), WORKERS) if own else start()
        return params, jaxcomm.init(tx, params, WORKERS)

    check(tx, step, begin, directory)


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", gossip_rows(WORKERS), ids=repr)
def test_gossip(case: GossipCase, tmp_path: pathlib.Path) -> None:
    method = optax.chain(jaxcomm.per_worker(optax.sgd(0.1, momentum=0.5)), case.make(WORKERS))
    simulated(method, True, tmp_path)


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", local_rows(), ids=lambda case: case.name)
def test_local_steps(case: LocalCase, tmp_path: pathlib.Path) -> None:
    """In the middle of a period."""
    simulated(case.make(optax.sgd(0.1, momentum=0.5)), True, tmp_path)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_owners_of_slices_on_a_mesh(kind: AxisType, tmp_path: pathlib.Path) -> None:
    """A key, residuals of senders and owners, moments in slices, and a window half full."""
    mesh = jax.make_mesh((WORKERS,), ("data",), axis_types=(kind,))
    codec = error_feedback(top_k(k=3))
    tx = jaxcomm.accumulate(jaxcomm.sharded_server(optax.adam(0.1), codec, codec), every=3)
    step = jaxcomm.make_step(lambda p, b: jnp.zeros(()), tx, mesh, gradients=given)
    check(tx, step, lambda: (start(), jaxcomm.init(tx, start(), mesh)), tmp_path)
