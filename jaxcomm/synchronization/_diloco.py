"""DiLoCo: an inner optimizer on each worker, and an outer optimizer on their mean displacement."""

import optax

from jaxcomm._axis import names_itself
from jaxcomm._contract import AxisName
from jaxcomm._require import require_transformation
from jaxcomm._workers import per_worker
from jaxcomm.synchronization._exchange import Period, average_every


@names_itself
def diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    period: Period,
    *,
    aggregator: optax.GradientTransformation | None = None,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    r"""Two optimizers (DiLoCo): an inner one per worker, and an outer one on the mean displacement.

    .. math:: x_i \gets x_i + \mathrm{inner}(g_i), \qquad\text{and at every } H \text{-th step}\quad
              a \gets a + \mathrm{outer}\Big(\frac{1}{n} \sum_i (a - x_i)\Big), \quad x_i \gets a

    Here :math:`a` is the parameters after the last exchange. The state of `inner` differs by
    worker; that of `outer` is equal on all workers. Steps between exchanges send nothing. An
    exchange sends the messages of `aggregator`. Non-finite steps are skipped, and 16-bit parameters
    are averaged, as in :func:`local_sgd`.

    Args:
      inner: Any optax optimizer, such as `optax.adamw`.
      outer: Any optax optimizer, such as `optax.sgd(0.7, momentum=0.9, nesterov=True)`. With
        `optax.sgd(1.0)`, the method is :func:`local_sgd`.
      period: As for :func:`local_sgd`.
      aggregator: As for :func:`local_sgd`. Its input is the displacement of each worker.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      A complete optimizer, for parameters that differ by worker (:func:`jaxcomm.replicate`). It
      accepts `weight`, `present` and `flush` as :func:`local_sgd` does.

    Raises:
      ValueError: As :func:`local_sgd` does, or if an optimizer is not an optax transformation.

    Example:
      >>> import optax
      >>> from jaxcomm.synchronization import diloco
      >>> outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
      >>> tx = diloco(optax.sgd(0.1, momentum=0.9), outer, period=50)

    References:
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023. Thérien et al., `MuLoCo
      <https://arxiv.org/abs/2505.23725>`_, 2025: with `optax.contrib.muon` as `inner`, and an
      `aggregator` of few bits with feedback.
    """
    require_transformation(inner, "inner")
    require_transformation(outer, "outer")
    return optax.chain(
        per_worker(inner, axis_name=axis_name),
        average_every(period, outer, aggregator=aggregator, axis_name=axis_name),
    )
