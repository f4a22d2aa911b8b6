"""What all gossip shares: units, weights, presence, coins, and memory that differs by worker.

Methods differ in one function: what a worker makes of its parameters, its local update and what it
hears.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis, _buckets, _noise
from jaxcomm._base import AxisName, PerWorker, PyTree
from jaxcomm._require import own_weight
from jaxcomm._switch import collective_cond
from jaxcomm.gossip._mixing_plan import Mixing
from jaxcomm.gossip._neighbors import Talk, to_links


class GossipState(NamedTuple):
    """The state of a gossip transformation, equal on all workers but for what is marked."""

    key: jax.Array  # key[]
    step: jax.Array  # uint32[]
    own: PerWorker  # what the method remembers
    skipped_steps: PerWorker  # int32[], steps of this worker that were not finite
    diagnostics: Any = ()  # dict of float32[], with `diagnostics=True`


class Mixed(NamedTuple):
    """What a method returns of a step."""

    changes: list[jax.Array]  # of each unit of parameters
    memory: PyTree
    disagreement: jax.Array  # of this worker and those that it heard


Method: TypeAlias = Callable[[Talk, PyTree, list[jax.Array], list[jax.Array]], Mixed]
"""`(talk, memory, parameters, updates)`, lists of units in the dtype `talk.wide`."""

Average: TypeAlias = Callable[[Talk, PyTree, list[jax.Array]], tuple[list[jax.Array], PyTree]]
"""`(talk, memory, parameters) -> (mean, memory)`, where all who are present agree on the mean."""


def plain_average(talk: Talk, memory: PyTree, x: list[jax.Array]) -> tuple[list[jax.Array], PyTree]:
    """The mean of the parameters, of which the memory knows nothing."""
    return talk.mean(x), memory


def require_symmetric(mixing: Mixing, method: str) -> Mixing:
    """The mixing, if the mean of workers survives a symmetric method.

    Raises:
      ValueError: If a matrix is not symmetric.
    """
    if not mixing.symmetric:
        raise ValueError(
            f"`{method}` needs symmetric weights, and this graph or matrix is directed: use "
            "`gossip.sgp`, whose push-sum corrects for it, or edges without direction."
        )
    return mixing


def require_fixed(mixing: Mixing, method: str) -> Mixing:
    """The mixing, if it is the same in all steps.

    Raises:
      ValueError: If it is not.
    """
    if not mixing.constant:
        raise ValueError(f"`{method}` is of one mixing matrix, the same in all steps.")
    return mixing


def _dtypes(params: PyTree) -> tuple[Any, Any]:
    """The dtype that holds every leaf exactly, and that of sums: of at least 32 bits."""
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(params)}
    wide = max({*dtypes, jnp.dtype(jnp.float32)}, key=lambda dtype: dtype.itemsize)
    return dtypes.pop() if len(dtypes) == 1 else wide, wide


def gossiped(
    mixing: Mixing,
    axis_name: AxisName,
    start: Callable[[list[jax.Array]], PyTree],
    method: Method,
    *,
    average: Average = plain_average,
    seed: int = 0,
    key: jax.Array | None = None,
    diagnostics: bool = False,
    in_pairs: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """A transformation to place after the optimizer, from mixing and a method.

    Args:
      mixing: Who talks to whom.
      axis_name: The mesh axis, or axes, that number the workers.
      start: First memory of a worker, of its units of parameters.
      method: A worker's step.
      average: The exact mean of all workers, and what they remember once they agree on it.
      seed: Seed of what workers draw.
      key: A typed threefry key, in place of `seed`.
      diagnostics: Whether the state's field `diagnostics` tells `disagreement` and `rounds`.
      in_pairs: Whether a worker hears in a round whom it sends to.
    """
    if not isinstance(diagnostics, bool):
        raise ValueError(f"`diagnostics` must be a Python bool, got {diagnostics!r}.")
    links = to_links(mixing, in_pairs)
    axis = _axis.label(axis_name)

    def require_workers() -> None:
        _axis.require_bound(axis_name)
        if (workers := _axis.size(axis_name)) != mixing.workers:
            raise ValueError(
                f"The graph has {mixing.workers} nodes, and `axis_name`={axis_name!r} counts "
                f"{workers} workers."
            )

    def units_of(
        tree: PyTree, dtype: Any
    ) -> tuple[list[jax.Array], Callable[[list[jax.Array]], PyTree]]:
        arrays, _, join = _buckets.split(tree, "bucket", _buckets.BUCKET_BYTES, dtype)
        return arrays, join

    def mark(tree: PyTree) -> PerWorker:
        return PerWorker({axis: jax.tree.map(lambda x: x[None], tree)})

    def init_fn(params: PyTree) -> GossipState:
        require_workers()
        memory = start(units_of(params, _dtypes(params)[1])[0])
        known = (
            dict.fromkeys(("disagreement", "skipped_steps", "rounds"), jnp.zeros((), jnp.float32))
            if diagnostics
            else ()
        )
        return GossipState(
            key=_noise.make_key(seed, key),
            step=jnp.zeros((), jnp.uint32),
            own=mark(memory),
            skipped_steps=mark(jnp.zeros((), jnp.int32)),
            diagnostics=known,
        )

    def update_fn(
        updates: PyTree,
        state: GossipState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        present: jax.Array | None = None,
        exact: jax.Array | bool | None = None,
        **extra_args: object,
    ) -> tuple[PyTree, GossipState]:
        del extra_args
        if params is None:
            raise ValueError("Gossip mixes parameters: call `tx.update(updates, state, params)`.")
        require_workers()
        _axis.require_own(params, axis_name)
        sent, wide = _dtypes(params)
        steps, join = units_of(updates, wide)
        if not steps:
            return updates, state._replace(step=state.step + 1)
        units, _ = units_of(params, wide)
        weighed, taken = _own_steps(params, updates, weight, wide)
        steps, _ = units_of(weighed, wide)
        skipped_steps = _axis.own(state.skipped_steps, axis_name) + jnp.where(taken, 0, 1)
        me = _axis.index(axis_name)
        flags = None
        if mixing.active:
            # Of the seed alone: who talks in a step is drawn alike for all leaves, and by clocks.
            (coin,) = _noise.make_coins(state.key, state.step, 1, me)
            flags = mixing.active(coin.public, state.step)
        placed = _noise.placed_key(state.key, axis_name, params)
        coins = _noise.make_coins(placed, state.step, len(units), me)
        talk = Talk(
            mixing,
            links,
            axis_name,
            flags,
            _presence(present, mixing.workers),
            sent,
            wide,
            coins,
        )
        memory = _axis.own(state.own, axis_name)
        changes, memory, disagreement = method(talk, memory, units, steps)
        if exact is not None:
            changes, memory = _exactly(talk, average, exact, units, changes, memory)
        known: Any = ()
        if diagnostics:
            lengths = jnp.asarray([len(rounds) for rounds in links], jnp.float32)
            known = {
                **lax.psum(
                    {
                        "disagreement": disagreement.astype(jnp.float32),
                        "skipped_steps": skipped_steps.astype(jnp.float32),
                    },
                    axis_name,
                ),
                "rounds": jnp.sum(lengths if flags is None else jnp.where(flags, lengths, 0)),
            }
        return join(changes), GossipState(
            key=state.key,
            step=state.step + 1,
            own=mark(memory),
            skipped_steps=mark(skipped_steps),
            diagnostics=known,
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _presence(present: jax.Array | None, workers: int) -> jax.Array | None:
    if present is None:
        return None
    if jnp.shape(present) != (workers,):
        raise ValueError(
            f"`present` must be one bool a worker, [{workers}], got shape {jnp.shape(present)}."
        )
    return jnp.asarray(present).astype(bool)


def _own_steps(
    params: PyTree, steps: PyTree, weight: jax.Array | float | None, wide: Any
) -> tuple[PyTree, jax.Array]:
    """The steps as they are weighted, and whether they are taken: 0 where they are not finite.

    A NaN would spread to the neighbours and never leave, and so would what the parameters' own
    dtype cannot hold. A weight that is none is let through as NaN: it is a mistake, and not a step
    that failed.
    """
    own = jnp.ones((), jnp.float32) if weight is None else own_weight(weight)
    weighed = jax.tree.map(
        lambda step: jnp.where(own == 0, 0, own.astype(wide) * step.astype(wide)), steps
    )

    def fits(x: jax.Array, step: jax.Array) -> jax.Array:
        largest = jnp.maximum(jnp.abs(step), jnp.abs(x.astype(wide) + step))
        return jnp.all(largest <= float(jnp.finfo(x.dtype).max))

    finite = [*map(fits, jax.tree.leaves(params), jax.tree.leaves(weighed))]
    taken = jnp.all(jnp.stack(finite)) | jnp.isnan(own)
    return jax.tree.map(lambda step: jnp.where(taken, step, 0), weighed), taken


def _exactly(
    talk: Talk,
    average: Average,
    exact: jax.Array | bool,
    x: list[jax.Array],
    changes: list[jax.Array],
    memory: PyTree,
) -> tuple[list[jax.Array], PyTree]:
    """Changes that end at the exact mean where `exact`; who is absent keeps its own."""
    flag = jnp.asarray(exact)
    if flag.shape != ():
        raise ValueError(f"`exact` must be one bool for all workers, got shape {flag.shape}.")

    def averaged() -> tuple[list[jax.Array], PyTree]:
        means, after = average(talk, memory, [a + b for a, b in zip(x, changes, strict=True)])
        exactly = [a - b for a, b in zip(means, x, strict=True)], after
        if talk.present is None:
            return exactly
        here = talk.present[_axis.index(talk.axis_name)]
        return jax.tree.map(lambda a, b: jnp.where(here, a, b), exactly, (changes, memory))

    return collective_cond(flag, averaged, lambda _: (changes, memory))
