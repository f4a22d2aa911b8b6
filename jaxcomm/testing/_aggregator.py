"""The laws of an aggregator, on simulated workers and on a mesh."""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxcomm._axis import state_specs
from jaxcomm._contract import PyTree
from jaxcomm._require import require_transformation
from jaxcomm._workers import init
from jaxcomm.testing._law import (
    LEAVES,
    finite_updates,
    require_equal,
    require_law,
    require_types,
    require_unbiased,
    rows_of,
    spacing_of,
    tree_of,
)

Mode = Literal["checked", "unchecked", "vmap"]


def mesh_of(workers: int, axis_name: str = "data") -> Mesh:
    """Returns a mesh of the first devices."""
    return jax.make_mesh(
        (workers,), (axis_name,), axis_types=(AxisType.Auto,), devices=jax.devices()[:workers]
    )


def of_one_worker(updates: PyTree) -> PyTree:
    """Returns the first worker's tree of leaves [workers, ...]."""
    return jax.tree.map(lambda x: x[0], updates)


def count(updates: PyTree) -> int:
    """Returns the number of workers of leaves [workers, ...]."""
    workers: int = jax.tree.leaves(updates)[0].shape[0]
    return workers


def program(
    tx: Any, workers: int, mode: Mode, weighted: bool = False, axis_name: str = "data"
) -> Any:
    """Returns `(updates [n, ...], state, weights [n]) -> (results [n, ...], state)`, not jitted.

    Results hold every worker's replica, so that tests can compare them.
    """

    def one(updates: PyTree, state: PyTree, weight: jax.Array) -> Any:
        extra = {"weight": weight} if weighted else {}
        return tx.update(updates, state, **extra)

    if mode == "vmap":

        def simulated(updates: PyTree, state: PyTree, weights: jax.Array) -> Any:
            axes = jax.tree.map(lambda s: 0 if s else None, state_specs(state))
            local = jax.tree.map(
                lambda a, x: x if a is None else x[:, None],
                axes,
                state,
                is_leaf=lambda a: a is None,
            )
            results, after = jax.vmap(
                one, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=axis_name
            )(updates, local, weights)
            after = jax.tree.map(
                lambda a, x: x if a is None else x[:, 0], axes, after, is_leaf=lambda a: a is None
            )
            return results, after

        return simulated

    def on_mesh(updates: PyTree, state: PyTree, weights: jax.Array) -> Any:
        specs = state_specs(state)

        def local(updates: PyTree, state: PyTree, weights: jax.Array) -> Any:
            results, state = one(of_one_worker(updates), state, weights[0])
            return jax.tree.map(lambda x: x[None], results), state

        return jax.shard_map(
            local,
            mesh=mesh_of(workers, axis_name),
            in_specs=(PartitionSpec(axis_name), specs, PartitionSpec(axis_name)),
            out_specs=(PartitionSpec(axis_name), specs),
            check_vma=mode == "checked",
        )(updates, state, weights)

    return on_mesh


def aggregator(
    tx: Any, workers: int, mode: Mode, weighted: bool = False, axis_name: str = "data"
) -> Any:
    """Returns the jitted program, from a cache."""
    return _jitted(tx, workers, mode, weighted, axis_name)


@functools.cache
def _jitted(tx: Any, workers: int, mode: Mode, weighted: bool, axis_name: str) -> Any:
    return jax.jit(program(tx, workers, mode, weighted, axis_name))


def initial(tx: Any, updates: PyTree, mode: Mode, axis_name: str = "data") -> Any:
    """Returns the initial state for updates [workers, ...]."""
    leaves, treedef = jax.tree.flatten(jax.eval_shape(of_one_worker, updates))
    return _initial(tx, count(updates), mode == "vmap", axis_name, treedef, tuple(leaves))


@functools.cache
def _initial(
    tx: Any, workers: int, simulated: bool, axis_name: str, treedef: Any, leaves: tuple[Any, ...]
) -> Any:
    params = treedef.unflatten(jnp.asarray(np.zeros(leaf.shape, leaf.dtype)) for leaf in leaves)
    laid_out = workers if simulated else mesh_of(workers, axis_name)
    return init(tx, params, laid_out, axis_name=axis_name)


def draws_of(tx: Any, updates: PyTree, steps: int, axis_name: str = "data") -> np.ndarray:
    """Returns the results of `steps` updates of the same gradients, [steps, coordinates]."""
    run = _drawing(tx, count(updates), steps, axis_name)
    return np.asarray(run(updates, initial(tx, updates, "vmap", axis_name)), np.float64)


@functools.cache
def _drawing(tx: Any, workers: int, steps: int, axis_name: str) -> Any:
    run, ones = aggregator(tx, workers, "vmap", axis_name=axis_name), jnp.ones(workers)

    def draw(updates: PyTree, state: PyTree) -> jax.Array:
        def body(state: PyTree, _: None) -> Any:
            results, state = run(updates, state, ones)
            leaves = [x[0].astype(jnp.float32).ravel() for x in jax.tree.leaves(results)]
            return state, jnp.concatenate(leaves)

        return jax.lax.scan(body, state, None, length=steps)[1]

    return jax.jit(draw)


TYPES, STATE, REPLICAS, MODES, EAGER = "update types", "state types", "replicas", "modes", "jit"
NONFINITE, MEMORY, WEIGHTS = "nonfinite", "memory after nonfinite", "equal weights"
NEAR = 1e-5  # The tolerance for floats that compilers round in a different order.

Nonfinite = Literal["all", "coordinate"]


class Setting(NamedTuple):
    """An aggregator, its number of workers and its mesh axis."""

    tx: Any
    workers: int
    axis_name: str

    def first(self, updates: PyTree, mode: Mode = "vmap") -> PyTree:
        """Returns the initial state."""
        return initial(self.tx, updates, mode, self.axis_name)

    def step(
        self, updates: PyTree, state: PyTree, mode: Mode = "vmap", weight: float | None = None
    ) -> tuple[PyTree, PyTree]:
        """Returns the results of all workers and the new state."""
        run = aggregator(self.tx, self.workers, mode, weight is not None, self.axis_name)
        weights = np.full(self.workers, 1 if weight is None else weight, np.float32)
        results: tuple[PyTree, PyTree] = run(updates, state, weights)
        return results

    def modes(self) -> list[Mode]:
        """Returns the modes for which this machine has enough devices."""
        return ["vmap", "checked"] if jax.device_count() >= self.workers else ["vmap"]


def require_replicas(results: PyTree, what: str) -> None:
    """Checks that results are equal on all workers, bit for bit or both NaN."""
    first = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), results)
    require_equal(REPLICAS, results, first, f"{what}, the result ")


def _near(results: PyTree) -> float:
    """Returns the tolerance for the coarsest dtype in the tree."""
    return max([NEAR, *(float(jnp.finfo(x.dtype).eps) for x in jax.tree.leaves(results))])


def require_steps(setting: Setting, updates: PyTree) -> None:
    """Checks types, replicas and modes over two steps in every mode."""
    found = {}
    for mode in setting.modes():
        before = setting.first(updates, mode)
        results, state = setting.step(updates, before, mode)
        what = f"with {setting.workers} workers in mode {mode!r}"
        require_types(TYPES, results, updates, f"{what}, the result ")
        require_types(STATE, state, before, f"{what}, the state ")
        require_replicas(results, what)
        found[mode], state = setting.step(updates, state, mode)
        require_types(STATE, state, before, f"{what}, the state after two steps ")
        require_replicas(found[mode], f"{what}, in the second step")
    simulated = found.pop("vmap")
    for results in found.values():
        what = "in the second step on a mesh, against `jax.vmap`, the result "
        require_equal(MODES, results, simulated, what, tolerance=_near(results))


def require_eager(setting: Setting, updates: PyTree) -> None:
    """Checks that the step gives the same result without `jax.jit`."""
    state = setting.first(updates)
    run = program(setting.tx, setting.workers, "vmap", axis_name=setting.axis_name)
    eager, _ = run(updates, state, jnp.ones(setting.workers))
    jitted, _ = setting.step(updates, state)
    what = "with jit, against without, the result "
    require_equal(EAGER, jitted, eager, what, tolerance=_near(jitted))


def require_equal_weights(setting: Setting, updates: PyTree) -> None:
    """Checks that equal weights give the same result as no weights."""
    state = setting.first(updates)
    plain, _ = setting.step(updates, state)
    weighted, _ = setting.step(updates, state, weight=2.0)
    what = "with `weight=2` on all workers, the result "
    require_equal(WEIGHTS, weighted, plain, what, tolerance=1e-6)


def _per_worker_leaves(state: PyTree) -> PyTree:
    """Returns the leaves that differ by worker."""
    specs = jax.tree.leaves(state_specs(state))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path): leaf
        for (path, leaf), spec in zip(leaves, specs, strict=True)
        if any(spec)
    }


def require_visible(
    setting: Setting,
    updates: PyTree,
    values: dict[int, float],
    *,
    shows: Nonfinite = "all",
    mode: Mode = "vmap",
    memory: bool = True,
) -> None:
    """Checks that a non-finite coordinate on some workers shows on all and changes no memory.

    Args:
      setting: The aggregator.
      updates: Finite updates, [workers, ...].
      values: The value that replaces one coordinate, by the number of the worker.
      shows: Whether the whole result must be NaN, or only that coordinate non-finite.
      mode: How the workers run.
      memory: Whether to check that per-worker memory is unchanged.
    """
    rows = rows_of(updates)
    hit = rows.shape[1] // 2
    for number, value in values.items():
        rows[number, hit] = value
    _, state = setting.step(updates, setting.first(updates, mode), mode)
    results, after = setting.step(tree_of(jax.tree.map(lambda x: x[0], updates), rows), state, mode)
    found = rows_of(results)
    where = ", ".join(f"{value} on worker {number}" for number, value in values.items())
    what = f"with {setting.workers} workers in mode {mode!r}, {where} in coordinate {hit}"
    if shows == "all":
        finite = np.argwhere(~np.isnan(found))
        worker, coordinate = finite[0] if len(finite) else (0, 0)
        require_law(
            not len(finite),
            NONFINITE,
            f"{what}, {len(finite)} of {found.size} results are not NaN, such as "
            f"{found[worker, coordinate]} in coordinate {coordinate} of worker {worker}.",
        )
    visible = np.isnan(found[:, hit]) if len(values) > 1 else ~np.isfinite(found[:, hit])
    require_law(visible.all(), NONFINITE, f"{what}, the workers' results are {found[:, hit]}.")
    if memory:
        require_equal(
            MEMORY, _per_worker_leaves(after), _per_worker_leaves(state), f"{what}, the state "
        )


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
    sample = draws_of(setting.tx, updates, draws, setting.axis_name)
    peak = np.abs(rows).max()
    rounding = (2.0**-21 * rows.shape[1] + _spacing(updates)) * peak
    what = f"input 'normal' on {setting.workers} workers"
    require_unbiased(UNBIASED, sample, rows.mean(axis=0), what, rounding=rounding)
