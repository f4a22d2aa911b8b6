"""Low rank: PowerSGD, with error feedback and warm start, and ATOMO, which is unbiased."""

from typing import Any, Unpack

import jax
import optax

from jaxcomm._contract import AxisName, Codec
from jaxcomm._require import Positive, checked
from jaxcomm.aggregation import all_gather_mean, all_reduce_mean
from jaxcomm.aggregation._coded import AggregatorOptions, takes_options
from jaxcomm.aggregation._warmup import in_stages
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.low_rank import power_iteration, projection, spectral_sampling
from jaxcomm.compression.low_rank._power_iteration import Side


def require_leaves(options: AggregatorOptions) -> None:
    """Raises unless `scope` is `"leaf"`: a bucket is a vector, which low rank cannot compress."""
    if options.get("scope") not in (None, "leaf"):
        raise ValueError(
            f"`scope` must be 'leaf', got {options.get('scope')!r}: a bucket is no matrix."
        )


@checked
@takes_options
def power_sgd(
    axis_name: AxisName = "data",
    *,
    rank: int,
    drawn: Positive = 1,
    memory_rank: int | None = None,
    alternate: bool = False,
    factor_codec: Codec | None = None,
    decay: float | jax.Array = 1.0,
    residual_dtype: Any = "float32",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Sends two thin factors of each matrix, and adds the compression error to the next gradient.

    .. math:: A_i = X_i + \beta E_i, \qquad P = \sum_i A_i Q, \qquad
              B = \operatorname{orth}([P, R]), \qquad E_i' = A_i - B B^T A_i, \qquad
              \text{update } B \Big(\frac{1}{n} \sum_i A_i^T B\Big)^T

    :math:`X_i` is the gradient of a leaf on worker i, as a matrix of `rows * columns`: the last
    axis is the columns, and the other axes together are the rows. :math:`Q`, `columns * rank`, is
    the factor of the last step (warm start). It is equal on all workers. :math:`R` has `drawn`
    random columns, which all workers draw, so they are not sent.
    :func:`jaxcomm.compression.low_rank.power_iteration` explains the codec.

    A worker sends :math:`2 (n - 1) / n` times `4 (rank rows + (rank + drawn) columns)` bytes per
    matrix. Leaves of one axis, and leaves whose factors have as many numbers as the leaf, are sent
    exactly in the same messages. All leaves together take two all-reduces: one for the left
    factors, with a flag of 4 bytes that reports non-finite updates, and one for the right factors.
    Small leaves of equal shape share one batched orthogonalization.

    With `alternate=True` (ACP-SGD), one factor is sent per step, in one all-reduce:

    .. math:: t \text{ even: } B = \operatorname{orth}([Q, R]), \quad P = \frac{1}{n} \sum_i A_i B,
              \quad \text{update } P B^T, \quad E_i' = A_i - A_i B B^T

    .. math:: t \text{ odd: } B = \operatorname{orth}([P, R]), \quad Q = \frac{1}{n} \sum_i A_i^T B,
              \quad \text{update } B Q^T, \quad E_i' = A_i - B B^T A_i

    A worker then sends :math:`2 (n - 1) / n` times `4 (rank + drawn) rows` bytes per matrix in even
    steps, and `4 (rank + drawn) columns` in odd steps. Each basis is one step old.
    :func:`jaxcomm.compression.low_rank.projection` explains the codec. The largest stable learning
    rate is smaller than with two factors per step: about half, in a linear regression at ranks 1, 2
    and 4.

    With a `factor_codec` :math:`C`, workers send :math:`C(A_i B)` or :math:`C(A_i^T B)`. One small
    all-reduce of the statistics precedes, and leaves that are sent exactly may take another one.
    The residual includes the error of :math:`C`, so nothing is lost. `dither(bits=16)` halves the
    bytes of the factors. The bound on its error grows with the number of workers and the size of a
    factor, and must be below 1: for 1024 x 1024 with `rank=4`, 32 workers are accepted and 64 are
    not. `blockwise(dither(bits=16), 64)`, which sends 3 % more, is accepted up to 128 workers.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      rank: The number of columns of :math:`Q`, at least 1. Matrices with fewer rows or columns use
        fewer.
      drawn: The number of random columns, at least 1. They guarantee that the residual stays
        bounded.
      memory_rank: The number of columns of :math:`Q` that the state holds, at least `rank`, the
        default. With the same number, methods of different ranks can be the stages of
        :func:`jaxcomm.warmup`.
      alternate: Whether to send one factor per step, in turn. It cannot be combined with
        `memory_rank`.
      factor_codec: The codec of the factors, with `alternate=True`: a codec with `combine="sum"`,
        without memory. Default: factors are sent as float32.
      decay: :math:`\beta`, in (0, 1].
      residual_dtype: The dtype of :math:`E_i`: float32, or bfloat16 for half the memory.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`. `scope` must be `"leaf"`, the
        default.

    Returns:
      A transformation to place before the optimizer, with the guarantees of
      :func:`jaxcomm.all_reduce_mean`. Each worker keeps one residual per coordinate. All workers
      keep the same :math:`Q`.

    Raises:
      ValueError: If an option is out of range; in `update`, if the error of `factor_codec` may be 1
        or more, `axis_name` is not bound, or an update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.power_sgd(rank=1)
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> x = jnp.arange(1.0, 3.0)[:, None, None] * jnp.ones((2, 6, 4))  # Two matrices of rank 1.
      >>> means = jax.vmap(average, axis_name="data")(x)
      >>> bool(jnp.allclose(means, 1.5, atol=1e-5))
      True

    References:
      Vogels, Karimireddy, Jaggi, `PowerSGD <https://arxiv.org/abs/1905.13727>`_, 2019. Zhang et
      al., `ACP-SGD <https://arxiv.org/abs/2306.08881>`_, 2023.

    Differs from the paper: the random columns are new, and `columns` more numbers per matrix are
    sent for each of them. The residual is :math:`A_i` minus what worker i sent; the authors and
    PyTorch subtract the mean :math:`B (\frac{1}{n} \sum_j A_j^T B)^T`. Residuals then differ, but
    not their mean over workers, on which alone the updates depend. The orthogonalization uses
    Householder reflections, instead of Gram-Schmidt.
    """
    require_leaves(options)

    def aggregator(codec: Codec) -> optax.GradientTransformationExtraArgs:
        feedback = error_feedback(codec, decay=decay, residual_dtype=residual_dtype)
        return all_reduce_mean(feedback, axis_name=axis_name, **options)

    if not alternate:
        if factor_codec is not None:
            raise ValueError("`factor_codec` needs `alternate`=True: a step of a single factor.")
        return aggregator(power_iteration(rank, drawn=drawn, memory_rank=memory_rank))
    if memory_rank is not None:
        raise ValueError("`memory_rank` cannot be combined with `alternate`=True.")
    sides: tuple[Side, ...] = ("right", "left")
    stages = [
        aggregator(projection(rank, side, drawn=drawn, factor_codec=factor_codec)) for side in sides
    ]
    return in_stages(stages, lambda step: step % 2, "power_sgd", 2)


@checked
@takes_options
def atomo(
    axis_name: AxisName = "data",
    *,
    rank: int,
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Sends randomly drawn singular components of each matrix; unbiased.

    .. math:: X_i = \sum_j \sigma_j u_j v_j^T, \qquad
              Q(X_i) = \sum_{j \in S_i} \frac{\sigma_j}{p_j} u_j v_j^T, \qquad
              \text{update } \frac{1}{n} \sum_i Q(X_i)

    :math:`X_i` is the gradient of a leaf on worker i, as a matrix of `rows * columns`: the last
    axis is the columns, and the other axes together are the rows. :math:`S_i` has at most `rank`
    components, drawn with the probabilities :math:`p_j = \min(\lambda \sigma_j, 1)`.
    :func:`jaxcomm.compression.low_rank.spectral_sampling` explains the codec.

    A worker sends :math:`n - 1` times `4 rank (rows + columns)` bytes per matrix, and 4 bytes for a
    flag that reports non-finite updates. Leaves of one axis, and leaves whose factors have as many
    numbers as the leaf, are sent exactly in the same message. Each step computes the singular
    vectors of each matrix, which is slow for large matrices.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      rank: The number of components that are sent, at least 1; the sparsity budget of the paper.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`. `scope` must be `"leaf"`, the
        default.

    Returns:
      A transformation to place before the optimizer, with the guarantees of
      :func:`jaxcomm.all_gather_mean`.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound or an
        update is already summed.
      TypeError: If it is differentiated: the probabilities of the draw are integers.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.atomo(rank=1)
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> x = jnp.arange(1.0, 3.0)[:, None, None] * jnp.ones((2, 6, 4))  # Two matrices of rank 1.
      >>> means = jax.vmap(average, axis_name="data")(x)
      >>> bool(jnp.allclose(means, 1.5, atol=1e-5))
      True

    References:
      Wang et al., `ATOMO: Communication-efficient Learning via Atomic Sparsification
      <https://arxiv.org/abs/1806.04090>`_, 2018.

    Differs from the paper: systematic sampling draws the components, so the payload has a fixed
    size. Entry-wise ATOMO is :func:`jaxcomm.compression.sparsifiers.wangni`.
    """
    require_leaves(options)
    return all_gather_mean(spectral_sampling(rank), axis_name=axis_name, **options)
