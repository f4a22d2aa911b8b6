"""Methods that round without a bias: Global-QSGD, QSGD, natural compression, TernGrad."""

from typing import Literal, Unpack

import optax

from jaxcomm._contract import AxisName
from jaxcomm._require import checked
from jaxcomm.aggregation import all_gather_mean, all_reduce_mean, merged_mean, two_stage_mean
from jaxcomm.aggregation._coded import AggregatorOptions, takes_options
from jaxcomm.compression._overflow import Policy
from jaxcomm.compression.quantizers import (
    dither,
    exponential_dither,
    natural,
    sparse_dither,
    ternary,
)

_AGGREGATORS = {"sum": all_reduce_mean, "tree": merged_mean, "two_stage": two_stage_mean}


@checked
@takes_options
def global_qsgd(
    axis_name: AxisName = "data",
    *,
    levels: int | None = None,
    bits: int | None = None,
    norm: Literal["max", "l2"] = "max",
    dithering: Literal["uniform", "exponential"] = "uniform",
    reduce: Literal["sum", "tree", "two_stage"] | None = None,
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Global-QSGD: the mean of updates, stochastically rounded to levels of one global norm.

    .. math:: G(x) = \frac{\|x\|}{n s} \sum_{i=1}^n
              \left\lfloor \frac{s\, x_i}{\|x\|} + u_i \right\rfloor,
              \qquad \mathbb{E}\, G(x) = \bar x

    with :math:`s` levels and one norm over all :math:`n` workers. The error is bounded by

    .. math:: \mathbb{E}\|G(x) - \bar x\|^2 \le \frac{\theta}{n} \sum_i \|x_i\|^2, \qquad
              \theta = \min\left(\frac{d}{s^2}, \frac{\sqrt{d / n}}{s}\right).

    The estimate is unbiased and needs no error feedback. Codes of all workers share the same
    levels, so an ordinary all-reduce adds them.

    A worker sends :math:`2 (n-1)/n` times :math:`32 / \lfloor 32 / b \rfloor` bits per coordinate,
    in fields of :math:`b` bits with :math:`2 n s < 2^b`. At the default of 15 levels this is 1 byte
    for 3 to 8 workers, less for 1 or 2, 32/3 bits up to 34 workers and 2 bytes up to 2184. A small
    all-reduce adds 4 bytes per bucket (12 with `norm="l2"`) and 4 bytes for a flag that reports
    non-finite updates. Sums cannot overflow, whatever the input.

    With `dithering="exponential"`, levels are the norm times powers of two. A code has 8 bits for
    any number of workers, and sums are rounded again to powers of two. `reduce="tree"` adds codes
    in a tree; the second moment grows by at most 9/8 at each of :math:`1 + \lceil \log_2 n \rceil`
    roundings. `reduce="two_stage"` computes one float32 sum between two roundings, with a separate
    norm for each row.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      levels: :math:`s`, a Python int. Default: 15, or the largest number for which `bits` holds
        the sum.
      bits: The width of a field in bits, 2 to 16 or 32. Default: the cheapest width that holds the
        sum. Widths 7, 9 and 11 to 15 cost as much as 8, 10 and 16. Without `levels`, 8 bits are 15
        levels for 8 workers, 1 for 64 to 127, and an error for more. From 11 workers on,
        :func:`jaxcomm.two_stage_mean` or 16 bits are better: "What bits mean" in docs/methods.md.
      norm: `"max"`, the largest magnitude on any worker, or `"l2"`, the norm of all workers'
        vectors together. The l2 norm must itself be below the largest float32.
      dithering: `"uniform"` or `"exponential"` levels. Exponential levels have 8 bits and the max
        norm, and accept no `levels` and no other `bits` or `norm`.
      reduce: `"sum"`, `"tree"` or `"two_stage"`. Default: `"sum"` for uniform levels, `"tree"` for
        exponential levels.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`. With `diagnostics`, the state's
        field `diagnostics` holds float32 scalars, which :func:`jaxcomm.make_step` copies into its
        metrics: `compression_error`, the squared error of a worker's decoded payload over the
        squared norm of its input, as a mean over workers; `density`, the nonzero fraction of that
        payload, as a mean over workers; `residual_norm`, the root mean square over workers of the
        l2 norm of their memory; and `levels`, if the codec has levels. This adds an all-reduce of
        12 bytes.

    Returns:
      A transformation to place before the optimizer. Updates are equal on all workers and keep
      their shape and dtype. A non-finite coordinate on any worker makes them NaN on all workers.
      `update(..., weight=w)` computes a weighted mean.

    Raises:
      ValueError: If an option is out of range; in `update`, if `bits` cannot hold the sum over the
        workers, if `axis_name` is not bound, or if an update is already summed.
      TypeError: If an update is differentiated: rounding has no derivative.

    Warns:
      UserWarning: In `update`, if `bits` leaves fewer than 4 levels for this number of workers.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxcomm
      >>> tx = optax.chain(jaxcomm.global_qsgd(levels=2), optax.sgd(1.0))
      >>> update = lambda g: tx.update(g, tx.init(g))[0]
      >>> print(jax.vmap(update, axis_name="data")(jnp.array([[3.0, 0.0], [1.5, 3.0]])))
      [[-2.25 -1.5 ]
       [-2.25 -1.5 ]]

    References:
      Xin et al., `Global-QSGD: Allreduce-Compatible Quantization for Distributed Learning with
      Theoretical Guarantees <https://arxiv.org/abs/2305.18627>`_, 2023.

    Differs from the paper: this method sends dense codes, so it does not realize the saving from
    sparse codes that the paper's ratio counts; :func:`sparse_global_qsgd` does. Differs from the
    released code: levels are rounded down so that the sum of all workers' codes fits, whereas the
    code's 127/n levels may wrap. Exponential codes work for any number of workers.
    """
    if dithering == "uniform":
        return _AGGREGATORS[reduce or "sum"](
            dither(levels=levels, bits=bits, norm=norm), axis_name=axis_name, **options
        )
    if levels is not None or bits not in (None, 8) or norm != "max":
        raise ValueError(
            "`dithering`='exponential' accepts no `levels`, only 8 `bits` and the max `norm`, got "
            f"{levels=}, {bits=}, {norm=}."
        )
    return _AGGREGATORS[reduce or "tree"](exponential_dither(), axis_name=axis_name, **options)


@checked
@takes_options
def qsgd(
    axis_name: AxisName = "data",
    *,
    levels: int | None = None,
    bits: int = 8,
    norm: Literal["max", "l2"] = "max",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""QSGD: each worker rounds to levels of its own norm; all workers gather and average.

    .. math:: \frac{1}{n} \sum_{i=1}^n \frac{\|x_i\|}{s}
              \left\lfloor \frac{s\, x_i}{\|x_i\|} + u_i \right\rfloor

    The estimate is unbiased. Its variance is at most :math:`\frac{\omega}{n^2} \sum_i \|x_i\|^2`
    with :math:`\omega = \min(d / s^2, \sqrt d / s)`. Codes with different norms cannot be summed,
    so workers gather them. A worker sends :math:`n - 1` bytes per coordinate at 8 bits, whereas a
    float32 all-reduce sends :math:`8 (n-1)/n`. From 8 workers on this saves nothing; use
    :func:`global_qsgd` there.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      levels: :math:`s`, a Python int. Default: the largest number that `bits` holds, 127 at 8.
      bits: The width of a field, 2 to 16 or 32.
      norm: `"max"` or `"l2"`, the norm of each unit (bucket or leaf) of one worker.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`.

    Returns:
      A transformation to place before the optimizer, with the guarantees of :func:`global_qsgd`.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound or an
        update is already summed.
      TypeError: If an update is differentiated: rounding has no derivative.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.qsgd()
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> print(jax.vmap(average, axis_name="data")(jnp.array([1.0, 2.0, 6.0])))
      [3. 3. 3.]

    References:
      Alistarh et al., `QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding
      <https://arxiv.org/abs/1610.02132>`_, 2017.

    Differs from the paper: the default norm is the max norm, which is common in practice. Codes
    have a fixed width and no Elias coding. A bucket or leaf shares one norm, instead of 512
    coordinates.
    """
    return all_gather_mean(
        dither(levels=levels, bits=bits, norm=norm),
        axis_name=axis_name,
        **options,
    )


@checked
@takes_options
def sparse_global_qsgd(
    axis_name: AxisName = "data",
    *,
    capacity: int,
    levels: int = 1,
    norm: Literal["max", "l2"] = "l2",
    overflow: Policy = "nan",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Sparse Global-QSGD: few levels of one global norm; workers gather only the nonzeros.

    With :math:`s` levels of the l2 norm, all workers together have at most
    :math:`s (s + \sqrt{n d})` nonzeros in expectation, whereas QSGD has :math:`n s (s + \sqrt d)`.
    This saves a factor of :math:`\sqrt n`; the variance grows by at most the same factor.

    A worker sends :math:`n - 1` times `capacity` entries, each with a code and an index of 16 or 32
    bits. A small all-reduce computes the norm over all workers.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      capacity: The largest number of nonzeros of one unit (bucket or leaf) of one worker, a Python
        int. More nonzeros make the update NaN, since dropping some of them adds bias. The expected
        number is at most :math:`s (s + \sqrt{n d}) / n`. Add several standard deviations, and more
        if some workers have larger updates. The standard deviation is about the square root of the
        expected number.
      levels: :math:`s`, a Python int.
      norm: `"l2"`, or `"max"`, which has many more nonzeros.
      overflow: What happens to more nonzeros than `capacity`: `"nan"` makes the update NaN,
        `"drop"` drops the nonzeros that do not fit.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`.

    Returns:
      A transformation to place before the optimizer, with the guarantees of :func:`global_qsgd`.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound or an
        update is already summed.
      TypeError: If an update is differentiated: rounding has no derivative.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.sparse_global_qsgd(capacity=1, norm="max")
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> print(jax.vmap(average, axis_name="data")(jnp.array([[4.0, 0.0], [0.0, 4.0]])))
      [[2. 2.]
       [2. 2.]]

    References:
      Xin et al., `Global-QSGD: Allreduce-Compatible Quantization for Distributed Learning with
      Theoretical Guarantees <https://arxiv.org/abs/2305.18627>`_, 2023, which designs this form
      and does not evaluate it.

    Differs from the paper: the capacity is fixed at trace time, as XLA requires.
    """
    return all_gather_mean(
        sparse_dither(levels=levels, capacity=capacity, norm=norm, overflow=overflow),
        share_statistics=True,
        axis_name=axis_name,
        **options,
    )


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


_OF_SCALES = {"own": all_gather_mean, "shared": all_reduce_mean}


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
    return _OF_SCALES[scale](ternary(clip=clip), axis_name=axis_name, **options)
