"""A checkpoint of another number of workers."""

import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxcomm
from jaxcomm.checkpoint import CheckpointError, Checkpoints
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import top_k
from tests.checkpoint.trees import assert_equal

TX = optax.chain(jaxcomm.two_stage_mean(error_feedback(top_k(k=3))), optax.adam(0.1))


@pytest.fixture(autouse=True)
def _promotion_that_optax_needs() -> Iterator[None]:
    with jax.numpy_dtype_promotion("standard"):
        yield


def loss(params: Any, batch: Any) -> Any:
    return jnp.mean((batch @ params["w"] - 1) ** 2)


def mesh_of(workers: int, kind: AxisType) -> Any:
    devices = jax.devices()[:workers]
    return jax.make_mesh((workers,), ("data",), axis_types=(kind,), devices=devices)


def start(mesh: Any) -> dict[str, Any]:
    params = {"w": jnp.ones((6, 4))}
    statistics = jaxcomm.replicate({"mean": jnp.zeros(3)}, mesh)
    return {
        "params": params,
        "opt_state": jaxcomm.init(TX, params, mesh),
        "statistics": statistics,
        "seen": jnp.int32(7),
    }


def go_on(state: dict[str, Any], mesh: Any) -> dict[str, Any]:
    step = jaxcomm.make_step(loss, TX, mesh, donate=False)
    rows = np.random.default_rng(0).normal(size=(24, 6)).astype(np.float32)
    params, opt_state, _ = step(state["params"], state["opt_state"], rows)
    return {**state, "params": params, "opt_state": opt_state}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counts", "kind"), [((4, 3), AxisType.Auto), ((4, 8), AxisType.Explicit)], ids=str
)
def test_restoring_equals_resize_workers(
    counts: tuple[int, int], kind: AxisType, tmp_path: pathlib.Path
) -> None:
    old, new = (mesh_of(n, kind) for n in counts)
    state = go_on(start(old), old)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        with pytest.raises(
            CheckpointError, match=f"{counts[0]} workers, .* {counts[1]}: pass `tx`"
        ):
            checkpoints.restore(start(new))
        restored = checkpoints.restore(start(new), tx=TX, workers=new).state
        checkpoints.save(2, restored)
        assert_equal(checkpoints.restore(start(new)).state, restored)
    opt_state, params = jaxcomm.resize_workers(TX, state["opt_state"], state["params"], new)
    assert_equal((restored["opt_state"], restored["params"]), (opt_state, params))
    assert restored["statistics"].per_worker["data"]["mean"].shape == (counts[1], 3)
    assert int(restored["seen"]) == 7
    moved = go_on(restored, new)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(moved["params"]))


def test_state_that_cannot_be_resized_is_refused(tmp_path: pathlib.Path) -> None:
    old, new = (mesh_of(n, AxisType.Auto) for n in (4, 2))
    with Checkpoints(tmp_path / "a") as checkpoints:
        checkpoints.save(1, start(old)["opt_state"])
        with pytest.raises(CheckpointError, match="cannot be resized"):
            checkpoints.restore(start(new)["opt_state"], tx=TX, workers=new)
    clocks = {**start(old), "clock": jaxcomm.PerWorker({"data": jnp.zeros((4, 2))})}
    with Checkpoints(tmp_path / "b") as checkpoints:
        checkpoints.save(1, {**clocks, "clock": jnp.zeros(4)})
        with pytest.raises(CheckpointError, match=r"`\['clock'\]` as float32\[4\], and this"):
            checkpoints.restore({**start(new), "clock": jnp.zeros(2)}, tx=TX, workers=new)
