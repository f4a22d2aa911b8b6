"""TernGrad: gradients as -1, 0 or +1 times a scale."""

from typing import Literal, Unpack

import optax

from jaxcomm._contract import AxisName
from jaxcomm._require import checked
from jaxcomm.aggregation import all_gather_mean, all_reduce_mean
from jaxcomm.aggregation._coded import AggregatorOptions, takes_options
from jaxcomm.compression.quantizers import ternary

_AGGREGATORS = {"own": all_gather_mean, "shared": all_reduce_mean}


@checked
@takes_options
def terngrad(
    axis_name: AxisName = "data",
    *,
    scale: Literal["own", "shared"] = "own",
    clip: float | None = 2.5,
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""TernGrad: the mean of gradients with coordinates rounded to 0 or plus or minus a scale.

    .. math:: \frac{1}{n} \sum_{i=1}^n s_i\, \operatorname{sgn}(x_i)\, b_i, \qquad
              P(b_{ij} = 1) = \frac{|x_{ij}|}{s_i}, \qquad s_i = \max_j |x_{ij}|

    after :math:`x_i` is clipped at `clip` standard deviations of its leaf. The rounding is
    unbiased; the clipping is not. Without clipping, the expected squared error of one worker is
    exactly :math:`s_i \|x_i\|_1 - \|x_i\|^2`, at most :math:`\frac{\sqrt d - 1}{2} \|x_i\|^2`. With
    a shared scale the same holds for the :math:`n d` coordinates of all workers together.

    With its own scale, a worker sends :math:`n - 1` payloads of 2 bits per coordinate and 4 bytes
    per leaf. With a shared scale it sends :math:`2 (n-1)/n` times :math:`32 / \lfloor 32 / b
    \rfloor` bits per coordinate, in the cheapest field with :math:`2 n < 2^b`: 4 bits for 4 to 7
    workers, 16/3 bits for 8 to 15. The shared scale sends less from 5 workers on. Both send 4 more
    bytes for a flag that reports non-finite updates.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      scale: `"own"`, a scale per worker, with gathered codes; or `"shared"`, the largest on any
        worker, with summed codes ("scaler sharing" in the paper). A shared scale is noisier if
        workers differ.
      clip: The number of standard deviations about 0 at which magnitudes are clipped; a Python
        float, or None for an unbiased mean.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`. `scope` is `"leaf"` by default.

    Returns:
      A transformation to place before the optimizer, with the guarantees of :func:`global_qsgd`.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound or an
        update is already summed.
      TypeError: If an update is differentiated: rounding has no derivative.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.terngrad()
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> print(jax.vmap(average, axis_name="data")(jnp.array([[3.0, 0.0], [-1.0, 1.0]])))
      [[1.  0.5]
       [1.  0.5]]

    References:
      Wen et al., `TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning
      <https://arxiv.org/abs/1705.07878>`_, 2017.

    Differs from the paper: there is no server. Standard deviations are about 0, so that a leaf of
    one coordinate is not clipped to 0. The last layer is not exempt; use `optax.partition` to
    exempt it.
    """
    return _AGGREGATORS[scale](ternary(clip=clip), axis_name=axis_name, **options)
