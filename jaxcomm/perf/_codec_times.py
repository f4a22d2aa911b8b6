"""Times whole updates on one device: encoding and decoding, without a link."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcomm._axis import state_specs
from jaxcomm._workers import init

SIDE, LEAVES = 1024, 4
"""The update that is timed: square matrices, since low-rank methods factor matrices."""


def _updates() -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    draw = lambda: jnp.asarray(random.standard_normal((SIDE, SIDE), np.float32))  # noqa: E731
    return {f"matrix_{i}": draw() for i in range(LEAVES)}


def _prepared(
    tx: optax.GradientTransformation, mesh: Mesh, updates: Mapping[str, jax.Array]
) -> Callable[[], Any]:
    """A compiled update of a single worker, which continues from its own state."""
    (axis,) = mesh.axis_names
    state = init(tx, updates, mesh, axis_name=axis)
    specs = state_specs(state)

    def update(updates: Any, state: Any) -> tuple[Any, Any]:
        return tx.update(updates, state, updates)

    whole = PartitionSpec()
    mapped = jax.shard_map(
        update, mesh=mesh, in_specs=(whole, specs), out_specs=(whole, specs), check_vma=False
    )
    # XLA would place results on the device and not on its mesh: the second call would compile too.
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), (whole, specs))
    run = jax.jit(mapped, out_shardings=placed)

    def once() -> Any:
        nonlocal state
        mean, state = run(updates, state)
        return mean

    return once


def _median(run: Callable[[], Any], repeats: int) -> float:
    jax.block_until_ready(run())
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds))


def codec_seconds(
    methods: Mapping[str, optax.GradientTransformation],
    device: jax.Device,
    axis_name: str,
    repeats: int,
    updates: Mapping[str, jax.Array] | None = None,
) -> dict[str, float]:
    """The seconds per coordinate of each method on one device, beyond those of a copy.

    Args:
      methods: Transformations by name, each without an optimizer.
      device: A device of this process.
      axis_name: The axis that the methods name.
      repeats: The updates that are timed.
      updates: The update, by default of `LEAVES` matrices.
    """
    mesh = Mesh(np.array([device]), (axis_name,), axis_types=(AxisType.Auto,))
    updates = jax.device_put(dict(_updates() if updates is None else updates), device)
    coordinates = sum(x.size for x in updates.values())
    copy = _median(_prepared(optax.identity(), mesh, updates), repeats)
    seconds = {}
    for name, tx in methods.items():
        taken = _median(_prepared(tx, mesh, updates), repeats)
        seconds[name] = max(taken - copy, 0.0) / coordinates
    return seconds
