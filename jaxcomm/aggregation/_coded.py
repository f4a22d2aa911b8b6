"""The common part of aggregators with a codec: options, units, weights, PRNG keys, memory, checks.

Aggregators differ only in the exchange, which turns the workers' units into one mean.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple, TypedDict, TypeVar, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxcomm import _axis, _noise, _units
from jaxcomm._contract import (
    Aggregator,
    AxisName,
    Codec,
    Context,
    Diagnostics,
    Keys,
    Layout,
    Memory,
    PerWorker,
    PyTree,
    require_state,
)
from jaxcomm._require import Range, own_weight, require_option, weight_dtype
from jaxcomm._resize import resized_by
from jaxcomm._units import Unit
from jaxcomm.aggregation._aggregator import require_last_stage, require_no_weight
from jaxcomm.aggregation._diagnostics import initial_diagnostics, measure_diagnostics
from jaxcomm.aggregation._exchange import (
    Exchange,
    Exchanged,
    Part,
    all_finite,
    nowhere_nan,
)
from jaxcomm.compression.low_rank._matrices import bound_of, product_of
from pallas_kernels._dispatch import target


class AggregatorOptions(TypedDict, total=False):
    """The keyword arguments that aggregators with a codec share.

    Attributes:
      scope: Which coordinates share statistics: each `"leaf"`; a `"bucket"` of consecutive leaves,
        up to `bucket_bytes`; or the whole `"tree"`, divided into buckets. Default: the `scope` of
        the codec. Its `layout` determines whether a bucket is also encoded as one vector.
      bucket_bytes: The maximum size of a bucket in float32 bytes; a larger leaf has its own bucket.
        Default: 32 MiB.
      seed: Seed of the randomness; may be traced. Default: 0.
      diagnostics: Whether the state's field `diagnostics` reports `compression_error`, `density`
        and `residual_norm` of the step, and metrics of the codec; see
        :func:`jaxcomm.global_qsgd`.
    """

    scope: _units.Scope | None
    bucket_bytes: Annotated[int, Range(least=4)] | None
    seed: int | jax.Array
    diagnostics: bool


DEFAULTS: AggregatorOptions = {
    "scope": None,
    "bucket_bytes": None,
    "seed": 0,
    "diagnostics": False,
}


_Constructor = TypeVar("_Constructor", bound=Callable[..., Any])


def takes_options(construct: _Constructor) -> _Constructor:
    """Lists the keywords of `AggregatorOptions` in the signature and docstring of a constructor."""
    signature = inspect.signature(construct)
    *own, _ = signature.parameters.values()
    kinds = get_type_hints(AggregatorOptions, include_extras=True)
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        for (name, kind), default in zip(kinds.items(), DEFAULTS.values(), strict=True)
    ]
    _, explained = (inspect.getdoc(AggregatorOptions) or "Attributes:\n").split("Attributes:\n")
    document = (inspect.getdoc(construct) or "").replace(
        "\n\nReturns:", f"\n{explained}\n\nReturns:", 1
    )
    vars(construct)["__signature__"] = signature.replace(parameters=[*own, *shared])
    construct.__doc__ = document
    return construct


def division(options: AggregatorOptions, codec: Codec) -> tuple[_units.Scope, int]:
    """The scope and the bytes of a bucket, by default those of the codec and of `split`."""
    full: AggregatorOptions = {**DEFAULTS, **options}
    scope = codec.scope if full["scope"] is None else full["scope"]
    capacity = _units.BUCKET_BYTES if full["bucket_bytes"] is None else full["bucket_bytes"]
    return scope, capacity


def weighted(x: jax.Array, own: jax.Array, total: jax.Array, workers: int) -> jax.Array:
    """Scales `x` by n w / sum(w); 0 if the weight is 0, even if `x` is NaN."""
    share = own.astype(x.dtype) * workers / total.astype(x.dtype)
    return jnp.where(own == 0, 0, x * share)


def weigh(
    axis_name: AxisName, weight: jax.Array | float, like: PyTree
) -> Callable[[jax.Array], jax.Array]:
    r"""Scales a worker's update so that the plain mean becomes the weighted mean.

    .. math:: x_i \mapsto \frac{n\, w_i}{\sum_j w_j}\, x_i

    A worker of weight 0 contributes nothing, even if its update is NaN, as a mean over no samples
    often is. If all weights are 0, the mean is 0. A weight that is negative or not finite, above
    2^100, or below 2^-100 but not 0, makes the mean NaN on all workers. The all-reduce of the
    weights sums one float32; one float64 if a leaf of `like` is float64.

    Args:
      axis_name: The axis of the mean.
      weight: float[] of this worker, 0 or from 2^-100 to 2^100; e.g. a number of samples.
      like: The updates that the result is called with.

    Raises:
      ValueError: Under the conditions of `own_weight`.
    """
    workers = _axis.size(axis_name)
    own = _axis.as_varying(own_weight(weight, weight_dtype(like)), axis_name)
    with jax.named_scope("weight"):
        total = lax.psum(own, axis_name)
    return lambda x: weighted(x, own, total, workers)


ResizeUnit = Callable[[Unit, tuple[int, ...], PyTree, PyTree], PyTree]
"""`(unit, its shape, memory [workers, ...], initial memory [new workers, ...]) -> memory`."""


class AggregatorState(NamedTuple):
    """The state of an aggregator with a codec, equal on all workers except `own`."""

    key: jax.Array  # key[]
    step: jax.Array  # uint32[]
    own: PerWorker  # the `Memory.own` of each unit
    shared: list[Any]  # the `Memory.shared` of each unit
    diagnostics: Any = ()  # dict of float32[], with `diagnostics=True`


def keep_if(finite: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)


def separated(own: PyTree) -> PyTree:
    """The identity. XLA updates memory in place only if the same loop does not also reshape it."""
    return lax.optimization_barrier(own)


def _decoded_once(means: list[jax.Array]) -> list[jax.Array]:
    """The identity. On CPUs, XLA would decode the means again for each other consumer."""
    return lax.optimization_barrier(means) if target().platform == "cpu" else means


def _all_finite_means(
    parts: list[Part], finalized: list[jax.Array], returned: list[jax.Array]
) -> jax.Array:
    """Whether all means are finite in the dtypes in which they are returned, bool[].

    A product of factors is computed only if the bound from its factors is not finite, or if
    `finalize` changed the mean.
    """
    computed, factored, in_range = [], [], []
    for part, mean, leaf in zip(parts, finalized, returned, strict=True):
        factors = None
        if part.payload is not None and mean is part.mean and part.codec.fast.factors:
            context = part.context.received(part.context.workers)
            factors = part.codec.fast.factors(context, part.payload)
        if factors is None:
            computed.append(leaf)
        else:
            factored.append((factors, leaf.dtype))
            largest = min(float(jnp.finfo(dtype).max) for dtype in (leaf.dtype, jnp.float32))
            in_range.append(bound_of(*factors) < largest / 2)  # The bound itself is rounded.
    flags = [all_finite(_decoded_once(computed))] if computed else []

    def in_full() -> jax.Array:
        return all_finite(product_of(*factors).astype(dtype) for factors, dtype in factored)

    if factored:
        bounded = jnp.all(jnp.stack(in_range))
        # Factors of shards differ over the axes of shards, and both branches need one type.
        true = _axis.varying_like(jnp.array(True), [factors for factors, _ in factored])
        flags.append(lax.cond(bounded, lambda: true, in_full))
    return jnp.all(jnp.stack(flags))


def persistent(memory: Memory) -> Memory:
    """What is kept of the memory: no report."""
    return memory.kept if jax.tree.leaves(memory.kept) else Memory()


def restore_memories(
    codec_for: Callable[[Unit], Codec],
    units: list[Unit],
    arrays: list[jax.Array],
    own: list[PyTree],
    shared: list[PyTree],
) -> list[Memory]:
    """The memory of each unit from the last step, or the initial one if its codec keeps none.

    Raises:
      ValueError: If the memory is of other units.
    """
    first = [codec_for(unit).init(x) for unit, x in zip(units, arrays, strict=True)]
    last = [Memory(*pair) for pair in zip(separated(own), shared, strict=True)]
    kept = [b if jax.tree.leaves(a) else a for a, b in zip(first, last, strict=False)]
    found, needed = (jax.tree.map(lambda x: x.shape, memories) for memories in (kept, first))
    if found != needed or len(last) != len(first):
        raise ValueError(
            f"This state has memory of shapes {found}, and these updates need {needed}: it was "
            "made for other parameters, or another codec or option. Use `jaxcomm.init`."
        )
    return kept


def unit_context(keys: Keys, unit: Unit, memory: Memory, x: jax.Array) -> Context:
    """The context of a unit, with its part of the PRNG keys of all buckets."""
    stacked = unit.form == "stacked"
    numbers = np.array(unit.key_numbers) if stacked else unit.key_numbers[0]
    selected = jax.tree.map(lambda key: key[numbers], keys)
    return Context(
        _noise.beyond(selected, unit.start),
        memory,
        shape=x.shape[1:] if stacked else x.shape,
        statistics_size=unit.statistics_size,
    )


def require_own_statistics(codec: Codec, shared_by: str) -> Codec:
    """The codec, whose `init` raises if it has both statistics and memory.

    Feedback needs a bound on the error of a unit with separate statistics. The option in
    `shared_by` shares statistics, which voids that bound.
    """

    def init(x: jax.Array) -> Memory:
        memory = codec.init(x)
        if jax.tree.leaves(memory) and jax.tree.leaves(codec.reduce_statistics):
            raise ValueError(
                f"{shared_by} shares statistics, and the residual of this codec might then grow "
                "without bound. Use separate statistics."
            )
        return memory

    return codec.replace(init=init)


def coded_mean(
    axis_name: AxisName,
    codec: Codec,
    exchange: Exchange,
    options: AggregatorOptions,
    *,
    diagnosed: Sequence[Codec] | None = None,
    redraws: bool = True,
    weighted: bool = True,
    stack: Codec | None = None,
    resize: ResizeUnit | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Builds an aggregator from a codec of whole units and an exchange.

    A non-finite coordinate on any worker makes the update NaN on all workers, and no memory
    changes. The same happens on overflow, if the codec has a `drop_overflow` variant: it then
    decodes to NaN.

    Args:
      axis_name: The mesh axes of the workers.
      codec: The codec that supplies the memory, `finalize` and `diagnose` of a unit.
      exchange: The function from units to their means.
      options: The options of the aggregator.
      diagnosed: The codecs whose diagnostics `codec.diagnose` combines. Default: only `codec`.
      redraws: Whether PRNG keys change in each step. Otherwise all steps use those of the first.
      weighted: Whether `update` accepts `weight=`: not if the result is no mean.
      stack: The codec of a stack of leaves, if the exchange accepts parts that are stacks.
      resize: The memory of a unit for another number of workers, if it is not the mean over
        workers.
    """
    scope, capacity = division(options, codec)
    options = {**DEFAULTS, **options}
    diagnostics = options["diagnostics"]
    require_option(codec.layout, "layout", Layout)
    shares_tree = scope == "tree" and codec.layout != "independent"
    if {"or", "equal"} & {*jax.tree.leaves(codec.reduce_statistics)} and (
        shares_tree or codec.layout == "shared_statistics"
    ):
        raise ValueError(
            "This codec has a statistic of a single array, such as a bitmap: use `scope`='leaf' or "
            "'bucket', and not `layout`='shared_statistics'."
        )
    if shares_tree:
        codec = require_own_statistics(codec, "`scope`='tree'")
    axes, axis = _axis.names(axis_name), _axis.label(axis_name)

    divided = functools.partial(
        _units.split,
        scope=scope,
        bucket_bytes=capacity,
        layout=codec.layout,
        stacks=stack is not None,
    )

    def codec_for(unit: Unit) -> Codec:
        return stack if stack is not None and unit.form == "stacked" else codec

    def init_fn(params: PyTree) -> AggregatorState:
        arrays, units, _ = divided(params)
        memories = [
            persistent(codec_for(unit).init(x)) for unit, x in zip(units, arrays, strict=True)
        ]
        own = [memory.own for memory in memories]
        samples = [x[0] if u.form == "stacked" else x for u, x in zip(units, arrays, strict=True)]
        state = AggregatorState(
            key=_noise.make_key(options["seed"]),
            step=jnp.zeros((), jnp.uint32),
            own=_axis.marked(own, axis_name),
            shared=[memory.shared for memory in memories],
            diagnostics=initial_diagnostics([codec] if diagnosed is None else diagnosed, samples)
            if diagnostics
            else (),
        )
        if resize is None or not jax.tree.leaves(own):
            return state
        shapes = [x.shape for x in arrays]

        def resized(old: AggregatorState, new: AggregatorState) -> AggregatorState:
            before, after = (each.own.per_worker[axis] for each in (old, new))
            memory = [*map(resize, units, shapes, before, after)]
            return old._replace(own=PerWorker({axis: memory}))

        return resized_by(state, resized)

    def update_fn(
        updates: PyTree,
        state: AggregatorState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        outer_axes: tuple[str, ...] = (),
        shard_axes: tuple[str, ...] = (),
        **extra_args: object,
    ) -> tuple[PyTree, AggregatorState]:
        require_state(state, AggregatorState, "an aggregator with a codec")
        if not weighted:
            require_no_weight(weight)
        _axis.require_local(updates, axis_name, (*shard_axes, *outer_axes))
        split = divided(updates)
        arrays, units, join = split
        if not units:
            return updates, state._replace(step=state.step + 1)
        if weight is not None:
            arrays = [*map(weigh(axis_name, weight, arrays), arrays)]
        own = _axis.own(state.own, axis_name)
        memories = restore_memories(codec_for, units, arrays, own, state.shared)
        remembers = bool(jax.tree.leaves(memories))
        if remembers:
            require_last_stage(outer_axes, axis_name)
        all_axes = (*shard_axes, *outer_axes, *axes)
        keys = _noise.keys_of_units(
            _noise.placed_key(state.key, axis_name, updates),
            state.step if redraws else jnp.zeros_like(state.step),
            1 + max([max(unit.key_numbers) for unit in units]),
            _axis.index(all_axes),
        )
        filled = [number for number, x in enumerate(arrays) if x.size]
        parts = [
            Part(codec_for(unit), unit_context(keys, unit, memory, x), x, unit)
            for unit, memory, x in zip(units, memories, arrays, strict=True)
            if x.size
        ]
        # The sum of empty units sends nothing, and types them as equal on all workers.
        means = [x if x.size else lax.psum(x, axis_name) for x in arrays]
        after = list(memories)
        parts, finite, sent, are_nan = exchange(parts) if parts else Exchanged([], jnp.array(True))
        for number, part in zip(filled, parts, strict=True):
            context = part.context.replace(memory=part.memory)
            means[number], after[number] = part.codec.finalize(context, part.payload, part.mean)
            are_nan &= means[number] is part.mean
        fits = finite
        if parts and codec.drop_overflow is not None:
            fits = finite & nowhere_nan([part.mean for part in parts])
            are_nan = False
        result = join(means)
        if not are_nan:  # After the join, whose leaves are copied anyway.
            result = jax.tree.map(lambda x: jnp.where(fits, x, jnp.nan) if x.size else x, result)
        kept = [*map(persistent, memories)]
        if parts and remembers:
            # Finite updates may overflow in the mean; committed, they would return in every step.
            leaves = jax.tree.leaves(result)
            returned = [
                leaves[units[number].leaves[0]] if units[number].form == "alone" else means[number]
                for number in filled
            ]
            finalized = [means[number] for number in filled]
            commits = fits & _all_finite_means(parts, finalized, returned)
            kept = keep_if(commits, [*map(persistent, after)], kept)
        own = separated([memory.own for memory in kept])
        metrics: Any = state.diagnostics
        if diagnostics and parts:
            if sent is None:
                raise ValueError("This aggregator does not support `diagnostics=True`.")
            per_unit: list[Diagnostics] = [
                part.codec.diagnose(part.context, part.x, after[number])
                for number, part in zip(filled, parts, strict=True)
            ]
            metrics = measure_diagnostics(all_axes, per_unit, sent(), after, finite)
        return result, AggregatorState(
            key=state.key,
            step=state.step + 1,
            own=_axis.marked(own, axis_name),
            shared=[memory.shared for memory in kept],
            diagnostics=metrics,
        )

    return Aggregator(
        init_fn, update_fn, axis_name, needs_whole="`scope`='tree'" if scope == "tree" else ""
    )
