"""Checks all laws of an aggregator."""

import math

import jax
import numpy as np
import optax

from jaxcomm._contract import PyTree
from jaxcomm._require import require_transformation
from jaxcomm.testing._law import require_law
from jaxcomm.testing._moments import require_unbiased
from jaxcomm.testing._steps import (
    Nonfinite,
    Setting,
    require_eager,
    require_equal_weights,
    require_steps,
    require_visible,
)
from jaxcomm.testing._updates import LEAVES, finite_updates, rows_of, spacing_of
from jaxcomm.testing._workers import draws as draw

RESOLUTION, ZEROS, UNBIASED = "resolution", "zeros", "unbiased"


def check_aggregator(
    tx: optax.GradientTransformation,
    *,
    workers: int = 3,
    axis_name: str = "data",
    params: PyTree = None,
    resolution: float | None = None,
    unbiased: bool = False,
    weighted: bool = False,
    zeros: bool = True,
    nonfinite: Nonfinite = "all",
    draws: int = 2000,
) -> None:
    r"""Checks that a transformation that averages over workers satisfies the aggregator laws.

    Workers are simulated with `jax.vmap`. If there are enough devices, they also run in
    `jax.shard_map` with `check_vma=True`. The check itself sends nothing; only `tx` does. The laws,
    with the names that error messages use:

    - `update types`, `state types`: updates and state keep structure, shapes and dtypes.
    - `replicas`: results are equal on all workers, bit for bit.
    - `modes`, `jit`: results are the same on a mesh and on one device, compiled or not.
    - `nonfinite`, `memory after nonfinite`: a NaN or an infinity on one worker makes the update NaN
      on all workers and leaves each worker's memory unchanged.
    - `zeros`: the first update of zeros is zero.
    - `equal weights`, with `weighted`: equal weights give the same result as no weights.
    - `resolution`, if set: the error of each coordinate is within this bound.
    - `unbiased`, if set: the average over draws is the mean over workers. A correct method fails in
      one run of a million.

    Args:
      tx: The aggregator, without an optimizer.
      workers: The number of workers.
      axis_name: The mesh axis over which `tx` averages.
      params: A pytree of arrays or `jax.ShapeDtypeStruct` with the shapes and dtypes of one
        worker's update. Default: leaves of 10 and 1 coordinates in float32, and of 3 in bfloat16.
      resolution: The largest error of a coordinate, relative to the largest magnitude on any
        worker; 0 for a mean that is exact up to floating-point rounding. Default: not tested.
      unbiased: Whether the expectation of the result is the mean.
      weighted: Whether `tx.update` takes `weight=`.
      zeros: Whether an update of zeros must give zeros.
      nonfinite: `"all"` if a non-finite coordinate on a worker must make the whole update NaN,
        `"coordinate"` if only this coordinate must be non-finite.
      draws: The number of steps over which `unbiased` averages the result.

    Returns:
      Nothing.

    Raises:
      AssertionError: If a law is violated. The message names the law, the input and the numbers.
      ValueError: If `tx` is not a transformation, or rejects its input.

    Example:
      >>> import optax, jaxcomm
      >>> from jaxcomm.testing import check_aggregator
      >>> check_aggregator(jaxcomm.global_qsgd(levels=3), resolution=1 / 3, unbiased=True)
      >>> half = optax.chain(jaxcomm.global_qsgd(levels=3), optax.scale(0.5))
      >>> check_aggregator(half, unbiased=True)
      Traceback (most recent call last):
      AssertionError: law 'unbiased': ...
    """
    require_transformation(tx)
    leaves = LEAVES if params is None else jax.eval_shape(lambda tree: tree, params)
    setting = Setting(tx, workers, axis_name)
    inputs = finite_updates(leaves, workers)
    normal = inputs["normal"]
    require_steps(setting, normal)
    require_eager(setting, normal)
    for mode in setting.modes():
        require_visible(setting, normal, {workers - 1: math.nan}, shows=nonfinite, mode=mode)
    for value in (math.inf, -math.inf):
        require_visible(setting, normal, {workers - 1: value}, shows=nonfinite)
    if workers > 1:
        opposite = {0: math.inf, workers - 1: -math.inf}
        require_visible(setting, normal, opposite, shows=nonfinite)
    if zeros:
        found = rows_of(setting.step(inputs["zero"], setting.first(inputs["zero"]))[0])
        require_law(
            not found.any(), ZEROS, f"with {workers} workers, zeros give {np.abs(found).max()}."
        )
    if weighted:
        require_equal_weights(setting, normal)
    if resolution is not None:
        for name, updates in inputs.items():
            _require_resolution(setting, updates, resolution, f"input {name!r}")
    if unbiased:
        _require_unbiased(setting, normal, draws)


def _spacing(updates: PyTree) -> np.ndarray:
    return spacing_of(jax.eval_shape(lambda tree: jax.tree.map(lambda x: x[0], tree), updates))


def _require_resolution(setting: Setting, updates: PyTree, resolution: float, what: str) -> None:
    """Checks the error of the first update."""
    rows = rows_of(updates)
    found = rows_of(setting.step(updates, setting.first(updates))[0])
    peak = np.abs(rows).max()
    rounding = setting.workers * 2.0**-22 + _spacing(updates)
    off = np.abs(found - rows.mean(axis=0))
    bound = (resolution + rounding) * peak + 1e-37
    worst = np.unravel_index(np.argmax(off - bound), off.shape)
    require_law(
        np.all(off <= bound),
        RESOLUTION,
        f"for {what} on {setting.workers} workers, coordinate {worst[1]} is {found[worst]:.6g}, "
        f"{off[worst] / (peak or 1):.3g} of the largest magnitude {peak:.3g} away from the mean "
        f"{rows.mean(axis=0)[worst[1]]:.6g}; {resolution:.3g} is allowed.",
    )


def _require_unbiased(setting: Setting, updates: PyTree, draws: int) -> None:
    """Averages steps with the same updates and separate coins."""
    rows = rows_of(updates)
    sample = draw(setting.tx, updates, draws, setting.axis_name)
    peak = np.abs(rows).max()
    rounding = (2.0**-21 * rows.shape[1] + _spacing(updates)) * peak
    what = f"input 'normal' on {setting.workers} workers"
    require_unbiased(UNBIASED, sample, rows.mean(axis=0), what, rounding=rounding)
