"""FetchSGD: momentum and error feedback in sketches that are equal on all workers."""

from typing import Annotated, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis, _noise
from jaxcomm._contract import AxisName, Context, Memory
from jaxcomm._noise import following
from jaxcomm._require import Positive, Range, Share, checked
from jaxcomm.aggregation._coded import AggregatorOptions, coded_mean, takes_options
from jaxcomm.aggregation._exchange import (
    Exchanged,
    Part,
    all_finite,
    everywhere,
    sum_together,
)
from jaxcomm.compression._bits import require_countable
from jaxcomm.compression.sketches import count_sketch
from jaxcomm.compression.sketches._count_sketch import CountSketchPayload, Hashing
from jaxcomm.compression.sparsifiers._largest import largest
from jaxcomm.compression.sparsifiers._sparse import make_count, to_dense
from pallas_kernels import _hash


class FetchMemory(NamedTuple):
    """The memory of one unit, equal on all workers."""

    momentum: jax.Array  # float32[rows, columns]
    error: jax.Array  # float32[rows, columns]
    epoch: jax.Array  # uint32[], how often the hashes have changed
    since: jax.Array  # uint32[], the steps that changed this memory since then


@checked
@takes_options
def fetch_sgd(
    axis_name: AxisName = "data",
    *,
    sketch_ratio: float,
    rows: int = 5,
    ratio: Share | None = None,
    k: Positive | None = None,
    momentum: Annotated[float, Range(least=0, below=1)] = 0.9,
    momentum_masking: bool = True,
    reseed_every: Positive | None = 1000,
    hashing: Hashing | None = None,
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""FetchSGD: sums sketches of gradients; momentum and error feedback act on the sum.

    .. math:: S_u \gets \mu S_u + \tfrac{1}{n} \sum_i S(g_i), \qquad S_e \gets S_e + S_u, \qquad
              \bar x = \mathrm{top}_k\, U(S_e)

    :math:`S` is a count-sketch, and :math:`U` the median over its rows. Then the
    cells of :math:`S_e` where :math:`S(\bar x)` is nonzero become 0. With `momentum_masking`, the
    same cells of :math:`S_u` become 0. This transformation applies the momentum, so follow it with
    `optax.sgd` without momentum.

    The hashes must stay the same while the tables are added up, so coordinates that collide in most
    rows would do so forever. Therefore every `reseed_every` steps both tables move to new hashes
    :math:`S'`:

    .. math:: S_e \gets S'\big(\mathrm{top}_{c/4}\, U(S_e)\big), \qquad
              S_u \gets S'\big(\mathrm{top}_{c/4}\, U(S_u)\big)

    for :math:`c` columns. The noise of so many estimates has about a quarter of the energy that
    they do not hold. That energy, of the small coordinates, is lost in such a step. All workers do
    the same without communication.

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
      reseed_every: The number of steps with the same hashes; None never changes them. A step that
        is not finite does not count.
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
    paper's text subtracts :math:`S(\bar x)`. The paper keeps its hashes for the whole run.
    """
    kept = make_count(ratio, k)
    sketch = count_sketch(sketch_ratio=sketch_ratio, rows=rows, decode="median", hashing=hashing)

    def table_of(x: jax.Array, context: Context) -> jax.Array:
        without_memory = context.received().replace(shape=x.shape)
        table: jax.Array = sketch.encode(without_memory, x)[0].table
        return table

    def read(table: jax.Array, context: Context) -> jax.Array:
        return sketch.decode(context.received(), CountSketchPayload(table))

    def seeded(context: Context, epoch: jax.Array) -> Context:
        """The context with the hashes of an epoch: steps between which they change."""
        place = 2 * epoch + jnp.arange(2, dtype=jnp.uint32)
        words = _hash.bits(place, *_noise.seeds(context.keys.shared))
        return context.replace(keys=context.keys._replace(shared=_noise.key_of(words)))

    def moved(table: jax.Array, shape: tuple[int, ...], old: Context, new: Context) -> jax.Array:
        """The largest coordinates of a table in one with other hashes."""
        estimate = read(table, old).ravel()
        number = min(max(table.shape[1] // 4, 1), estimate.size)
        chosen = largest(estimate, number, jnp.abs)
        return table_of(to_dense(estimate[chosen], chosen, shape), new)

    def current(context: Context) -> tuple[Context, FetchMemory]:
        """The context with the hashes of this step, and the memory under them."""
        memory = context.memory.shared
        old = seeded(context, memory.epoch)
        if reseed_every is None:
            return old, memory
        due = memory.since >= reseed_every
        epoch = memory.epoch + due.astype(jnp.uint32)
        new = seeded(context, epoch)

        def move(tables: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            return tuple(moved(table, context.shape, old, new) for table in tables)

        tables = memory.momentum, memory.error
        velocity, error = lax.cond(due, move, lambda tables: tables, tables)
        return new, FetchMemory(velocity, error, epoch, jnp.where(due, 0, memory.since))

    def init(x: jax.Array) -> Memory:
        require_countable(x.size)
        like = jax.eval_shape(lambda x: table_of(x, Context.of(x)), x)
        empty = jnp.zeros(like.shape, like.dtype)
        return Memory((), FetchMemory(empty, empty, jnp.uint32(0), jnp.uint32(0)))

    def exchange(parts: list[Part]) -> Exchanged:
        workers = _axis.size(axis_name)
        finite = everywhere(axis_name, all_finite(part.x for part in parts))
        seeded_units = [current(part.context) for part in parts]
        tables = [
            table_of(part.x / workers, context)
            for part, (context, _) in zip(parts, seeded_units, strict=True)
        ]
        with jax.named_scope("tables"):
            totals = sum_together(axis_name, tables)
        results = []
        for part, (context, memory), total in zip(parts, seeded_units, totals, strict=True):
            x = part.x
            velocity = momentum * memory.momentum + total
            error = memory.error + velocity
            estimate = read(error, context).ravel()
            chosen = largest(estimate, kept(x.size), jnp.abs)
            update = to_dense(estimate[chosen], chosen, x.shape)
            hit = table_of(update, context) != 0
            masked = jnp.where(hit, 0, velocity) if momentum_masking else velocity
            after = FetchMemory(
                masked, jnp.where(hit, 0, error), memory.epoch, following(memory.since)
            )
            results.append(part._replace(memory=Memory((), after), mean=update))

        def sent() -> list[jax.Array]:
            return [
                read(table, context) * workers
                for table, (context, _) in zip(tables, seeded_units, strict=True)
            ]

        return Exchanged(results, finite, sent)

    unit_codec = sketch.replace(init=init)
    return coded_mean(axis_name, unit_codec, exchange, options, redraws=False)
