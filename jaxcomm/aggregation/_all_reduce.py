"""The mean of payloads that an all-reduce sums."""

from typing import Unpack

import optax

from jaxcomm._contract import AxisName, Codec, PyTree
from jaxcomm._require import checked, combine_of
from jaxcomm.aggregation._agreement import sum_together
from jaxcomm.aggregation._coded import coded_mean
from jaxcomm.aggregation._combined import combine_payloads
from jaxcomm.aggregation._exchange import Part
from jaxcomm.aggregation._options import AggregatorOptions, takes_options


@checked()
@takes_options
def all_reduce_mean(
    axis_name: AxisName,
    codec: Codec,
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Reduces statistics, sums the payloads of all workers, and decodes the sum once.

    .. math:: a = \bigoplus_i \mathrm{measure}(x_i), \qquad
              \bar x \approx \mathrm{decode}\Big(\sum_i \mathrm{encode}(x_i, a), a\Big)

    where :math:`\bigoplus` is the reduction that the codec chooses for each statistic (sum, maximum
    or OR). A worker sends :math:`2 (n-1)/n` payloads. The statistics of all buckets or leaves and a
    flag that reports non-finite updates take one small all-reduce per kind of reduction.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      codec: A codec with `combine="sum"`.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`.

    Returns:
      A transformation to place before the optimizer. Updates are equal on all workers and keep
      their shape and dtype. A non-finite coordinate on any worker makes them NaN on all workers.
      `update(..., weight=w)` computes a weighted mean.

    Raises:
      ValueError: If the codec's payloads cannot be summed, or an option is out of range; in
        `update`, if `axis_name` is not bound or an update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm.aggregation import all_reduce_mean
      >>> from jaxcomm.compression.quantizers import dither
      >>> tx = all_reduce_mean("data", dither(levels=3))
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> print(jax.vmap(average, axis_name="data")(jnp.array([[3.0, 0.0], [-1.0, 3.0]])))
      [[1.  1.5]
       [1.  1.5]]
    """
    if codec.combine != "sum":
        raise ValueError(
            "`all_reduce_mean` needs a codec whose payloads can be summed (`combine='sum'`), got "
            f"{combine_of(codec)}. Use `all_gather_mean`."
        )

    def add(parts: list[Part], payloads: list[PyTree]) -> list[PyTree]:
        total: list[PyTree] = sum_together(axis_name, payloads)
        return total

    return coded_mean(
        axis_name, codec, combine_payloads(axis_name, codec, add), options, stacks=True
    )
