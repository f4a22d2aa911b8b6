"""Means over the workers that finish first; the others are spares."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis, _noise
from jaxcomm._contract import Aggregator, PyTree, require_state
from jaxcomm._require import Natural, checked, own_weight, weight_dtype
from jaxcomm.aggregation._aggregator import axes_of, needs_whole
from jaxcomm.aggregation._exchange import of_all_workers


class BackupState(NamedTuple):
    """The state of `backup`, equal on all workers except `PerWorker` parts of `inner`."""

    key: jax.Array  # key[], of the times, if they are drawn
    step: jax.Array  # uint32[]
    inner: Any


def is_among_first(times: jax.Array, index: jax.Array, count: int) -> jax.Array:
    """Whether worker `index` is one of the first `count`, bool[]; ties go to the smaller index."""
    known = jnp.where(jnp.isnan(times), jnp.inf, times)
    own = known[index]
    others = jnp.arange(len(times), dtype=jnp.int32)
    earlier = (known < own) | ((known == own) & (others < index))
    return (jnp.sum(earlier, dtype=jnp.int32) < count) & jnp.isfinite(own)


@checked
def backup(
    tx: optax.GradientTransformationExtraArgs,
    backups: Natural,
    *,
    times: Callable[[jax.Array, jax.Array, tuple[int, int]], jax.Array] | None = None,
    seed: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Averages over the first :math:`n - b` workers of a step, and drops the others.

    .. math:: \bar x = \mathrm{tx}(x_i;\, w_i [i \in F]), \qquad
              F = \text{the } n - b \text{ workers with the smallest times}

    where :math:`b` is `backups`, and :math:`w_i` the weights, 1 by default. Without memory in `tx`,
    this is the mean over :math:`F`.

    *On a mesh no seconds are saved.* All devices run one program, and a dropped worker takes part
    in each collective with the weight 0. So the others wait for it, and it sends what they send.
    This transformation trains as backup workers do, e.g. along a simulated clock; and it excludes
    workers whose gradients should not count. The times come from one of three sources:

    - `times` draws them from a key that is equal on all workers. Nothing is sent for it.
    - `update(..., finish_times=t)` with a vector of the times of all workers, equal on all of them,
      such as from a clock outside of the step. Nothing is sent for it.
    - `update(..., finish_times=t)` with the time of this worker, e.g. as measured. Workers gather
      them, 4 (n - 1) bytes.

    Besides that, a worker sends what `tx` sends with a weight.

    Args:
      tx: An aggregator that takes weights.
      backups: :math:`b`, a Python int less than the number of workers. With 0, the result is `tx`.
      times: `(key, step, (workers, 1)) -> float32[workers, 1]`, such as the field `sample` of a
        straggler model: `synchronization.shifted_exponential(1.0).sample`. The key is
        `jax.random.key(seed)`, so that a clock can draw the same times.
      seed: Seed of `times`; may be traced.

    Returns:
      An aggregator, to place before the optimizer, with the guarantees of `tx`. The gradient of a
      dropped worker is lost, even if it is NaN. If `tx` keeps a residual, a dropped worker sends
      and keeps parts of its residual as in any other step. A worker whose time is infinite or NaN
      has not finished, and is dropped too. If all are dropped, the mean is 0. Ties go to the worker
      with the smaller index.

    Raises:
      ValueError: If `tx` is not an aggregator, or `backups` is not a Python int of at least 0. In
        `update`, if `backups` is not less than the number of workers, if there are no times, or
        they have another shape, or if `tx` takes no weights.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.backup(jaxcomm.mean(), backups=1)
      >>> def average(x, seconds):
      ...     return tx.update(x, tx.init(x), finish_times=seconds)[0]
      >>> gradients, seconds = jnp.array([1.0, 5.0, 30.0]), jnp.array([0.2, 0.1, 0.9])
      >>> print(jax.vmap(average, axis_name="data")(gradients, seconds))
      [3. 3. 3.]

    References:
      Chen et al., `Revisiting Distributed Synchronous SGD <https://arxiv.org/abs/1604.00981>`_,
      2016.

    Differs from the paper: :math:`n` counts all workers, of which b are backups; the paper has
    :math:`n + b`.
    """
    axes = axes_of(tx, "backup")
    if backups == 0:
        return tx

    def init_fn(params: PyTree) -> BackupState:
        return BackupState(_noise.make_key(seed), jnp.zeros((), jnp.uint32), tx.init(params))

    def update_fn(
        updates: PyTree,
        state: BackupState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        finish_times: jax.Array | float | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, BackupState]:
        require_state(state, BackupState, "`backup`")
        workers = _axis.size(axes)
        if backups >= workers:
            raise ValueError(
                f"`backups`={backups} must be less than the {workers} workers of {axes}."
            )
        if times is None:
            of_all = of_all_workers(finish_times, "finish_times", axes)
        elif finish_times is None:
            of_all = times(state.key, state.step, (workers, 1))[:, 0]
        else:
            raise ValueError("`backup` draws `times`: leave out `finish_times`, or `times`.")
        counts = is_among_first(of_all, _axis.index(axes), workers - backups)
        own = own_weight(1.0 if weight is None else weight, weight_dtype(updates))
        result, inner = tx.update(
            updates, state.inner, params, weight=jnp.where(counts, own, 0.0), **extra_args
        )
        return result, BackupState(state.key, state.step + 1, inner)

    return Aggregator(init_fn, update_fn, axes, needs_whole=needs_whole([tx]))
