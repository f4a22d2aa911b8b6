"""Gradients of an earlier step, so that sending them depends on nothing of this one."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._axis import require_shards
from jaxcomm._collectives import after
from jaxcomm._contract import Aggregator, PerWorker, PyTree, require_state
from jaxcomm._require import Natural, checked, own_weight, weight_dtype
from jaxcomm._resize import resized_by, weighted_mean_of_workers
from jaxcomm._units import require_floating
from jaxcomm.aggregation._aggregator import axes_of, needs_whole, require_last_stage
from jaxcomm.aggregation._coded import keep_if
from jaxcomm.aggregation._exchange import all_finite, everywhere


class DelayedState(NamedTuple):
    """The state of `delayed`, equal on all workers except `own` and `PerWorker` parts of `inner`.

    `own` is a ring. `"mean"` holds the last gradients, `[staleness, ...]` each, and `"weight"`
    their weights, float32[staleness].
    """

    oldest: jax.Array  # int32[], the slot of the oldest gradient, from 0 to staleness - 1
    own: PerWorker
    inner: Any


@checked
def delayed(
    tx: optax.GradientTransformationExtraArgs, staleness: Natural = 1
) -> optax.GradientTransformationExtraArgs:
    r"""Aggregates the gradients of an earlier step: those of :math:`\tau` steps ago.

    .. math:: (\Delta^t, s^{t+1}) = \mathrm{tx}(g_i^{t - \tau}, s^t), \qquad
              g_i^t = 0 \text{ for } t < 0

    where :math:`\tau` is `staleness`. What `tx` sends depends on the state only, and not on the
    gradients of this step. So the compiler may send it during the whole forward and backward pass.
    XLA for GPUs does so; XLA for CPUs does not. :func:`jaxcomm.wire.overlap_report` shows it
    for a compiled step. More than one step hides no more, since a program cannot send beyond its
    end, and shows what staleness costs. In each step all workers still wait for the last of them,
    so the wait for a slow worker is not hidden.

    A worker sends what `tx` sends, and 4 bytes in an all-reduce of a flag that reports non-finite
    gradients. It keeps :math:`\tau` gradients in their dtypes.

    Stale gradients need a smaller learning rate. A rate of :math:`\eta / \tau` is
    `optax.sgd(eta / tau)` after this transformation.

    Args:
      tx: An aggregator.
      staleness: :math:`\tau`, a Python int. With 0, the result is `tx` itself.

    Returns:
      An aggregator, to place before the optimizer. Its first :math:`\tau` updates are those of `tx`
      for zeros. `update(..., weight=w)` keeps the weight beside its gradient; pass it in each step
      or in none. A non-finite gradient on any worker makes the update of *this* step NaN on all
      workers, and leaves the whole state as it was. A worker of weight 0 is not checked.

    Raises:
      ValueError: If `tx` is not an aggregator, or `staleness` is not a Python int of at least 0. In
        `init`, if `axis_name` of `tx` is not bound. In `update`, if an update is already summed or
        not floating-point, the result is an inner stage of `hierarchical`, or the state is of
        another `staleness`.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.delayed(jaxcomm.mean(), staleness=1)
      >>> def two_steps(g):
      ...     first, state = tx.update(g, tx.init(g))
      ...     second, state = tx.update(10 * g, state)
      ...     return first, second
      >>> for update in jax.vmap(two_steps, axis_name="data")(jnp.array([1.0, 2.0])):
      ...     print(update)
      [0. 0.]
      [1.5 1.5]

    References:
      Li et al., `Pipe-SGD <https://arxiv.org/abs/1811.03619>`_, 2018. Zhu et al., `Delayed Gradient
      Averaging <https://arxiv.org/abs/2106.02847>`_, 2021.

    Differs from the papers: Pipe-SGD has several iterations in flight at once, of which each is one
    step here. Delayed gradient averaging replaces a worker's own gradient at once, and only those
    of others late; here all are late, so that parameters stay equal.
    """
    axes = axes_of(tx, "delayed")
    if staleness == 0:
        return tx

    def init_fn(params: PyTree) -> DelayedState:
        require_floating(params)
        require_shards()
        ring = {
            "mean": jax.tree.map(lambda x: lax.broadcast(jnp.zeros_like(x), (staleness,)), params),
            "weight": jnp.ones(staleness, weight_dtype(params)),
        }
        own = resized_by(_axis.marked(ring, axes), weighted_mean_of_workers)
        return DelayedState(jnp.zeros((), jnp.int32), own, tx.init(params))

    def update_fn(
        updates: PyTree,
        state: DelayedState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        outer_axes: tuple[str, ...] = (),
        **extra_args: Any,
    ) -> tuple[PyTree, DelayedState]:
        require_state(state, DelayedState, "`delayed`")
        require_floating(updates)
        require_shards()
        require_last_stage(outer_axes, axes)
        _axis.require_local(updates, axes, extra_args.get("shard_axes", ()))
        # A state that `init` has just made is not typed as different by worker.
        ring = _axis.local_params(_axis.own(state.own, axes), axis_name=axes)
        if (slots := len(ring["weight"])) != staleness:
            raise ValueError(
                f"This state is of `delayed` with `staleness`={slots}, and not {staleness}: make a "
                "new one with `jaxcomm.init`."
            )
        own = _axis.as_varying(
            own_weight(1.0 if weight is None else weight, weight_dtype(updates)), axes
        )
        # A mean over no samples is often NaN, which would make means of the ring NaN.
        counted = jax.tree.map(lambda x: jnp.where(own == 0, jnp.zeros((), x.dtype), x), updates)
        old = jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, state.oldest, keepdims=False), ring
        )
        given = extra_args if weight is None else {**extra_args, "weight": old["weight"]}
        result, inner = tx.update(old["mean"], state.inner, params, **given)
        leaves = [x for x in jax.tree.leaves(counted) if x.size] or [own]
        # XLA has one collective in flight at a time. If the flag came first, the others would wait
        # for it, and with it for the backward pass.
        spoiled = jnp.where(jnp.isfinite(own) & all_finite(leaves), 0.0, 1.0)
        finite = everywhere(axes, after(spoiled, result) == 0)
        # Without the barrier, XLA computes the payload together with what replaces it in the ring.
        kept, _ = lax.optimization_barrier((old, finite))
        new = keep_if(finite, {"mean": counted, "weight": own}, kept)
        ring = jax.tree.map(
            lambda x, one: lax.dynamic_update_index_in_dim(x, one, state.oldest, 0), ring, new
        )
        oldest = jnp.where(finite, (state.oldest + 1) % staleness, state.oldest)
        kept = _axis.marked(ring, axes)
        new_state = DelayedState(oldest, kept, keep_if(finite, inner, state.inner))
        nan = lambda x: jnp.where(finite, x, jnp.full((), jnp.nan, x.dtype))  # noqa: E731
        return jax.tree.map(nan, result), new_state

    return Aggregator(init_fn, update_fn, axes, needs_whole=needs_whole([tx]))
