"""Metrics of a step: means over workers, each worker's own values, or periodic means."""

from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._collectives import collective_cond
from jaxcomm._contract import AxisName, PyTree
from jaxcomm.aggregation._coded import weigh
from jaxcomm.metrics._reduced import apart, over_axes, together, values_of

Metrics: TypeAlias = Literal["mean", "own"] | int
"""Means over workers in every step, each worker's own values, or the period of means in steps."""


def check_metrics(metrics: Metrics) -> None:
    """Raises a ValueError unless `metrics` is `"mean"`, `"own"` or a period."""
    period = isinstance(metrics, int) and not isinstance(metrics, bool) and metrics >= 1
    if not period and metrics not in ("mean", "own"):
        raise ValueError(
            "`metrics` must be 'mean', 'own' or a period, a Python int of at least 1, got "
            f"{metrics!r}."
        )


def _means(
    axis_name: AxisName, values: dict[str, PyTree], weight: jax.Array | None
) -> dict[str, PyTree]:
    """Returns float32 means over workers, with the gradients' weights; NaN if all weights are 0."""
    names = _axis.names(axis_name)
    workers = _axis.size(axis_name)
    if weight is None:
        return jax.tree.map(lambda x: lax.psum(x, names) / workers, values)
    weighed = weigh(axis_name, weight, values)
    total = lax.psum(_axis.as_varying(weight, axis_name), names)

    def mean(x: jax.Array) -> jax.Array:
        return jnp.where(total == 0, jnp.nan, lax.psum(weighed(x), names) / workers)

    return {**jax.tree.map(mean, values), "weight": total}


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
        "`metrics` as a period needs a counter of steps, but `tx` keeps none. Aggregators with a "
        "codec, gossip, Adam and schedules keep one; `jaxcomm.mean` and plain SGD do not. Use "
        "'mean' or 'own'."
    )


def reduce_metrics(
    metrics: Metrics,
    axis_name: AxisName,
    values: dict[str, PyTree],
    weight: jax.Array | None,
    opt_state: optax.OptState,
) -> dict[str, PyTree]:
    """Returns the metrics of one step in one worker; with `"own"`, `[1, ...]`.

    Args:
      metrics: Which metrics to return.
      axis_name: The axes of the workers.
      values: This worker's loss and aux.
      weight: Its weight, if gradients are weighted.
      opt_state: The state before the step, which counts steps.
    """
    values, others = apart(values)
    values = jax.tree.map(
        lambda x: _axis.as_varying(jnp.asarray(x).astype(jnp.float32), axis_name), values
    )
    weight = None if weight is None else jnp.asarray(weight, jnp.float32)
    if metrics == "own":
        own = values_of(together(values, others))
        own = own if weight is None else {**own, "weight": weight}
        return jax.tree.map(lambda x: _axis.as_varying(x, axis_name)[None], own)

    def reduced() -> dict[str, PyTree]:
        means = _means(axis_name, values, weight)
        totals = {} if weight is None else {"weight": means.pop("weight")}
        return values_of(together(means, over_axes(others, axis_name))) | totals

    def floating() -> dict[str, PyTree]:
        return jax.tree.map(
            lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32),
            reduced(),
        )

    if metrics == "mean":
        return reduced()
    if jax.config.jax_debug_nans:
        raise ValueError(
            "`metrics` as a period returns NaN in the steps between, which `jax_debug_nans` "
            "reports as an error: use 'mean' or 'own' with it."
        )
    due = _steps_so_far(opt_state) % metrics == metrics - 1
    return collective_cond(
        due,
        floating,
        lambda shapes: jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), shapes),
    )


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
