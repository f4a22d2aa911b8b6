"""DeepSqueeze: gossip of compressed parameters with error feedback."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomm._axis import names_itself
from jaxcomm._contract import AxisName, Codec, PyTree
from jaxcomm._require import require_codec
from jaxcomm.gossip._agreeing import agreeing
from jaxcomm.gossip._choco_sgd import require_step_size
from jaxcomm.gossip._compressed_messages import encode, require_standalone_codec
from jaxcomm.gossip._gossiped import Mixed, gossiped, require_symmetric
from jaxcomm.gossip._neighbors import MixingStep


@names_itself
def deep_squeeze(
    mixing: Any,
    codec: Codec,
    *,
    step_size: float,
    axis_name: AxisName = "data",
    seed: int = 0,
    key: jax.Array | None = None,
    diagnostics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Gossip of compressed parameters with feedback of the compression error.

    .. math:: v_i = x_i + \Delta_i + e_i, \qquad e_i \gets v_i - C(v_i), \qquad
              x_i \gets x_i + \Delta_i + \eta \sum_j W_{ij} (C(v_j) - C(v_i))

    A worker sends one payload to each neighbor. It stores one array, :math:`e_i`, of the size of
    the parameters. The graph may change from step to step.

    Args:
      mixing: As for :func:`dpsgd`; a :class:`MatchaPlan` is also valid.
      codec: A codec of :mod:`jaxcomm.compression` without memory. It must be a contraction:
        :math:`\mathbb{E}\|C(x) - x\|^2 \le (1 - \delta) \|x\|^2` with :math:`\delta > 0`. Wrap an
        unbiased codec whose relative variance :math:`\omega` is at least 1 in
        :func:`jaxcomm.compression.scaled`.
      step_size: :math:`\eta` in (0, 1]. A value of 1 with a lossless codec is D-PSGD.
      axis_name: The mesh axis, or axes, of the workers, which are the nodes of the graph.
      seed: Seed of the codec and of random mixing.
      key: A typed threefry key that replaces `seed`.
      diagnostics: As for :func:`dpsgd`. The `disagreement` compares the decoded messages
        :math:`C(v)`, not the parameters.

    Returns:
      A transformation as returned by :func:`dpsgd`.

    Raises:
      ValueError: If an option is out of range, the graph is directed or not connected, or the codec
        needs shared statistics, has memory, or is not a contraction.

    Example:
      >>> import optax
      >>> from jaxcomm import compression, gossip
      >>> codec = compression.quantizers.dither(levels=7)
      >>> tx = optax.chain(
      ...     optax.sgd(0.1), gossip.deep_squeeze(gossip.ring(8), codec, step_size=0.5)
      ... )

    References:
      Tang et al., `DeepSqueeze: Decentralization Meets Error-Compensated Compression
      <https://arxiv.org/abs/1907.07346>`_, 2019.
    """
    require_codec(codec, user="deep_squeeze")
    require_step_size(step_size)
    mixing = require_symmetric(agreeing(mixing), "deep_squeeze")

    def start(units: list[jax.Array]) -> PyTree:
        for x in units:
            require_standalone_codec(codec, "deep_squeeze", x.size)
        return [*map(jnp.zeros_like, units)]

    def method(
        mixing_step: MixingStep,
        residual: list[jax.Array],
        x: list[jax.Array],
        steps: list[jax.Array],
    ) -> Mixed:
        corrected = [a + b + e for a, b, e in zip(x, steps, residual, strict=True)]
        message, sent, decode = encode(codec, mixing_step, corrected)

        def contribution(received: PyTree, weight: jax.Array) -> tuple[list[jax.Array], jax.Array]:
            differences = [a - b for a, b in zip(decode(received), sent, strict=True)]
            squares = sum(jnp.sum(jnp.square(d)) for d in differences)
            return [weight * d for d in differences], weight * squares

        zeros = [*map(jnp.zeros_like, x)], mixing_step.zero
        total, disagreement = mixing_step.sum_over_neighbors(message, contribution, zeros)
        residual = [a - b for a, b in zip(corrected, sent, strict=True)]
        changes = [a + step_size * b for a, b in zip(steps, total, strict=True)]
        return Mixed(changes, residual, disagreement)

    def average(
        mixing_step: MixingStep, residual: list[jax.Array], x: list[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        # An exact mean has no compression error, and old residuals would move workers off it.
        return mixing_step.mean(x), [*map(jnp.zeros_like, residual)]

    return gossiped(
        mixing,
        start,
        method,
        average=average,
        seed=seed,
        key=key,
        diagnostics=diagnostics,
        axis_name=axis_name,
    )
