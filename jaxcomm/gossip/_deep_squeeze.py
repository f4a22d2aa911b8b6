"""DeepSqueeze: compressed parameters, whose error is added to the next."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxcomm._base import AxisName, Codec, PyTree
from jaxcomm._require import require_codec
from jaxcomm.gossip._choco_sgd import require_step_size
from jaxcomm.gossip._compressed_messages import encode, require_own
from jaxcomm.gossip._gossiped import Mixed, gossiped, require_symmetric
from jaxcomm.gossip._neighbors import Talk
from jaxcomm.gossip._to_mixing import to_mixing


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
    r"""Gossip of compressed parameters, with feedback of what was left out.

    .. math:: v_i = x_i + \Delta_i + e_i, \qquad e_i \gets v_i - C(v_i), \qquad
              x_i \gets x_i + \Delta_i + \eta \sum_j W_{ij} (C(v_j) - C(v_i))

    A worker sends one payload to each neighbour and keeps one array, whatever the graph does from
    step to step.

    Args:
      mixing: As for :func:`dpsgd`; a :class:`MatchaPlan` will do.
      codec: A contraction of :mod:`jaxcomm.compression` without memory; one with :math:`\omega
        \ge 1` goes in :func:`jaxcomm.compression.scaled`.
      step_size: :math:`\eta` in (0, 1]; 1 with a codec that loses nothing is D-PSGD.
      axis_name: The mesh axis, or axes, that number the workers, the nodes of the graph.
      seed: Seed of the codec and of mixing at random.
      key: A typed threefry key, in place of `seed`.
      diagnostics: As for :func:`dpsgd`; the disagreement is that of what was sent.

    Returns:
      A transformation like that of :func:`dpsgd`.

    Raises:
      ValueError: If an option is out of range, the graph is directed or not connected, or the codec
        needs agreement, has memory, or is no contraction.

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
    given = require_symmetric(to_mixing(mixing), "deep_squeeze")

    def start(units: list[jax.Array]) -> PyTree:
        for x in units:
            require_own(codec, "deep_squeeze", x.size)
        return [*map(jnp.zeros_like, units)]

    def method(
        talk: Talk, residual: list[jax.Array], x: list[jax.Array], steps: list[jax.Array]
    ) -> Mixed:
        corrected = [a + b + e for a, b, e in zip(x, steps, residual, strict=True)]
        message, sent, decode = encode(codec, talk, corrected)

        def take(heard: jax.Array, weight: jax.Array) -> tuple[list[jax.Array], jax.Array]:
            apart = [a - b for a, b in zip(decode(heard), sent, strict=True)]
            squares = sum(jnp.sum(jnp.square(d)) for d in apart)
            return [weight * d for d in apart], weight * squares

        nothing = [*map(jnp.zeros_like, x)], talk.zero
        apart, disagreement = talk.hear(message, take, nothing)
        residual = [a - b for a, b in zip(corrected, sent, strict=True)]
        moved = [a + step_size * b for a, b in zip(steps, apart, strict=True)]
        return Mixed(moved, residual, disagreement)

    def average(
        talk: Talk, residual: list[jax.Array], x: list[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        # All of it is known now: what were left of residuals would drive workers apart.
        return talk.mean(x), [*map(jnp.zeros_like, residual)]

    return gossiped(
        given,
        axis_name,
        start,
        method,
        average=average,
        seed=seed,
        key=key,
        diagnostics=diagnostics,
    )
