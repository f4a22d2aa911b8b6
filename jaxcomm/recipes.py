"""Methods under their papers' names, each a composition of a codec and an aggregator."""

from typing import Literal

import jax
import optax

from jaxcomm._base import AxisName
from jaxcomm._buckets import Scope
from jaxcomm.aggregation import gathered_mean, summed_mean
from jaxcomm.compression.quantizers import dither


def global_qsgd(
    axis_name: AxisName = "data",
    *,
    levels: int | None = None,
    bits: int | None = None,
    norm: Literal["max", "l2"] = "max",
    scope: Scope = "bucket",
    bucket_bytes: int | None = None,
    seed: int = 0,
    key: jax.Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Global-QSGD: the mean of updates, rounded without bias to levels of a norm of all workers.

    .. math:: G(x) = \frac{\|x\|}{n s} \sum_{i=1}^n
              \left\lfloor \frac{s\, x_i}{\|x\|} + u_i \right\rfloor,
              \qquad \mathbb{E}\, G(x) = \bar x

    with :math:`s` levels and one norm over all :math:`n` workers, and

    .. math:: \mathbb{E}\|G(x) - \bar x\|^2 \le \frac{\theta}{n} \sum_i \|x_i\|^2, \qquad
              \theta = \min\left(\frac{d}{s^2}, \frac{\sqrt{d / n}}{s}\right).

    Unbiased, so that no error feedback is needed, and codes of different workers share their
    levels, so that an ordinary all-reduce adds them.

    A worker sends :math:`2 (n-1)/n` times the width of a code a coordinate: 1 byte up to 8 workers
    at the default of 15 levels, 2 up to 2184, then 4; besides, in one small all-reduce, 4 bytes a
    bucket (12 with `norm="l2"`) and 4 for a flag. Sums cannot overflow, whatever the input.

    Args:
      axis_name: The mesh axis, or axes, that number the workers.
      levels: :math:`s`, a Python int. Default: 15, or the most that `bits` holds for the sum.
      bits: Width of a code on the wire, 8, 16 or 32. Default: the narrowest that holds the sum.
      norm: `"max"`, the largest magnitude on any worker, or `"l2"`, the norm of all workers'
        vectors together. The l2 norm must itself be below the largest float32.
      scope: What shares a norm: a `"leaf"`, a `"bucket"` of leaves, or the whole `"tree"`.
      bucket_bytes: The most float32 bytes joined in a bucket. Default: 32 MiB.
      seed: Seed of the rounding; may be traced.
      key: A typed threefry key, in place of `seed`.

    Returns:
      A transformation to place before the optimizer. Updates come back equal on all workers, in
      their shape and dtype; a non-finite coordinate on any worker makes them NaN on all.
      `update(..., weight=w)` makes the mean a weighted one.

    Raises:
      ValueError: If an option is out of range; in `update`, if `bits` cannot hold the sum over the
        workers there are, if `axis_name` is not bound, or if an update is already summed.

    Warns:
      UserWarning: In `update`, if `bits` leaves fewer than 4 levels for the workers there are.

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

    Differs from the paper: the dense wire only, so the saving by sparse codes that the paper's
    ratio counts is not realised. Differs from its released code: levels are rounded down such that
    the sum of all workers' codes fits, where the code's 127/n levels may wrap around.
    """
    return summed_mean(
        axis_name,
        dither(levels=levels, bits=bits, norm=norm),
        scope=scope,
        bucket_bytes=bucket_bytes,
        seed=seed,
        key=key,
    )


def qsgd(
    axis_name: AxisName = "data",
    *,
    levels: int | None = None,
    bits: int = 8,
    norm: Literal["max", "l2"] = "max",
    scope: Scope = "bucket",
    bucket_bytes: int | None = None,
    seed: int = 0,
    key: jax.Array | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""QSGD: each worker rounds to levels of its own norm; codes are gathered and averaged.

    .. math:: \frac{1}{n} \sum_{i=1}^n \frac{\|x_i\|}{s}
              \left\lfloor \frac{s\, x_i}{\|x_i\|} + u_i \right\rfloor

    Unbiased. The variance is at most :math:`\frac{\omega}{n^2} \sum_i \|x_i\|^2` with
    :math:`\omega = \min(d / s^2, \sqrt d / s)`. Codes of unlike levels cannot be summed: a worker
    sends :math:`n - 1` bytes a coordinate at 8 bits, where a float32 all-reduce sends :math:`8
    (n-1)/n`. From 8 workers on this saves nothing; :func:`global_qsgd` does.

    Args:
      axis_name: The mesh axis, or axes, that number the workers.
      levels: :math:`s`, a Python int. Default: the most that `bits` holds, 127 at 8.
      bits: Width of a code on the wire, 8, 16 or 32.
      norm: `"max"` or `"l2"` of the worker's own unit.
      scope: What shares a norm: a `"leaf"`, a `"bucket"` of leaves, or the whole `"tree"`.
      bucket_bytes: The most float32 bytes joined in a bucket. Default: 32 MiB.
      seed: Seed of the rounding; may be traced.
      key: A typed threefry key, in place of `seed`.

    Returns:
      A transformation to place before the optimizer, with the guarantees of :func:`global_qsgd`.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound, or an
        update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.qsgd()
      >>> average = lambda x: tx.update(x, tx.init(x))[0]
      >>> print(jax.vmap(average, axis_name="data")(jnp.array([1.0, 2.0, 6.0])))
      [3. 3. 3.]

    References:
      Alistarh et al., `QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding
      <https://arxiv.org/abs/1610.02132>`_, 2017.

    Differs from the paper: the default norm is the max norm, as practice has it; codes have a fixed
    width and no Elias coding; a norm is shared by a bucket or leaf, not by 512 coordinates.
    """
    return gathered_mean(
        axis_name,
        dither(levels=levels, bits=bits, norm=norm),
        scope=scope,
        bucket_bytes=bucket_bytes,
        seed=seed,
        key=key,
    )
