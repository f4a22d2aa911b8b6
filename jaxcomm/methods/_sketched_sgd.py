"""Sketched SGD: finds the largest coordinates of the mean by sketches, then sums them exactly."""

from typing import Annotated, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis
from jaxcomm._contract import AxisName, Context, Diagnostics, Memory
from jaxcomm._require import Positive, Range, Share, checked
from jaxcomm.aggregation._coded import AggregatorOptions, coded_mean, takes_options
from jaxcomm.aggregation._exchange import (
    Exchanged,
    Part,
    all_finite,
    everywhere,
    sum_together,
)
from jaxcomm.compression._means import headroom
from jaxcomm.compression.sketches import count_sketch
from jaxcomm.compression.sketches._count_sketch import Hashing
from jaxcomm.compression.sparsifiers._largest import largest
from jaxcomm.compression.sparsifiers._sparse import make_count, to_dense


class SketchedMemory(NamedTuple):
    """The memory of one unit, different on each worker."""

    velocity: jax.Array
    residual: jax.Array


@checked
@takes_options
def sketched_sgd(
    axis_name: AxisName = "data",
    *,
    sketch_ratio: float,
    rows: int = 5,
    ratio: Share | None = None,
    k: Positive | None = None,
    candidates: Annotated[float, Range(least=1)] = 4.0,
    momentum: Annotated[float, Range(least=0, below=1)] = 0.9,
    momentum_masking: bool = True,
    hashing: Hashing | None = None,
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Sketched SGD: sums sketches to find :math:`k` coordinates, then sums their exact values.

    .. math:: u_i \gets \mu u_i + g_i, \qquad v_i \gets v_i + u_i, \qquad
              H = \mathrm{top}_{Pk}\, U\Big(\tfrac{1}{n} \sum_i S(v_i)\Big), \qquad
              \bar x = \mathrm{top}_k\, \tfrac{1}{n} \sum_i (v_i)_H

    :math:`S` is a count-sketch, and :math:`U` the median over its rows. On the support of
    :math:`\bar x`, :math:`v_i` becomes 0, and with `momentum_masking` so does :math:`u_i`. This
    transformation applies the momentum, so follow it with `optax.sgd` without momentum. Nothing is
    lost: :math:`\sum_i v_i` after a step plus :math:`n \bar x` equals :math:`\sum_i v_i` before it.

    Unlike :func:`jaxcomm.gtop_k` and a top-k of each worker, :math:`H` depends on the sum. It
    therefore includes a coordinate that is small on each worker but large in the sum. A worker
    sends :math:`2 (n-1)/n` times 4 bytes per cell and per candidate, and 4 bytes for a flag that
    reports non-finite updates.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      sketch_ratio: Cells of the table per coordinate of a unit (a bucket or a leaf).
      rows: The number of rows of the table.
      ratio: :math:`k / d`, in (0, 1]; at least one coordinate is sent.
      k: The number :math:`k` itself, in place of `ratio`.
      candidates: :math:`P`, at least 1: the number of exact values to sum per coordinate of the
        update.
      momentum: :math:`\mu` in [0, 1).
      momentum_masking: Whether to set the velocity to 0 where the update is nonzero.
      hashing: See :func:`jaxcomm.compression.sketches.count_sketch`. Default: `"tiles"` if they
        enlarge the table by at most a tenth, else `"elements"`.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`.

    Returns:
      A transformation to place before the optimizer. Updates are equal on all workers, with at most
      :math:`k` nonzero coordinates per unit. A non-finite coordinate on any worker makes them NaN
      on all workers, and changes no memory. `update(..., weight=w)` computes a weighted mean.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound or an
        update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.sketched_sgd(sketch_ratio=10, k=1, hashing="elements")
      >>> average = jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data")
      >>> print(jax.jit(average)(jnp.array([[4.0, 3.0, 0.0], [0.0, 3.0, 4.0]])))
      [[0. 3. 0.]
       [0. 3. 0.]]

    References:
      Ivkin et al., `Communication-efficient Distributed SGD with Sketching
      <https://arxiv.org/abs/1903.04488>`_, 2019.

    Differs from the paper: the learning rate is applied after aggregation. Candidates are the
    :math:`P k` largest estimates, as in the paper's experiments, and not those above a fraction of
    the norm. Each worker sets its own values of sent coordinates to 0; the paper's analysis
    subtracts the mean.
    """
    kept = make_count(ratio, k)
    sketch = count_sketch(sketch_ratio=sketch_ratio, rows=rows, decode="median", hashing=hashing)

    def init(x: jax.Array) -> Memory:
        return Memory(SketchedMemory(jnp.zeros_like(x), jnp.zeros_like(x)), ())

    def accumulated(memory: Memory, x: jax.Array) -> SketchedMemory:
        velocity = momentum * memory.own.velocity + x
        return SketchedMemory(velocity, memory.own.residual + velocity)

    def exchange(parts: list[Part]) -> Exchanged:
        workers = _axis.size(axis_name)
        finite = everywhere(axis_name, all_finite(part.x for part in parts))
        scale = headroom(workers)
        memories = [accumulated(part.context.memory, part.x) for part in parts]
        tables = [
            sketch.encode(part.context.received(), residual * scale)[0]
            for part, (_, residual) in zip(parts, memories, strict=True)
        ]
        with jax.named_scope("tables"):
            totals = sum_together(axis_name, tables)
        candidates_of = []
        for part, total in zip(parts, totals, strict=True):
            estimate = sketch.decode(part.context.received(), total)
            size = part.x.size
            number = min(round(candidates * kept(size)), size)
            candidates_of.append(largest(estimate.ravel(), number, jnp.abs))
        own = [
            residual.ravel()[where] * scale
            for (_, residual), where in zip(memories, candidates_of, strict=True)
        ]
        with jax.named_scope("candidates"):
            exact_sums = sum_together(axis_name, own)
        results, sent = [], []
        for part, (velocity, residual), where, exact in zip(
            parts, memories, candidates_of, exact_sums, strict=True
        ):
            x, count = part.x, kept(part.x.size)
            best = largest(exact, count, jnp.abs)
            chosen = where[best]
            support = to_dense(jnp.ones(count, jnp.float32), chosen, x.shape) != 0
            mean = to_dense(exact[best] * (1 / scale / workers), chosen, x.shape)
            after = SketchedMemory(
                jnp.where(support, 0, velocity) if momentum_masking else velocity,
                jnp.where(support, 0, residual),
            )
            results.append(part._replace(memory=Memory(after), mean=mean))
            sent.append(jnp.where(support, residual, 0))
        return Exchanged(results, finite, lambda: sent)

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        return Diagnostics(target=accumulated(context.memory, x).residual)

    unit_codec = sketch.replace(init=init, diagnose=diagnose)
    return coded_mean(axis_name, unit_codec, exchange, options)
