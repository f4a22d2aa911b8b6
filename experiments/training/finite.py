"""Ends a run at the step whose loss or parameters are not finite, and says whose data is why."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from experiments.cli.errors import ExperimentError
from jaxcomm.training import describe_nonfinite


@jax.jit
def _copy(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


@jax.jit
def _is_finite(tree: Any) -> jax.Array:
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]).all()


class FiniteSteps(NamedTuple):
    """Checks each step of a run; keeps a copy of the parameters, since a step donates them."""

    loss: Callable[..., jax.Array]
    mesh: Mesh

    def before(self, params: Any) -> Any:
        """A copy of the parameters before a step, which `require` describes."""
        return _copy(params)

    def require(self, number: int, loss: float, before: Any, after: Any, batch: Any) -> None:
        """Checks the loss of a step, and the parameters after it. All processes call it.

        Raises:
          ExperimentError: If one is not finite.
        """
        if math.isfinite(loss) and bool(_is_finite(after)):
            return
        what = "loss" if not math.isfinite(loss) else "update"
        found = describe_nonfinite(self.loss, before, batch, self.mesh)
        why = found or "all gradients are finite, so the method or the optimizer made it so"
        raise ExperimentError(
            f"the {what} of step {number} is not finite: {why}. Correct the data of the worker, or "
            "use a smaller --learning-rate."
        )
