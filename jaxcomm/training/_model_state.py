"""State that a loss changes in a forward pass, such as running statistics, in one worker."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PerWorker, PyTree
from jaxcomm._require import same_model_state
from jaxcomm._workers import own_params
from jaxcomm.aggregation import mean


def _require_equal(
    path: tuple[Any, ...], x: jax.Array, over: set[str], inner: tuple[str, ...]
) -> None:
    if over & set(inner):
        raise ValueError(
            f"`model_state{jax.tree_util.keystr(path)}` is {x.dtype} and differs over the devices "
            f"of one worker, {list(inner)}, so it has no mean: let it not depend on the batch or "
            "the key. A function of `gradients=` must reduce it over these axes too."
        )
    if over:
        raise ValueError(
            f"`model_state{jax.tree_util.keystr(path)}` is {x.dtype} and differs by worker, so "
            "workers have no mean to agree on: let it not depend on the batch or the key, or let "
            "each worker keep its own model state with `jaxcomm.replicate(model_state, mesh)`."
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
    before = own_params(model_state)
    new = same_model_state(returned, before)
    axes = inner if is_own else (*_axis.names(axis_name), *inner)
    changes: jax.Array | bool = True
    if weight is not None:
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
                _require_equal(path, x, names, inner)
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
