"""Momentum before compression: each worker sends a running mean of its updates."""

import jax
import jax.numpy as jnp

from jaxcomm._contract import Codec
from jaxcomm._require import require_codec
from jaxcomm.compression.feedback._loop import feedback_loop


def momentum(codec: Codec, momentum: float = 0.9) -> Codec:
    r"""Compresses a running mean of a worker's updates instead of the update.

    .. math:: m^t = \beta\, m^{t-1} + (1 - \beta)\, x^t, \qquad \text{sent: } C(m^t)

    with :math:`m^0 = 0`; :math:`\beta` is the option `momentum`. With
    :func:`jaxcomm.compression.quantizers.signs` this is Signum. Compression errors are not
    compensated: momentum smooths the input, and keeps no residual. Sends the same payload as
    `codec`.

    Args:
      codec: Any codec, such as `signs()` or `error_feedback(scaled_signs())`.
      momentum: :math:`\beta` in [0, 1), a Python float; 0 is no momentum.

    Returns:
      A codec that keeps one float32 array like `x` on each worker.

    Raises:
      ValueError: If `momentum` is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.feedback import momentum
      >>> from jaxcomm.compression.quantizers import signs
      >>> codec, memory = momentum(signs(), momentum=0.5), None
      >>> for x in (jnp.array([4.0, 4.0]), jnp.array([-1.0, -8.0])):
      ...     memory = codec.init(x) if memory is None else memory
      ...     payload, memory = codec.encode(Context.of(x, memory=memory), x)
      ...     print(codec.decode(Context.of(x), payload), memory.own.kept)
      [1. 1.] [2. 2.]
      [ 1. -1.] [ 0.5 -3. ]

    References:
      Bernstein et al., `signSGD: Compressed Optimisation for Non-Convex Problems
      <https://arxiv.org/abs/1802.04434>`_, 2018.
    """
    require_codec(codec, user="momentum")
    if not isinstance(momentum, int | float) or isinstance(momentum, bool) or not 0 <= momentum < 1:
        raise ValueError(
            f"`momentum` must be a Python float in [0, 1), got {momentum!r}. Under "
            "`optax.inject_hyperparams` pass `static_args=('momentum',)`."
        )

    def average(kept: jax.Array, x: jax.Array) -> jax.Array:
        return momentum * kept + (1 - momentum) * x

    return feedback_loop(
        codec,
        initial=jnp.zeros_like,
        corrected=average,
        updated=lambda kept, x, sent: average(kept, x),
    )
