"""One optimizer inside, on each worker by itself, and one outside."""

import optax

from jaxcomm._base import AxisName
from jaxcomm._per_worker import per_worker
from jaxcomm.synchronization._exchange import Period, meets_every
from jaxcomm.synchronization._require import require_transformation


def diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    period: Period,
    aggregator: optax.GradientTransformation | None = None,
    *,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    r"""Two optimizers: one inside, on each worker by itself, and one outside, of what they moved.

    .. math:: x_i \gets x_i + \mathrm{inner}(g_i), \qquad\text{and at every } H \text{-th step}\quad
              a \gets a + \mathrm{outer}\Big(\frac{1}{n} \sum_i (a - x_i)\Big), \quad x_i \gets a

    The state of `inner` is each worker's own, that of `outer` common. Between exchanges nothing is
    sent; what `aggregator` sends is, at them. Steps that are not finite are left out, and 16 bits
    averaged, as :func:`local_sgd` does.

    Args:
      inner: Any optax optimizer, such as `optax.adamw`.
      outer: Any, such as `optax.sgd(0.7, momentum=0.9, nesterov=True)`; with `optax.sgd(1.0)` this
        is :func:`local_sgd`.
      period: As for :func:`local_sgd`.
      aggregator: As for :func:`local_sgd`: it is given how far workers have moved.
      axis_name: The mesh axis, or axes, that number the workers.

    Returns:
      A whole transformation, on parameters that differ by worker (:func:`jaxcomm.replicate`). It
      takes `weight` and `present` as :func:`local_sgd` does.

    Raises:
      ValueError: As :func:`local_sgd` does, or if an optimizer is no optax transformation.

    Example:
      >>> import optax
      >>> from jaxcomm.synchronization import diloco
      >>> outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
      >>> tx = diloco(optax.sgd(0.1, momentum=0.9), outer, period=50)

    References:
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023.
    """
    require_transformation(inner, "inner")
    require_transformation(outer, "outer")
    return optax.chain(
        per_worker(inner, axis_name), meets_every(period, outer, aggregator, axis_name)
    )
