"""The contracts: what a codec is, what it may remember, and where state differs by worker."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax

AxisName: TypeAlias = str | tuple[str, ...]
"""A mesh axis, or several that together count the workers, outermost first."""

PyTree: TypeAlias = Any
Layout: TypeAlias = Literal["concatenated", "shared_statistics", "independent"]
LossFn: TypeAlias = Callable[..., Any]


class Coins(NamedTuple):
    """The randomness of one unit (a bucket or a leaf) in one step.

    A codec that needs sender and receivers to draw alike (hashes, rotations, shared masks) uses
    `public`; one that needs workers to draw apart (rounding) uses `private`. `measure` and `encode`
    of one step get the same coins.
    """

    public: jax.Array  # key[], equal on all workers
    private: jax.Array  # key[], each worker's own


class Memory(NamedTuple):
    """What a codec keeps of one unit from step to step; `Memory()` when nothing."""

    own: PyTree = ()  # differs by worker: a residual, a shift
    shared: PyTree = ()  # equal on all workers: a running mean of what was sent


_NOTHING = Memory()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What a codec knows of one unit in one step, beside the unit.

    A pytree: `jax.jit` and `jax.vmap` take it as an argument. The last four are static.

    Attributes:
      coins: The unit's randomness. Receivers have `coins.public` alone.
      memory: What the codec keeps of the unit; `Memory()` for receivers.
      statistics: Statistics: what workers agreed on, or the sender's own, which then travel with
        the payload; `()` in `measure`.
      workers: How many payloads may be added before they are decoded: the axis size where payloads
        are summed, 1 elsewhere.
      count: How many payloads were added to the one that is decoded; the mean is over so many.
      shape: Of the unit.
      statistics_size: How many coordinates share statistics, where other units do with this one.
        `None`: those of the unit alone.
    """

    coins: Coins
    memory: Memory = _NOTHING
    statistics: PyTree = ()
    workers: int = dataclasses.field(default=1, metadata={"static": True})
    count: int = dataclasses.field(default=1, metadata={"static": True})
    shape: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    statistics_size: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def size(self) -> int:
        """How many coordinates the statistics are of, at least 1: what `Claims` ask for."""
        return max(
            math.prod(self.shape) if self.statistics_size is None else self.statistics_size, 1
        )

    @classmethod
    def of(cls, x: jax.Array, seed: int = 0, memory: Memory = _NOTHING) -> "Context":
        """That of one worker by itself, with coins of a seed: to try out a codec.

        Example:
          >>> import jax.numpy as jnp
          >>> from jaxcomm import Context
          >>> Context.of(jnp.zeros((2, 3))).shape
          (2, 3)
        """
        public, private = jax.random.split(jax.random.key(seed, impl="threefry2x32"))
        return cls(Coins(public, private), memory, shape=x.shape)

    def replace(self, **changes: Any) -> "Context":
        """The same, with other fields."""
        return dataclasses.replace(self, **changes)

    def received(self, count: int = 1) -> "Context":
        """What receivers of `count` payloads know: neither the private coin nor any memory."""
        coins = Coins(self.coins.public, self.coins.public)
        return dataclasses.replace(self, coins=coins, memory=_NOTHING, count=count)


class Claims(NamedTuple):
    r"""What a codec states of its error; nothing by default.

    Attributes:
      variance: `(size, workers) -> omega` of an unbiased codec, with :math:`\sum_i \mathbb{E}
        \|Q(x_i) - x_i\|^2 \le \omega \sum_i \|x_i\|^2` over the workers that share statistics, of
        `size` coordinates each. `None`: biased, or no bound is known.
      contraction: `(size, workers) -> delta` of a biased codec, with :math:`\sum_i \mathbb{E}
        \|Q(x_i) - x_i\|^2 \le (1 - \delta) \sum_i \|x_i\|^2`. `None`: no bound is known.
      bounded: whether, without such a bound, :math:`\mathbb{E} \|Q(x) - x\|^2 \le (1 - \delta)
        \|x\|^2 + c` for some :math:`\delta > 0` and constant :math:`c`, so that under feedback of
        bounded updates what is left out stays bounded too; or whether it does so of updates
        within a bound that the codec names.
    """

    variance: Callable[[int, int], float] | None = None
    contraction: Callable[[int, int], float] | None = None
    bounded: bool = False


class Diagnostics(NamedTuple):
    r"""What a codec tells of one unit in one step, for `diagnostics=True`.

    Attributes:
      target: What a payload without loss would decode to: the unit, or what a wrapper makes of it.
        The compression error is measured against it.
      totals: `{name: float32[]}`, added over units, as coordinates for which there was no room.
      ratios: `{name: (part, whole)}`, float32[] each: :math:`\sum \text{part} / \sum \text{whole}`
        over units. `union_density` is told only where workers agreed on what it is of.
      errors: `{name: float32[]}`, squared errors relative to the squares of the unit: their mean
        over units, weighted by those squares.
      constants: `{name: number}`, known while tracing, as the levels that `bits` leave.
    """

    target: jax.Array
    totals: dict[str, jax.Array] = {}  # noqa: RUF012
    ratios: dict[str, tuple[jax.Array, jax.Array]] = {}  # noqa: RUF012
    errors: dict[str, jax.Array] = {}  # noqa: RUF012
    constants: dict[str, float] = {}  # noqa: RUF012


def no_memory(x: jax.Array) -> Memory:
    """The `init` of a codec that remembers nothing."""
    return _NOTHING


def no_statistics(context: Context, x: jax.Array) -> tuple[()]:
    """The `measure` of a codec that needs none."""
    return ()


def mean_is_update(context: Context, payload: PyTree, mean: jax.Array) -> tuple[jax.Array, Memory]:
    """The `finalize` of a codec for which the mean is the update."""
    return mean, context.memory


def target_is_unit(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
    """The `diagnose` of a codec that has nothing to tell."""
    return Diagnostics(x)


class Codec(NamedTuple):
    r"""Pure functions between one float32 array and what is sent for it.

    Only `encode` and `decode` are required. No mesh axis is named in a codec, so one line on one
    device tests it, `jax.vmap` maps it, and any aggregator can carry it.

    Attributes:
      encode: `(context, x) -> (payload, memory)`; `payload` is a NamedTuple of arrays, the named
        type of what crosses the wire. May change `memory.own` only.
      decode: `(context, payload) -> float32[context.shape]`, the *mean* of the `context.count`
        payloads whose sum `payload` is. It may use the public coin, and no memory. Of few values
        among zeros, a :class:`jaxcomm.SparseDecode`.
      init: `x -> Memory`, before the first step.
      measure: `(context, x) -> statistics`, a NamedTuple of float32 arrays, or of uint32 where they
        are packed bits; `()` when none. The same coins as `encode` gets in that step.
      reduce_statistics: How workers combine each statistic before encoding: the statistics'
        NamedTuple with `"sum"` or `"max"` in place of each array, or `"or"` in place of packed
        bits; `()` when none.
      finalize: `(context, payload, mean) -> (update, memory)`, once a step, after aggregation, with
        the memory that `encode` returned. `payload` is the one that was decoded to the mean, where
        payloads were joined to one, and `None` where each was decoded by itself. What it makes of
        `memory.shared` must be equal on all workers.
      combine: `"sum"` where payloads of different workers may be added, a function
        `(coins, payload, payload) -> payload` where they may be merged otherwise, `None` where
        each has to be decoded by itself.
      diagnose: `(context, x, after) -> Diagnostics`, with the memory before the step in the
        context, and that after it.
      claims: What is known of the error.
      drop_overflow: The same codec where it drops what finds no room. `None` where all finds room,
        or is dropped already; else `decode` gives NaN of a payload in which something found none,
        and the aggregator NaN on all workers. Feedback takes this form, since it keeps what is left
        out; a wrapper that keeps nothing wraps both.
      scope: What shares statistics by default: each `"leaf"` where the codec has a scale that
        layers of unlike size should not share, or a `"bucket"` of leaves.
      layout: What a bucket is to the codec. `"concatenated"`: one vector, in which coordinates
        depend on each other. `"shared_statistics"`: units that lie where they are and share the
        bucket's statistics, combined as `reduce_statistics` says; given these, each coordinate is
        encoded by itself. `"independent"`: units that share nothing, where the codec cuts what it
        gets into blocks of its own.

    Example:
      >>> from typing import NamedTuple
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm import Codec, Context
      >>> class Halves(NamedTuple):
      ...     values: jax.Array
      >>> half = Codec(
      ...     encode=lambda context, x: (Halves(x.astype(jnp.bfloat16)), context.memory),
      ...     decode=lambda context, payload: payload.values.astype(jnp.float32) / context.count,
      ... )
      >>> x = jnp.array([1.0, 2.0])
      >>> payload, _ = half.encode(Context.of(x), x)
      >>> print(half.decode(Context.of(x), payload))
      [1. 2.]
    """

    encode: Callable[[Context, jax.Array], tuple[PyTree, Memory]]
    decode: Callable[[Context, PyTree], jax.Array]
    init: Callable[[jax.Array], Memory] = no_memory
    measure: Callable[[Context, jax.Array], PyTree] = no_statistics
    reduce_statistics: PyTree = ()
    finalize: Callable[[Context, PyTree, jax.Array], tuple[jax.Array, Memory]] = mean_is_update
    combine: str | Callable[[Coins, PyTree, PyTree], PyTree] | None = None
    diagnose: Callable[[Context, jax.Array, Memory], Diagnostics] = target_is_unit
    claims: Claims = Claims()
    drop_overflow: "Codec | None" = None
    scope: Literal["leaf", "bucket"] = "bucket"
    layout: Layout = "concatenated"


class PerWorker(NamedTuple):
    """Marks state whose value differs by worker.

    `per_worker` is a dict with one key, the names of the mesh axes the leaves differ over, joined
    by commas (`"data"`, or `"dcn,ici"`). A leaf is `[workers, ...]` outside the workers and `[1,
    ...]` in one, so that a checkpoint holds every worker's value. `jaxcomm.state_specs` derives
    shardings from the name `per_worker`, which survives where a framework flattens the type away.
    """

    per_worker: dict[str, PyTree]
