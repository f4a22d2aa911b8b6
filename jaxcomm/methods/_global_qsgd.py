"""Unbiased quantization: Global-QSGD, dense and sparse, and QSGD."""

from typing import Literal, Unpack

import optax

from jaxcomm._contract import AxisName
from jaxcomm._require import checked
from jaxcomm.aggregation import all_gather_mean, all_reduce_mean, merged_mean, two_stage_mean
from jaxcomm.aggregation._coded import AggregatorOptions, takes_options
from jaxcomm.compression._overflow import Policy
from jaxcomm.compression.quantizers import dither, exponential_dither, sparse_dither

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
