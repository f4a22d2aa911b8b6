"""State that a loss changes in a forward pass, such as running statistics, in one worker."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxcomm import _axis
from jaxcomm._base import AxisName, PerWorker, PyTree
from jaxcomm._state import own_params
from jaxcomm.aggregation import mean


def _type_of(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"


def _require_same_types(new: PyTree, old: PyTree) -> None:
    """Raises a ValueError unless the loss returns the model state with its structure and types."""

    def types(tree: PyTree) -> dict[str, str]:
        return {
            jax.tree_util.keystr(path): _type_of(x)
            for path, x in jax.tree_util.tree_leaves_with_path(tree)
        }

    returned, taken = types(new), types(old)
    where = next((path for path in taken if path not in returned), None)
    if where is not None:
        raise ValueError(
            f"`loss_fn` must return the whole model state, but what it returned lacks "
            f"`model_state{where}`. With `has_model_state=True` it returns `(loss, model_state)`, "
            "or `(loss, (model_state, aux))` with aux."
        )
    where = next((path for path in returned if path not in taken), None)
    if where is not None:
        raise ValueError(
            f"`loss_fn` returned `model_state{where}`, which the model state that it received does "
            "not have: initialize it before the first step."
        )
    where = next((path for path in taken if taken[path] != returned[path]), None)
    if where is not None:
        raise ValueError(
            f"`loss_fn` returned `model_state{where}` as {returned[where]}, but received it as "
            f"{taken[where]}: return it with the same shape and dtype."
        )


def _as_array(x: Any) -> jax.Array:
    return x if isinstance(x, jax.Array) else jnp.asarray(x, np.asarray(x).dtype)


def _require_equal(path: tuple[Any, ...], x: jax.Array, axes: tuple[str, ...]) -> None:
    if not _axis.is_known_equal(x, axes):
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


def reduce_model_state(
    returned: PyTree,
    model_state: PyTree,
    axis_name: AxisName,
    inner: tuple[str, ...],
    weight: jax.Array | None,
) -> PyTree:
    """The model state after a step: the exact mean over workers, or each worker's own.

    A leaf that is the same on all workers by its type is sent nowhere. A leaf in which a finite
    value would become NaN or infinite keeps its value, as do all floating-point leaves in a step
    in which no example has a weight.

    Args:
      returned: What the loss returned on this device.
      model_state: The model state before the step, a `PerWorker` if each worker keeps its own.
      axis_name: The axes of the workers.
      inner: The axes of the devices of one worker, over which the mean is taken in any case.
      weight: The weight of this device's examples, if gradients are weighted.
    """
    is_own = isinstance(model_state, PerWorker)
    before = own_params(model_state)
    new = jax.tree.map(_as_array, returned)
    _require_same_types(new, before)
    axes = inner if is_own else (*_axis.names(axis_name), *inner)
    changes: jax.Array | bool = True
    if weight is not None:
        total = lax.psum(_axis.as_varying(jnp.asarray(weight, jnp.float32), axes), axes)
        changes = total != 0
    leaves, structure = jax.tree_util.tree_flatten_with_path(new)
    differing = {}
    for path, x in leaves:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            if all(_axis.mode(name) == "checked" for name in axes):
                _require_equal(path, x, axes)
        elif axes and not _axis.is_known_equal(x, axes):
            wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
            differing[path] = _axis.as_varying(wide, axes)
    if differing:
        tx = mean(axes)
        outer = _axis.names(axis_name) if is_own else ()
        means, _ = tx.update([*differing.values()], tx.init(None), weight=weight, outer_axes=outer)
        differing = dict(zip(differing, means, strict=True))
    averaged = [differing[path].astype(x.dtype) if path in differing else x for path, x in leaves]
    after = jax.tree.map(
        lambda x, old: _unless_not_finite(x, old, changes),
        jax.tree.unflatten(structure, averaged),
        before,
    )
    if is_own:
        label = _axis.label(axis_name)
        return PerWorker({label: jax.tree.map(lambda x: x[None], after)})
    return after
