"""All laws of an aggregator."""

import math

import jax
import numpy as np
import optax

from jaxcomm._base import PyTree
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
    r"""Holds a transformation that averages over workers to the laws of an aggregator.

    Workers are simulated with `jax.vmap`, and run in `jax.shard_map` with `check_vma=True` where
    there are devices for them; nothing but what `tx` sends is sent. The laws, by the names that
    messages begin with:

    - `update types`, `state types`: updates and state keep structure, shapes and dtypes.
    - `replicas`: results are equal on all workers, bit for bit.
    - `modes`, `jit`: on a mesh and on one device, compiled or not, they are the same.
    - `nonfinite`, `memory after nonfinite`: a NaN or an infinity on one worker makes the update NaN
      on all, and what each worker remembers stays as it was.
    - `zeros`: the first update of zeros is zero.
    - `equal weights`, where asked for: they are as good as none.
    - `resolution`, where given: no coordinate is farther from the mean.
    - `unbiased`, where asked for: the average of draws is the mean. One that is right fails in one
      run of a million.

    Args:
      tx: The aggregator, alone.
      workers: How many there are.
      axis_name: The mesh axis over which `tx` averages.
      params: A tree like one worker's update, of arrays or `jax.ShapeDtypeStruct`. Default: leaves
        of 10 and 1 coordinates in float32, and of 3 in bfloat16.
      resolution: The largest error of a coordinate, relative to the largest magnitude on any
        worker; 0 for a mean that is exact but for rounding of floats. Default: not tested.
      unbiased: Whether the expectation of the result is the mean.
      weighted: Whether `tx.update` takes `weight=`.
      zeros: Whether an update of zeros is to give zeros.
      nonfinite: `"all"` where all of the update is to be NaN, `"coordinate"` where only the one
        that is not finite on a worker.
      draws: Steps over which the result is averaged for `unbiased`.

    Returns:
      Nothing.

    Raises:
      AssertionError: If a law does not hold. The message names the law, the input and the numbers.
      ValueError: If `tx` is no transformation, or refuses what it is given.

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
            not found.any(), ZEROS, f"of {workers} workers, zeros give {np.abs(found).max()}."
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
    """Of the first update."""
    given = rows_of(updates)
    found = rows_of(setting.step(updates, setting.first(updates))[0])
    peak = np.abs(given).max()
    rounding = setting.workers * 2.0**-22 + _spacing(updates)
    off = np.abs(found - given.mean(axis=0))
    bound = (resolution + rounding) * peak + 1e-37
    worst = np.unravel_index(np.argmax(off - bound), off.shape)
    require_law(
        np.all(off <= bound),
        RESOLUTION,
        f"of {what} on {setting.workers} workers, coordinate {worst[1]} is {found[worst]:.6g}, "
        f"{off[worst] / (peak or 1):.3g} of the largest magnitude {peak:.3g} away from the mean "
        f"{given.mean(axis=0)[worst[1]]:.6g}; {resolution:.3g} is allowed.",
    )


def _require_unbiased(setting: Setting, updates: PyTree, draws: int) -> None:
    """Of steps with coins of their own, of the same updates."""
    given = rows_of(updates)
    sample = draw(setting.tx, updates, draws, setting.axis_name)
    peak = np.abs(given).max()
    rounding = (2.0**-21 * given.shape[1] + _spacing(updates)) * peak
    what = f"input 'normal' on {setting.workers} workers"
    require_unbiased(UNBIASED, sample, given.mean(axis=0), what, rounding=rounding)
