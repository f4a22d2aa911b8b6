"""Natural compression."""

from typing import Unpack

import optax

from jaxcomm._contract import AxisName
from jaxcomm._require import checked
from jaxcomm.aggregation import all_gather_mean
from jaxcomm.aggregation._coded import AggregatorOptions, takes_options
from jaxcomm.compression.quantizers import natural


@checked
@takes_options
def natural_compression(
    axis_name: AxisName = "data",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Natural compression: the mean of updates, stochastically rounded to powers of two.

    .. math:: G(x) = \frac{1}{n} \sum_{i=1}^n C_{nat}(x_i), \qquad \mathbb{E}\, G(x) = \bar x,
              \qquad \mathbb{E}\|G(x) - \bar x\|^2 \le \frac{1}{8 n^2} \sum_i \|x_i\|^2

    A worker sends :math:`n - 1` times 9 bits per coordinate, and 4 bytes for a flag that reports
    non-finite updates. From 8 workers on this is more than a float32 all-reduce.
    `jaxcomm.two_stage_mean(natural(), axis_name=axis_name)`, with `natural` of
    `jaxcomm.compression.quantizers`, rounds twice and sends :math:`\tfrac{9}{4} d (n-1)/n` bytes
    for any number of workers. :func:`global_qsgd` with `dithering="exponential"` applies the same
    rounding relative to a norm, in 8 bits.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`.

    Returns:
      A transformation to place before the optimizer, with the guarantees of :func:`global_qsgd`.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound or an
        update is already summed.
      TypeError: If an update is differentiated: rounding has no derivative.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.natural_compression()
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> print(jax.vmap(average, axis_name="data")(jnp.array([[4.0, -0.5], [2.0, 0.0]])))
      [[ 3.   -0.25]
       [ 3.   -0.25]]

    References:
      Horváth et al., `Natural Compression for Distributed Deep Learning
      <https://arxiv.org/abs/1905.10988>`_, 2019.

    Differs from the paper: there is no server, which would round the mean again.
    """
    return all_gather_mean(natural(), axis_name=axis_name, **options)
