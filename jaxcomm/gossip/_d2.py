"""D2: decentralized SGD for data that differ between workers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomm._axis import names_itself
from jaxcomm._contract import AxisName
from jaxcomm.gossip._agreeing import agreeing
from jaxcomm.gossip._gossiped import Mixed, gossiped, require_fixed, require_symmetric
from jaxcomm.gossip._neighbors import MixingStep


@names_itself
def d2(
    mixing: Any, *, axis_name: AxisName = "data", diagnostics: bool = False
) -> optax.GradientTransformationExtraArgs:
    r"""Decentralized SGD that removes the effect of gradient variance between workers (D2).

    .. math:: x_i^{k+1} = \sum_j W_{ij} y_j, \qquad
              y_i = 2 x_i^k - x_i^{k-1} + \Delta_i^k - \Delta_i^{k-1}, \qquad y_i^0 = x_i^0 +
              \Delta_i^0

    It is computed as :math:`c_i \gets c_i + \sum_j W_{ij} (y_j - y_i)` with :math:`y_i = x_i +
    \Delta_i + c_i`, then :math:`x_i \gets x_i + \Delta_i + c_i`. The corrections :math:`c_i` add to
    0 over workers. Each is stored with its rounding error, so that the mean does not drift.

    With updates :math:`\Delta = -\gamma g` at a constant learning rate :math:`\gamma`, D2 converges
    to the optimum of the mean loss, while D-PSGD does not. A worker sends its parameters once to
    each neighbor.

    Args:
      mixing: A networkx graph, or a symmetric matrix [n, n] whose eigenvalues are above -1/3.
      axis_name: The mesh axis, or axes, of the workers, which are the nodes of the graph.
      diagnostics: As for :func:`dpsgd`.

    Returns:
      A transformation as returned by :func:`dpsgd`. It stores two arrays of the size of the
      parameters on each worker. Use it after plain SGD without momentum.

    Raises:
      ValueError: If the graph is directed or not connected, the mixing changes between steps, or
        an eigenvalue is -1/3 or less. D2 then diverges; use `gossip.lazy_mixing(mixing)`.

    Example:
      >>> import optax
      >>> from jaxcomm import gossip
      >>> tx = optax.chain(optax.sgd(0.1), gossip.d2(gossip.lazy_mixing(gossip.ring(8))))

    References:
      Tang et al., `D2: Decentralized Training over Decentralized Data
      <https://arxiv.org/abs/1803.07068>`_, 2018.
    """
    mixing = require_fixed(require_symmetric(agreeing(mixing), "d2"), "d2")
    smallest = float(np.linalg.eigvalsh(mixing.matrices[0])[0])
    if smallest <= -1 / 3 + 1e-9:
        raise ValueError(
            f"`d2` diverges if an eigenvalue of the mixing matrix is -1/3 or less, got "
            f"{smallest:.4f}: use `gossip.lazy_mixing(mixing)`, whose eigenvalues are not negative."
        )

    def start(units: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
        return [(jnp.zeros_like(x), jnp.zeros_like(x)) for x in units]

    def method(
        mixing_step: MixingStep,
        memory: list[tuple[jax.Array, jax.Array]],
        x: list[jax.Array],
        steps: list[jax.Array],
    ) -> Mixed:
        corrected = [a + b + c for a, b, (c, _) in zip(x, steps, memory, strict=True)]
        differences, disagreement = mixing_step.weighted_differences(corrected)
        after = [_compensated_add(*pair, d) for pair, d in zip(memory, differences, strict=True)]
        return Mixed([b + c for b, (c, _) in zip(steps, after, strict=True)], after, disagreement)

    return gossiped(mixing, start, method, diagnostics=diagnostics, axis_name=axis_name)


def _compensated_add(
    total: jax.Array, error: jax.Array, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The sum, and its exact rounding error (Knuth)."""
    x = x + error
    new = total + x
    of_x = new - total
    return new, (total - (new - of_x)) + (x - of_x)
