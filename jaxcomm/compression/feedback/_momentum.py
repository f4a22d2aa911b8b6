"""Before compression, on each worker: momentum, its correction, and clipping."""

import jax
import jax.numpy as jnp

from jaxcomm._contract import Claims, Codec, Context, Diagnostics, Memory, PyTree
from jaxcomm._require import AboveZero, BelowOne, checked
from jaxcomm.compression._means import over_peak
from jaxcomm.compression.feedback._loop import feedback_loop


@checked
def momentum(codec: Codec, momentum: BelowOne = 0.9) -> Codec:
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

    def average(kept: jax.Array, x: jax.Array) -> jax.Array:
        return momentum * kept + (1 - momentum) * x

    return feedback_loop(
        codec,
        initial=jnp.zeros_like,
        corrected=average,
        updated=lambda kept, x, sent: average(kept, x),
    )


@checked
def momentum_correction(
    codec: Codec, momentum: BelowOne = 0.9, *, nesterov: bool = False, momentum_masking: bool = True
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


@checked
def local_clip(codec: Codec, max_norm: AboveZero | jax.Array) -> Codec:
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
