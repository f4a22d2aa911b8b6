"""The laws of an aggregator, by the names that error messages use."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._contract import PyTree
from jaxcomm.testing._aggregator import (
    AggregatorTrial,
    Mode,
    draws_of,
    of_one_worker,
    own_leaves,
    program,
)
from jaxcomm.testing._law import (
    LEAVES,
    MIXED,
    edges,
    finite_updates,
    require_equal,
    require_law,
    require_moment,
    require_types,
    require_unbiased,
    rows_of,
    size_of,
    spacing_of,
    tree_of,
    weights_of,
)

NEAR = 1e-5  # Compilers round floats in a different order.
TINY = 1e-37  # The smallest numbers of float32 are rounded to zero.


def _mixed(trial: AggregatorTrial) -> list[PyTree]:
    """Updates of the trial's shapes and, by default, of several dtypes."""
    trees = [LEAVES, MIXED] if trial.leaves is None else [trial.leaves]
    return [finite_updates(leaves, trial.workers)["normal"] for leaves in trees]


def _traced(trial: AggregatorTrial) -> Iterator[tuple[str, PyTree, PyTree]]:
    """A description, the arguments of a step, updates and state, and their types after it."""
    *_, updates = _mixed(trial)
    for mode in trial.modes:
        given = updates, trial.first_types(updates, mode)
        step = functools.partial(trial.step, mode=mode)
        yield f"{trial} in mode {mode!r}", given, jax.eval_shape(step, *given)


def _places(trial: AggregatorTrial) -> list[Mode]:
    """One device, and the mesh if there is one, where types are checked."""
    return trial.modes[:2]


def require_update_types(trial: AggregatorTrial) -> None:
    """Results keep structure, shapes and dtypes."""
    for what, (updates, _), (results, _) in _traced(trial):
        require_types("update types", results, updates, f"{what}, the result ")


def require_state_types(trial: AggregatorTrial) -> None:
    """The state keeps structure, shapes and dtypes."""
    for what, (_, before), (_, after) in _traced(trial):
        require_types("state types", after, before, f"{what}, the state ")


def require_replicas(trial: AggregatorTrial) -> None:
    """Results are equal on all workers, bit for bit or both NaN, over two steps, in any dtype.

    The first ones are near the mean, and in each mode the same.
    """
    for updates in _mixed(trial):
        found = {}
        for mode in _places(trial):
            state = trial.first(updates, mode)
            for number in range(2):
                results, state = trial.step(updates, state, mode)
                results = found[mode] = jax.tree.map(np.asarray, results)
                first = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), results)
                what = f"{trial} in mode {mode!r}, in step {number}, the result "
                require_equal("replicas", results, first, what)
                if trial.resolution is not None and not number:
                    _require_near(trial, updates, "leaves of several dtypes", rows_of(results))
        for name, results in found.items():
            what = f"{trial} in mode {name!r}, against `jax.vmap`, the result "
            require_equal("modes", results, found["vmap"], what, tolerance=_near(updates))


def require_modes(trial: AggregatorTrial) -> None:
    """Three steps give the same on a mesh, checked or not, and on one device: near the mean."""
    updates = trial.normal()
    found: dict[str, list[PyTree]] = {}
    near = 0.0 if trial.integers else _near(updates) / 8
    for mode in trial.modes:
        state, found[mode] = trial.first(updates, mode), []
        for number in range(3):
            scaled = tree_of(trial.shapes, 2.0**number * rows_of(updates))
            results, state = trial.step(scaled, state, mode)
            found[mode].append(results)
        if trial.resolution is not None:
            _require_near(trial, updates, f"mode {mode!r}", rows_of(found[mode][0]))
    simulated = found.pop("vmap")
    for name, results in found.items():
        what = f"{trial} on a mesh, {name}, against `jax.vmap`, the result "
        require_equal("modes", results, simulated, what, tolerance=near)
    if found:
        what = f"{trial} on a mesh, with the check of types against without, the result "
        require_equal("modes", found["checked"], found["unchecked"], what)


def _near(updates: PyTree) -> float:
    """Returns the tolerance for the coarsest dtype."""
    return max([NEAR, *(float(jnp.finfo(x.dtype).eps) for x in jax.tree.leaves(updates))])


def require_jit(trial: AggregatorTrial) -> None:
    """The result is the same without `jax.jit`."""
    updates = trial.normal()
    state = trial.first(updates)
    run = program(trial.tx, trial.workers, "vmap", axis_name=trial.axis_name)
    eager, _ = run(updates, state, np.ones(trial.workers, np.float32))
    jitted, _ = trial.step(updates, state)
    what = f"{trial}, with jit against without, the result "
    require_equal("jit", jitted, eager, what, tolerance=_near(jitted))


def _spoilt(trial: AggregatorTrial) -> list[tuple[Mode, dict[int, float]]]:
    """Modes, and values that are not finite by the number of the worker."""
    last = trial.workers - 1
    opposite = {0: math.inf, last: -math.inf}
    infinite: list[dict[int, float]] = [{last: math.inf}, {last: -math.inf}, opposite]
    nan = [(mode, {last: math.nan}) for mode in trial.modes]
    return [*nan, *(("vmap", values) for values in infinite)]


def _with_values(
    trial: AggregatorTrial, values: dict[int, float], mode: Mode
) -> tuple[str, int, np.ndarray, PyTree, PyTree]:
    """A second step in which one coordinate of some workers has another value.

    Returns a description, the coordinate, the results, and the state before and after.
    """
    updates = trial.normal()
    rows = rows_of(updates)
    hit = rows.shape[1] // 2
    rows[[*values], hit] = [*values.values()]
    _, state = trial.step(updates, trial.first(updates, mode), mode)
    results, after = trial.step(tree_of(trial.shapes, rows), state, mode)
    where = ", ".join(f"{value} on worker {number}" for number, value in values.items())
    what = f"{trial} in mode {mode!r}, {where} in coordinate {hit}"
    return what, hit, rows_of(results), state, after


def _require_visible(trial: AggregatorTrial, values: dict[int, float], mode: Mode) -> None:
    what, hit, found, _, _ = _with_values(trial, values, mode)
    if trial.nonfinite == "all":
        finite = np.argwhere(~np.isnan(found))
        worker, coordinate = finite[0] if len(finite) else (0, 0)
        require_law(
            not len(finite),
            "nonfinite",
            f"{what}, {len(finite)} of {found.size} results are not NaN, such as "
            f"{found[worker, coordinate]} in coordinate {coordinate} of worker {worker}.",
        )
    visible = np.isnan(found[:, hit]) if len(values) > 1 else ~np.isfinite(found[:, hit])
    require_law(visible.all(), "nonfinite", f"{what}, the workers' results are {found[:, hit]}.")


def require_nonfinite(trial: AggregatorTrial) -> None:
    """A non-finite coordinate on some workers shows on all, also among leaves of 16 bits."""
    for mode, values in _spoilt(trial):
        _require_visible(trial, values, mode)
    if trial.leaves is None:
        _require_visible(trial._replace(leaves=MIXED), {trial.workers - 1: math.nan}, "vmap")


def require_kept_memory(trial: AggregatorTrial) -> None:
    """A non-finite coordinate on some workers changes no worker's memory."""
    law = "memory after nonfinite"
    for mode, values in _spoilt(trial):
        what, _, _, before, after = _with_values(trial, values, mode)
        require_equal(law, own_leaves(after), own_leaves(before), f"{what}, the state ")


def require_zeros(trial: AggregatorTrial) -> None:
    """Zeros give zeros; near a mean, so does a coordinate that is zero on all workers."""
    inputs = finite_updates(trial.shapes, trial.workers)
    for name in ("zero", "one_hot") if trial.resolution is not None else ("zero",):
        found = trial.result(inputs[name]) * (rows_of(inputs[name]) == 0).all(axis=0)
        worst = np.abs(found).max()
        require_law(not worst, "zeros", f"{trial}, for input {name!r}, a zero becomes {worst}.")


def require_resolution(trial: AggregatorTrial) -> None:
    """Each coordinate of the first result is near the mean."""
    size = size_of(trial.shapes)
    inputs = finite_updates(trial.shapes, trial.workers)
    extreme = {k: tree_of(trial.shapes, x) for k, x in edges(size, trial.workers).items()}
    inputs |= {k: tree for k, tree in extreme.items() if np.isfinite(rows_of(tree)).all()}
    for name, updates in inputs.items():
        _require_near(trial, updates, f"input {name!r}", trial.result(updates))


def _require_near(trial: AggregatorTrial, updates: PyTree, what: str, found: np.ndarray) -> None:
    rows = rows_of(updates)
    if not rows.size:
        return
    assert trial.resolution is not None
    peak, resolution = np.abs(rows).max(), trial.resolution(*rows.shape)
    rounding = trial.workers * 2.0**-22 + spacing_of(jax.eval_shape(of_one_worker, updates))
    off = np.abs(found - rows.mean(axis=0))
    bound = np.broadcast_to((resolution + rounding) * peak + TINY, off.shape)
    worst = np.unravel_index(np.argmax(np.nan_to_num(off - bound, nan=np.inf)), off.shape)
    require_law(
        np.all(off <= bound),
        "resolution",
        f"{trial}, for {what}, coordinate {worst[1]} is {found[worst]:.6g}, "
        f"{off[worst] / (peak or 1):.3g} of the largest magnitude {peak:.3g} away from the mean; "
        f"{resolution:.3g} is allowed.",
    )


def require_shapes(trial: AggregatorTrial) -> None:
    """Scalars, leaves without elements and trees with both are averaged like any other."""
    n = trial.workers
    some = trial.normal(seed=1)
    trees: dict[str, PyTree] = {
        "a scalar": jnp.asarray(np.random.default_rng(0).normal(size=n), jnp.float32),
        "no element": jnp.zeros((n, 0)),
        "a matrix without elements": jnp.zeros((n, 2, 0)),
        "leaves without elements among others": [jnp.zeros((n, 0)), some, jnp.zeros((n, 0, 4))],
    }
    for name, updates in trees.items():
        for mode in _places(trial) if name in ("a scalar", "no element") else trial.modes[:1]:
            results, _ = trial.step(updates, trial.first(updates, mode), mode)
            what = f"{trial} in mode {mode!r}, for {name}, the result "
            require_types("shapes", results, updates, what)
            if trial.resolution is not None:
                _require_near(trial, updates, name, rows_of(results))


def require_overflow(trial: AggregatorTrial) -> None:
    """No sum overflows: if all workers hold the extreme value, so does the mean."""
    size = size_of(trial.shapes)
    row = np.resize(np.array([1, -1, 1, 0.25, -1]), size)
    updates = tree_of(trial.shapes, np.tile(row, (trial.workers, 1)))
    assert trial.resolution is not None
    bound = trial.resolution(trial.workers, size) + 1e-5 + spacing_of(trial.shapes).max(initial=0)
    state = trial.first(updates)
    for number in range(10):  # Draws: a sum that overflows by rounding does so in one of three.
        results, state = trial.step(updates, state)
        off = np.abs(rows_of(results) - row).max()
        what = f"{trial} that hold the extreme value, in step {number}, the result is {off:.3g} off"
        require_law(off <= bound, "overflow", f"{what}; {bound:.3g} is allowed.")


def require_weights(trial: AggregatorTrial) -> None:
    """The result is the weighted mean; workers without weight do not count."""
    updates, law = trial.normal(), "weights"
    rows = rows_of(updates)
    for weights in weights_of(trial.workers).values():
        for mode in _places(trial):
            found = trial.result(updates, mode, weights)
            shares = weights[:, None] / weights.sum()
            peak = np.abs(trial.workers * shares * rows).max()
            off = np.abs(found - np.sum(shares * rows, axis=0))
            if trial.resolution is not None:
                rounding = 1e-6 + spacing_of(trial.shapes)
                bound = (trial.resolution(*rows.shape) + rounding) * peak
                what = f"{trial} of weights {weights} in mode {mode!r}, the result is {off.max()}"
                require_law(np.all(off <= bound), law, f"{what} off; {bound.max()} is allowed.")
    none = trial.result(updates, _places(trial)[-1], np.zeros(trial.workers))
    require_law(not none.any(), law, f"{trial} without any weight, the result is not zero.")
    _require_dropped(trial)
    _require_impossible(trial, updates)


def require_equal_weights(trial: AggregatorTrial) -> None:
    """A common factor of all weights changes nothing, over several steps."""
    updates = trial.normal()
    plain, _ = trial.step(updates, trial.first(updates))
    twice, _ = trial.step(updates, trial.first(updates), weights=np.full(trial.workers, 2.0))
    what = f"{trial}, with `weight=2` on all of them, the result "
    require_equal("equal weights", twice, plain, what)
    found: list[Any] = []
    for factor in (1.0, 64.0):
        state = trial.first(updates)
        for number in range(3):
            weights = factor * np.roll(weights_of(trial.workers)["uneven"], number)
            result, state = trial.step(updates, state, weights=weights)
            found.append(result)
    what = f"{trial}, with all weights 64 times as large, the result "
    require_equal("equal weights", found[3:], found[:3], what)


def _require_dropped(trial: AggregatorTrial) -> None:
    """Checks that a worker without weight may send NaN and infinity."""
    if trial.workers == 1:
        return
    rows = np.ones((trial.workers, size_of(trial.shapes)))
    rows[1], rows[1, ::2] = np.nan, np.inf
    weights = np.arange(trial.workers) != 1
    found = trial.result(tree_of(trial.shapes, rows), weights=weights)
    if trial.resolution is not None:
        share = trial.workers / (trial.workers - 1)
        bound = share * trial.resolution(*rows.shape) + 1e-6
        what = f"{trial}, a NaN on worker 1, which has no weight, gives {found[0]} instead of 1."
        require_law(np.all(np.abs(found - 1) <= bound), "weights", what)


def _require_impossible(trial: AggregatorTrial, updates: PyTree) -> None:
    """Checks that weights that are none, or overflow, make the whole result NaN."""
    impossible = (
        # Combined with weights that leave the sum unchanged: 1, 0 and the largest float.
        *([-1.0, 1.0, 0.0, 2.0], [-1.0, 1.0, 0.0, 0.0], [np.nan, 0.0, 0.0, 0.0]),
        # Of which the quotient would be 0, or NaN.
        *([np.inf, 1.0, 0.0, 2.0], [3e38] * 4, [3e37] * 4, [1e-39, 0.0, 0.0, 0.0]),
    )
    for row in impossible:
        weights = np.resize(row, trial.workers)
        found = trial.result(updates, _places(trial)[-1], weights)
        what = f"{trial} of weights {weights}, the result is {found[0]} and must be NaN."
        require_law(np.isnan(found).all(), "weights", what)


def require_no_bias(trial: AggregatorTrial) -> None:
    """The average of draws is the mean over workers."""
    narrow = tree_of(trial.shapes, rows_of(trial.normal(seed=2)).astype(jnp.bfloat16))
    inputs = {"normal": trial.normal(seed=1), "normal in bfloat16": narrow}
    for name, updates in inputs.items():
        rows = rows_of(updates)
        sample = draws_of(trial.tx, updates, trial.draws, trial.axis_name)
        peak = np.abs(rows).max()
        require_unbiased(
            "unbiased",
            sample,
            rows.mean(axis=0),
            f"input {name!r} {trial}",
            spread=trial.resolution and trial.resolution(*rows.shape) * peak,
            rounding=(2.0**-21 * (rows.shape[1] + 1) + spacing_of(trial.shapes)) * peak,
        )


def require_variance(trial: AggregatorTrial) -> None:
    """`E|G - mean|^2` is at most what is claimed."""
    updates = trial.normal(seed=3)
    rows = rows_of(updates)
    sample = draws_of(trial.tx, updates, trial.draws, trial.axis_name)
    errors = np.sum((sample - rows.mean(axis=0)) ** 2, axis=1)
    assert trial.variance is not None
    bound = trial.variance(rows.shape[1], trial.workers) / trial.workers * np.sum(rows**2)
    bound += np.sum(((2.0**-21 + spacing_of(trial.shapes)) * rows) ** 2)
    require_moment("variance", errors, bound, f"normal input {trial}", alpha=1e-6)


def require_permutation(trial: AggregatorTrial) -> None:
    """Permuting the workers changes nothing."""
    # Coordinates at the norm or at zero are rounded exactly, so results can be compared.
    rng, shape = np.random.default_rng(5), (trial.workers, size_of(trial.shapes))
    signs: np.ndarray = rng.choice([-1.0, 1.0], shape)
    if trial.silent:
        # A codec that clips sees few zeros; one that keeps a part of a matrix, one coordinate.
        turns = 5 if trial.resolution is not None else shape[1]
        own = rng.permutation(shape[1]) % turns == np.arange(trial.workers)[:, None]
        signs = own * np.resize([1.0, -1.0, 1.0], trial.workers)[:, None]
    given, permuted = (
        trial.result(tree_of(trial.shapes, rows)) for rows in (signs, np.roll(signs, -1, axis=0))
    )
    bound = 0.0 if trial.integers else 1e-6
    if (near := trial.resolution) is not None and near(*shape):
        exact = trial.random and near(shape[0], 2) == near(shape[0], 1)
        bound = 1e-6 + (0.0 if exact else 2 * near(*shape))
    bound += spacing_of(trial.shapes).max(initial=0)
    off = np.abs(permuted - given).max()
    what = f"{trial} in another order, the result moves by {off:.3g}; {bound:.3g} is allowed."
    require_law(off <= bound, "permutation", what)
    if trial.resolution is not None:
        off = np.abs(given - signs.mean(axis=0)).max()
        what = f"{trial} that hold -1, 0 or 1, the result is {off:.3g} off; {bound:.3g} is allowed."
        require_law(off <= max(bound, 1e-6), "permutation", what)
