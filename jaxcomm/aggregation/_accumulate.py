"""Gradient accumulation that communicates only once per update."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PerWorker, PyTree, require_state
from jaxcomm._mesh import collective_cond
from jaxcomm._require import Positive, checked, own_weight, weight_dtype
from jaxcomm._resize import resized_by, weighted_mean_of_workers
from jaxcomm._units import require_floating


class AccumulateState(NamedTuple):
    """The state of `accumulate`, equal on all workers except `own`."""

    mini_step: jax.Array  # int32[], from 0 to every - 1
    own: PerWorker  # {"mean": mean over the mini-steps so far, "weight": sum of their weights}
    inner: Any


@checked
def accumulate(
    tx: optax.GradientTransformation, every: Positive, *, axis_name: AxisName = "data"
) -> optax.GradientTransformationExtraArgs:
    r"""Averages `every` gradients on each worker, then runs `tx` once on the mean.

    .. math:: \bar g_i = \frac{\sum_{t=1}^{k} w_{i,t}\, g_{i,t}}{\sum_t w_{i,t}}, \qquad
              (\Delta, s') = \mathrm{tx}\Big(\bar g_i, s, x;\ \textstyle\sum_t w_{i,t}\Big)
              \text{ at every } k\text{-th mini-step, and } \Delta = 0 \text{ elsewhere}

    where :math:`k` is `every`. Weights are 1 by default. `tx` communicates only at the last
    mini-step, which divides the bytes sent by :math:`k`. If training ends within a window, pass
    `flush=True` in its last step. `optax.MultiSteps` communicates at each
    mini-step, and `jax.shard_map` rejects it. In other contexts it returns the same updates.

    Args:
      tx: A whole chain of aggregator and optimizer: `accumulate(optax.chain(...), 4)`.
      every: The number of gradients per update, a Python int. With 1, the result is `tx` itself,
        without `flush`.
      axis_name: The mesh axis, or axes, over which gradients differ.

    Returns:
      A transformation to use in place of `tx`. Its state holds the running mean of each worker in
      float32 (float64 for float64 leaves). `update(..., weight=w)` weights both mini-steps and
      workers; pass it at every mini-step or at none. A mini-step of weight 0 adds nothing, even if
      its gradient is not finite. `update(..., flush=flag)`, a bool that is equal on all workers,
      makes this mini-step the last of its window: `tx` runs on the mean of the gradients so far.
      Pass a flag in every step, `step(..., flush=is_last)`, and the step is compiled once. With
      `weight=0` as well, the flush adds no gradient of its own. `tx` receives the flag too.

    Raises:
      ValueError: If `every` is not a positive Python int; in `init`, if `axis_name` is not bound;
        in `update`, if an update is already summed or not floating-point.

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
    inner = optax.with_extra_args_support(tx)
    if every == 1:
        return inner

    def mark(means: PyTree, total: jax.Array) -> PerWorker:
        return _axis.marked({"mean": means, "weight": total}, axis_name)

    def empty(tree: PyTree) -> PerWorker:
        def zeros(x: jax.Array) -> jax.Array:
            return jnp.zeros(x.shape, x.dtype if x.dtype.itemsize >= 4 else jnp.float32)

        return mark(jax.tree.map(zeros, tree), jnp.zeros((), weight_dtype(tree)))

    def init_fn(params: PyTree) -> AccumulateState:
        require_floating(params)
        own = resized_by(empty(params), weighted_mean_of_workers)
        return AccumulateState(jnp.zeros((), jnp.int32), own, inner.init(params))

    def update_fn(
        updates: PyTree,
        state: AccumulateState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        flush: jax.Array | bool | None = None,
        **extra_args: object,
    ) -> tuple[PyTree, AccumulateState]:
        require_state(state, AccumulateState, "`accumulate`")
        require_floating(updates)
        _axis.require_local(updates, axis_name)
        new_weight = own_weight(1.0 if weight is None else weight, weight_dtype(updates))
        running = _axis.own(state.own, axis_name)
        total = running["weight"] + new_weight

        def add(mean: jax.Array, x: jax.Array) -> jax.Array:
            # A running mean, because the sum of huge gradients may overflow.
            share = new_weight.astype(mean.dtype) / total.astype(mean.dtype)
            part = jnp.where(total == 0, 0, share)
            joined = mean * (1 - part) + x.astype(mean.dtype) * part
            return jnp.where(new_weight == 0, mean, joined)

        means = jax.tree.map(add, running["mean"], updates)
        last = state.mini_step >= every - 1  # It is beyond if the state is of a larger `every`.
        if flush is not None:
            extra_args = {**extra_args, "flush": flush}
            last |= jnp.asarray(flush)

        def update() -> tuple[PyTree, AccumulateState]:
            gradients = jax.tree.map(lambda mean, x: mean.astype(x.dtype), means, updates)
            extra = extra_args if weight is None else {**extra_args, "weight": total}
            result, after = inner.update(gradients, state.inner, params, **extra)
            return result, AccumulateState(jnp.zeros((), jnp.int32), empty(updates), after)

        def wait(shapes: tuple[PyTree, AccumulateState]) -> tuple[PyTree, AccumulateState]:
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[0])
            return zeros, AccumulateState(state.mini_step + 1, mark(means, total), state.inner)

        return collective_cond(last, update, wait)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
