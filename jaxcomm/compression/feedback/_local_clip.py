"""Updates clipped on each worker, before anything else is done with them."""

import jax
import jax.numpy as jnp

from jaxcomm._base import Claims, Codec, Context, Diagnostics, Memory, PyTree
from jaxcomm._require import require_codec


def clip_together(parts: list[jax.Array], max_norm: jax.Array | float) -> list[jax.Array]:
    """The parts of one vector, or where its l2 norm is over `max_norm` scaled down to that norm.

    Args:
      parts: Of one floating dtype, and any shapes.
      max_norm: Over 0.
    """
    peak = jnp.max(jnp.stack([jnp.max(jnp.abs(x), initial=0) for x in parts]))
    # A power of two brings the reciprocal of the peak, by which XLA multiplies, into range. The
    # norm itself may be beyond float32: only that of `units`, in [1, sqrt(d)], is formed.
    lift = jnp.where(peak < 1, 2.0**64, 2.0**-64).astype(peak.dtype)
    units = [x * lift / jnp.where(peak > 0, peak * lift, 1) for x in parts]
    square = jnp.sum(jnp.stack([jnp.sum(jnp.square(unit)) for unit in units]))
    most = max_norm / jnp.sqrt(jnp.maximum(square, 1))
    return [jnp.where(peak > most, unit * most, x) for unit, x in zip(units, parts, strict=True)]


def clip_to_norm(x: jax.Array, max_norm: jax.Array | float) -> jax.Array:
    """`x`, or where its l2 norm is over `max_norm` its direction with that norm."""
    return clip_together([x], max_norm)[0]


def local_clip(codec: Codec, max_norm: jax.Array | float) -> Codec:
    r"""Clips each worker's update by its l2 norm before the codec gets it.

    .. math:: x_i \mapsto x_i \min\Big(1, \frac{c}{\|x_i\|}\Big)

    Under feedback it stands outside, `local_clip(error_feedback(codec), c)`, so that what is
    gathered is clipped already: a large update that has been kept back would come again and again.
    Of :math:`n` independent updates the mean has a norm about :math:`\sqrt n` times smaller: where
    the mean is to be clipped at :math:`c'`, :math:`c = c' / \sqrt n`. Sends what `codec` sends. The
    mean is biased where any worker's update is clipped.

    Args:
      codec: A codec.
      max_norm: :math:`c`, over 0, of a unit: a bucket (by default all leaves together, up to 32
        MiB), or a leaf with `scope="leaf"`. It may be traced.

    Returns:
      A codec.

    Raises:
      ValueError: If `max_norm` is not positive.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.feedback import local_clip
      >>> from jaxcomm.compression.sparsifiers import top_k
      >>> codec, x = local_clip(top_k(k=1), 1.0), jnp.array([3.0, 4.0])
      >>> payload, _ = codec.encode(Context.of(x), x)
      >>> print(jnp.round(codec.decode(Context.of(x), payload), 4))
      [0.  0.8]

    References:
      Lin et al., `Deep Gradient Compression <https://arxiv.org/abs/1712.01887>`_, 2018.
    """
    require_codec(codec, user="local_clip")
    if isinstance(max_norm, int | float) and not max_norm > 0:
        raise ValueError(f"`max_norm` must be over 0, got {max_norm}.")

    def encode(context: Context, x: jax.Array) -> tuple[PyTree, Memory]:
        return codec.encode(context, clip_to_norm(x, max_norm))

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        return codec.diagnose(context, clip_to_norm(x, max_norm), after)

    return codec._replace(
        measure=lambda context, x: codec.measure(context, clip_to_norm(x, max_norm)),
        encode=encode,
        diagnose=diagnose,
        claims=Claims(),
        layout="concatenated",
        drop_overflow=codec.drop_overflow and local_clip(codec.drop_overflow, max_norm),
    )
