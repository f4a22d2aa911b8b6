"""The contract: codecs, their context and memory, what a fast path may use, and aggregators."""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

import jax
import jax.numpy as jnp
import optax

AxisName: TypeAlias = str | tuple[str, ...]
"""One mesh axis, or several that together index the workers, outermost first."""

PyTree: TypeAlias = Any
Layout: TypeAlias = Literal["concatenated", "shared_statistics", "independent"]


class Keys(NamedTuple):
    """The PRNG keys of one unit (a bucket or a leaf) in one step.

    Use `shared` where sender and receivers need the same draws (hashes, rotations, shared masks).
    Use `private` where workers need independent draws (rounding). `measure` and `encode` get the
    same PRNG keys within one step.
    """

    shared: jax.Array  # key[], equal on all workers
    private: jax.Array  # key[], different on each worker


class Memory(NamedTuple):
    """A codec's state for one unit between steps; `Memory()` if the codec is stateless."""

    own: PyTree = ()  # differs by worker: a residual, a shift
    shared: PyTree = ()  # equal on all workers: a running mean of the decoded payloads
    report: PyTree = ()  # not kept: what `encode` reports of this step, such as an overflow

    @property
    def kept(self) -> "Memory":
        """The memory for the next step, without the report of this one."""
        return self._replace(report=())


_NOTHING = Memory()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """The input of a codec for one unit in one step, besides the unit itself.

    It is a pytree, so `jax.jit` and `jax.vmap` take it as an argument. The last four fields are
    static.

    Attributes:
      keys: The unit's PRNG keys. Receivers have only `keys.shared`.
      memory: The codec's state for the unit; `Memory()` for receivers.
      statistics: The statistics of the unit, reduced over workers; or those of the sender, which
        then travel with the payload; `()` in `measure`.
      workers: How many payloads may be added before they are decoded: the axis size where payloads
        are summed, 1 elsewhere.
      count: The number of payloads in the sum that is decoded. `decode` divides by it.
      shape: The shape of the unit.
      statistics_size: How many coordinates share statistics, if several units share them. `None`:
        the number of coordinates of this unit.
    """

    keys: Keys
    memory: Memory = _NOTHING
    statistics: PyTree = ()
    workers: int = dataclasses.field(default=1, metadata={"static": True})
    count: int = dataclasses.field(default=1, metadata={"static": True})
    shape: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    statistics_size: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def size(self) -> int:
        """The number of coordinates that share statistics, at least 1: the `size` of `Claims`."""
        return max(
            math.prod(self.shape) if self.statistics_size is None else self.statistics_size, 1
        )

    @classmethod
    def of(cls, x: jax.Array, seed: int = 0, memory: Memory = _NOTHING) -> "Context":
        """The context of a single worker, with PRNG keys from a seed. Use it to try out a codec.

        Example:
          >>> import jax.numpy as jnp
          >>> from jaxcomm import Context
          >>> Context.of(jnp.zeros((2, 3))).shape
          (2, 3)
        """
        shared, private = jax.random.split(jax.random.key(seed, impl="threefry2x32"))
        return cls(Keys(shared, private), memory, shape=x.shape)

    def replace(self, **changes: Any) -> "Context":
        """A copy with the fields in `changes` replaced."""
        return dataclasses.replace(self, **changes)

    def received(self, count: int = 1) -> "Context":
        """The context of a receiver of `count` payloads: no private key and no memory."""
        keys = Keys(self.keys.shared, self.keys.shared)
        return dataclasses.replace(self, keys=keys, memory=_NOTHING, count=count)


class Claims(NamedTuple):
    r"""Bounds on the error of a codec; none by default.

    Attributes:
      variance: `(size, workers) -> omega` of an unbiased codec, with :math:`\sum_i \mathbb{E}
        \|Q(x_i) - x_i\|^2 \le \omega \sum_i \|x_i\|^2`. The sum is over the workers that share
        statistics; each has `size` coordinates. `None`: the codec is biased, or no bound is known.
      contraction: `(size, workers) -> delta` of a biased codec, with :math:`\sum_i \mathbb{E}
        \|Q(x_i) - x_i\|^2 \le (1 - \delta) \sum_i \|x_i\|^2`. `None`: no bound is known.
      bounded: Whether a weaker bound holds where `contraction` is `None`: :math:`\mathbb{E}
        \|Q(x) - x\|^2 \le (1 - \delta) \|x\|^2 + c` for some :math:`\delta > 0` and constant
        :math:`c`; or whether each coordinate is sent exactly within a fixed number of steps. Under
        error feedback, the residual then stays bounded for bounded inputs. The codec may restrict
        this to inputs within a bound that it states.
    """

    variance: Callable[[int, int], float] | None = None
    contraction: Callable[[int, int], float] | None = None
    bounded: bool = False


class Diagnostics(NamedTuple):
    r"""Per-worker diagnostics of one unit in one step, for `diagnostics=True`.

    Attributes:
      target: The array that a lossless payload would decode to: the unit, or the unit after a
        wrapper's transform. The compression error is measured against it.
      totals: `{name: float32[]}`, summed over units, e.g. coordinates dropped for lack of capacity.
      ratios: `{name: (part, whole)}`, float32[] each: :math:`\sum \text{part} / \sum \text{whole}`
        over units. `union_density` is reported only where its bitmap was reduced over workers.
      errors: `{name: float32[]}`, squared errors relative to the squared norm of the unit: their
        mean over units, weighted by those squared norms.
      constants: `{name: number}`, static values, e.g. the number of levels that `bits` allow.
    """

    target: jax.Array
    totals: dict[str, jax.Array] = {}  # noqa: RUF012
    ratios: dict[str, tuple[jax.Array, jax.Array]] = {}  # noqa: RUF012
    errors: dict[str, jax.Array] = {}  # noqa: RUF012
    constants: dict[str, float] = {}  # noqa: RUF012


def no_memory(x: jax.Array) -> Memory:
    """The `init` of a codec without memory."""
    return _NOTHING


def no_statistics(context: Context, x: jax.Array) -> tuple[()]:
    """The `measure` of a codec without statistics."""
    return ()


def mean_is_update(context: Context, payload: PyTree, mean: jax.Array) -> tuple[jax.Array, Memory]:
    """The `finalize` of a codec whose update is the mean itself."""
    return mean, context.memory


def target_is_unit(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
    """The `diagnose` of a codec without metrics of its own."""
    return Diagnostics(x)


class Entries(NamedTuple):
    """The entries of an array that may be nonzero."""

    indices: jax.Array  # uint32[k], into the flat array; distinct, except those out of range
    values: jax.Array  # float32[k]; values with indices out of range are ignored


def scatter(entries: Entries, shape: tuple[int, ...]) -> jax.Array:
    """float32 zeros with the values added at the indices; indices out of range are dropped."""
    size = math.prod(shape)
    zeros = jnp.zeros(max(size, 1), jnp.float32)  # `at` needs an element.
    dense = zeros.at[entries.indices].add(entries.values, mode="drop")
    return dense[:size].reshape(shape)


def scattered(
    entries: Callable[[Context, PyTree], Entries],
) -> Callable[[Context, PyTree], jax.Array]:
    r"""The `decode` of a codec whose payload decodes to a few values among zeros.

    .. math:: \mathrm{decode}(\text{context}, \text{payload}) = \sum_j v_j e_{i_j}

    State the entries in `fast` too: gathered means and feedback then make no dense copy.

    Args:
      entries: `(context, payload) -> Entries`, the mean over `context.count`.

    Returns:
      `(context, payload) -> float32[context.shape]`.

    Example:
      >>> from typing import NamedTuple
      >>> import jax, jax.numpy as jnp
      >>> from jaxcomm import Codec, Context, Entries, Fast, scattered
      >>> class First(NamedTuple):
      ...     value: jax.Array
      >>> def entries(context, payload):
      ...     return Entries(jnp.zeros(1, jnp.uint32), payload.value / context.count)
      >>> first = Codec(
      ...     encode=lambda context, x: (First(x.ravel()[:1]), context.memory),
      ...     decode=scattered(entries),
      ...     fast=Fast(entries=entries),
      ... )
      >>> x = jnp.array([3.0, 1.0])
      >>> payload, _ = first.encode(Context.of(x), x)
      >>> print(first.decode(Context.of(x), payload))
      [3. 0.]
    """
    return lambda context, payload: scatter(entries(context, payload), context.shape)


class Mapped(NamedTuple):
    r"""A `decode` that maps linearly what another one returns.

    .. math:: \mathrm{decode}(\text{context}, \text{payload}) = M\, \mathrm{inner}(\text{context}',
              \text{payload})

    The mean of several payloads then takes one product with :math:`M`, and not one each.
    """

    decode: Callable[[Context, PyTree], jax.Array]  # the inner one
    within: Callable[[Context], Context]  # its context, from that of the codec
    back: Callable[[jax.Array, tuple[int, ...]], jax.Array]  # `(array, shape)`, the map
    entries: Callable[[Context, PyTree], Entries] | None = None  # of the inner one


class Fast(NamedTuple):
    r"""What others may use in place of the functions of a codec, to pass over arrays less often.

    All results are those of `measure`, `encode` and `decode`, up to the rounding of floats. So a
    codec with other functions has none of these unless it states them: see `Codec.replace`.

    Attributes:
      linear: Which of `"measure"` and `"encode"` are linear in `x`, for a fixed context. Feedback
        applies them to the update and to the residual separately, and does not write the sum.
      exposes_nonfinite: Which of these have a result that is non-finite, or empty, if a coordinate
        of `x` is. The finite check then reads the result instead of `x`. With `"decode"`, what is
        decoded with NaN in place of all statistics is NaN everywhere: no pass needs to write it.
      entries: `(context, payload) -> Entries` of a payload that decodes to a few values among
        zeros; `decode` is then :func:`jaxcomm.scattered`.
      factors: `(context, payload) -> (left, right)`, float32[rows, k] and float32[columns, k], of
        a payload that decodes to `left @ right.T`; or `None` if it is one that does not. XLA fuses
        a product of few columns into the operations that read it.
      mapped: The parts of a `decode` that maps linearly what another one returns.
      with_residual: `(context, x, e, divisor) -> (payload, memory, e')`: encodes and computes the
        residual :math:`e' = x + e - \mathrm{decode}(\mathrm{encode}(x + e))` in one pass, where
        receivers divide what they decode by the float `divisor`. :math:`e'` has the dtype of `e`.
      add: `(context, payload, total, divisor) -> total + decode(context, payload) / divisor`.
      selection: The coordinates that a sparsifier sends as they are, for chains of codecs.
      integers: The integers in the payload, so that another code of them can replace it.
      code: The name of a variable-length code in which `encode` sends, for error messages.
      bits: `(context, payload) -> float32[]`, the bits per integer that this code needs.
    """

    linear: tuple[str, ...] = ()
    exposes_nonfinite: tuple[str, ...] = ()
    entries: Callable[[Context, PyTree], Entries] | None = None
    factors: Callable[[Context, PyTree], tuple[jax.Array, jax.Array] | None] | None = None
    mapped: Mapped | None = None
    with_residual: Callable[..., tuple[PyTree, Memory, jax.Array]] | None = None
    add: Callable[[Context, PyTree, jax.Array, float], jax.Array] | None = None
    selection: Any = None  # a `Selection` of `compression/sparsifiers`
    integers: Any = None  # `Integers` of `compression/_bits.py`
    code: str = ""
    bits: Callable[[Context, PyTree], jax.Array] | None = None


@dataclasses.dataclass(frozen=True)
class Codec:
    r"""Pure functions that map one float32 array to a payload and back.

    Only `encode` and `decode` are required. A codec names no mesh axis. You can therefore test it
    in one line on one device, map it with `jax.vmap`, and use it in any aggregator.

    Attributes:
      encode: `(context, x) -> (payload, memory)`; `payload` is a NamedTuple of arrays, the named
        type of what crosses the wire. It may change only `memory.own`.
      decode: `(context, payload) -> float32[context.shape]`. `payload` is the sum of
        `context.count` payloads; `decode` returns their *mean*. It may use the shared key, but no
        memory. Use :func:`jaxcomm.scattered` if the result is a few values among zeros.
      init: `x -> Memory`, before the first step.
      measure: `(context, x) -> statistics`, a NamedTuple of float32 arrays, or of uint32 arrays for
        packed bits; `()` for none. It gets the same keys as `encode` in that step.
      reduce_statistics: How workers combine each statistic before encoding: the statistics'
        NamedTuple with `"sum"` or `"max"` in place of each array, or `"or"` in place of packed
        bits; `()` for none. An array with `"equal"` is not reduced: it is already equal on all
        workers.
      finalize: `(context, payload, mean) -> (update, memory)`, called once per step after
        aggregation. The context holds the memory that `encode` returned. `payload` is the combined
        payload that was decoded to the mean, or `None` if each payload was decoded separately. The
        `memory.shared` that it returns must be equal on all workers.
      combine: `"sum"` if payloads of different workers may be added. A function
        `(keys, payload, payload) -> payload` if they are merged in another way. `None` if each
        must be decoded separately.
      diagnose: `(context, x, after) -> Diagnostics`. The context holds the memory before the step;
        `after` is the memory after it.
      claims: Known bounds on the error.
      drop_overflow: The variant of the codec that drops coordinates for lack of capacity. `None` if
        nothing can overflow, or if the codec already drops. Otherwise `decode` returns NaN for a
        payload that overflowed, and the aggregator returns NaN on all workers. Feedback uses this
        variant, since it keeps the residual. A wrapper without a residual wraps both variants.
      scope: Which coordinates share statistics by default: each `"leaf"`, if layers of different
        magnitude should not share the codec's scale; or a `"bucket"` of leaves.
      layout: How the codec treats a bucket. `"concatenated"`: as one vector, in which coordinates
        depend on each other. `"shared_statistics"`: as units that stay separate arrays and share
        the bucket's statistics, combined according to `reduce_statistics`; once the statistics are
        fixed, each coordinate is encoded independently. `"independent"`: as units that share
        nothing; the codec cuts its input into blocks.
      fast: What others may use in place of these functions.

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
    combine: str | Callable[[Keys, PyTree, PyTree], PyTree] | None = None
    diagnose: Callable[[Context, jax.Array, Memory], Diagnostics] = target_is_unit
    claims: Claims = Claims()  # noqa: RUF009
    drop_overflow: "Codec | None" = None
    scope: Literal["leaf", "bucket"] = "bucket"
    layout: Layout = "concatenated"
    fast: Fast = Fast()  # noqa: RUF009

    def replace(self, **changes: Any) -> "Codec":
        """A copy with the fields in `changes` replaced.

        With another `measure`, `encode` or `decode` it has no fast paths, since those of this codec
        may be wrong for it, unless `fast` is among the changes.
        """
        if {"measure", "encode", "decode"} & changes.keys():
            changes = {"fast": Fast(), **changes}
        return dataclasses.replace(self, **changes)

    def update(self, *args: Any, **extra_args: Any) -> NoReturn:
        """Raises a ValueError: `optax.chain` calls it if a codec is in place of an aggregator."""
        del args, extra_args
        raise ValueError(
            "A codec is not an optax transformation, since it only encodes: pass it to an "
            "aggregator, as in `optax.chain(jaxcomm.all_gather_mean(codec), ...)`."
        )


class PerWorker(NamedTuple):
    """Marks state whose value differs by worker.

    `per_worker` is a dict with one key: the names of the mesh axes over which the leaves differ,
    joined by commas (`"data"`, or `"dcn,ici"`). A leaf is `[workers, ...]` outside
    `jax.shard_map`, and `[1, ...]` inside it, on each worker. A checkpoint therefore holds the
    values of all workers. `jaxcomm.state_specs` derives shardings from the name `per_worker`,
    which survives when a framework flattens the type.
    """

    per_worker: dict[str, PyTree]


Kind: TypeAlias = Literal["mean", "gossip", "local", "loss", "backward"]

_REPORTS: contextvars.ContextVar[list[tuple["Aggregator", PyTree]] | None] = contextvars.ContextVar(
    "reports", default=None
)


class Aggregator(optax.GradientTransformationExtraArgs):
    """An optax transformation that exchanges something with other workers, and what it is.

    Read the type where you hold the aggregator. `optax.chain` and other combinators return a plain
    transformation: `reports` finds the aggregators in it, since they report themselves while
    its `init` is called.

    Attributes:
      axes: The axes of the workers.
      kind: `"mean"`: updates become their mean over `axes`; `update` takes `outer_axes` and
        `shard_axes`, further axes over which updates differ. `"gossip"` and `"local"`: parameters
        are mixed, with those of neighbors or in some steps only. `"loss"` and `"backward"`: a mean
        that needs the loss, or the backward pass, in place of gradients.
      needs_whole: The option by which it needs all gradients at once; empty if none.
      name: The scope of what it computes; `checked` sets it to the name of its constructor.
      parts: Functions of it for wrappers that run them separately, such as `MixingParts`.
    """

    axes: tuple[str, ...]
    kind: Kind
    needs_whole: str
    name: str
    parts: Any

    def __new__(
        cls,
        init: Callable[[PyTree], PyTree],
        update: Callable[..., tuple[PyTree, PyTree]],
        axis_name: AxisName,
        kind: Kind = "mean",
        needs_whole: str = "",
        parts: Any = None,
    ) -> "Aggregator":
        """The aggregator whose workers are those of `axis_name`."""

        def reporting_init(params: PyTree) -> PyTree:
            with jax.named_scope(self.name):
                state, found = init(params), _REPORTS.get()
            if found is not None:
                found.append((self, state))
            return state

        def named_update(*args: Any, **kwargs: Any) -> tuple[PyTree, PyTree]:
            with jax.named_scope(self.name):
                return update(*args, **kwargs)

        is_named = hasattr(update, "aggregator")  # That of `_replace`.
        self = super().__new__(cls, reporting_init, update if is_named else named_update)
        self.axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
        self.kind, self.needs_whole, self.parts = kind, needs_whole, parts
        self.name = kind
        vars(named_update)["aggregator"] = self
        return self

    def _replace(self, **changes: Any) -> "Aggregator":
        """The same kind of aggregator with another `init` or `update`."""
        init, update = {"init": self.init, "update": self.update, **changes}.values()
        other = Aggregator(init, update, self.axes, self.kind, self.needs_whole, self.parts)
        other.name = self.name
        return other


@contextlib.contextmanager
def reports() -> Iterator[list[tuple[Aggregator, PyTree]]]:
    """The aggregators whose `init` is called in this context, each with its state, in order."""
    found: list[tuple[Aggregator, PyTree]] = []
    token = _REPORTS.set(found)
    try:
        yield found
    finally:
        _REPORTS.reset(token)


class MixingParts(NamedTuple):
    """The parts of a gossip method.

    Its `update` also takes `shard_axes`, the axes over which its leaves are shards, `share`, and
    `applies`, whether the worker's whole step is finite: a worker skips all of a step or nothing.
    """

    share: Callable[..., jax.Array]  # `(state, params, weight, present) -> float[]`, of its step
    fits: Callable[[PyTree, PyTree, jax.Array], jax.Array]  # `(params, updates, share) -> bool[]`


def require_state(state: Any, kind: type, holder: str) -> None:
    """Raises unless a state has the fields of `kind`; or, if `kind` has none, no leaves.

    The check compares fields and not types, since frameworks may rebuild the types of a state.
    """
    fields: tuple[str, ...] = kind._fields  # type: ignore[attr-defined]
    if getattr(state, "_fields", None) != fields and (fields or jax.tree.leaves(state)):
        raise ValueError(
            f"This state belongs to another transformation: {holder} expects `{kind.__name__}`, "
            f"got `{type(state).__name__}`. Pass that of `jaxcomm.init` for this `tx`."
        )
