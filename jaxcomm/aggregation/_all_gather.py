"""The mean of payloads that are gathered and decoded separately."""

from typing import Unpack

import optax

from jaxcomm._contract import AxisName, Codec
from jaxcomm._require import checked
from jaxcomm.aggregation._coded import coded_mean, require_own_statistics
from jaxcomm.aggregation._gathered import gather_payloads
from jaxcomm.aggregation._local import without_global_diagnostics
from jaxcomm.aggregation._options import AggregatorOptions, takes_options


@checked()
@takes_options
def all_gather_mean(
    axis_name: AxisName,
    codec: Codec,
    *,
    share_statistics: bool = False,
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Gathers every worker's payload, decodes each, and averages.

    .. math:: \bar x \approx \frac{1}{n} \sum_i \mathrm{decode}(\mathrm{encode}(x_i, a_i), a_i),
              \qquad a_i = \mathrm{measure}(x_i)

    It works with any codec, since workers need no common statistics. A worker sends :math:`n - 1`
    payloads (it forwards those of other workers), so the saving shrinks with :math:`n`: against a
    float32 all-reduce, one byte per coordinate saves nothing at :math:`n = 8`. The payloads of all
    buckets or leaves travel in one message, with their statistics and 4 bytes for a flag that
    reports non-finite updates. A message of 2^16 words or more is padded to a multiple of 4096
    words. Payloads are decoded one at a time, in worker order. Replicas therefore stay bit-equal,
    and only the payloads take memory that grows with :math:`n`.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      codec: Any codec.
      share_statistics: Whether to reduce statistics over workers first, as
        :func:`jaxcomm.all_reduce_mean` does. Default: each worker sends its own statistics.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`.

    Returns:
      A transformation to place before the optimizer. Updates are equal on all workers and keep
      their shape and dtype. A non-finite coordinate on any worker makes them NaN on all workers.
      `update(..., weight=w)` computes a weighted mean.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound or an
        update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm.aggregation import all_gather_mean
      >>> from jaxcomm.compression.quantizers import dither
      >>> tx = all_gather_mean("data", dither(levels=1))
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> print(jax.vmap(average, axis_name="data")(jnp.array([[3.0, 0.0], [0.0, 5.0]])))
      [[1.5 2.5]
       [1.5 2.5]]
    """

    exchange = gather_payloads(axis_name, codec, share_statistics)
    unit_codec = (
        require_own_statistics(codec, "`share_statistics`=True")
        if share_statistics
        else without_global_diagnostics(codec)
    )
    return coded_mean(axis_name, unit_codec, exchange, options, stacks=True)
