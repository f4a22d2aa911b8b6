"""An exact average of all workers now and then."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._base import AxisName, PyTree
from jaxcomm._when import run_when


class ExactAverageState(NamedTuple):
    """The state of `exact_average`, equal on all workers."""

    step: jax.Array  # int32[]


def exact_average(
    every: int, *, axis_name: AxisName = "data"
) -> optax.GradientTransformationExtraArgs:
    r"""Sets all workers to their mean in every k-th step; does nothing in the others.

    .. math:: x_i \gets \frac{1}{n} \sum_j (x_j + \Delta_j)

    Sends a float32 all-reduce of the parameters in those steps. Optax adds updates, so that workers
    agree but for the rounding of that one sum.

    Args:
      every: k, an int of at least 1.
      axis_name: The mesh axis, or axes, that number the workers.

    Returns:
      A transformation to place *after* gossip in a chain, on parameters that differ by worker.

    Raises:
      ValueError: If `every` is no positive int; in `update`, if parameters do not differ by worker.

    Example:
      >>> import optax
      >>> from jaxcomm import gossip
      >>> tx = optax.chain(optax.sgd(0.1), gossip.dpsgd(gossip.ring(8)), gossip.exact_average(10))
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"`every` must be a Python int of at least 1, got {every!r}.")

    def init_fn(params: PyTree) -> ExactAverageState:
        del params
        return ExactAverageState(jnp.zeros((), jnp.int32))

    def update_fn(
        updates: PyTree, state: ExactAverageState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, ExactAverageState]:
        del extra_args
        if params is None:
            raise ValueError("Averaging needs parameters: `tx.update(updates, state, params)`.")
        _axis.require_own(params, axis_name)

        def average() -> PyTree:
            def one(update: jax.Array, x: jax.Array) -> jax.Array:
                new = x.astype(jnp.float32) + update.astype(jnp.float32)
                mean = lax.psum(new / _axis.size(axis_name), _axis.names(axis_name))
                change = _axis.as_varying(mean, axis_name) - x.astype(jnp.float32)
                return change.astype(update.dtype)

            return jax.tree.map(one, updates, params)

        step = optax.safe_increment(state.step)
        after = run_when(step % every == 0, average, lambda _: updates)
        return after, ExactAverageState(step)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
