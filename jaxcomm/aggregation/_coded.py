"""What all aggregators of coded updates share: units, weights, coins, memory, and what is finite.

They differ in the exchange alone: how workers' units become one mean.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis, _buckets, _noise
from jaxcomm._base import AxisName, Codec, Coins, Memory, PerWorker, PyTree
from jaxcomm.aggregation._weights import weigh


class AggregatorState(NamedTuple):
    """The state of an aggregator; all but `own` is equal on all workers."""

    key: jax.Array  # key[]
    step: jax.Array  # uint32[]
    own: PerWorker  # each unit's Memory.own
    shared: list[Any]  # each unit's Memory.shared


Exchange: TypeAlias = Callable[
    [list[Coins], list[Memory], list[jax.Array]],
    tuple[list[jax.Array], list[Memory], jax.Array],
]
"""(coins, memories, units) -> (mean, memory) of each unit, and whether all workers were finite."""


def _keep_if(finite: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)


def coded_mean(
    axis_name: AxisName,
    codec: Codec,
    exchange: Exchange,
    *,
    scope: _buckets.Scope,
    bucket_bytes: int | None,
    seed: int,
    key: jax.Array | None,
) -> optax.GradientTransformationExtraArgs:
    """An aggregator from a codec and an exchange.

    A non-finite coordinate on any worker makes the update NaN on all, and no memory changes.
    """
    _buckets.check_scope(scope)
    capacity = _buckets.BUCKET_BYTES if bucket_bytes is None else bucket_bytes
    if not isinstance(capacity, int) or capacity < 4:
        raise ValueError(
            f"`bucket_bytes` must be a Python int of at least 4, got {capacity}. Under "
            "`optax.inject_hyperparams` pass `static_args=('bucket_bytes',)`."
        )
    axis = _axis.label(axis_name)

    def init_fn(params: PyTree) -> AggregatorState:
        units, _ = _buckets.split(params, scope, capacity)
        memories = [codec.init(unit) for unit in units]
        own = [memory.own for memory in memories]
        if jax.tree.leaves(own) and not _axis.is_bound(axis_name):
            raise ValueError(
                f"This state differs by worker, and `axis_name`={axis_name!r} is not bound here. "
                "Use `jaxcomm.init(tx, params, mesh)` in place of `tx.init(params)`."
            )
        return AggregatorState(
            key=_noise.make_key(seed, key),
            step=jnp.zeros((), jnp.uint32),
            own=PerWorker({axis: jax.tree.map(lambda x: x[None], own)}),
            shared=[memory.shared for memory in memories],
        )

    def update_fn(
        updates: PyTree,
        state: AggregatorState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        **extra_args: object,
    ) -> tuple[PyTree, AggregatorState]:
        del params, extra_args
        _axis.require_local(updates, axis_name)
        units, join = _buckets.split(updates, scope, capacity)
        if not units:
            return updates, state._replace(step=state.step + 1)
        if weight is not None:
            units = [*map(weigh(axis_name, weight), units)]
        own = jax.tree.map(lambda x: x[0], state.own.per_worker[axis])
        memories = [Memory(*pair) for pair in zip(own, state.shared, strict=True)]
        coins = _noise.make_coins(state.key, state.step, len(units), _axis.index(axis_name))
        means, decided, finite = exchange(coins, memories, units)
        settled = [codec.settle(*pair) for pair in zip(decided, means, strict=True)]
        kept = _keep_if(finite, [memory for _, memory in settled], memories)
        visible = [jnp.where(finite, update, jnp.nan) for update, _ in settled]
        return join(visible), AggregatorState(
            key=state.key,
            step=state.step + 1,
            own=PerWorker({axis: jax.tree.map(lambda x: x[None], [m.own for m in kept])}),
            shared=[memory.shared for memory in kept],
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
