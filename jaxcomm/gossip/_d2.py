"""D2: decentralized SGD that data of different kinds on different workers does not slow down."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxcomm._base import AxisName
from jaxcomm.gossip._gossiped import Mixed, gossiped, require_fixed, require_symmetric
from jaxcomm.gossip._neighbors import Talk
from jaxcomm.gossip._to_mixing import to_mixing


def d2(
    mixing: Any, *, axis_name: AxisName = "data", diagnostics: bool = False
) -> optax.GradientTransformationExtraArgs:
    r"""Decentralized SGD without the variance of gradients between workers.

    .. math:: x_i^{k+1} = \sum_j W_{ij} y_j, \qquad
              y_i = 2 x_i^k - x_i^{k-1} + \Delta_i^k - \Delta_i^{k-1}, \qquad y_i^0 = x_i^0 +
              \Delta_i^0

    computed as :math:`c_i \gets c_i + \sum_j W_{ij} (y_j - y_i)` with :math:`y_i = x_i + \Delta_i
    + c_i`, then :math:`x_i \gets x_i + \Delta_i + c_i`: corrections add to 0 over workers, and are
    kept with what rounding leaves out of them, lest the mean drift.

    With steps :math:`\Delta = -\gamma g` of a constant rate it converges to the optimum of the mean
    loss where D-PSGD stays off it. A worker sends its parameters once to each neighbour.

    Args:
      mixing: A networkx graph, or a symmetric matrix [n, n] whose eigenvalues are above -1/3.
      axis_name: The mesh axis, or axes, that number the workers, the nodes of the graph.
      diagnostics: As for :func:`dpsgd`.

    Returns:
      A transformation like that of :func:`dpsgd`, that remembers two arrays like the parameters on
      each worker. Steps are to be those of plain SGD, without momentum.

    Raises:
      ValueError: If the graph is directed or not connected, mixing changes from step to step, or an
        eigenvalue is -1/3 or less, with which it diverges; then `gossip.lazy(mixing)` will do.

    Example:
      >>> import optax
      >>> from jaxcomm import gossip
      >>> tx = optax.chain(optax.sgd(0.1), gossip.d2(gossip.lazy(gossip.ring(8))))

    References:
      Tang et al., `D2: Decentralized Training over Decentralized Data
      <https://arxiv.org/abs/1803.07068>`_, 2018.
    """
    given = require_fixed(require_symmetric(to_mixing(mixing), "d2"), "d2")
    smallest = float(np.linalg.eigvalsh(given.matrices[0])[0])
    if smallest <= -1 / 3 + 1e-9:
        raise ValueError(
            f"`d2` diverges with an eigenvalue of {smallest:.4f} of the mixing matrix, which must "
            "be above -1/3: use `gossip.lazy(mixing)`, whose eigenvalues are positive."
        )

    def start(units: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
        return [(jnp.zeros_like(x), jnp.zeros_like(x)) for x in units]

    def method(
        talk: Talk,
        memory: list[tuple[jax.Array, jax.Array]],
        x: list[jax.Array],
        steps: list[jax.Array],
    ) -> Mixed:
        corrected = [a + b + c for a, b, (c, _) in zip(x, steps, memory, strict=True)]
        apart, disagreement = talk.differences(corrected)
        after = [_add(*pair, d) for pair, d in zip(memory, apart, strict=True)]
        return Mixed([b + c for b, (c, _) in zip(steps, after, strict=True)], after, disagreement)

    return gossiped(given, axis_name, start, method, diagnostics=diagnostics)


def _add(total: jax.Array, error: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum, and what rounding leaves out of it, exactly (Knuth)."""
    x = x + error
    new = total + x
    of_x = new - total
    return new, (total - (new - of_x)) + (x - of_x)
