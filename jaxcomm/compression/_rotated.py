"""A random rotation before a codec; it spreads large coordinates over all coordinates."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _noise
from jaxcomm._contract import Codec, Coins, Context, Diagnostics, Memory, PyTree
from jaxcomm._require import require_codec
from jaxcomm.compression._bits import require_countable


def _padded(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    require_countable(size, 2**31)
    return 1 << max(size - 1, 0).bit_length()


def _butterfly(x: jax.Array) -> jax.Array:
    """One of the log2(d) equal steps of a Walsh-Hadamard transform of `x`, float32[d]."""
    upper, lower = x.reshape(2, -1)
    return jnp.stack([upper + lower, upper - lower], axis=1).ravel()


def hadamard(x: jax.Array) -> jax.Array:
    r""":math:`H x / \sqrt d` by :math:`d \log_2 d` additions; its own inverse.

    .. math:: H_1 = (1), \qquad H_{2 d} = \begin{pmatrix} H_d & H_d \\ H_d & -H_d \end{pmatrix}

    The loop halves after every second step, so that sums of large coordinates do not overflow. It
    is a `fori_loop`, so that the compiler does not fuse steps and repeat all additions for each
    coordinate.

    Args:
      x: float32[d], d a power of two.
    """
    steps = x.size.bit_length() - 1
    if steps > 1:
        x = lax.fori_loop(0, steps // 2, lambda _, x: _butterfly(_butterfly(x)) * 0.5, x)
    return _butterfly(x) * 0.5**0.5 if steps % 2 else x


def _signs(public: jax.Array, size: int) -> jax.Array:
    """Random signs, the same on all workers, float32[size]."""
    odd = _noise.bits(public, (size,)) & jnp.uint32(1)
    return jnp.where(odd == 1, jnp.float32(-1), jnp.float32(1))


def _rotate(public: jax.Array, x: jax.Array) -> jax.Array:
    """Pads `x` with zeros and rotates it: float32[padded]."""
    size = _padded(x.size)
    return hadamard(jnp.pad(x.ravel(), (0, size - x.size)) * _signs(public, size))


def _rotate_back(public: jax.Array, y: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_rotate`, without the padding."""
    return (hadamard(y) * _signs(public, y.size))[: math.prod(shape)].reshape(shape)


def _inner_key(public: jax.Array) -> jax.Array:
    """The public key for the inner codec, so that its draws do not repeat these signs."""
    return jax.random.fold_in(public, 0x48D)


def _at_padded_size(
    bound: Callable[[int, int], float] | None,
) -> Callable[[int, int], float] | None:
    return None if bound is None else lambda size, workers: bound(_padded(size), workers)


def rotated(codec: Codec) -> Codec:
    r"""Rotates an array by a random orthogonal map before `codec`, and back after decoding.

    .. math:: Q_R(x) = R^{-1} Q(R x), \qquad R = \frac{1}{\sqrt d} H D

    with random signs :math:`D`, the same on all workers, and the Walsh-Hadamard matrix :math:`H`.
    The rotation takes :math:`d \log_2 d` additions. It preserves norms, while :math:`\max_j |(R
    x)_j|` is about :math:`\sqrt{2 \ln d / d}\, \|x\|` for any :math:`x`. Levels from the least to
    the largest coordinate are then close together. With :math:`k` levels the bound on the squared
    error falls from :math:`\frac{d}{2 (k-1)^2} \|x\|^2` to :math:`\frac{2 \ln d + 2}{(k-1)^2}
    \|x\|^2`. The gain is large if few coordinates are large. There is none if all coordinates have
    similar magnitudes.

    The array is padded with zeros to a power of two, at most to nearly twice as many coordinates.
    All of them are sent. `blockwise(rotated(codec), 1024)` pads the last block only, and needs ten
    additions per coordinate at any size.

    Args:
      codec: A codec without memory. Memory that exists for `diagnostics=True` only is allowed.

    Returns:
      A codec with the statistics, payload and `combine` of `codec` at the padded size. It states
      the `variance` or `contraction` of `codec` at that size, and is unbiased if `codec` is. The
      l2 norm of `x` must be below half the largest float32.

    Raises:
      ValueError: In `init`, if the codec has memory. The rotation changes at each step, so feedback
        must be outside: `error_feedback(rotated(codec))`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression import rotated
      >>> from jaxcomm.compression.quantizers import dither
      >>> x = jnp.zeros(1024).at[3].set(32.0)
      >>> for codec in (dither(levels=1), rotated(dither(levels=1))):
      ...     print(codec.measure(Context.of(x), x).max_abs)
      32.0
      1.0

    References:
      Suresh et al., `Distributed Mean Estimation with Limited Communication
      <https://arxiv.org/abs/1611.00429>`_, 2017.
    """

    require_codec(codec, user="rotated")

    def inner_coins(coins: Coins) -> Coins:
        return coins._replace(public=_inner_key(coins.public))

    def inner_context(context: Context) -> Context:
        size = _padded(math.prod(context.shape))
        return context.replace(coins=inner_coins(context.coins), shape=(size,))

    def init(x: jax.Array) -> Memory:
        memory = codec.init(jnp.zeros(_padded(x.size)))
        if jax.tree.leaves(memory):
            raise ValueError(
                "`rotated` takes codecs without memory, since the rotation changes at each "
                "step. Put feedback outside: `error_feedback(rotated(codec))`."
            )
        return memory

    def measure(context: Context, x: jax.Array) -> PyTree:
        return codec.measure(inner_context(context), _rotate(context.coins.public, x))

    def encode(context: Context, x: jax.Array) -> tuple[PyTree, Memory]:
        return codec.encode(inner_context(context), _rotate(context.coins.public, x))

    def decode(context: Context, payload: PyTree) -> jax.Array:
        mean = codec.decode(inner_context(context), payload)
        return _rotate_back(context.coins.public, mean, context.shape)

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        y = _rotate(context.coins.public, x)
        diagnostics = codec.diagnose(inner_context(context), y, after)
        if diagnostics.target is y:  # Rotating `y` back would add rounding errors.
            return diagnostics._replace(target=x)
        target = _rotate_back(context.coins.public, diagnostics.target, context.shape)
        return diagnostics._replace(target=target)

    combine = codec.combine
    if callable(combine):
        merge = combine
        combine = lambda coins, *payloads: merge(inner_coins(coins), *payloads)  # noqa: E731

    return codec.replace(
        init=init,
        measure=measure,
        encode=encode,
        decode=decode,
        combine=combine,
        diagnose=diagnose,
        layout="concatenated",
        claims=codec.claims._replace(
            variance=_at_padded_size(codec.claims.variance),
            contraction=_at_padded_size(codec.claims.contraction),
        ),
        drop_overflow=codec.drop_overflow and rotated(codec.drop_overflow),
    )
