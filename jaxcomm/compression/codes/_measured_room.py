"""The room that a variable-length code needs for given updates."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxcomm._contract import Codec, Context
from jaxcomm._require import require_codec, require_untraced


def measured_room(
    codec: Codec, updates: jax.Array, *, quantile: float = 0.999, seed: int = 0
) -> float:
    r"""The bits per integer in which a fraction `quantile` of the given updates fits.

    .. math:: r = \mathrm{quantile}_q\Big(\frac{\ell(x_1)}{m}, \frac{\ell(x_2)}{m}, \ldots\Big)

    with :math:`\ell` the words that the rows of an update take, in bits, for its :math:`m`
    integers. Each update is encoded once, with coins of its own. This does not depend on the room
    of `codec`, and sends nothing. Run it outside of the training program, with updates of the size
    of the units that are sent: a bucket of leaves, or a leaf.

    Args:
      codec: A codec of this package, such as `elias(dither(levels=7), room=8.0)`.
      updates: `[samples, ...]`, updates of one unit, for instance of several steps and workers.
      quantile: The fraction of the updates that fit, a Python float in (0, 1]. With few samples it
        is their largest length.
      seed: The seed of the coins.

    Returns:
      The `room`, a Python float. Units that differ more over time than these need more: a margin
      of some percent avoids overflows.

    Raises:
      ValueError: If `codec` is not a variable-length code, an argument is out of range, or there
        are no updates or no integers.

    Example:
      >>> import jax
      >>> from jaxcomm.compression.codes import elias, measured_room
      >>> from jaxcomm.compression.quantizers import dither
      >>> updates = jax.random.normal(jax.random.key(0), (20, 5_000))
      >>> 2.5 < measured_room(elias(dither(levels=7)), updates) < 4
      True
    """
    require_codec(codec, user="measured_room")
    require_untraced(quantile, "quantile")
    bits_of = codec.fast.bits
    if bits_of is None:
        raise ValueError(
            "`measured_room` needs a codec of `jaxcomm.compression.codes` itself, such as "
            "`elias(dither(levels=7))`, without feedback."
        )
    if not isinstance(quantile, int | float) or not 0 < quantile <= 1:
        raise ValueError(f"`quantile` must be a Python float in (0, 1], got {quantile!r}.")
    if updates.ndim < 2 or not updates.size:
        raise ValueError(
            f"`updates` must be [samples, ...] with at least one coordinate, got the shape "
            f"{updates.shape}."
        )

    @jax.jit
    def lengths(key: jax.Array, x: jax.Array) -> jax.Array:
        coins = Context.of(x).coins._replace(public=key, private=jax.random.fold_in(key, 1))
        context = Context(coins, codec.init(x), shape=x.shape)
        context = context.replace(statistics=codec.measure(context, x))
        payload, _ = codec.encode(context, x)
        return bits_of(context, payload)

    keys = jax.random.split(jax.random.key(seed, impl="threefry2x32"), len(updates))
    bits = jnp.stack(
        [lengths(key, x.astype(jnp.float32)) for key, x in zip(keys, updates, strict=True)]
    )
    return float(np.quantile(np.asarray(bits, np.float64), quantile, method="higher"))
