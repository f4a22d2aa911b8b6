"""EF21: workers and receivers keep an estimate, and workers send the difference to it."""

from jaxcomm._contract import Codec
from jaxcomm._require import require_codec
from jaxcomm.compression._scaled import require_contraction
from jaxcomm.compression.feedback._shifted import shifted


def ef21(codec: Codec) -> Codec:
    r"""Tracks each worker's update by an estimate; the result is the mean of the estimates.

    .. math:: m_i^t = C(x_i^t - g_i^t), \qquad g_i^{t+1} = g_i^t + m_i^t, \qquad
              \bar x^t \approx g^{t+1} = g^t + \frac{1}{n} \sum_i m_i^t

    The invariant :math:`g^t = \frac{1}{n} \sum_i g_i^t` holds always; estimates start at 0. As
    updates converge, so do the estimates, :math:`\mathbb{E}\|g_i^{t+1} - x_i\|^2 \le (1 - \delta)
    \|g_i^t - x_i\|^2`, however much data differ by worker. The estimates follow noise in the
    updates with a delay. Unlike with :func:`error_feedback`, no residual is accumulated and sent
    later. Sends the same payload as `codec`.

    Args:
      codec: A contraction, :math:`\mathbb{E}\|C(a) - a\|^2 \le (1 - \delta) \|a\|^2` with
        :math:`\delta > 0`, such as :func:`jaxcomm.compression.sparsifiers.top_k`.

    Returns:
      A codec that keeps two arrays like `x` on each worker, a sum and its rounding error, and two
      that are equal on all workers. Use it with :func:`jaxcomm.all_gather_mean`, or with
      :func:`jaxcomm.all_reduce_mean` if payloads can be summed.

    Raises:
      ValueError: When encoding, if the codec is no contraction or no bound is known. Wrap a codec
        with :math:`\omega \ge 1` in :func:`jaxcomm.compression.scaled`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression.feedback import ef21
      >>> from jaxcomm.compression.sparsifiers import top_k
      >>> codec, x = ef21(top_k(k=1)), jnp.array([3.0, 2.0, 1.0])
      >>> context = Context.of(x, memory=codec.init(x))
      >>> for _ in range(3):
      ...     payload, memory = codec.encode(context, x)
      ...     mean = codec.decode(context.received(), payload)
      ...     update, memory = codec.finalize(context.replace(memory=memory), payload, mean)
      ...     context = context.replace(memory=memory)
      ...     print(update)
      [3. 0. 0.]
      [3. 2. 0.]
      [3. 2. 1.]

    References:
      Richtárik et al., `EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
      Feedback <https://arxiv.org/abs/2106.05203>`_, 2021.

    Differs from the paper: estimates start at 0, so that the first one is :math:`C(x_i^0)`. The
    update is the estimate after this step's message, not before it.
    """
    require_codec(codec, user="ef21")
    return shifted(
        codec,
        rate=lambda size, workers: 1.0,
        require=lambda size, workers: require_contraction(codec, size, workers, "ef21"),
    )
