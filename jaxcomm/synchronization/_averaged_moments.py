"""An optimizer of each worker, some fields of whose state are averaged periodically."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PerWorker, PyTree
from jaxcomm._mesh import collective_cond
from jaxcomm._noise import following
from jaxcomm._require import Positive, checked
from jaxcomm._workers import per_worker
from jaxcomm.aggregation import mean
from jaxcomm.synchronization._averaging_round import apply_finite_step, no_steps, takes_part
from jaxcomm.synchronization._trees import chosen, narrow, wide


class MomentsState(NamedTuple):
    """The state of an optimizer whose moments are averaged."""

    step: jax.Array  # int32[], steps so far
    optimizer: PerWorker
    done: dict[str, PerWorker]  # of each field, each worker's steps since its last average


def _places(state: PyTree) -> dict[str, list[int]]:
    """Of each named field, which leaves are its floating-point arrays."""
    found: dict[str, list[int]] = {}
    for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
        if jnp.issubdtype(x.dtype, jnp.floating):
            for key in path:
                if isinstance(key, jax.tree_util.GetAttrKey):
                    found.setdefault(key.name, []).append(i)
    return found


def _unchanged(kept: Any, _: Any) -> Any:
    return kept


@checked
def averaged_moments(
    inner: optax.GradientTransformation,
    periods: Mapping[str, Positive],
    *,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    r"""An optimizer of each worker, some fields of whose state are averaged periodically.

    .. math:: s_i \gets \mathrm{inner}(s_i, g_i), \qquad\text{and at every } K_s \text{-th step}
              \quad s_i \gets \frac{\sum_j W_j s_j}{\sum_j W_j}

    :math:`W_j` are the steps that worker j has applied since the last average, or their weights. In
    its last step of a period, a field is sent by an all-reduce in float32, with two numbers.

    Args:
      inner: Any optax optimizer.
      periods: The number of steps between averages of each field of the state, such as `mu` and
        `nu` of Adam. Fields that are not named stay those of each worker.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      An optimizer to place before `local_sgd`. It accepts `weight`, `present` and `flush`, too.

    Raises:
      ValueError: If a period is not a positive int; in `init`, if the state has no such field.

    Example:
      >>> import optax
      >>> from jaxcomm.synchronization._averaged_moments import averaged_moments
      >>> tx = averaged_moments(optax.adam(0.01), {"nu": 100})
    """
    own = per_worker(inner, axis_name=axis_name)
    average = mean(axis_name)

    def init_fn(params: PyTree) -> MomentsState:
        optimizer = own.init(params)
        named = _places(_axis.own(optimizer, axis_name))
        if missing := [field for field in periods if field not in named]:
            raise ValueError(
                f"The state of `inner` has no floating-point field {missing[0]!r}, of {[*named]}."
            )
        done = {field: no_steps(params, axis_name) for field in periods}
        return MomentsState(jnp.zeros((), jnp.int32), optimizer, done)

    def update_fn(
        updates: PyTree,
        state: MomentsState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        present: jax.Array | None = None,
        flush: jax.Array | bool = False,
        **extra_args: Any,
    ) -> tuple[PyTree, MomentsState]:
        extra = extra_args if weight is None else {**extra_args, "weight": weight}
        updates, marked = own.update(updates, state.optimizer, params, **extra)
        step, participates = following(state.step), takes_part(present, axis_name)
        optimizer = _axis.own(marked, axis_name)
        leaves, treedef = jax.tree.flatten(optimizer)
        after, named = dict(state.done), _places(optimizer)
        for field, period in periods.items():
            _, after[field] = apply_finite_step(params, updates, after[field], weight, axis_name)
            places = named[field]
            kept = [leaves[i] for i in places], _axis.own(after[field], axis_name)

            def averaged(kept: Any = kept) -> Any:
                floats, done = kept
                steps = _axis.local_params(
                    jnp.where(participates, done.weight, 0), axis_name=axis_name
                )
                with jax.named_scope("weight"):
                    total = lax.psum(steps, axis_name)
                means, _ = average.update(wide(floats), optax.EmptyState(), weight=steps)
                finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in means]))
                replace = participates & (total > 0) & finite
                new = narrow(means, floats), jax.tree.map(jnp.zeros_like, done)
                return chosen(replace, new, kept)

            due = (step % period == 0) | jnp.asarray(flush)
            floats, done = collective_cond(due, averaged, partial(_unchanged, kept))
            after[field] = _axis.marked(done, axis_name)
            for i, x in zip(places, floats, strict=True):
                leaves[i] = x
        marked = _axis.marked(jax.tree.unflatten(treedef, leaves), axis_name)
        return updates, MomentsState(step, marked, after)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
