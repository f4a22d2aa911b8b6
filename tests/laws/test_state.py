"""State is ordinary: it has a stable type, compiles once, can be scanned, donated and saved."""

import functools
import pathlib
from typing import Any

import chex
import jax
import numpy as np
import pytest

import jaxcomm
from jaxcomm.checkpoint import Checkpoints
from tests.cases import CASES, Case
from tests.laws.steps import of_linear, start_of_linear
from tests.workers import Mode, aggregator, gradients, initial, mesh_of, of_one_worker


@pytest.mark.parametrize("mode", ["checked", "unchecked", "vmap"])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_stable_and_compiled_once(case: Case, mode: Mode, caplog: pytest.LogCaptureFixture) -> None:
    tx, updates, ones = case.make(), gradients(4), np.ones(4, np.float32)
    run, before = aggregator(tx, 4, mode), initial(tx, updates, mode)
    _, after = run(updates, before, ones)
    chex.assert_trees_all_equal_shapes_and_dtypes(before, after)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    with jax.log_compiles():
        run(updates, after, ones)
    # Not by the size of jit's cache, which has an entry for each kind of call, also of one program.
    # "Finished tracing" is said of a trace that was found too, if a call is not on jit's fast path.
    assert not [each for each in caplog.messages if each.startswith("Finished XLA compilation")]


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_init_without_arrays(case: Case) -> None:
    params = of_one_worker(gradients(4))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    for workers in (mesh_of(4), 4):
        abstract = jax.eval_shape(lambda p, w=workers: jaxcomm.init(case.make(), p, w), shapes)
        concrete = jaxcomm.init(case.make(), params, workers)
        chex.assert_trees_all_equal_shapes_and_dtypes(abstract, concrete)


@pytest.mark.parametrize("donate", [True, False])
@pytest.mark.parametrize("case", CASES, ids=repr)
def test_scanned_donated_and_single_steps_are_equal(case: Case, donate: bool) -> None:
    params, state, batch = start_of_linear(case)
    scanned, losses = _scanned(case)(params, state, batch)
    for expected in losses:
        params, state, metrics = of_linear(case, donate)(params, state, batch)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    chex.assert_trees_all_close(params, scanned, rtol=1e-5, atol=1e-6)
    assert losses[-1] < losses[0]


@functools.cache
def _scanned(case: Case) -> Any:
    """Four steps on one batch in one program."""
    step = of_linear(case, donate=False)

    def run(params: Any, state: Any, batch: jax.Array) -> Any:
        def body(carry: tuple, _: None) -> tuple:
            params, state, metrics = step(*carry, batch)
            return (params, state), metrics["loss"]

        (params, _), losses = jax.lax.scan(body, (params, state), None, length=4)
        return params, losses

    return jax.jit(run)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_checkpoint_and_resume_bit_equal(case: Case, tmp_path: pathlib.Path) -> None:
    """The state is donated to the next step while it is written; a new run starts from it."""
    step = of_linear(case, donate=True)

    def steps(state: dict[str, Any], count: int) -> dict[str, Any]:
        for _ in range(count):
            params, opt_state, _ = step(state["params"], state["opt_state"], batch)
            state = {"params": params, "opt_state": opt_state}
        return state

    params, opt_state, batch = start_of_linear(case)
    state = steps({"params": params, "opt_state": opt_state}, 2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state, position={"seen": 32})
        expected = steps(state, 2)
    params, opt_state, _ = start_of_linear(case)
    with Checkpoints(tmp_path) as checkpoints:
        at, restored, position = checkpoints.restore({"params": params, "opt_state": opt_state})
    assert (at, position) == (2, {"seen": 32})
    chex.assert_trees_all_equal(expected, steps(restored, 2))
