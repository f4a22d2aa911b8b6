"""Skips steps with NaN or infinity, on all workers together."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PyTree, require_state
from jaxcomm._gradients import backward_of
from jaxcomm._mesh import collective_cond
from jaxcomm._require import Natural, checked, own_weight
from jaxcomm.aggregation._exchange import all_finite


class SkipNonfiniteState(NamedTuple):
    """The state of `skip_nonfinite`, equal on all workers except `PerWorker` parts of `inner`."""

    skipped_steps: jax.Array  # int32[], the number of skipped steps
    inner: Any
    diagnostics: dict[str, jax.Array]  # float32[], this number and the next
    consecutive_errors: jax.Array  # int32[], the steps in a row that were not finite until now


@jax.named_scope("flag")
def _finite_everywhere(finite: jax.Array, axis_name: AxisName) -> jax.Array:
    # A flag, because the maximum of the gradients themselves may drop NaN.
    flag = _axis.as_varying(jnp.where(finite, 0.0, 1.0).astype(jnp.float32), axis_name)
    return lax.pmax(flag, axis_name) == 0


@checked
def skip_nonfinite(
    tx: optax.GradientTransformation,
    *,
    axis_name: AxisName = "data",
    max_consecutive_errors: Natural | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Skips a step on all workers if any worker has NaN or infinity in its gradient.

    .. math:: (\Delta, s') = \begin{cases}
              \mathrm{tx}(g_i, s, x) & \text{if all } g_1, \dots, g_n \text{ and this } \Delta
                                      \text{ are finite} \\
              (0, s) & \text{otherwise} \end{cases}

    Workers first reduce one float32 flag in an all-reduce. In a skipped step, `tx` does not run and
    sends nothing. The result of `tx` may still be NaN, e.g. if a codec overflowed, and is checked
    too. If the result is equal on all workers, this check sends nothing. If it differs by worker,
    as in local methods and gossip, or if JAX does not track this in its type (`check_vma=False`),
    the check sends a second flag. `optax.apply_if_finite` checks each worker separately: around a
    collective it deadlocks, or JAX rejects it. With `jaxcomm.scheduling.wait_free` in `tx`, workers
    send while gradients are computed: such a step is skipped afterwards, without a flag.

    If every step is skipped, training stands still without a word. There are two ways to notice.
    `metrics["diagnostics/consecutive_errors"]` counts the steps in a row that were not finite; read
    it where you print metrics, and raise. Or set `max_consecutive_errors`, as of
    `optax.apply_if_finite`: the step after so many is not skipped, so its update, and then the
    parameters and the loss, are NaN on all workers. A jitted step cannot raise itself, and it does
    not wait for its results to look.

    Args:
      tx: A whole chain of aggregator and optimizer: `skip_nonfinite(optax.chain(...))`.
      axis_name: The mesh axis, or axes, over which gradients differ.
      max_consecutive_errors: The most steps that are skipped in a row, a Python int of at least 0.
        Default: no limit.

    Returns:
      A transformation to use in place of `tx`. Its state counts the skipped steps in
      `skipped_steps`, and metrics report the number as `diagnostics/skipped_steps`. The gradient
      of a worker of weight 0 is not checked, since a mean over no samples is often NaN. A weight
      that is negative or not finite skips the step.

    Raises:
      ValueError: If `max_consecutive_errors` is out of range. In `update`, if `axis_name` is not
        bound or an update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxcomm
      >>> tx = jaxcomm.skip_nonfinite(optax.chain(jaxcomm.mean(), optax.sgd(1.0)))
      >>> def one_step(g):
      ...     update, state = tx.update(g, tx.init(g))
      ...     return update, state.skipped_steps
      >>> for result in jax.vmap(one_step, axis_name="data")(jnp.array([1.0, jnp.nan])):
      ...     print(result)
      [0. 0.]
      [1 1]
    """
    most = max_consecutive_errors
    inner = optax.with_extra_args_support(tx)

    def counted(skipped: jax.Array, errors: jax.Array, inner_state: Any) -> SkipNonfiniteState:
        counts = {"skipped_steps": skipped, "consecutive_errors": errors}
        diagnostics = {name: count.astype(jnp.float32) for name, count in counts.items()}
        return SkipNonfiniteState(skipped, inner_state, diagnostics, errors)

    def init_fn(params: PyTree) -> SkipNonfiniteState:
        return counted(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), inner.init(params))

    def skipped_once(state: SkipNonfiniteState) -> SkipNonfiniteState:
        return counted(
            optax.safe_increment(state.skipped_steps),
            optax.safe_increment(state.consecutive_errors),
            state.inner,
        )

    def taken(state: SkipNonfiniteState, after: Any, finite: jax.Array) -> SkipNonfiniteState:
        errors = jnp.where(finite, 0, optax.safe_increment(state.consecutive_errors))
        return counted(state.skipped_steps, errors, after)

    def is_over(state: SkipNonfiniteState) -> jax.Array:
        return jnp.zeros((), bool) if most is None else state.consecutive_errors >= most

    def update_fn(
        updates: PyTree, state: SkipNonfiniteState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, SkipNonfiniteState]:
        require_state(state, SkipNonfiniteState, "`skip_nonfinite`")
        backward = backward_of(updates)
        if backward is not None:
            # Workers aggregate while gradients are computed, so the step is skipped afterwards.
            result, after = inner.update(updates, state.inner, params, **extra_args)
            finite = backward.finite & all_finite(jax.tree.leaves(result))
            keep = finite | is_over(state)
            return jax.tree.map(
                lambda x, y: jnp.where(keep, x, y),
                (result, taken(state, after, finite)),
                (jax.tree.map(jnp.zeros_like, result), skipped_once(state)),
            )
        _axis.require_local(updates, axis_name)
        finite = all_finite(jax.tree.leaves(updates))
        if extra_args.get("weight") is not None:
            weight = own_weight(extra_args["weight"])
            finite = jnp.isfinite(weight) & (finite | (weight == 0))
        all_given = _finite_everywhere(finite, axis_name)

        def zeros(like: PyTree) -> PyTree:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

        after_skip = skipped_once(state)

        def update() -> tuple[PyTree, SkipNonfiniteState]:
            result, after = inner.update(updates, state.inner, params, **extra_args)
            all_found = all_finite(jax.tree.leaves(result))
            if not _axis.is_known_equal(result, axis_name):
                all_found = _finite_everywhere(all_found, axis_name)
            done = result, taken(state, after, all_given & all_found)
            keep = all_found | is_over(state)
            return jax.tree.map(
                lambda x, y: jnp.where(keep, x, y),
                done,
                (jax.tree.map(jnp.zeros_like, result), after_skip),
            )

        def skip(shapes: tuple[PyTree, SkipNonfiniteState]) -> tuple[PyTree, SkipNonfiniteState]:
            return zeros(shapes[0]), after_skip

        return collective_cond(all_given | is_over(state), update, skip)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
