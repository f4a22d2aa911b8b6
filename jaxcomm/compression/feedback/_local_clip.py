"""Clips updates on each worker before compression."""

import jax
import jax.numpy as jnp

from jaxcomm._contract import Claims, Codec, Context, Diagnostics, Memory, PyTree
from jaxcomm._require import require_codec
from jaxcomm.compression._means import over_peak


def clip_together(parts: list[jax.Array], max_norm: jax.Array | float) -> list[jax.Array]:
    """Scales the parts of a vector down if its l2 norm exceeds `max_norm`.

    Args:
      parts: Arrays of one floating dtype and any shapes.
      max_norm: The largest norm, positive.
    """
    peak = jnp.max(jnp.stack([jnp.max(jnp.abs(x), initial=0) for x in parts]))
    # The norm may exceed the range of float32, so only that of `units`, in [1, sqrt(d)], is
    # computed.
    units = [over_peak(x, peak) for x in parts]
    square = jnp.sum(jnp.stack([jnp.sum(jnp.square(unit)) for unit in units]))
    most = max_norm / jnp.sqrt(jnp.maximum(square, 1))
    return [jnp.where(peak > most, unit * most, x) for unit, x in zip(units, parts, strict=True)]


def clip_to_norm(x: jax.Array, max_norm: jax.Array | float) -> jax.Array:
    """Scales `x` down if its l2 norm exceeds `max_norm`."""
    return clip_together([x], max_norm)[0]


def local_clip(codec: Codec, max_norm: jax.Array | float) -> Codec:
    r"""Clips the l2 norm of each worker's update before the codec.

    .. math:: x_i \mapsto x_i \min\Big(1, \frac{c}{\|x_i\|}\Big)

    Put it outside feedback, `local_clip(error_feedback(codec), c)`, so that residuals contain
    clipped updates only. Otherwise a large update would stay in the residual and return in many
    steps. The mean of :math:`n` independent updates has a norm about :math:`\sqrt n` times smaller.
    To clip the mean at :math:`c'`, use :math:`c = c' / \sqrt n`. Sends the same payload as `codec`.
    The mean is biased if any worker's update is clipped.

    Args:
      codec: A codec.
      max_norm: :math:`c`, positive, for one unit: a bucket (by default all leaves together, up to
        32 MiB), or a leaf with `scope="leaf"`. It may be traced.

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
        raise ValueError(f"`max_norm` must be positive, got {max_norm}.")

    def encode(context: Context, x: jax.Array) -> tuple[PyTree, Memory]:
        return codec.encode(context, clip_to_norm(x, max_norm))

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        return codec.diagnose(context, clip_to_norm(x, max_norm), after)

    return codec.replace(
        measure=lambda context, x: codec.measure(context, clip_to_norm(x, max_norm)),
        encode=encode,
        diagnose=diagnose,
        claims=Claims(),
        layout="concatenated",
        drop_overflow=codec.drop_overflow and local_clip(codec.drop_overflow, max_norm),
    )
