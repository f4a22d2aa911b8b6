"""Skips steps with NaN or infinity, on all workers together."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._base import AxisName, PyTree
from jaxcomm._deferred import backward_of
from jaxcomm._require import checked, own_weight, require_state
from jaxcomm._switch import collective_cond
from jaxcomm.aggregation._agreement import all_finite


class SkipNonfiniteState(NamedTuple):
    """The state of `skip_nonfinite`, equal on all workers except `PerWorker` parts of `inner`."""

    skipped_steps: jax.Array  # int32[], the number of skipped steps
    inner: Any
    diagnostics: dict[str, jax.Array]  # float32[], the same number


def _finite_everywhere(finite: jax.Array, axis_name: AxisName) -> jax.Array:
    # A flag, because the maximum of the gradients themselves may drop NaN.
    flag = _axis.as_varying(jnp.where(finite, 0.0, 1.0).astype(jnp.float32), axis_name)
    return lax.pmax(flag, axis_name) == 0


@checked()
def skip_nonfinite(
    tx: optax.GradientTransformation, axis_name: AxisName = "data"
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

    Args:
      tx: A whole chain of aggregator and optimizer: `skip_nonfinite(optax.chain(...))`.
      axis_name: The mesh axis, or axes, over which gradients differ.

    Returns:
      A transformation to use in place of `tx`. Its state counts the skipped steps in
      `skipped_steps`, and metrics report the number as `diagnostics/skipped_steps`. The gradient
      of a worker of weight 0 is not checked, since a mean over no samples is often NaN. A weight
      that is negative or not finite skips the step.

    Raises:
      ValueError: In `update`, if `axis_name` is not bound or an update is already summed.

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
    inner = optax.with_extra_args_support(tx)

    def init_fn(params: PyTree) -> SkipNonfiniteState:
        diagnostics = {"skipped_steps": jnp.zeros((), jnp.float32)}
        return SkipNonfiniteState(jnp.zeros((), jnp.int32), inner.init(params), diagnostics)

    def skipped_once(state: SkipNonfiniteState) -> SkipNonfiniteState:
        skipped = optax.safe_increment(state.skipped_steps)
        return state._replace(
            skipped_steps=skipped, diagnostics={"skipped_steps": skipped.astype(jnp.float32)}
        )

    def update_fn(
        updates: PyTree, state: SkipNonfiniteState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, SkipNonfiniteState]:
        require_state(state, SkipNonfiniteState, "`skip_nonfinite`")
        backward = backward_of(updates)
        if backward is not None:
            # Workers aggregate while gradients are computed, so the step is skipped afterwards.
            result, after = inner.update(updates, state.inner, params, **extra_args)
            keep = backward.finite & all_finite(jax.tree.leaves(result) or [jnp.zeros(())])
            return jax.tree.map(
                lambda x, y: jnp.where(keep, x, y),
                (result, state._replace(inner=after)),
                (jax.tree.map(jnp.zeros_like, result), skipped_once(state)),
            )
        _axis.require_local(updates, axis_name)
        finite = all_finite(jax.tree.leaves(updates) or [jnp.zeros(())])
        if extra_args.get("weight") is not None:
            weight = own_weight(extra_args["weight"])
            finite = jnp.isfinite(weight) & (finite | (weight == 0))
        proceed = _finite_everywhere(finite, axis_name)

        def zeros(like: PyTree) -> PyTree:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

        after_skip = skipped_once(state)

        def update() -> tuple[PyTree, SkipNonfiniteState]:
            result, after = inner.update(updates, state.inner, params, **extra_args)
            done = result, state._replace(inner=after)
            leaves = jax.tree.leaves(result) or [jnp.zeros(())]
            keep = all_finite(leaves)
            if not _axis.is_known_equal(leaves, axis_name):
                keep = _finite_everywhere(keep, axis_name)
            return jax.tree.map(
                lambda x, y: jnp.where(keep, x, y),
                done,
                (jax.tree.map(jnp.zeros_like, result), after_skip),
            )

        def skip(shapes: tuple[PyTree, SkipNonfiniteState]) -> tuple[PyTree, SkipNonfiniteState]:
            return zeros(shapes[0]), after_skip

        return collective_cond(proceed, update, skip)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
