"""Momentum on each worker, before sparsification."""

import jax
import jax.numpy as jnp

from jaxcomm._contract import Codec
from jaxcomm._require import require_codec
from jaxcomm.compression.feedback._loop import feedback_loop


def require_momentum(momentum: float) -> None:
    """Raises unless `momentum` is in [0, 1), where a velocity stays bounded."""
    if not isinstance(momentum, int | float) or not 0 <= momentum < 1:
        raise ValueError(f"`momentum` must be a Python float in [0, 1), got {momentum!r}.")


def momentum_correction(
    codec: Codec, momentum: float = 0.9, *, nesterov: bool = False, momentum_masking: bool = True
) -> Codec:
    r"""Compresses a velocity instead of the update, and resets the velocity where it was sent.

    .. math:: u^t = \mu u^{t-1} + x^t, \qquad m^t = C(u^t), \qquad
              u_j^t \gets 0 \text{ where } m_j^t \ne 0

    The momentum of an optimizer after sparse updates would treat a coordinate that was delayed by
    :math:`\tau` steps as new. Here each step's update accumulates momentum while it waits. With
    `nesterov`, :math:`u^t = \mu (u^{t-1} + x^t)` and :math:`m^t = C(u^t + x^t)`. The last
    assignment is momentum factor masking: it drops the old velocity of a coordinate that was just
    sent. With a codec that sends all coordinates, masking resets the whole velocity, and the result
    is plain SGD. Use `momentum_masking=False` with dense codecs. Sends the same payload as `codec`.

    Follow it with `optax.sgd` without momentum.

    Args:
      codec: Usually `error_feedback(top_k(...))`.
      momentum: :math:`\mu` in [0, 1).
      nesterov: Whether to use Nesterov's momentum.
      momentum_masking: Whether velocities become 0 where this worker has sent a nonzero value.

    Returns:
      A codec that keeps one array like `x` on each worker. Use it with
      :func:`jaxcomm.all_gather_mean`; :func:`jaxcomm.two_stage_mean` would apply momentum twice.

    Raises:
      ValueError: If `momentum` is out of range.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.feedback import error_feedback, momentum_correction
      >>> from jaxcomm.compression.sparsifiers import top_k
      >>> codec = momentum_correction(error_feedback(top_k(k=1)), 0.5)
      >>> x = jnp.array([2.0, 3.0])
      >>> memory = codec.init(x)
      >>> for _ in range(2):
      ...     payload, memory = codec.encode(Context.of(x, memory=memory), x)
      ...     print(codec.decode(Context.of(x), payload), memory.own.kept)
      [0. 3.] [2. 0.]
      [5. 0.] [0. 3.]

    References:
      Lin et al., `Deep Gradient Compression <https://arxiv.org/abs/1712.01887>`_, 2018.
    """
    require_codec(codec, user="momentum_correction")
    require_momentum(momentum)

    def velocity(kept: jax.Array, x: jax.Array) -> jax.Array:
        return momentum * (kept + x) if nesterov else momentum * kept + x

    def corrected(kept: jax.Array, x: jax.Array) -> jax.Array:
        return velocity(kept, x) + x if nesterov else velocity(kept, x)

    def updated(kept: jax.Array, x: jax.Array, sent: jax.Array) -> jax.Array:
        moved = velocity(kept, x)
        return jnp.where(sent != 0, 0, moved) if momentum_masking else moved

    return feedback_loop(
        codec, initial=jnp.zeros_like, corrected=corrected, updated=updated, elementwise=True
    )
