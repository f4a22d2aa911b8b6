"""The largest coordinates of the mean, found in a sum of sketches and then fetched exactly."""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis
from jaxcomm._base import AxisName, Context, Diagnostics, Memory
from jaxcomm._require import checked
from jaxcomm.aggregation._agreement import all_finite, everywhere, sum_together
from jaxcomm.aggregation._coded import coded_mean
from jaxcomm.aggregation._exchange import Encoded, Exchanged, Part
from jaxcomm.aggregation._options import AggregatorOptions, takes_options
from jaxcomm.compression._means import headroom
from jaxcomm.compression.feedback._momentum_correction import require_momentum
from jaxcomm.compression.sketches import count_sketch
from jaxcomm.compression.sketches._count_sketch import Hashing
from jaxcomm.compression.sparsifiers._largest import largest
from jaxcomm.compression.sparsifiers._sparse import make_count, to_dense


class SketchedMemory(NamedTuple):
    """What a worker remembers of one unit."""

    velocity: jax.Array
    residual: jax.Array


@checked()
@takes_options
def sketched_sgd(
    axis_name: AxisName = "data",
    *,
    sketch_ratio: float,
    rows: int = 5,
    ratio: float | None = None,
    k: int | None = None,
    candidates: float = 4.0,
    momentum: float = 0.9,
    masking: bool = True,
    hashing: Hashing | None = None,
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Sketched SGD: sketches are added to find :math:`k` coordinates, whose values are then added.

    .. math:: u_i \gets \mu u_i + g_i, \qquad v_i \gets v_i + u_i, \qquad
              H = \mathrm{top}_{Pk}\, U\Big(\tfrac{1}{n} \sum_i S(v_i)\Big), \qquad
              \bar x = \mathrm{top}_k\, \tfrac{1}{n} \sum_i (v_i)_H

    with :math:`S` a count-sketch and :math:`U` its median of rows. On the support of
    :math:`\bar x`, :math:`v_i` becomes 0, and so does :math:`u_i` with `masking`. Momentum is
    gathered here: the optimizer behind is `optax.sgd` without it. Nothing is lost:
    :math:`\sum_i v_i` after a step, and :math:`n \bar x`, are :math:`\sum_i v_i` before it.

    Unlike :func:`jaxcomm.gtop_k` and a top-k of each worker, :math:`H` is of the sum: a coordinate
    that is small on each worker and large together is found. A worker sends :math:`2 (n-1)/n`
    times 4 bytes a cell and a candidate, and 4 for a flag.

    Args:
      axis_name: The mesh axis, or axes, that number the workers.
      sketch_ratio: Cells of the table for each coordinate of a unit.
      rows: Of the table.
      ratio: :math:`k / d`, in (0, 1]; at least one coordinate is sent.
      k: The number itself, in place of `ratio`.
      candidates: :math:`P`, at least 1: of so many for each that is kept values are fetched.
      momentum: :math:`\mu` in [0, 1).
      masking: Whether velocities become 0 where an update was made.
      hashing: As of :func:`jaxcomm.compression.sketches.count_sketch`. Default: `"tiles"` where
        the table is at most a tenth larger with them, else `"elements"`.
      **options: As :class:`AggregatorOptions` says.

    Returns:
      A transformation to place before the optimizer. Updates come back equal on all workers, with
      at most :math:`k` coordinates of a unit that are not 0; a non-finite coordinate on any worker
      makes them NaN on all, and changes no memory. `update(..., weight=w)` makes the mean a
      weighted one.

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

    Differs from the paper: the learning rate stands outside; candidates are the :math:`P k`
    largest estimates, as in the paper's experiments, and not those over a part of the norm; each
    worker forgets its own values of what was sent, where the analysis subtracts the mean.
    """
    kept = make_count(ratio, k)
    if not isinstance(candidates, int | float) or not candidates >= 1:
        raise ValueError(f"`candidates` must be a Python float of at least 1, got {candidates!r}.")
    require_momentum(momentum)
    sketch = count_sketch(ratio=sketch_ratio, rows=rows, decode="median", hashing=hashing)

    def init(x: jax.Array) -> Memory:
        return Memory(SketchedMemory(jnp.zeros_like(x), jnp.zeros_like(x)), ())

    def gathered(memory: Memory, x: jax.Array) -> SketchedMemory:
        velocity = momentum * memory.own.velocity + x
        return SketchedMemory(velocity, memory.own.residual + velocity)

    def exchange(parts: list[Part]) -> Exchanged:
        workers = _axis.size(axis_name)
        finite = everywhere(axis_name, all_finite(part.x for part in parts))
        scale = headroom(workers)
        both = [gathered(context.memory, x) for _, context, x, _ in parts]
        tables = [
            sketch.encode(part.context.received(), residual * scale)[0]
            for part, (_, residual) in zip(parts, both, strict=True)
        ]
        found = []
        for (_, context, x, _), total in zip(parts, sum_together(axis_name, tables), strict=True):
            estimate = sketch.decode(context.received(), total)
            wanted = min(round(candidates * kept(x.size)), x.size)
            found.append(largest(estimate.ravel(), wanted, jnp.abs))
        own = [
            residual.ravel()[where] * scale
            for (_, residual), where in zip(both, found, strict=True)
        ]
        units, sent = [], []
        for (_, context, x, _), (velocity, residual), where, exact in zip(
            parts, both, found, sum_together(axis_name, own), strict=True
        ):
            count = kept(x.size)
            best = largest(exact, count, jnp.abs)
            chosen = where[best]
            there = to_dense(jnp.ones(count), chosen, x.shape) != 0
            mean = to_dense(exact[best] * (1 / scale / workers), chosen, x.shape)
            left = SketchedMemory(
                jnp.where(there, 0, velocity) if masking else velocity,
                jnp.where(there, 0, residual),
            )
            units.append(Encoded(context, Memory(left, ()), mean))
            sent.append(jnp.where(there, residual, 0))
        return Exchanged(units, finite, lambda: sent)

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        return Diagnostics(target=gathered(context.memory, x).residual)

    of_units = sketch._replace(init=init, diagnose=diagnose)
    return coded_mean(axis_name, of_units, exchange, options)
