"""One block of consecutive coordinates per step: block coordinate descent."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _noise
from jaxcomm._contract import Claims, Codec, Context, Memory, PyTree
from jaxcomm._require import Positive, checked
from jaxcomm.compression._bits import ValuesPayload, require_countable
from jaxcomm.compression._means import headroom
from jaxcomm.compression.quantizers._dither import l2_norm

Order: TypeAlias = Literal["cyclic", "random", "gauss_southwell"]

SIGNS = 8
PATIENCE = 4  # Sweeps after which a block is sent whatever its norm.


class Turn(NamedTuple):
    """The block of the step in a cyclic order: the statistic, and the memory that workers share."""

    block: Any  # float32[]


class Projections(NamedTuple):
    """The statistics of the Gauss-Southwell order."""

    waiting: Any  # float32[blocks], the steps since each block was sent
    sums: Any  # float32[blocks, SIGNS], of the block's coordinates with random signs


class Waiting(NamedTuple):
    """The memory of the Gauss-Southwell order, which workers share."""

    steps: jax.Array  # int32[blocks], since each block was sent


class _Cut(NamedTuple):
    """How blocks are cut."""

    longer: int  # blocks that are longer by one coordinate
    size: int  # of the others
    capacity: int  # the coordinates of the largest block, the size of the payload


def _cut(size: int, blocks: int) -> _Cut:
    return _Cut(require_countable(size) % blocks, size // blocks, -(-size // blocks))


def _place(cut: _Cut, size: int, block: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The start of a slice of `capacity` coordinates, and which of them belong to the block."""
    first = block * cut.size + jnp.minimum(block, cut.longer)
    start = jnp.minimum(first, size - cut.capacity)  # The slice may begin before the last block.
    place = start + jnp.arange(cut.capacity, dtype=jnp.int32)
    end = first + cut.size + (block < cut.longer).astype(jnp.int32)
    return start, (place >= first) & (place < end)


def _projected(x: jax.Array, blocks: int, shared: jax.Array) -> jax.Array:
    """The sums of the blocks with random signs, float32[blocks, SIGNS]."""
    cut, flat, words = _cut(x.size, blocks), x.ravel(), _noise.bits(shared, (x.size,))
    split = cut.longer * (cut.size + 1)

    def sums(number: jax.Array) -> jax.Array:
        signed = jnp.where((words >> number) & 1 == 0, flat, -flat)
        longer = signed[:split].reshape(cut.longer, cut.size + 1)
        others = signed[split:].reshape(blocks - cut.longer, cut.size)
        return jnp.concatenate([jnp.sum(longer, axis=1), jnp.sum(others, axis=1)])

    return jax.vmap(sums, out_axes=1)(jnp.arange(SIGNS, dtype=jnp.uint32))


class _Rule(NamedTuple):
    """How workers agree on the block of a step; `chosen` is the same on all of them."""

    chosen: Callable[[Context], jax.Array]  # int32[]
    claims: Claims
    measure: Callable[[Context, jax.Array], PyTree] = lambda context, x: ()
    reduce_statistics: PyTree = ()
    init: Callable[[jax.Array], Memory] = lambda x: Memory()
    advance: Callable[[Context], Memory] = lambda context: context.memory


def _cyclic(blocks: int) -> _Rule:
    def advance(context: Context) -> Memory:
        (block,) = context.memory.shared
        return context.memory._replace(shared=Turn((block + 1) % blocks))

    return _Rule(
        chosen=lambda context: context.statistics.block.astype(jnp.int32),
        # All coordinates are sent exactly in every `blocks` steps.
        claims=Claims(bounded=True),
        # The state may be of more blocks.
        measure=lambda context, x: Turn((context.memory.shared.block % blocks).astype(jnp.float32)),
        reduce_statistics=Turn("equal"),
        init=lambda x: Memory(shared=Turn(jnp.zeros((), jnp.int32))),
        advance=advance,
    )


def _random(blocks: int) -> _Rule:
    def chosen(context: Context) -> jax.Array:
        (word,) = _noise.bits(context.keys.shared, (1,))
        return (word % jnp.uint32(blocks)).astype(jnp.int32)

    return _Rule(chosen, Claims(contraction=lambda size, workers: 1 / blocks))


def _gauss_southwell(blocks: int) -> _Rule:
    def measure(context: Context, x: jax.Array) -> Projections:
        sums = _projected(x, blocks, context.keys.shared) * headroom(context.workers)
        return Projections(context.memory.shared.steps.astype(jnp.float32), sums)

    def chosen(context: Context) -> jax.Array:
        waiting, sums = context.statistics
        largest, longest = jnp.argmax(jax.vmap(l2_norm)(sums)), jnp.argmax(waiting)
        block = jnp.where(jnp.max(waiting) >= PATIENCE * blocks, longest, largest)
        return block.astype(jnp.int32)

    def advance(context: Context) -> Memory:
        steps = (context.memory.shared.steps + 1).at[chosen(context)].set(0)
        return context.memory._replace(shared=Waiting(steps))

    return _Rule(
        chosen,
        # All coordinates are sent exactly in every (PATIENCE + 1) * blocks steps.
        claims=Claims(bounded=True),
        measure=measure,
        reduce_statistics=Projections("equal", "sum"),
        init=lambda x: Memory(shared=Waiting(jnp.zeros(blocks, jnp.int32))),
        advance=advance,
    )


_RULES: dict[str, Callable[[int], _Rule]] = {
    "cyclic": _cyclic,
    "random": _random,
    "gauss_southwell": _gauss_southwell,
}


@checked
def block_coordinate(blocks: Positive, order: Order = "cyclic") -> Codec:
    r"""One of :math:`B` blocks of consecutive coordinates per step, the same on all workers.

    .. math:: C(x)_j = \begin{cases} x_j & j \in S_b \\ 0 & \text{otherwise} \end{cases}, \qquad
              b^t = \begin{cases} t \bmod B & \text{cyclic} \\
              \text{uniform in } 0, \ldots, B - 1 & \text{random} \\
              \operatorname{argmax}_b \|\bar x_{S_b}\| & \text{Gauss-Southwell} \end{cases}

    The blocks :math:`S_0, \ldots, S_{B-1}` of a unit of :math:`d` coordinates are consecutive, and
    their sizes differ by at most one. By default a unit is a bucket of consecutive leaves, so that
    a block is a part of the tree. With `scope="leaf"` it is a leaf, and a block consists of whole
    rows if :math:`B` divides their number.

    Values are not scaled, as in coordinate descent. With plain SGD and a separable loss, a sweep of
    :math:`B` cyclic steps equals one step along the whole gradient. The update of other blocks is
    0, but momentum moves them. Without memory they are lost in this step; inside
    :func:`jaxcomm.compression.feedback.error_feedback` a later step sends them.

    A worker sends :math:`4 \lceil d / B \rceil` bytes, and no index: all workers know the block.
    Payloads of all workers can be added. For the Gauss-Southwell order, workers estimate the norms
    of blocks of the mean :math:`\bar x`: they add 8 sums of each block with random signs that all
    of them draw, and so send another :math:`32 B` bytes in the all-reduce of statistics. The
    estimate of a squared norm has a relative standard deviation of at most a half. A block that was
    not sent in :math:`4 B` steps is sent whatever its norm, so each is within :math:`5 B` steps.

    Args:
      blocks: :math:`B`, a Python int of at least 1. If it exceeds :math:`d`, some blocks are empty.
      order: `"cyclic"`, `"random"` (a new draw in each step), or `"gauss_southwell"` (the largest
        estimated norm of the mean).

    Returns:
      A biased codec for :func:`jaxcomm.all_reduce_mean`; `combine` is `"sum"`. If the order is
      random, it states the `contraction` 1 / B. Otherwise it is `bounded`, and keeps the next
      block, or the steps since each block was sent, as memory that workers share. Its derivative is
      that of the sent values, for the selection that it made.

    Raises:
      ValueError: If `blocks` is not a Python int of at least 1, or `order` has another value. In
        `update`, if the order is Gauss-Southwell and payloads are not added.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> from jaxcomm.compression.sparsifiers import block_coordinate
      >>> tx = jaxcomm.all_reduce_mean(block_coordinate(2))
      >>> def two_steps(g):
      ...     first, state = tx.update(g, tx.init(g))
      ...     second, state = tx.update(g, state)
      ...     return first, second
      >>> gradients = jnp.array([[2.0, 4.0, 6.0, 8.0], [0.0, 0.0, 0.0, 0.0]])
      >>> for update in jax.jit(jax.vmap(two_steps, axis_name="data"))(gradients):
      ...     print(update[0])
      [1. 2. 0. 0.]
      [0. 0. 3. 4.]

    References:
      Wright, `Coordinate Descent Algorithms <https://arxiv.org/abs/1502.04759>`_, 2015. Nutini et
      al., `Coordinate Descent Converges Faster with the Gauss-Southwell Rule Than Random Selection
      <https://arxiv.org/abs/1506.00552>`_, 2015. Nesterov, `Efficiency of Coordinate Descent
      Methods on Huge-Scale Optimization Problems <https://doi.org/10.1137/100802001>`_, 2012.

    Differs from the papers: the Gauss-Southwell rule there takes exact norms, and so needs the mean
    of all blocks. Norms of the workers' own gradients would not do: they do not vanish at the
    optimum if data differ.
    """
    rule = _RULES[order](blocks)

    def encode(context: Context, x: jax.Array) -> tuple[ValuesPayload, Memory]:
        cut = _cut(x.size, blocks)
        start, inside = _place(cut, x.size, rule.chosen(context))
        values = lax.dynamic_slice_in_dim(x.ravel(), start, cut.capacity)
        kept = jnp.where(inside, values.astype(jnp.float32) * headroom(context.workers), 0)
        return ValuesPayload(kept), context.memory

    def decode(context: Context, payload: ValuesPayload) -> jax.Array:
        size = math.prod(context.shape)
        start, _ = _place(_cut(size, blocks), size, rule.chosen(context))
        values = payload.values / (context.count * headroom(context.workers))
        zeros = jnp.zeros(size, jnp.float32)
        return lax.dynamic_update_slice_in_dim(zeros, values, start, 0).reshape(context.shape)

    def finalize(context: Context, payload: PyTree, mean: jax.Array) -> tuple[jax.Array, Memory]:
        if payload is None and order == "gauss_southwell":
            raise ValueError("`order`='gauss_southwell' needs an aggregator that adds payloads.")
        return mean, rule.advance(context)

    return Codec(
        encode=encode,
        decode=decode,
        init=rule.init,
        measure=rule.measure,
        reduce_statistics=rule.reduce_statistics,
        finalize=finalize,
        combine="sum",
        claims=rule.claims,
    )
