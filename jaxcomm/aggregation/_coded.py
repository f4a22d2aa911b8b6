"""What all aggregators of coded updates share: units, weights, coins, memory, and what is finite.

They differ in the exchange alone: how workers' units become one mean.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxcomm import _axis, _buckets, _noise, _units
from jaxcomm._base import AxisName, Codec, Coins, Context, Diagnostics, Memory, PerWorker, PyTree
from jaxcomm._require import require_state
from jaxcomm._units import Unit
from jaxcomm.aggregation._agreement import all_finite, nowhere_nan
from jaxcomm.aggregation._diagnostics import initial_diagnostics, measure_diagnostics
from jaxcomm.aggregation._exchange import Exchange, Exchanged, Part
from jaxcomm.aggregation._options import AggregatorOptions, choose
from jaxcomm.aggregation._stages import averages_over
from jaxcomm.aggregation._weights import weigh
from jaxcomm.compression._overflow import remembers
from jaxcomm.compression._stacked import stacked
from pallas_kernels._dispatch import target


class AggregatorState(NamedTuple):
    """The state of an aggregator; all but `own` is equal on all workers."""

    key: jax.Array  # key[]
    step: jax.Array  # uint32[]
    own: PerWorker  # each unit's Memory.own
    shared: list[Any]  # each unit's Memory.shared
    diagnostics: Any = ()  # dict of float32[], with `diagnostics=True`


def _keep_if(finite: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)


def _apart(own: PyTree) -> PyTree:
    """The same. XLA writes memory where it lies only if no pass that does reshapes it besides."""
    return lax.optimization_barrier(own)


def _as_handed_on(means: list[jax.Array]) -> list[jax.Array]:
    """The same. XLA for CPUs would decode them once more for whatever else reads them."""
    return lax.optimization_barrier(means) if target().platform == "cpu" else means


def _lasting(memory: Memory) -> Memory:
    """The memory, or nothing of one that was of this step alone, for `diagnostics`."""
    return memory if remembers(memory) else Memory()


def _resumed(codec: Codec, x: jax.Array, lasting: Memory) -> Memory:
    """What has lasted, or the first memory where nothing lasts.

    Raises:
      ValueError: If it is of another unit.
    """
    first = codec.init(x)
    if not remembers(first):
        return first
    described = lambda memory: jax.tree.map(lambda leaf: leaf.shape, memory)  # noqa: E731
    if described(first) != described(lasting):
        raise ValueError(
            f"This state remembers {described(lasting)} of a unit of which it is to remember "
            f"{described(first)}: it was made for other parameters, for another codec, or for "
            "another `scope` or `bucket_bytes`."
        )
    return lasting


def _context(coins: Coins, unit: Unit, memory: Memory, x: jax.Array) -> Context:
    """With the coins of the unit, of those of all buckets."""
    if unit.form == "stacked":
        own, shape = jax.tree.map(lambda keys: keys[np.array(unit.coins)], coins), x.shape[1:]
    else:
        own, shape = jax.tree.map(lambda keys: keys[unit.coins[0]], coins), x.shape
    return Context(
        _noise.beyond(own, unit.start), memory, shape=shape, statistics_size=unit.statistics_size
    )


def require_own_statistics(codec: Codec, shared_by: str) -> Codec:
    """The codec, unless it has both statistics and memory, which `shared_by` would part.

    Feedback asks for a bound on the error of one unit with statistics of its own.
    """

    def init(x: jax.Array) -> Memory:
        memory = codec.init(x)
        if remembers(memory) and jax.tree.leaves(codec.reduce_statistics):
            raise ValueError(
                f"{shared_by} shares statistics among updates of unlike size, and this codec "
                "remembers what it leaves out, which might then grow without end. Let each have "
                "its own."
            )
        return memory

    return codec._replace(init=init)


def coded_mean(
    axis_name: AxisName,
    codec: Codec,
    exchange: Exchange,
    options: AggregatorOptions,
    *,
    tells: Sequence[Codec] | None = None,
    draws_anew: bool = True,
    stacks: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """An aggregator from a codec of whole units and an exchange.

    A non-finite coordinate on any worker makes the update NaN on all, and no memory changes; so
    does what finds no room, which a codec with a form that drops it decodes to NaN.

    Args:
      axis_name: The workers.
      codec: Whose memory, `finalize` and `diagnose` are those of a unit.
      exchange: From units to their means.
      options: Those of the aggregator.
      tells: The codecs whose diagnostics `codec.diagnose` joins. Default: `codec` alone.
      stacks: Whether the exchange takes stacks of leaves: parts whose codec is `stacked`.
      draws_anew: Whether coins are those of the step, or of the first step in all of them.
    """
    scope, capacity, seed, key, diagnostics = choose(options, codec)
    _units.check_layout(codec.layout)
    shares_tree = scope == "tree" and codec.layout != "independent"
    if "or" in jax.tree.leaves(codec.reduce_statistics) and (
        shares_tree or codec.layout == "shared_statistics"
    ):
        raise ValueError(
            "`scope`='tree' and `layout`='shared_statistics' share statistics among updates, and "
            "this codec's is a bitmap of one. Use `scope`='leaf' or 'bucket', and "
            "`layout`='concatenated'."
        )
    if shares_tree:
        codec = require_own_statistics(codec, "`scope`='tree'")
    axis = _axis.label(axis_name)

    def divided(tree: PyTree) -> _buckets.Split:
        return _buckets.split(tree, scope, capacity, layout=codec.layout, stacks=stacks)

    def codec_for(unit: Unit) -> Codec:
        return stacked(codec) if unit.form == "stacked" else codec

    def init_fn(params: PyTree) -> AggregatorState:
        arrays, units, _ = divided(params)
        memories = [
            _lasting(codec_for(unit).init(x)) for unit, x in zip(units, arrays, strict=True)
        ]
        own = [memory.own for memory in memories]
        firsts = [x[0] if u.form == "stacked" else x for u, x in zip(units, arrays, strict=True)]
        if jax.tree.leaves(own):
            _axis.require_bound(axis_name)
        return AggregatorState(
            key=_noise.make_key(seed, key),
            step=jnp.zeros((), jnp.uint32),
            own=PerWorker({axis: jax.tree.map(lambda x: x[None], own)}),
            shared=[memory.shared for memory in memories],
            diagnostics=initial_diagnostics([codec] if tells is None else tells, firsts)
            if diagnostics
            else (),
        )

    def remembered(state: AggregatorState, split: _buckets.Split) -> list[Memory]:
        arrays, units, _ = split
        own = _apart(_axis.own(state.own, axis_name))
        if len(own) != len(units):
            raise ValueError(
                f"This state is of {len(own)} units, and these updates are {len(units)}: it was "
                "made for other parameters, or for another `scope` or `bucket_bytes`."
            )
        return [
            _resumed(codec_for(unit), x, Memory(*pair))
            for unit, x, *pair in zip(units, arrays, own, state.shared, strict=True)
        ]

    @averages_over(axis_name)
    def update_fn(
        updates: PyTree,
        state: AggregatorState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        outer_axes: tuple[str, ...] = (),
        **extra_args: object,
    ) -> tuple[PyTree, AggregatorState]:
        require_state(state, AggregatorState, "an aggregator of codes")
        _axis.require_local(updates, axis_name, outer_axes)
        split = divided(updates)
        arrays, units, join = split
        if not units:
            return updates, state._replace(step=state.step + 1)
        if weight is not None:
            arrays = [*map(weigh(axis_name, weight), arrays)]
        memories = remembered(state, split)
        if outer_axes and any(map(remembers, memories)):
            raise ValueError(
                f"The aggregator over {axis_name!r} keeps memory, which would differ over "
                f"{list(outer_axes)} as well: only the last stage of `hierarchical` may, and none "
                "in `shard_local`."
            )
        everybody = (*outer_axes, *_axis.names(axis_name))
        coins = _noise.coins_of_units(
            _noise.placed_key(state.key, axis_name, updates),
            state.step if draws_anew else jnp.zeros_like(state.step),
            1 + max(max(unit.coins) for unit in units),
            _axis.index(everybody),
        )
        filled = [number for number, x in enumerate(arrays) if x.size]
        parts = [
            Part(codec_for(unit), _context(coins, unit, memory, x), x, unit)
            for unit, memory, x in zip(units, memories, arrays, strict=True)
            if x.size
        ]
        # Of no coordinates nothing is sent; the sum types them as equal on all workers.
        means = [x if x.size else lax.psum(x, axis_name) for x in arrays]
        after = list(memories)
        encoded, finite, sent = exchange(parts) if parts else Exchanged([], jnp.array(True))
        for number, part, each in zip(filled, parts, encoded, strict=True):
            settled = each.context.replace(memory=each.memory)
            means[number], after[number] = part.codec.finalize(settled, each.payload, each.mean)
        fits = finite
        if parts and codec.drop_overflow is not None:
            fits = finite & nowhere_nan([each.mean for each in encoded])
        # Of pieces, which are copied anyway.
        visible = jax.tree.map(lambda x: jnp.where(fits, x, jnp.nan) if x.size else x, join(means))
        settles = fits
        if parts and any(map(remembers, memories)):
            # What was finite may overflow on the way; kept, it would come back in every step.
            leaves = jax.tree.leaves(visible)
            handed_on = [
                leaves[units[number].leaves[0]] if units[number].form == "alone" else means[number]
                for number in filled
            ]
            settles = fits & all_finite(_as_handed_on(handed_on))
        kept = [*map(_lasting, _keep_if(settles, after, memories))]
        known: Any = state.diagnostics
        if diagnostics and parts:
            if sent is None:
                raise ValueError("`diagnostics=True` is not known to this way of forming a mean.")
            told: list[Diagnostics] = [
                part.codec.diagnose(each.context, part.x, after[number])
                for number, part, each in zip(filled, parts, encoded, strict=True)
            ]
            known = measure_diagnostics(everybody, told, sent(), after, finite)
        return visible, AggregatorState(
            key=state.key,
            step=state.step + 1,
            own=PerWorker({axis: jax.tree.map(lambda x: x[None], _apart([m.own for m in kept]))}),
            shared=[memory.shared for memory in kept],
            diagnostics=known,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
