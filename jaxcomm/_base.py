"""The contracts: what a codec is, what it may remember, and where state differs by worker."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax

AxisName: TypeAlias = str | tuple[str, ...]
"""A mesh axis, or several that together count the workers, outermost first."""

PyTree: TypeAlias = Any
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
    """What a codec keeps of one unit from step to step; `Memory((), ())` when nothing."""

    own: PyTree  # differs by worker: a residual, a shift
    shared: PyTree  # equal on all workers: a running mean of what was sent


def no_facts(workers: int) -> dict[str, float]:
    """The `facts` of a codec that has nothing to tell."""
    del workers
    return {}


def no_news(memory: Memory) -> dict[str, jax.Array]:
    """The `tell` of a codec that has nothing to tell."""
    del memory
    return {}


def no_observations(
    public: jax.Array, agreed: PyTree, x: jax.Array
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """The `observe` of a codec that has nothing to tell."""
    del public, agreed, x
    return {}


def given(memory: Memory, x: jax.Array) -> jax.Array:
    """The `target` of a codec that aims at what it is given."""
    del memory
    return x


class Codec(NamedTuple):
    r"""Pure functions between one float32 array and what is sent for it.

    No mesh axis is named in a codec, so one line on one device tests it, `jax.vmap` maps it, and
    any aggregator can carry it. `workers` is static: how many payloads may be added before they are
    decoded (the axis size where payloads are summed, 1 elsewhere). Where workers agree on nothing,
    `agreed` is the sender's own statistics and travels with the payload.

    Attributes:
      init: `x -> Memory`.
      measure: `(coins, memory, x) -> statistics`, a NamedTuple of float32 arrays, or of uint32
        where they are packed bits; `()` when none.
      agree: how workers combine each statistic before encoding: the statistics' NamedTuple with
        `"sum"` or `"max"` in place of each array, or `"or"` in place of packed bits; `()` when
        none.
      encode: `(coins, memory, x, agreed, workers) -> (payload, memory)`; `payload` is a NamedTuple,
        the named type of what crosses the wire. May change `memory.own` only.
      decode: `(public, payload, agreed, workers, count, shape) -> float32[shape]`, the *mean* of
        the `count` payloads whose sum `payload` is; `count=1` decodes one worker's own.
      settle: `(memory, mean) -> (update, memory)`, once per encode, after aggregation.
      combine: `"sum"` where payloads of different workers may be added, a function
        `(coins, payload, payload) -> payload` where they may be merged otherwise, `None` where
        each has to be decoded by itself.
      facts: `workers -> {name: number}`, what is known while tracing and worth telling with
        `info=True`, such as the levels that `bits` leave.
      target: `(memory, x) -> array`, what a payload without loss would decode to: `x`, or what a
        wrapper makes of it. `info=True` measures the compression error against it.
      tell: `memory -> {name: float32[]}`, what a worker knows after encoding and is worth telling
        with `info=True`, such as coordinates for which there was no room.
      observe: `(public, agreed, x) -> {name: (part, whole)}`, float32[] each, what all workers
        know of a unit once they have agreed; `info=True` tells :math:`\sum \text{part} / \sum
        \text{whole}` over units: of what all agreed on or, where nobody agrees, on average over
        workers, of what each has by itself, but for `union_density`. `x` is the unit scaled
        to magnitudes of at most 1.
      variance: `(size, workers) -> omega` of an unbiased codec, with :math:`\sum_i \mathbb{E}
        \|Q(x_i) - x_i\|^2 \le \omega \sum_i \|x_i\|^2` over the workers that share statistics, of
        `size` coordinates each. `None`: biased, or no bound is known.
      contraction: `(size, workers) -> delta` of a biased codec, with :math:`\sum_i \mathbb{E}
        \|Q(x_i) - x_i\|^2 \le (1 - \delta) \sum_i \|x_i\|^2`. `None`: no bound is known.
      bounded: whether, without such a bound, :math:`\mathbb{E} \|Q(x) - x\|^2 \le (1 - \delta)
        \|x\|^2 + c` for some :math:`\delta > 0` and constant :math:`c`, so that under feedback of
        bounded updates what is left out stays bounded too; or whether it does so of updates
        within a bound that the codec names.
      dropping: The same codec where it drops what finds no room. `None` where all finds room, or
        is dropped already; else `decode` gives NaN of a payload in which something found none, and
        the aggregator NaN on all workers. Feedback takes this form, since it keeps what is left
        out; a wrapper that keeps nothing wraps both.
      scope: What an aggregator makes a unit of by default: `"leaf"` where the codec has a scale
        that layers of unlike size should not share, or a `"bucket"` of leaves.
    """

    init: Callable[[jax.Array], Memory]
    measure: Callable[[Coins, Memory, jax.Array], PyTree]
    agree: PyTree
    encode: Callable[[Coins, Memory, jax.Array, PyTree, int], tuple[PyTree, Memory]]
    decode: Callable[[jax.Array, PyTree, PyTree, int, int, tuple[int, ...]], jax.Array]
    settle: Callable[[Memory, jax.Array], tuple[jax.Array, Memory]]
    combine: str | Callable[[Coins, PyTree, PyTree], PyTree] | None
    facts: Callable[[int], dict[str, float]] = no_facts
    target: Callable[[Memory, jax.Array], jax.Array] = given
    tell: Callable[[Memory], dict[str, jax.Array]] = no_news
    observe: Callable[[jax.Array, PyTree, jax.Array], dict[str, tuple[jax.Array, jax.Array]]] = (
        no_observations
    )
    variance: Callable[[int, int], float] | None = None
    contraction: Callable[[int, int], float] | None = None
    bounded: bool = False
    dropping: "Codec | None" = None
    scope: Literal["leaf", "bucket"] = "bucket"


def no_memory(x: jax.Array) -> Memory:
    """The `init` of a codec that remembers nothing."""
    del x
    return Memory((), ())


def settled(memory: Memory, mean: jax.Array) -> tuple[jax.Array, Memory]:
    """The `settle` of a codec for which the mean is the update."""
    return mean, memory


class PerWorker(NamedTuple):
    """Marks state whose value differs by worker.

    `per_worker` is a dict with one key, the names of the mesh axes the leaves differ over, joined
    by commas (`"data"`, or `"dcn,ici"`). A leaf is `[workers, ...]` outside the workers and `[1,
    ...]` in one, so that a checkpoint holds every worker's value. `jaxcomm.state_specs` derives
    shardings from the name `per_worker`, which survives where a framework flattens the type away.
    """

    per_worker: dict[str, PyTree]
