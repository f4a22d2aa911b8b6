"""What all aggregators of coded updates share: units, weights, coins, memory, and what is finite.

They differ in the exchange alone: how workers' units become one mean.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis, _buckets, _noise
from jaxcomm._base import AxisName, Codec, Context, Diagnostics, Memory, PerWorker, PyTree
from jaxcomm._require import require_state
from jaxcomm.aggregation._agreement import all_finite, nowhere_nan
from jaxcomm.aggregation._info import measure_info, nothing_known
from jaxcomm.aggregation._options import AggregatorOptions, choose
from jaxcomm.aggregation._stages import averages_over
from jaxcomm.aggregation._weights import weigh
from jaxcomm.compression._overflow import remembers


class AggregatorState(NamedTuple):
    """The state of an aggregator; all but `own` is equal on all workers."""

    key: jax.Array  # key[]
    step: jax.Array  # uint32[]
    own: PerWorker  # each unit's Memory.own
    shared: list[Any]  # each unit's Memory.shared
    info: Any = ()  # dict of float32[], with `info=True`


class Part(NamedTuple):
    """One unit of this worker's updates, and what is known of it before the exchange."""

    context: Context
    x: jax.Array


class Encoded(NamedTuple):
    """One unit after the exchange."""

    context: Context  # as it was encoded, with the memory before the step
    memory: Memory  # after encoding
    mean: jax.Array  # over all workers
    payload: PyTree = None  # which was decoded to the mean, where payloads were joined


class Exchanged(NamedTuple):
    """What workers make of their parts together."""

    units: list[Encoded]
    finite: jax.Array  # bool[], whether all workers' parts were
    sent: Callable[[], list[jax.Array]] | None = None  # what this worker sent, decoded; for `info`


Exchange: TypeAlias = Callable[[list[Part]], Exchanged]


def _keep_if(finite: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)


def _lasting(memory: Memory) -> Memory:
    """The memory, or nothing of one that was of this step alone, for `info`."""
    return memory if remembers(memory) else Memory()


def _resumed(codec: Codec, x: jax.Array, lasting: Memory) -> Memory:
    """What has lasted, or the first memory where nothing lasts."""
    first = codec.init(x)
    return lasting if remembers(first) else first


def require_own_statistics(codec: Codec, shared_by: str) -> Codec:
    """The codec, unless it has both statistics and memory, which `shared_by` would part.

    Feedback asks for a bound on the error of one unit with statistics of its own.
    """

    def init(x: jax.Array) -> Memory:
        memory = codec.init(x)
        if remembers(memory) and jax.tree.leaves(codec.agree):
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
) -> optax.GradientTransformationExtraArgs:
    """An aggregator from a codec of whole units and an exchange.

    A non-finite coordinate on any worker makes the update NaN on all, and no memory changes; so
    does what finds no room, which a codec with a form that drops it decodes to NaN.

    Args:
      axis_name: The workers.
      codec: Whose memory, `settle` and `diagnose` are those of a unit.
      exchange: From units to their means.
      options: Those of the aggregator.
      tells: The codecs whose diagnostics `codec.diagnose` joins. Default: `codec` alone.
      draws_anew: Whether coins are those of the step, or of the first step in all of them.
    """
    scope, capacity, seed, key, info = choose(options, codec)
    if scope == "tree":
        codec = require_own_statistics(codec, "`scope`='tree'")
    axis = _axis.label(axis_name)

    def init_fn(params: PyTree) -> AggregatorState:
        units, _ = _buckets.split(params, scope, capacity)
        memories = [_lasting(codec.init(unit)) for unit in units]
        own = [memory.own for memory in memories]
        if jax.tree.leaves(own):
            _axis.require_bound(axis_name)
        return AggregatorState(
            key=_noise.make_key(seed, key),
            step=jnp.zeros((), jnp.uint32),
            own=PerWorker({axis: jax.tree.map(lambda x: x[None], own)}),
            shared=[memory.shared for memory in memories],
            info=nothing_known([codec] if tells is None else tells, units) if info else (),
        )

    def remembered(state: AggregatorState, units: list[jax.Array]) -> list[Memory]:
        own = _axis.own(state.own, axis_name)
        if len(own) != len(units):
            raise ValueError(
                f"This state is of {len(own)} units, and these updates are {len(units)}: it was "
                "made for other parameters, or for another `scope` or `bucket_bytes`."
            )
        return [
            _resumed(codec, unit, Memory(*pair))
            for unit, *pair in zip(units, own, state.shared, strict=True)
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
        units, join = _buckets.split(updates, scope, capacity)
        if not units:
            return updates, state._replace(step=state.step + 1)
        if weight is not None:
            units = [*map(weigh(axis_name, weight), units)]
        memories = remembered(state, units)
        if outer_axes and any(map(remembers, memories)):
            raise ValueError(
                f"The aggregator over {axis_name!r} keeps memory, which would differ over "
                f"{list(outer_axes)} as well: only the last stage of `hierarchical` may, and none "
                "in `shard_local`."
            )
        everybody = (*outer_axes, *_axis.names(axis_name))
        coins = _noise.make_coins(
            _noise.placed_key(state.key, axis_name, updates),
            state.step if draws_anew else jnp.zeros_like(state.step),
            len(units),
            _axis.index(everybody),
        )
        filled = [unit for unit, x in enumerate(units) if x.size]
        parts = [
            Part(Context(coins[i], memories[i], shape=units[i].shape), units[i]) for i in filled
        ]
        # Of no coordinates nothing is sent; the sum types them as equal on all workers.
        means = [x if x.size else lax.psum(x, _axis.names(axis_name)) for x in units]
        after = list(memories)
        encoded, finite, sent = exchange(parts) if parts else Exchanged([], jnp.array(True))
        for unit, each in zip(filled, encoded, strict=True):
            settled = each.context.replace(memory=each.memory)
            means[unit], after[unit] = codec.settle(settled, each.payload, each.mean)
        fits = finite
        if parts and codec.dropping is not None:
            fits = finite & nowhere_nan([each.mean for each in encoded])
        settles = fits
        if parts and any(map(remembers, memories)):
            # What was finite may overflow on the way; kept, it would come back in every step.
            settles = fits & all_finite(each.mean for each in encoded)
        kept = [*map(_lasting, _keep_if(settles, after, memories))]
        known: Any = state.info
        if info and parts:
            if sent is None:
                raise ValueError("`info=True` is not known to this way of forming a mean.")
            told: list[Diagnostics] = [
                codec.diagnose(each.context, units[unit], after[unit])
                for unit, each in zip(filled, encoded, strict=True)
            ]
            known = measure_info(everybody, told, sent(), after, finite)
        visible = [jnp.where(fits, mean, jnp.nan) if mean.size else mean for mean in means]
        return join(visible), AggregatorState(
            key=state.key,
            step=state.step + 1,
            own=PerWorker({axis: jax.tree.map(lambda x: x[None], [m.own for m in kept])}),
            shared=[memory.shared for memory in kept],
            info=known,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
