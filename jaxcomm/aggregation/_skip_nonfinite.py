"""Steps that all workers leave out together."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._base import AxisName, PyTree
from jaxcomm._require import checked, own_weight, require_state
from jaxcomm._switch import collective_cond
from jaxcomm.aggregation._agreement import all_finite


class SkipNonfiniteState(NamedTuple):
    """The state of `skip_nonfinite`, equal on all workers but for what `inner` marks."""

    skipped: jax.Array  # int32[], how many steps so far
    inner: Any
    diagnostics: dict[str, jax.Array]  # float32[], the same number


def _all_say(finite: jax.Array, axis_name: AxisName) -> jax.Array:
    # Not the maximum of the gradients themselves, which may drop NaN.
    flag = _axis.as_varying(jnp.where(finite, 0.0, 1.0).astype(jnp.float32), axis_name)
    return lax.pmax(flag, axis_name) == 0


@checked()
def skip_nonfinite(
    tx: optax.GradientTransformation, axis_name: AxisName = "data"
) -> optax.GradientTransformationExtraArgs:
    r"""Leaves a step out, on all workers, where any of them has a NaN or infinity in its gradient.

    .. math:: (\Delta, s') = \begin{cases}
              \mathrm{tx}(g_i, s, x) & \text{if all } g_1, \dots, g_n \text{ and that } \Delta
                                      \text{ are finite} \\
              (0, s) & \text{otherwise} \end{cases}

    Workers agree before anything else, in one all-reduce of a float32 flag; what `tx` sends is not
    sent in a step that is left out. What `tx` returns may still be NaN, where a codec found no
    room. Of a result that is equal on all workers nothing is sent; where it is each worker's own,
    as of local methods and gossip, or its type does not tell (`check_vma=False`), a second such
    flag is. `optax.apply_if_finite` asks each worker alone: around a collective it waits forever,
    or is refused.

    Args:
      tx: A whole chain, the aggregator and the optimizer: `skip_nonfinite(optax.chain(...))`.
      axis_name: The mesh axis, or axes, over which gradients differ.

    Returns:
      A transformation in place of `tx`. Its state counts the steps left out, in `skipped`, and
      metrics tell the number as `diagnostics/skipped`. A worker of weight 0 is not asked, since a
      mean over no samples is often NaN; a weight that is negative or not finite leaves the step
      out.

    Raises:
      ValueError: In `update`, if `axis_name` is not bound or an update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxcomm
      >>> tx = jaxcomm.skip_nonfinite(optax.chain(jaxcomm.mean(), optax.sgd(1.0)))
      >>> def one_step(g):
      ...     update, state = tx.update(g, tx.init(g))
      ...     return update, state.skipped
      >>> for result in jax.vmap(one_step, axis_name="data")(jnp.array([1.0, jnp.nan])):
      ...     print(result)
      [0. 0.]
      [1 1]
    """
    inner = optax.with_extra_args_support(tx)

    def init_fn(params: PyTree) -> SkipNonfiniteState:
        diagnostics = {"skipped": jnp.zeros((), jnp.float32)}
        return SkipNonfiniteState(jnp.zeros((), jnp.int32), inner.init(params), diagnostics)

    def update_fn(
        updates: PyTree, state: SkipNonfiniteState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, SkipNonfiniteState]:
        require_state(state, SkipNonfiniteState, "`skip_nonfinite`")
        _axis.require_local(updates, axis_name)
        finite = all_finite(jax.tree.leaves(updates) or [jnp.zeros(())])
        if extra_args.get("weight") is not None:
            weight = own_weight(extra_args["weight"])
            finite = jnp.isfinite(weight) & (finite | (weight == 0))
        fine = _all_say(finite, axis_name)

        def zeros(like: PyTree) -> PyTree:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

        skipped = optax.safe_increment(state.skipped)
        after_skip = state._replace(
            skipped=skipped, diagnostics={"skipped": skipped.astype(jnp.float32)}
        )

        def update() -> tuple[PyTree, SkipNonfiniteState]:
            result, after = inner.update(updates, state.inner, params, **extra_args)
            done = result, state._replace(inner=after)
            leaves = jax.tree.leaves(result) or [jnp.zeros(())]
            came = all_finite(leaves)
            if not _axis.is_known_equal(leaves, axis_name):
                came = _all_say(came, axis_name)
            return jax.tree.map(
                lambda x, y: jnp.where(came, x, y), done, (zeros(result), after_skip)
            )

        def skip(shapes: tuple[PyTree, SkipNonfiniteState]) -> tuple[PyTree, SkipNonfiniteState]:
            return zeros(shapes[0]), after_skip

        return collective_cond(fine, update, skip)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
