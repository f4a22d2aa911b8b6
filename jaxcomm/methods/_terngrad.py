"""TernGrad: gradients as minus one, zero or plus one times a scale."""

from typing import Literal, Unpack

import optax

from jaxcomm._base import AxisName
from jaxcomm._require import checked
from jaxcomm.aggregation import all_gather_mean, all_reduce_mean
from jaxcomm.aggregation._options import AggregatorOptions, takes_options
from jaxcomm.compression.quantizers import ternary

_AGGREGATORS = {"own": all_gather_mean, "shared": all_reduce_mean}


@checked()
@takes_options
def terngrad(
    axis_name: AxisName = "data",
    *,
    scale: Literal["own", "shared"] = "own",
    clip: float | None = 2.5,
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""TernGrad: the mean of gradients whose coordinates are 0 or plus or minus the largest one.

    .. math:: \frac{1}{n} \sum_{i=1}^n s_i\, \operatorname{sgn}(x_i)\, b_i, \qquad
              P(b_{ij} = 1) = \frac{|x_{ij}|}{s_i}, \qquad s_i = \max_j |x_{ij}|

    after :math:`x_i` is clipped at so many standard deviations of its leaf. Unbiased but for the
    clipping; without it, the squared error of one worker is :math:`s_i \|x_i\|_1 - \|x_i\|^2`
    exactly, at most :math:`\frac{\sqrt d - 1}{2} \|x_i\|^2`. With the scale of all workers the
    same holds of their :math:`n d` coordinates together.

    A worker sends, with its own scale, :math:`n - 1` times 2 bits a coordinate and 4 bytes a leaf;
    with a shared one :math:`2 (n-1)/n` times :math:`32 / \lfloor 32 / b \rfloor` bits, in the
    cheapest field of :math:`2 n < 2^b`: 4 bits for 4 to 7 workers, 16/3 for 8 to 15, which is less
    from 5 workers on. In both cases 4 bytes for a flag besides.

    Args:
      axis_name: The mesh axis, or axes, that number the workers.
      scale: `"own"`, each worker's, with codes gathered; or `"shared"`, the largest on any worker,
        with codes summed ("scaler sharing" in the paper), noisier where workers differ.
      clip: Standard deviations about 0 beyond which magnitudes are cut; a Python float, or None for
        an unbiased mean.
      **options: As :class:`jaxcomm.AggregatorOptions` says; `scope` is `"leaf"` by default.

    Returns:
      A transformation to place before the optimizer, with the guarantees of :func:`global_qsgd`.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound, or an
        update is already summed.

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

    Differs from the paper: there is no server; deviations are about 0, so that a leaf of one
    coordinate is not clipped to nothing; the last layer is no exception (`optax.partition` makes
    one).
    """
    if scale not in _AGGREGATORS:
        raise ValueError(f"`scale` must be one of {[*_AGGREGATORS]}, got {scale!r}.")
    return _AGGREGATORS[scale](
        axis_name,
        ternary(clip=clip),
        **options,
    )
