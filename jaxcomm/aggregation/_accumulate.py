"""Gradients added up on the spot, and sent once in a while."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis
from jaxcomm._base import AxisName, PerWorker, PyTree
from jaxcomm._buckets import require_floating
from jaxcomm._require import checked, own_weight, require_state
from jaxcomm._switch import collective_cond


class AccumulateState(NamedTuple):
    """The state of `accumulate`; all but `own` is equal on all workers."""

    mini_step: jax.Array  # int32[], from 0 to every - 1
    own: PerWorker  # {"mean": of the mini-steps so far, "weight": their sum}
    inner: Any


@checked()
def accumulate(
    tx: optax.GradientTransformation, every: int, axis_name: AxisName = "data"
) -> optax.GradientTransformationExtraArgs:
    r"""Averages `every` gradients on each worker, and only then lets `tx` communicate and update.

    .. math:: \bar g_i = \frac{\sum_{t=1}^{k} w_{i,t}\, g_{i,t}}{\sum_t w_{i,t}}, \qquad
              (\Delta, s') = \mathrm{tx}\Big(\bar g_i, s, x;\ \textstyle\sum_t w_{i,t}\Big)
              \text{ at every } k\text{-th mini-step, and } \Delta = 0 \text{ elsewhere}

    with :math:`k` the option `every`, and weights of 1 where none are given. What `tx` sends is
    sent at the last mini-step, and nothing at the others: a :math:`k`-th of the bytes.
    `optax.MultiSteps` gives the same updates where it runs, but communicates at each mini-step, and
    `jax.shard_map` refuses it.

    Args:
      tx: A whole chain, the aggregator and the optimizer: `accumulate(optax.chain(...), 4)`.
      every: How many gradients make an update, a Python int. 1 is `tx` itself.
      axis_name: The mesh axis, or axes, over which gradients differ.

    Returns:
      A transformation in place of `tx`. Its state holds each worker's running mean, float32 (or
      float64 where the leaf is). `update(..., weight=w)` weighs both the mini-steps and the
      workers: give it at every mini-step or at none. A mini-step of weight 0 adds nothing, whatever
      its gradient holds.

    Raises:
      ValueError: If `every` is no positive Python int; in `init`, if `axis_name` is not bound; in
        `update`, if an update is already summed or not floating-point.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxcomm
      >>> tx = jaxcomm.accumulate(optax.chain(jaxcomm.mean(), optax.sgd(1.0)), every=2)
      >>> def two_steps(g):
      ...     first, state = tx.update(g, tx.init(g))
      ...     second, state = tx.update(3 * g, state)
      ...     return first, second
      >>> for update in jax.vmap(two_steps, axis_name="data")(jnp.array([1.0, 2.0])):
      ...     print(update)
      [0. 0.]
      [-3. -3.]
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(
            f"`every` must be a Python int of at least 1, got {every!r}. Under "
            "`optax.inject_hyperparams` pass `static_args=('every',)`."
        )
    inner = optax.with_extra_args_support(tx)
    if every == 1:
        return inner
    axis = _axis.label(axis_name)

    def mark(means: PyTree, total: jax.Array) -> PerWorker:
        own = {"mean": means, "weight": total}
        return PerWorker({axis: jax.tree.map(lambda x: x[None], own)})

    def nothing(tree: PyTree) -> PerWorker:
        def zeros(x: jax.Array) -> jax.Array:
            return jnp.zeros(x.shape, x.dtype if x.dtype.itemsize >= 4 else jnp.float32)

        return mark(jax.tree.map(zeros, tree), jnp.zeros((), jnp.float32))

    def init_fn(params: PyTree) -> AccumulateState:
        _axis.require_bound(axis_name)
        require_floating(params)
        return AccumulateState(jnp.zeros((), jnp.int32), nothing(params), inner.init(params))

    def update_fn(
        updates: PyTree,
        state: AccumulateState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        **extra_args: object,
    ) -> tuple[PyTree, AccumulateState]:
        require_state(state, AccumulateState, "`accumulate`")
        require_floating(updates)
        _axis.require_local(updates, axis_name)
        own = own_weight(1.0 if weight is None else weight)
        so_far = _axis.own(state.own, axis_name)
        total = so_far["weight"] + own

        def add(mean: jax.Array, x: jax.Array) -> jax.Array:
            # A running mean: the sum of huge gradients may overflow, their mean not.
            share = own.astype(mean.dtype) / total.astype(mean.dtype)
            part = jnp.where(total == 0, 0, share)
            joined = mean * (1 - part) + x.astype(mean.dtype) * part
            return jnp.where(own == 0, mean, joined)

        means = jax.tree.map(add, so_far["mean"], updates)

        def update() -> tuple[PyTree, AccumulateState]:
            whole = jax.tree.map(lambda mean, x: mean.astype(x.dtype), means, updates)
            extra = extra_args if weight is None else {**extra_args, "weight": total}
            result, after = inner.update(whole, state.inner, params, **extra)
            return result, AccumulateState(jnp.zeros((), jnp.int32), nothing(updates), after)

        def wait(shapes: tuple[PyTree, AccumulateState]) -> tuple[PyTree, AccumulateState]:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[0])
            return zeros, AccumulateState(state.mini_step + 1, mark(means, total), state.inner)

        return collective_cond(state.mini_step == every - 1, update, wait)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
