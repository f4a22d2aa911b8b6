"""Laws of an aggregator's step: types, replicas, modes and non-finite updates."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._axis import state_specs
from jaxcomm._contract import PyTree
from jaxcomm.testing._law import require_equal, require_law, require_types
from jaxcomm.testing._updates import rows_of, tree_of
from jaxcomm.testing._workers import Mode, aggregator, initial, program

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
