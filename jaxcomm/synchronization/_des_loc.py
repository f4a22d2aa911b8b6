"""DES-LOC: local steps whose parameters and moments are averaged in periods of their own."""

from collections.abc import Mapping

import optax

from jaxcomm._contract import AxisName
from jaxcomm._require import Positive, checked
from jaxcomm.synchronization._averaged_moments import averaged_moments
from jaxcomm.synchronization._exchange import Period
from jaxcomm.synchronization._local_sgd import local_sgd


@checked
def des_loc(
    inner: optax.GradientTransformation,
    period: Period,
    periods: Mapping[str, Positive],
    *,
    aggregator: optax.GradientTransformation | None = None,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    r"""Local steps that average parameters often, and each moment in a period of its own (DES-LOC).

    .. math:: x_i \gets \frac{1}{n} \sum_j x_j \text{ at every } K_x \text{-th step}, \qquad
              u_i \gets \frac{1}{n} \sum_j u_j \text{ at every } K_u \text{-th}, \qquad
              v_i \gets \frac{1}{n} \sum_j v_j \text{ at every } K_v \text{-th}

    An average of d coordinates sends :math:`2 (n - 1) / n` times `4 d` bytes and two float32, so
    with :math:`K_u = 3 K_x` and :math:`K_v = 6 K_x` half of what Local Adam sends. Non-finite steps
    are skipped, and 16-bit parameters are averaged, as in
    :func:`jaxcomm.synchronization.local_sgd`.

    Args:
      inner: Any optax optimizer.
      period: :math:`K_x`, as for :func:`jaxcomm.synchronization.local_sgd`.
      periods: The number of steps between averages of each floating-point field of the state of
        `inner`, such as `{"mu": 96, "nu": 96}` for Adam. Fields that are not named stay those of
        each worker.
      aggregator: As for :func:`jaxcomm.synchronization.local_sgd`; moments are averaged exactly.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      A complete optimizer, for parameters that differ by worker (:func:`jaxcomm.replicate`). If all
      fields have the period of the parameters, it is :func:`jaxcomm.synchronization.pr_sgd`.

    Raises:
      ValueError: As :func:`jaxcomm.synchronization.local_sgd` does; if a period is not a positive
        int; or, in `init`, if the state has no such field.

    Example:
      >>> import optax
      >>> from jaxcomm.synchronization import des_loc
      >>> tx = des_loc(optax.adam(0.001), 32, {"mu": 96, "nu": 96})

    References:
      Iacob et al., `DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation
      Models <https://arxiv.org/abs/2505.22549>`_, 2025.

    The paper has :math:`K_v = 2 K_u`. Where all gradients of a worker have been 0, as of a dead
    unit, so is its :math:`v_i`, and an average of :math:`u` alone makes it step by :math:`\bar u /
    \epsilon`. With Adam's :math:`\epsilon = 10^{-8}` this made a small network diverge, and
    :math:`K_v = K_u` or :math:`10^{-4}` did not.

    Differs from the paper: averages follow a step, where the paper's precede the next one, which is
    the same. Gradients are not clipped: place a clip in `inner`.
    """
    return optax.chain(
        averaged_moments(inner, periods, axis_name=axis_name),
        local_sgd(period, aggregator=aggregator, axis_name=axis_name),
    )
