"""What workers average beside gradients: the model state, and metrics of the loss."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PerWorker, PyTree
from jaxcomm._gradients import same_model_state
from jaxcomm._mesh import collective_cond
from jaxcomm._require import Positive
from jaxcomm.aggregation import mean
from jaxcomm.aggregation._coded import weigh
from jaxcomm.metrics._reduced import is_reduced, over_axes, separate, together, values_of

Metrics: TypeAlias = Literal["mean", "own"] | Positive
"""Means over workers in every step, each worker's own values, or the period of means in steps."""


def _require_equal(path: tuple[Any, ...], x: jax.Array, over: set[str]) -> None:
    if over:
        raise ValueError(
            f"`model_state{jax.tree_util.keystr(path)}` is {x.dtype} and differs over "
            f"{sorted(over)}, so it has no mean: let it be equal, or let each worker keep its own "
            "with `jaxcomm.replicate(model_state, mesh)`."
        )


def _unless_not_finite(new: jax.Array, old: jax.Array, changes: jax.Array | bool) -> jax.Array:
    """`new`; or `old` if a finite value would become NaN or infinite, or nothing `changes`."""
    if not jnp.issubdtype(new.dtype, jnp.floating):
        return new
    return jnp.where(jnp.all(jnp.isfinite(new) | ~jnp.isfinite(old)) & changes, new, old)


def _or_common(average: jax.Array, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The average, or what all workers have: under `jax.vmap` no type says that it is equal."""
    if any(_axis.mode(name) != "vmap" for name in axes):
        return average
    least, most = lax.pmin(x, axes), lax.pmax(x, axes)
    return jnp.where(least == most, least, average)


@jax.named_scope("make_step/model_state")
def reduce_model_state(
    returned: PyTree,
    model_state: PyTree,
    axis_name: AxisName,
    inner: tuple[str, ...],
    weight: jax.Array | None,
    differs: PyTree = None,
) -> PyTree:
    """The model state after a step: the exact mean over workers, or each worker's own.

    A leaf that is known to be equal on all workers is sent nowhere. A leaf in which a finite
    value would become NaN or infinite keeps its value, as do all floating-point leaves in a step
    in which no example has a weight.

    Args:
      returned: What the loss returned on this device.
      model_state: The model state before the step, a `PerWorker` if each worker keeps its own.
      axis_name: The axes of the workers.
      inner: The axes of the devices of one worker, over which the mean is taken in any case.
      weight: The weight of this device's examples, if gradients are weighted.
      differs: How each leaf of `returned` varies, if that is known.
    """
    is_own = isinstance(model_state, PerWorker)
    before = _axis.own_params(model_state)
    new = same_model_state(returned, before)
    axes = inner if is_own else (*_axis.names(axis_name), *inner)
    changes: jax.Array | bool = True
    if weight is not None:
        with jax.named_scope("weight"):
            total = lax.psum(_axis.as_varying(jnp.asarray(weight, jnp.float32), axes), axes)
        changes = total != 0
    leaves, structure = jax.tree_util.tree_flatten_with_path(new)
    over = [{*axes} for _ in leaves]
    if differs is not None:
        over = [{*axes} & {*leaf.over} for leaf in jax.tree.leaves(differs)]
    differing = {}
    for (path, x), names in zip(leaves, over, strict=True):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            if differs is not None:
                _require_equal(path, x, names)
        elif names:
            wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
            differing[path] = _axis.as_varying(wide, axes)
    if differing:
        tx = mean(axes)
        outer = _axis.names(axis_name) if is_own else ()
        means, _ = tx.update([*differing.values()], tx.init(None), weight=weight, outer_axes=outer)
        means = [_or_common(m, x, axes) for m, x in zip(means, differing.values(), strict=True)]
        differing = dict(zip(differing, means, strict=True))
    averaged = [differing[path].astype(x.dtype) if path in differing else x for path, x in leaves]
    after = jax.tree.map(
        lambda x, old: _unless_not_finite(x, old, changes),
        jax.tree.unflatten(structure, averaged),
        before,
    )
    return _axis.marked(after, axis_name) if is_own else after


@jax.named_scope("make_step/devices")
def over_devices(
    values: dict[str, PyTree],
    gradient: PyTree,
    weight: jax.Array | None,
    inner: tuple[str, ...],
    names: tuple[str, ...],
) -> tuple[dict[str, PyTree], PyTree, jax.Array | None]:
    """Values, gradient and weight of a worker, from those of its devices, which each have rows."""
    average = mean(inner)
    means, others = separate(values)
    means = jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.float32), means)
    per_device = _axis.local_params((means, gradient), axis_name=inner)
    state = average.init(per_device)
    (means, gradient), _ = average.update(per_device, state, weight=weight, outer_axes=names)
    with jax.named_scope("metrics"):
        values = together(means, over_axes(others, inner))
    with jax.named_scope("weight"):
        return values, gradient, None if weight is None else lax.psum(weight, inner)


def _is_counter(leaf: object) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.integer) and not leaf.ndim


def _steps_so_far(opt_state: optax.OptState) -> jax.Array:
    """Returns the first counter of steps in the state, int[]: of an aggregator, Adam or a schedule.

    Other counters of optax restart at times.
    """
    nodes: list[object] = []

    def counts(node: object) -> bool:
        nodes.append(node)
        return False

    jax.tree.flatten(opt_state, is_leaf=counts)
    for field, begins in (("step", ""), ("count", "ScaleBy")):
        for node in nodes:
            counter = getattr(node, field, None)
            if type(node).__name__.startswith(begins) and _is_counter(counter):
                return jnp.asarray(counter)
    raise ValueError(
        "`metrics` as a period needs a counter of steps, as of Adam or an aggregator with a codec, "
        "and `tx` keeps none: use 'mean' or 'own'."
    )


def require_aux(aux: Mapping[str, object], taken: set[str]) -> None:
    """Raises a ValueError if aux has a reserved name."""
    if both := sorted(taken & aux.keys()):
        raise ValueError(f"The step adds the metrics {both}: give those of `loss_fn` other names.")


def require_means(
    aux_of: Callable[[PyTree], PyTree], aux: PyTree, batch: PyTree, remedy: str
) -> None:
    """Raises a ValueError if an entry of aux grows with the batch, with one value per example.

    Args:
      aux_of: The function from a worker's batch to aux. It is traced with twice the rows, unless
        all entries of aux are scalars.
      aux: The aux of the worker's own batch.
      batch: The worker's batch.
      remedy: The end of the message: an alternative to returning the mean.
    """
    if not any(jnp.ndim(leaf) for leaf in jax.tree.leaves(aux)):
        return
    try:
        twice: PyTree = jax.eval_shape(
            lambda rows: aux_of(jax.tree.map(lambda x: jnp.concatenate([x, x]), rows)), batch
        )
    except Exception:
        return  # The loss requires this number of rows, so it cannot be checked.
    flat = jax.tree_util.tree_leaves_with_path(aux, is_leaf=is_reduced)
    for (path, node), leaf, other in zip(
        flat, jax.tree.leaves(aux), jax.tree.leaves(twice), strict=True
    ):
        if jnp.shape(leaf) != jnp.shape(other):
            raise ValueError(
                f"`aux{jax.tree_util.keystr(path)}` has shape {jnp.shape(leaf)}, one value per "
                f"example: return its {node.by if is_reduced(node) else 'mean'}{remedy}."
            )


def reduce_metrics(
    metrics: Metrics,
    names: tuple[str, ...],
    loss: jax.Array,
    aux: dict[str, PyTree],
    weight: jax.Array | None,
    opt_state: optax.OptState,
) -> dict[str, PyTree]:
    """The float32 metrics of one step in one worker; with `"own"`, `[1, ...]`.

    Args:
      metrics: Which metrics to return.
      names: The axes of the workers.
      loss: This worker's loss.
      aux: Its other metrics.
      weight: Its weight, if gradients are weighted.
      opt_state: The state before the step, which counts steps.
    """
    values: dict[str, PyTree] = {"loss": loss, **aux}
    means, others = separate(values) if aux else (values, {})
    means = jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.float32), means)
    weight = None if weight is None else jnp.asarray(weight, jnp.float32)

    def found(means: PyTree, others: PyTree, total: jax.Array | None) -> dict[str, PyTree]:
        values = values_of(together(means, others)) if aux else means
        return values if total is None else {**values, "weight": total}

    if metrics == "own":
        return jax.tree.map(lambda x: x[None], found(means, others, weight))

    @jax.named_scope("make_step/metrics")
    def reduced() -> dict[str, PyTree]:
        if weight is None:
            averages, total = jax.tree.map(lambda x: lax.pmean(x, names), means), None
        else:  # NaN if all weights are 0.
            weighed, total = weigh(names, weight, means), lax.psum(weight, names)
            averages = jax.tree.map(
                lambda x: jnp.where(total == 0, jnp.nan, lax.pmean(weighed(x), names)), means
            )
        return found(averages, over_axes(others, names) if aux else {}, total)

    def floating() -> dict[str, PyTree]:
        return jax.tree.map(
            lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32),
            reduced(),
        )

    if metrics == "mean":
        return reduced()
    due = _steps_so_far(opt_state) % metrics == metrics - 1
    return collective_cond(
        due,
        floating,
        lambda shapes: jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), shapes),
    )


@jax.named_scope("make_step/diagnostics")
def diagnostics_of(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """Returns the diagnostics of aggregators with `diagnostics=True`, as `diagnostics/<name>`.

    Names contain the path in the state if several aggregators have diagnostics. Values that differ
    by worker are replaced by their maximum, with an all-reduce of one float32.
    """
    found: dict[str, dict[str, jax.Array]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
        *before, field, name = [None, None, *path]
        if isinstance(field, jax.tree_util.GetAttrKey) and field.name == "diagnostics":
            where = jax.tree_util.keystr(
                tuple(key for key in before if key is not None), simple=True, separator="/"
            )
            if axes := _axis.per_worker_axes(path):
                leaf = lax.pmax(leaf[0], axes)
            found.setdefault(where, {})[jax.tree_util.keystr((name,), simple=True)] = leaf
    return {
        "/".join(["diagnostics", *([where] if where and len(found) > 1 else []), name]): value
        for where, values in found.items()
        for name, value in values.items()
    }
