"""SparseLoCo: DiLoCo whose exchanges send few coordinates, in 2 bits each."""

import optax

from jaxcomm._axis import names_itself
from jaxcomm._contract import AxisName
from jaxcomm.aggregation import all_gather_mean
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import coarse_top_k
from jaxcomm.synchronization._diloco import diloco
from jaxcomm.synchronization._exchange import Period


@names_itself
def sparseloco(
    inner: optax.GradientTransformation,
    period: Period = 30,
    *,
    k: int = 64,
    block_size: int = 4096,
    decay: float = 0.95,
    learning_rate: optax.ScalarOrSchedule = 1.0,
    axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
    r"""DiLoCo that sends the largest coordinates of each block in 2 bits, and keeps the rest.

    .. math:: e_i \gets \beta e_i + (a - x_i), \qquad m_i = C(e_i), \qquad e_i \gets e_i - m_i,
              \qquad a \gets a - \alpha \frac{1}{n} \sum_i m_i, \qquad x_i \gets a

    at every H-th step. C is :func:`jaxcomm.compression.sparsifiers.coarse_top_k`. What an exchange
    does not send is sent later, so the residual :math:`e_i` takes the place of an outer momentum.
    An exchange sends n - 1 times k values of 2 bits per block, k indices of about 8 bits, two
    float32 per block, and 12 bytes: for the defaults, 0.2 bits per coordinate and worker. From
    about 300 workers on this is more than a float32 all-reduce.

    Args:
      inner: Any optax optimizer, such as `optax.adamw`; its state differs by worker.
      period: H, as for :func:`local_sgd`.
      k: The number of coordinates of each block that are sent. The default is 1.6 %; the paper
        sends 1 to 3 %.
      block_size: Coordinates of a block.
      decay: :math:`\beta`, in (0, 1].
      learning_rate: :math:`\alpha`.
      axis_name: The mesh axis, or axes, of the workers.

    Returns:
      A complete optimizer, as from :func:`diloco`.

    Raises:
      ValueError: If an option is out of range. In `update`, as :func:`local_sgd` does.

    Example:
      >>> import optax
      >>> from jaxcomm.synchronization import sparseloco
      >>> tx = sparseloco(optax.adamw(4e-4))

    References:
      Sarfi et al., `Communication Efficient LLM Pre-training with SparseLoCo
      <https://arxiv.org/abs/2508.15706>`_, 2025. The defaults are the settings of Lidin et al.,
      `Covenant-72B <https://arxiv.org/abs/2603.08163>`_, 2026.

    Differs from the paper: see :func:`jaxcomm.compression.sparsifiers.coarse_top_k`. Code that the
    authors released before the paper divides the sum of a coordinate by the number of workers that
    sent it; the paper, and this function, divide by the number of all workers. For replicas
    with sharded parameters, compose :func:`diloco` with this aggregator in
    :func:`jaxcomm.shard_local`.
    """
    codec = error_feedback(coarse_top_k(k=k, block_size=block_size), decay=decay)
    return diloco(
        inner,
        optax.sgd(learning_rate),
        period,
        aggregator=all_gather_mean(codec, axis_name=axis_name),
        axis_name=axis_name,
    )
