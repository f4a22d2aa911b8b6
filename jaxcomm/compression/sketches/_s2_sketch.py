"""S2 Reducer's codec: a bitmap of what is not zero, and a count-sketch of the values."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jaxcomm import _axis
from jaxcomm._base import Codec, Coins, Memory, no_memory, settled
from jaxcomm.compression import _support
from jaxcomm.compression._overflow import Policy, choose_form, decoded_to_nan
from jaxcomm.compression._support import Granularity
from jaxcomm.compression.sketches._cells import (
    S2Payload,
    S2Statistics,
    Sketch,
    add,
    cells_of,
    estimate,
    make_sketch,
)
from jaxcomm.compression.sketches._peeling import peel, unpeeled

Decode = Literal["mean", "median", "peel"]


def _estimate(
    sketch: Sketch, public: jax.Array, table: jax.Array, chosen: jax.Array, how: str
) -> jax.Array:
    """The coordinates of the chosen parts: estimated; or those that peel, and then the others."""
    cells = cells_of(sketch, public, chosen)
    if how != "peel":
        return estimate(table, cells, how)
    peeled = peel(table, *cells, _support.real(chosen, sketch.parts))
    return jnp.where(peeled.solved, peeled.values, estimate(peeled.rest, cells, "mean"))


def s2_sketch(
    *,
    density: float,
    ratio: float,
    rows: int = 1,
    granularity: Granularity = "row",
    decode: Decode = "mean",
    overflow: Policy = "nan",
) -> Codec:
    r"""The coordinates of the union of all workers' supports, in a count-sketch.

    .. math:: U = \bigcup_i \operatorname{supp}(x_i), \qquad
              S_{rj} = \sum_{t \in U : h_r(t) = j} \sigma_r(t) x_t, \qquad
              \hat x_t = \begin{cases} \operatorname{mean}_r \sigma_r(t) S_{r h_r(t)} & t \in U \\
              0 & \text{otherwise} \end{cases}

    with hashes that all workers draw alike, and anew in each step. Workers agree on a bitmap of
    :math:`U` before they encode, and tables are added. See :func:`jaxcomm.s2_reducer`.

    More coordinates than are foreseen make the update NaN, but under feedback, or where they are
    to be dropped: as many parts in a row as are foreseen are sent then, from a random one.

    Args:
      density: :math:`|U| / d` as it is foreseen, in (0, 1].
      ratio: Cells of the table for each coordinate that is foreseen: each row has `ceil(ratio *
        density * d / rows)` columns.
      rows: Of the table.
      granularity: What has one bit in the bitmap: a `"row"` (all but the first axis), an
        `"element"`, or a block of so many coordinates. :math:`U` is a union of these.
      decode: `"mean"` or `"median"` of the rows' estimates; or `"peel"`, which solves for the
        values, and estimates those it cannot solve for.
      overflow: Without feedback, of more coordinates than are foreseen: `"nan"`, or `"drop"` to
        lose those that have no room.

    Returns:
      A codec. Its payload is a float32 table; its statistic is the bitmap, which workers combine by
      `"or"`. `combine` is `"sum"`. But for the median, of which no bound is known, it is unbiased
      and states its `variance`, :math:`(K - 1)/c` for :math:`c` cells in all and the :math:`K`
      coordinates foreseen. Under feedback, :math:`U` is of what is left out as well, be it by
      rounding: every part that was ever touched, in the end.

    Raises:
      ValueError: If an option is out of range; when encoding, if `granularity` is `"row"` and the
        unit has one axis.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm import Coins
      >>> from jaxcomm.compression.sketches import s2_sketch
      >>> codec = s2_sketch(density=0.5, ratio=2, rows=3, decode="peel")
      >>> coins = Coins(jax.random.key(0), jax.random.key(1))
      >>> x = jnp.zeros((8, 4)).at[3].set(jnp.arange(4.0)).at[6].set(5.0)
      >>> agreed = codec.measure(coins, codec.init(x), x)
      >>> payload, _ = codec.encode(coins, codec.init(x), x, agreed, 1)
      >>> agreed.support.shape, payload.table.shape
      ((1,), (3, 11))
      >>> bool(jnp.allclose(codec.decode(coins.public, payload, agreed, 1, 1, x.shape), x))
      True

    References:
      Ge et al., `S2 Reducer: High-Performance Sparse Communication to Accelerate Distributed Deep
      Learning <https://arxiv.org/abs/2110.02140>`_, 2021.
    """
    sketch_of = make_sketch(density, ratio, rows, granularity)
    if decode not in get_args(Decode):
        raise ValueError(f"`decode` must be one of {get_args(Decode)}, got {decode!r}.")
    if decode == "peel" and rows < 2:
        raise ValueError(
            f"`decode`='peel' needs `rows` of 2 or more, best 3, got {rows}: in a single row, what "
            "collides is never alone."
        )

    def measure(coins: Coins, memory: Memory, x: jax.Array) -> S2Statistics:
        del coins, memory
        return S2Statistics(_support.bitmap(x, _support.parts_of(x.shape, granularity)), ())

    def encode(
        coins: Coins, memory: Memory, x: jax.Array, agreed: S2Statistics, workers: int
    ) -> tuple[S2Payload, Memory]:
        sketch = sketch_of(x.shape)
        if not x.size:
            return S2Payload(_axis.varying_like(jnp.zeros((rows, 0)), x)), memory

        chosen = _support.window(agreed.support, coins.public, sketch.room, sketch.parts)
        # So that what workers add stays finite; powers of 2 lose nothing.
        values = _support.take(x, chosen, sketch.parts) * 2.0 ** -(workers - 1).bit_length()
        table = add(jnp.zeros(sketch.cells), cells_of(sketch, coins.public, chosen), values)
        return S2Payload(table.reshape(rows, sketch.columns)), memory

    def decode_mean(
        public: jax.Array,
        payload: S2Payload,
        agreed: S2Statistics,
        workers: int,
        count: int,
        shape: tuple[int, ...],
    ) -> jax.Array:
        sketch = sketch_of(shape)
        if not sketch.parts.size:
            return jnp.zeros(shape)
        table = payload.table.ravel() * (2.0 ** (workers - 1).bit_length() / count)
        chosen = _support.window(agreed.support, public, sketch.room, sketch.parts)
        values = _estimate(sketch, public, table, chosen, decode)
        into = _support.nothing(sketch.parts, jnp.float32)
        return _support.whole(_support.put(values, chosen, sketch.parts, into), shape)

    def observe(
        public: jax.Array, agreed: S2Statistics, x: jax.Array
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        sketch = sketch_of(x.shape)
        union = _support.coordinates_in(agreed.support, sketch.parts)
        beyond = jnp.maximum(union - sketch.room * sketch.parts.width, 0)
        told = {"union_density": (union, jnp.float32(x.size)), "overflow": (beyond, union)}
        if decode == "peel":
            lost = unpeeled(sketch, public, agreed.support, sketch.room)
            return told | {"unpeeled": (lost, union)}
        squares = jnp.sum(jnp.square(x))
        dropped = beyond / jnp.maximum(union, 1)
        error = dropped + (1 - dropped) * jnp.maximum(union - beyond - 1, 0) / sketch.cells
        return told | {"expected_error": (error * squares, squares)}

    def fits(payload: S2Payload, agreed: S2Statistics, shape: tuple[int, ...]) -> jax.Array:
        del payload
        return _support.count(agreed.support) <= sketch_of(shape).room

    unbiased = decode != "median"
    dropping = Codec(
        init=no_memory,
        measure=measure,
        agree=S2Statistics("or", ()),
        encode=encode,
        decode=decode_mean,
        settle=settled,
        combine="sum",
        observe=observe,
        variance=(lambda size, workers: sketch_of((size, 1)).variance) if unbiased else None,
    )
    return choose_form(overflow, dropping=dropping, strict=decoded_to_nan(dropping, fits))
