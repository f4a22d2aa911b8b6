"""The common part of all aggregators with a codec: units, weights, coins, memory, finite checks.

Aggregators differ only in the exchange, which turns the workers' units into one mean.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxcomm import _axis, _noise, _units
from jaxcomm._contract import (
    AxisName,
    Codec,
    Coins,
    Context,
    Diagnostics,
    Memory,
    PerWorker,
    PyTree,
)
from jaxcomm._require import require_state
from jaxcomm._resize import resized_by
from jaxcomm._units import Unit
from jaxcomm.aggregation._agreement import all_finite, nowhere_nan
from jaxcomm.aggregation._diagnostics import initial_diagnostics, measure_diagnostics
from jaxcomm.aggregation._exchange import Encoded, Exchange, Exchanged, Part
from jaxcomm.aggregation._options import AggregatorOptions, choose
from jaxcomm.aggregation._stages import averages_over, require_last_stage
from jaxcomm.aggregation._weights import weigh
from jaxcomm.compression._stacked import stacked
from jaxcomm.compression.low_rank._matrices import bound_of, product_of
from pallas_kernels._dispatch import target

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
    parts: list[Part], encoded: list[Encoded], finalized: list[jax.Array], returned: list[jax.Array]
) -> jax.Array:
    """Whether all means are finite in the dtypes in which they are returned, bool[].

    A product of factors is computed only if the bound from its factors is not finite, or if
    `finalize` changed the mean.
    """
    computed, factored, in_range = [], [], []
    for part, each, mean, leaf in zip(parts, encoded, finalized, returned, strict=True):
        context = each.context.received(each.context.workers)
        factors = None
        if each.payload is not None and mean is each.mean and part.codec.fast.factors:
            factors = part.codec.fast.factors(context, each.payload)
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


def restored(codec: Codec, x: jax.Array, memory: Memory) -> Memory:
    """The memory from the last step, or the initial memory if the codec keeps none.

    Raises:
      ValueError: If the memory is of another unit.
    """
    first = codec.init(x)
    if not jax.tree.leaves(first):
        return first
    shapes_of = lambda tree: jax.tree.map(lambda leaf: leaf.shape, tree)  # noqa: E731
    if shapes_of(first) != shapes_of(memory):
        raise ValueError(
            f"This state has memory of shapes {shapes_of(memory)} for a bucket or leaf that "
            f"needs {shapes_of(first)}. It was made for other parameters, for another codec, or "
            "for another `scope` or `bucket_bytes`: make a new state with `jaxcomm.init`."
        )
    return memory


def unit_context(coins: Coins, unit: Unit, memory: Memory, x: jax.Array) -> Context:
    """The context of a unit, with its part of the coins of all buckets."""
    if unit.form == "stacked":
        selected, shape = jax.tree.map(lambda keys: keys[np.array(unit.coins)], coins), x.shape[1:]
    else:
        selected, shape = jax.tree.map(lambda keys: keys[unit.coins[0]], coins), x.shape
    return Context(
        _noise.beyond(selected, unit.start),
        memory,
        shape=shape,
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
                f"{shared_by} shares statistics among arrays of different magnitude. The residual "
                "that this codec keeps might then grow without bound. Use separate statistics."
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
    stacks: bool = False,
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
      redraws: Whether coins change in each step. Otherwise all steps use those of the first step.
      stacks: Whether the exchange accepts stacks of leaves: parts whose codec is `stacked`.
      resize: The memory of a unit for another number of workers, if it is not the mean over
        workers.
    """
    scope, capacity, seed, key, diagnostics = choose(options, codec)
    _units.check_layout(codec.layout)
    shares_tree = scope == "tree" and codec.layout != "independent"
    if {"or", "equal"} & {*jax.tree.leaves(codec.reduce_statistics)} and (
        shares_tree or codec.layout == "shared_statistics"
    ):
        raise ValueError(
            "With `scope`='tree' or `layout`='shared_statistics', several arrays share statistics. "
            "This codec has a statistic of a single array, such as a bitmap. Use `scope`='leaf' or "
            "'bucket', and `layout`='concatenated'."
        )
    if shares_tree:
        codec = require_own_statistics(codec, "`scope`='tree'")
    axis = _axis.label(axis_name)

    def divided(tree: PyTree) -> _units.Split:
        return _units.split(tree, scope, capacity, layout=codec.layout, stacks=stacks)

    def codec_for(unit: Unit) -> Codec:
        return stacked(codec) if unit.form == "stacked" else codec

    def init_fn(params: PyTree) -> AggregatorState:
        arrays, units, _ = divided(params)
        memories = [
            persistent(codec_for(unit).init(x)) for unit, x in zip(units, arrays, strict=True)
        ]
        own = [memory.own for memory in memories]
        samples = [x[0] if u.form == "stacked" else x for u, x in zip(units, arrays, strict=True)]
        if jax.tree.leaves(own):
            _axis.require_bound(axis_name)
        state = AggregatorState(
            key=_noise.make_key(seed, key),
            step=jnp.zeros((), jnp.uint32),
            own=_axis.marked(own, axis_name),
            shared=[memory.shared for memory in memories],
            diagnostics=initial_diagnostics([codec] if diagnosed is None else diagnosed, samples)
            if diagnostics
            else (),
        )
        if resize is None or not jax.tree.leaves(own):
            return state
        shapes = [sample.shape for sample in samples]

        def resized(old: AggregatorState, new: AggregatorState) -> AggregatorState:
            before, after = (each.own.per_worker[axis] for each in (old, new))
            memory = [*map(resize, units, shapes, before, after)]
            return old._replace(own=PerWorker({axis: memory}))

        return resized_by(state, resized)

    def restore_memories(state: AggregatorState, split: _units.Split) -> list[Memory]:
        arrays, units, _ = split
        own = separated(_axis.own(state.own, axis_name))
        if len(own) != len(units):
            raise ValueError(
                f"This state has {len(own)} buckets or leaves, but these updates have "
                f"{len(units)}. It was made for other parameters, or for another `scope` or "
                "`bucket_bytes`: make a new state with `jaxcomm.init`."
            )
        return [
            restored(codec_for(unit), x, Memory(*pair))
            for unit, x, *pair in zip(units, arrays, own, state.shared, strict=True)
        ]

    @averages_over(axis_name, "`scope`='tree'" if scope == "tree" else "")
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
        _axis.require_local(updates, axis_name, (*shard_axes, *outer_axes))
        split = divided(updates)
        arrays, units, join = split
        if not units:
            return updates, state._replace(step=state.step + 1)
        if weight is not None:
            arrays = [*map(weigh(axis_name, weight, arrays), arrays)]
        memories = restore_memories(state, split)
        if jax.tree.leaves(memories):
            require_last_stage(outer_axes, axis_name)
        all_axes = (*shard_axes, *outer_axes, *_axis.names(axis_name))
        coins = _noise.coins_of_units(
            _noise.placed_key(state.key, axis_name, updates),
            state.step if redraws else jnp.zeros_like(state.step),
            1 + max(max(unit.coins) for unit in units),
            _axis.index(all_axes),
        )
        filled = [number for number, x in enumerate(arrays) if x.size]
        parts = [
            Part(codec_for(unit), unit_context(coins, unit, memory, x), x, unit)
            for unit, memory, x in zip(units, memories, arrays, strict=True)
            if x.size
        ]
        # The sum of empty units sends nothing, and types them as equal on all workers.
        means = [x if x.size else lax.psum(x, axis_name) for x in arrays]
        after = list(memories)
        encoded, finite, sent = exchange(parts) if parts else Exchanged([], jnp.array(True))
        for number, part, each in zip(filled, parts, encoded, strict=True):
            context = each.context.replace(memory=each.memory)
            means[number], after[number] = part.codec.finalize(context, each.payload, each.mean)
        fits = finite
        if parts and codec.drop_overflow is not None:
            fits = finite & nowhere_nan([each.mean for each in encoded])
        # After the join, whose leaves are copied anyway.
        result = jax.tree.map(lambda x: jnp.where(fits, x, jnp.nan) if x.size else x, join(means))
        commits = fits
        if parts and jax.tree.leaves(memories):
            # Finite updates may overflow in the mean; committed, they would return in every step.
            leaves = jax.tree.leaves(result)
            returned = [
                leaves[units[number].leaves[0]] if units[number].form == "alone" else means[number]
                for number in filled
            ]
            finalized = [means[number] for number in filled]
            commits = fits & _all_finite_means(parts, encoded, finalized, returned)
        kept = keep_if(commits, [*map(persistent, after)], [*map(persistent, memories)])
        own = separated([memory.own for memory in kept])
        metrics: Any = state.diagnostics
        if diagnostics and parts:
            if sent is None:
                raise ValueError("This aggregator does not support `diagnostics=True`.")
            per_unit: list[Diagnostics] = [
                part.codec.diagnose(each.context, part.x, after[number])
                for number, part, each in zip(filled, parts, encoded, strict=True)
            ]
            metrics = measure_diagnostics(all_axes, per_unit, sent(), after, finite)
        return result, AggregatorState(
            key=state.key,
            step=state.step + 1,
            own=_axis.marked(own, axis_name),
            shared=[memory.shared for memory in kept],
            diagnostics=metrics,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
