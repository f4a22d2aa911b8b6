"""SlowMo: local SGD with momentum over exchanges."""

import optax

from jaxcomm._axis import names_itself
from jaxcomm._contract import AxisName
from jaxcomm.synchronization._exchange import Period, average_every


@names_itself
def slowmo(
    period: Period,
    *,
    slow_learning_rate: float = 1.0,
    momentum: float = 0.5,
    learning_rate: optax.ScalarOrSchedule = 1.0,
    aggregator: optax.GradientTransformation | None = None,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    r"""Local SGD with a slow momentum over exchanges (SlowMo).

    .. math:: u \gets \beta u + \frac{1}{\gamma} (a - \bar x), \qquad
              a \gets a - \alpha \gamma u, \qquad x_i \gets a

    Here :math:`\bar x` is the mean over workers, and :math:`a` the parameters after the last
    exchange. It sends the same messages as :func:`local_sgd`.

    Args:
      period: As for :func:`local_sgd`.
      slow_learning_rate: :math:`\alpha`.
      momentum: :math:`\beta` in [0, 1). With 0 and `slow_learning_rate=1`, the method is
        :func:`local_sgd`.
      learning_rate: :math:`\gamma` of the inner optimizer. A number, or a schedule of the number of
        exchanges. Dividing by it makes :math:`u` independent of the learning rate.
      aggregator: As for :func:`local_sgd`.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      A transformation as returned by :func:`local_sgd`. An exchange does not change the state of
      the inner optimizer.

    Raises:
      ValueError: As :func:`local_sgd` does, or if `momentum` is out of range.

    Example:
      >>> import optax
      >>> from jaxcomm.synchronization import slowmo
      >>> tx = optax.chain(optax.sgd(0.1), slowmo(period=12, momentum=0.5, learning_rate=0.1))

    References:
      Wang et al., `SlowMo <https://arxiv.org/abs/1910.00643>`_, 2019.
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"`momentum` must be in [0, 1), got {momentum!r}.")
    rate = learning_rate if callable(learning_rate) else lambda count: learning_rate
    slow = optax.chain(
        optax.scale_by_schedule(lambda count: 1 / rate(count)),
        optax.trace(momentum),
        optax.scale_by_schedule(lambda count: -slow_learning_rate * rate(count)),
    )
    return average_every(period, slow, aggregator=aggregator, axis_name=axis_name)
