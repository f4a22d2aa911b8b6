"""The transformation that all gossip methods share: units, weights, presence, PRNG keys, memory.

Methods differ in one function, which computes a worker's change from its parameters, its local
update and the messages of its neighbors.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis, _noise, _units
from jaxcomm._contract import Aggregator, AxisName, MixingParts, PerWorker, PyTree
from jaxcomm._mesh import collective_cond
from jaxcomm._noise import following
from jaxcomm._require import Positive, checked, own_weight, presence
from jaxcomm._resize import resized_by, total_on_the_first
from jaxcomm.gossip._mixing import Mixing
from jaxcomm.gossip._neighbors import MixingStep, to_links


class GossipState(NamedTuple):
    """The state of a gossip transformation; equal on all workers except `PerWorker` fields."""

    key: jax.Array  # key[]
    step: jax.Array  # uint32[]
    own: PerWorker  # the memory of the method
    skipped_steps: PerWorker  # int32[], the number of non-finite updates of this worker
    diagnostics: Any = ()  # dict of float32[] if `diagnostics=True`


class Mixed(NamedTuple):
    """The result of a method for one step."""

    changes: list[jax.Array]  # the change of each unit of parameters
    memory: PyTree
    disagreement: jax.Array  # between this worker and its senders


Method: TypeAlias = Callable[[MixingStep, PyTree, list[jax.Array], list[jax.Array]], Mixed]
"""`(mixing_step, memory, parameters, updates) -> Mixed`; lists of units in `mixing_step.wide`."""

Average: TypeAlias = Callable[[MixingStep, PyTree, list[jax.Array]], tuple[list[jax.Array], PyTree]]
"""`(mixing_step, memory, parameters) -> (mean, memory)`; the mean is over all present workers."""


def plain_average(
    mixing_step: MixingStep, memory: PyTree, x: list[jax.Array]
) -> tuple[list[jax.Array], PyTree]:
    """The mean of the parameters, for methods whose memory holds no parameters."""
    return mixing_step.mean(x), memory


def require_symmetric(mixing: Mixing, method: str) -> Mixing:
    """Returns the mixing if a symmetric method preserves the mean over workers with it.

    Args:
      mixing: A mixing.
      method: The name of the method, for the error message.

    Returns:
      The same mixing.

    Raises:
      ValueError: If a matrix is not symmetric.

    Example:
      >>> from jaxcomm import gossip
      >>> gossip.require_symmetric(gossip.to_mixing(gossip.ring(8)), "dpsgd").degree
      2
    """
    if not mixing.symmetric:
        raise ValueError(f"`{method}` needs symmetric weights; `gossip.sgp` takes directed graphs.")
    return mixing


def require_fixed(mixing: Mixing, method: str) -> Mixing:
    """Returns the mixing if it is the same in all steps.

    Raises:
      ValueError: If it changes between steps.
    """
    if not mixing.constant:
        raise ValueError(f"`{method}` needs one mixing matrix that is the same in all steps.")
    return mixing


def _dtypes(params: PyTree) -> tuple[Any, Any]:
    """The dtype that holds every leaf exactly, and the dtype of sums, at least 32 bits."""
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(params)}
    wide = max({*dtypes, jnp.dtype(jnp.float32)}, key=lambda dtype: dtype.itemsize)
    return dtypes.pop() if len(dtypes) == 1 else wide, wide


@checked
def gossiped(
    mixing: Mixing,
    start: Callable[[list[jax.Array]], PyTree],
    method: Method,
    *,
    axis_name: AxisName = "data",
    average: Average = plain_average,
    seed: int | jax.Array = 0,
    diagnostics: bool = False,
    in_pairs: bool = False,
    weighs_steps: bool = True,
) -> optax.GradientTransformationExtraArgs:
    r"""Makes a transformation, to place after the optimizer, from a mixing and a method.

    .. math:: x_i \gets x_i + \mathrm{method}(x_i, \Delta_i, \text{what neighbors send})

    It divides parameters into units, scales steps by weights, leaves out absent workers, draws
    random mixings, and skips a step of a worker that is not finite. Workers send what `method`
    sends through its :class:`MixingStep`.

    Args:
      mixing: The mixing, from :func:`to_mixing`.
      axis_name: The mesh axis, or axes, of the workers.
      start: From a worker's units of parameters to its initial memory.
      method: The step of a worker.
      average: Computes the exact mean over all workers, and their memory after it.
      seed: Seed of the workers' draws.
      diagnostics: Whether the state's field `diagnostics` reports the `disagreement`,
        `skipped_steps` and `rounds`.
      in_pairs: Whether the sender and the receiver of each message exchange messages in one round.
      weighs_steps: Whether a step is scaled by its weight relative to those of the neighbors.
        Otherwise the method uses the weight, and only steps of weight 0 are not taken.

    Returns:
      A transformation for parameters that differ by worker.

    Raises:
      ValueError: If an option is out of range; in `init` and `update`, if the mixing is of another
        number of workers.

    Example:
      >>> import optax
      >>> from jaxcomm import gossip
      >>> def method(mixing_step, memory, x, steps):  # D-PSGD
      ...     differences, disagreement = mixing_step.weighted_differences(x)
      ...     changes = [a + b for a, b in zip(steps, differences)]
      ...     return gossip.Mixed(changes, memory, disagreement)
      >>> mixing = gossip.to_mixing(gossip.ring(8))
      >>> tx = optax.chain(optax.sgd(0.1), gossip.gossiped(mixing, lambda units: (), method))
    """
    links = to_links(mixing, in_pairs)

    def require_workers() -> None:
        if (workers := _axis.size(axis_name)) != mixing.workers:
            raise ValueError(f"The graph has {mixing.workers} nodes, for {workers} workers.")

    def units_of(
        tree: PyTree, dtype: Any
    ) -> tuple[list[jax.Array], Callable[[list[jax.Array]], PyTree]]:
        arrays, _, join = _units.split(tree, "bucket", _units.BUCKET_BYTES, dtype)
        return arrays, join

    def mixing_step_of(
        state: GossipState, params: PyTree, units: int, present: jax.Array | None
    ) -> MixingStep:
        me = _axis.index(axis_name)
        flags = None
        if mixing.active:
            # The draw depends on the seed alone: all leaves, and `neighbor_barrier`, use the same.
            (keys,) = _noise.keys_per_unit(state.key, state.step, 1, me)
            flags = mixing.active(keys.shared, state.step)
        placed = _noise.placed_key(state.key, axis_name, params)
        return MixingStep(
            mixing,
            links,
            axis_name,
            flags,
            None if present is None else presence(present, mixing.workers),
            *_dtypes(params),
            _noise.keys_per_unit(placed, state.step, units, me),
            None,
        )

    def share_of(
        state: GossipState,
        params: PyTree,
        weight: jax.Array | float | None,
        present: jax.Array | None,
    ) -> jax.Array:
        """By what this worker's step is scaled: 1 without weights, NaN if a weight is invalid."""
        if weight is None:
            return jnp.ones((), jnp.float32)
        own = _axis.as_varying(own_weight(weight, _dtypes(params)[1]), axis_name)
        if not weighs_steps:
            return jnp.where(own == 0, 0, own / own)
        return mixing_step_of(state, params, 1, present).relative(own)

    def init_fn(params: PyTree) -> GossipState:
        require_workers()
        memory = start(units_of(params, _dtypes(params)[1])[0])
        reported, zero = ("disagreement", "skipped_steps", "rounds"), jnp.zeros((), jnp.float32)
        return GossipState(
            key=_noise.make_key(seed),
            step=jnp.zeros((), jnp.uint32),
            own=resized_by(_axis.marked(memory, axis_name), lambda old, new: new),
            skipped_steps=resized_by(
                _axis.marked(jnp.zeros((), jnp.int32), axis_name), total_on_the_first
            ),
            diagnostics=dict.fromkeys(reported, zero) if diagnostics else (),
        )

    def update_fn(
        updates: PyTree,
        state: GossipState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        present: jax.Array | None = None,
        exact: jax.Array | bool | None = None,
        shard_axes: tuple[str, ...] = (),
        share: jax.Array | None = None,
        applies: jax.Array | None = None,
        **extra_args: object,
    ) -> tuple[PyTree, GossipState]:
        del extra_args
        if params is None:
            raise ValueError("Gossip mixes parameters: call `tx.update(updates, state, params)`.")
        require_workers()
        _axis.require_own(params, axis_name)
        wide = _dtypes(params)[1]
        steps, join = units_of(updates, wide)
        if not steps:
            return updates, state._replace(step=following(state.step, mixing.period))
        units, _ = units_of(params, wide)
        share = share_of(state, params, weight, present) if share is None else share
        applied = _fits(params, updates, share) if applies is None else applies
        scaled = _scaled(updates, share, wide)
        taken = jax.tree.map(lambda step: jnp.where(applied, step, 0), scaled)
        steps, _ = units_of(taken, wide)
        skipped_steps = _axis.own(state.skipped_steps, axis_name)
        skipped_steps = jnp.where(applied, skipped_steps, optax.safe_increment(skipped_steps))
        mixing_step = mixing_step_of(state, params, len(units), present)
        if weight is not None:
            mixing_step = mixing_step._replace(
                weight=jnp.where(applied, own_weight(weight, wide), 0)
            )
        memory = _axis.own(state.own, axis_name)
        _require_memory(memory, jax.eval_shape(start, units))
        changes, memory, disagreement = method(mixing_step, memory, units, steps)
        if exact is not None:
            changes, memory = _with_exact_mean(mixing_step, average, exact, units, changes, memory)
        report: Any = ()
        if diagnostics:
            lengths = jnp.asarray([len(rounds) for rounds in links], jnp.float32)
            disagreement = disagreement.astype(jnp.float32)
            if shard_axes:
                with jax.named_scope("diagnostics"):
                    disagreement = lax.psum(disagreement, shard_axes)
            flags = mixing_step.flags
            rounds = lengths if flags is None else jnp.where(flags, lengths, 0)
            report = {
                "disagreement": disagreement,
                "skipped_steps": skipped_steps.astype(jnp.float32),
            }
            with jax.named_scope("diagnostics"):
                report = {**lax.psum(report, axis_name), "rounds": jnp.sum(rounds)}
        return join(changes), GossipState(
            key=state.key,
            step=following(state.step, mixing.period),
            own=_axis.marked(memory, axis_name),
            skipped_steps=_axis.marked(skipped_steps, axis_name),
            diagnostics=report,
        )

    return Aggregator(init_fn, update_fn, axis_name, "gossip", parts=MixingParts(share_of, _fits))


def _require_memory(memory: PyTree, expected: PyTree) -> None:
    """Raises unless a memory has the structure and the shapes of the expected one."""

    def form(tree: PyTree) -> tuple[Any, list[Any]]:
        return jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]

    if form(memory) != form(expected):
        raise ValueError(
            "This state is of another method, `overlap` or `staleness`: use `jaxcomm.init`."
        )


def _scaled(steps: PyTree, share: jax.Array, wide: Any) -> PyTree:
    """The scaled steps; 0 if the share is 0, even if a step is NaN."""
    return jax.tree.map(
        lambda step: jnp.where(share == 0, 0, share.astype(wide) * step.astype(wide)), steps
    )


def _fits(params: PyTree, updates: PyTree, share: jax.Array) -> jax.Array:
    """Whether a step is applied: not if it is not finite, or overflows the parameters' dtype.

    A NaN would spread to the neighbors and never leave. That of an invalid weight passes through.
    """
    wide = _dtypes(params)[1]

    def fits(x: jax.Array, step: jax.Array) -> jax.Array:
        largest = jnp.maximum(jnp.abs(step), jnp.abs(x.astype(wide) + step))
        return jnp.all(largest <= float(jnp.finfo(x.dtype).max))

    scaled = _scaled(updates, share, wide)
    finite = [*map(fits, jax.tree.leaves(params), jax.tree.leaves(scaled))]
    return jnp.all(jnp.stack(finite)) | jnp.isnan(share)


def _with_exact_mean(
    mixing_step: MixingStep,
    average: Average,
    exact: jax.Array | bool,
    x: list[jax.Array],
    changes: list[jax.Array],
    memory: PyTree,
) -> tuple[list[jax.Array], PyTree]:
    """Changes that end at the exact mean if `exact`; absent workers keep their own."""
    flag = jnp.asarray(exact)
    if flag.shape:
        raise ValueError(f"`exact` must be one bool for all workers, got shape {flag.shape}.")

    def averaged() -> tuple[list[jax.Array], PyTree]:
        means, after = average(mixing_step, memory, jax.tree.map(jnp.add, x, changes))
        exact_changes = jax.tree.map(jnp.subtract, means, x)
        if mixing_step.present is None:
            return exact_changes, after
        here = mixing_step.present[_axis.index(mixing_step.axis_name)]
        return jax.tree.map(
            lambda a, b: jnp.where(here, a, b), (exact_changes, after), (changes, memory)
        )

    return collective_cond(flag, averaged, lambda _: (changes, memory))


class ExactAverageState(NamedTuple):
    """The state of `periodic_averaging`; equal on all workers except as `gossip` marks."""

    step: jax.Array  # int32[]
    gossip: Any


@checked
def periodic_averaging(
    period: Positive, gossip: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    r"""Gossip that sets all workers to their exact mean in every k-th step.

    .. math:: x_i \gets \frac{1}{n} \sum_j x_j \text{ after the step of gossip,} \qquad\text{or of
              push-sum}\quad \frac{\sum_j w_j x_j}{\sum_j w_j},\quad w_i \gets \frac{1}{n} \sum_j
              w_j = 1

    The state of the method is adjusted: copies of neighbors become the mean, residuals become 0,
    and messages in flight arrive. The corrections of D2 and the pending updates of AD-PSGD do not
    change, because they apply to updates.

    These steps send an all-reduce of the parameters, in float32 at least; the other steps send
    none. Optax adds the update to the parameters, so workers are equal up to the rounding of this
    addition. Absent workers (`present`) are not averaged and do not change.

    Args:
      period: k, an int of at least 1.
      gossip: A method of :mod:`jaxcomm.gossip`.

    Returns:
      A transformation that replaces `gossip`, to place after the optimizer.

    Raises:
      ValueError: If `period` is not a positive int, or `gossip` is not a gossip method.

    Example:
      >>> import optax
      >>> from jaxcomm import gossip
      >>> push = gossip.sgp(gossip.one_peer_exponential(8))
      >>> tx = optax.chain(optax.sgd(0.1), gossip.periodic_averaging(10, push))
    """
    if not isinstance(gossip, Aggregator) or gossip.kind != "gossip":
        raise ValueError(f"`gossip` must be a method of `jaxcomm.gossip`, got {gossip!r}.")

    def init_fn(params: PyTree) -> ExactAverageState:
        return ExactAverageState(jnp.zeros((), jnp.int32), gossip.init(params))

    def update_fn(
        updates: PyTree,
        state: ExactAverageState,
        params: PyTree = None,
        *,
        exact: jax.Array | bool = False,
        **extra_args: Any,
    ) -> tuple[PyTree, ExactAverageState]:
        step = following(state.step, period)
        now = (step % period == 0) | jnp.asarray(exact)
        updates, after = gossip.update(updates, state.gossip, params, exact=now, **extra_args)
        return updates, ExactAverageState(step, after)

    return Aggregator(init_fn, update_fn, gossip.axes, "gossip")
