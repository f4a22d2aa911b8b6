"""FetchSGD: momentum and error feedback in sketches that are equal on all workers."""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis
from jaxcomm._base import AxisName, Context, Memory
from jaxcomm._require import checked
from jaxcomm.aggregation._agreement import all_finite, everywhere, sum_together
from jaxcomm.aggregation._coded import coded_mean
from jaxcomm.aggregation._exchange import Encoded, Exchanged, Part
from jaxcomm.aggregation._options import AggregatorOptions, takes_options
from jaxcomm.compression.feedback._momentum_correction import require_momentum
from jaxcomm.compression.sketches import count_sketch
from jaxcomm.compression.sketches._count_sketch import CountSketchPayload, Hashing
from jaxcomm.compression.sparsifiers._largest import largest
from jaxcomm.compression.sparsifiers._sparse import make_count, to_dense


class FetchMemory(NamedTuple):
    """The memory of one unit, equal on all workers."""

    momentum: jax.Array  # float32[rows, columns]
    error: jax.Array  # float32[rows, columns]


@checked()
@takes_options
def fetch_sgd(
    axis_name: AxisName = "data",
    *,
    sketch_ratio: float,
    rows: int = 5,
    ratio: float | None = None,
    k: int | None = None,
    momentum: float = 0.9,
    momentum_masking: bool = True,
    hashing: Hashing | None = None,
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""FetchSGD: sums sketches of gradients; momentum and error feedback act on the sum.

    .. math:: S_u \gets \mu S_u + \tfrac{1}{n} \sum_i S(g_i), \qquad S_e \gets S_e + S_u, \qquad
              \bar x = \mathrm{top}_k\, U(S_e)

    :math:`S` is a count-sketch with fixed hashes, and :math:`U` the median over its rows. Then the
    cells of :math:`S_e` where :math:`S(\bar x)` is nonzero become 0. With `momentum_masking`, the
    same cells of :math:`S_u` become 0. This transformation applies the momentum, so follow it with
    `optax.sgd` without momentum.

    The state is equal on all workers, so any worker may leave, return, or be replaced. The values
    in the update are estimates. A cell that is set to 0 loses the other coordinates that hash to
    it, so the table must be several times wider than :math:`k`. A worker sends :math:`2 (n-1)/n`
    times 4 bytes per cell, and 4 bytes for a flag that reports non-finite updates.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      sketch_ratio: Cells of the table per coordinate of a unit (a bucket or a leaf).
      rows: The number of rows of the table.
      ratio: :math:`k / d`, in (0, 1]; at least one coordinate is updated.
      k: The number :math:`k` itself, in place of `ratio`.
      momentum: :math:`\mu` in [0, 1).
      momentum_masking: Whether to set the cells of the momentum to 0 together with those of the
        error.
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
      >>> tx = jaxcomm.fetch_sgd(sketch_ratio=100, k=1, momentum=0.5, hashing="elements")
      >>> def two_steps(g):
      ...     first, state = tx.update(g, tx.init(g))
      ...     second, state = tx.update(g, state)
      ...     return first, second
      >>> train = jax.jit(jax.vmap(two_steps, axis_name="data"))
      >>> for update in train(jnp.array([[2.0, 3.0]])):
      ...     print(update)
      [[0. 3.]]
      [[5. 0.]]

    References:
      Rothchild et al., `FetchSGD: Communication-Efficient Federated Learning with Sketching
      <https://arxiv.org/abs/2007.07682>`_, 2020.

    Differs from the paper: the learning rate is applied after aggregation, so an error is scaled by
    the learning rate of the step that sends it. Cells are set to 0, as in the paper's code; the
    paper's text subtracts :math:`S(\bar x)`.
    """
    kept = make_count(ratio, k)
    require_momentum(momentum)
    sketch = count_sketch(sketch_ratio=sketch_ratio, rows=rows, decode="median", hashing=hashing)

    def table_of(x: jax.Array, context: Context) -> jax.Array:
        without_memory = context.received().replace(shape=x.shape)
        table: jax.Array = sketch.encode(without_memory, x)[0].table
        return table

    def read(table: jax.Array, context: Context) -> jax.Array:
        return sketch.decode(context.received(), CountSketchPayload(table))

    def init(x: jax.Array) -> Memory:
        like = jax.eval_shape(lambda x: table_of(x, Context.of(x)), x)
        empty = jnp.zeros(like.shape, like.dtype)
        return Memory((), FetchMemory(empty, empty))

    def exchange(parts: list[Part]) -> Exchanged:
        workers = _axis.size(axis_name)
        finite = everywhere(axis_name, all_finite(part.x for part in parts))
        tables = [table_of(x / workers, context) for _, context, x, _ in parts]
        units = []
        for (_, context, x, _), total in zip(parts, sum_together(axis_name, tables), strict=True):
            memory = context.memory.shared
            velocity = momentum * memory.momentum + total
            error = memory.error + velocity
            estimate = read(error, context).ravel()
            chosen = largest(estimate, kept(x.size), jnp.abs)
            update = to_dense(estimate[chosen], chosen, x.shape)
            hit = table_of(update, context) != 0
            masked = jnp.where(hit, 0, velocity) if momentum_masking else velocity
            after = Memory((), FetchMemory(masked, jnp.where(hit, 0, error)))
            units.append(Encoded(context, after, update))

        def sent() -> list[jax.Array]:
            return [
                read(table, part.context) * workers
                for table, part in zip(tables, parts, strict=True)
            ]

        return Exchanged(units, finite, sent)

    unit_codec = sketch._replace(init=init)
    return coded_mean(axis_name, unit_codec, exchange, options, redraws=False)
