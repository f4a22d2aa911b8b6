"""Aggregation of groups of leaves and of layers, while the backward pass goes on."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._collectives import after
from jaxcomm._contract import Aggregator, PyTree, require_state
from jaxcomm._gradients import Backward, Taker, backward_of
from jaxcomm._require import Positive, checked
from jaxcomm._units import BUCKET_BYTES
from jaxcomm.aggregation import mean
from jaxcomm.aggregation._aggregator import common_axes, needs_whole
from jaxcomm.aggregation._exchange import all_finite
from jaxcomm.metrics import _reduced
from jaxcomm.scheduling._layers import Layers, aggregate_at_end, aggregated, hooked

Groups: TypeAlias = Sequence[Sequence[str]]
"""Groups of leaves, by path as `jax.tree_util.keystr` prints it, in the order of their messages."""


@dataclasses.dataclass(frozen=True)
class Divided:
    """A tree as groups of leaves and, after them, stacks of layers."""

    structure: Any
    groups: int
    parts: list[PyTree]  # groups by path, then stacks
    paths: list[str]  # of the stacks
    places: list[tuple[int, str | None]]  # of each node: a group and a path, or a stack

    def joined(self, parts: Sequence[PyTree]) -> PyTree:
        """The tree, with other values in its parts."""
        nodes = [
            parts[number] if path is None else parts[number][path] for number, path in self.places
        ]
        return jax.tree.unflatten(self.structure, nodes)


def _by_size(sizes: dict[str, int], bucket_bytes: int) -> list[list[str]]:
    """Consecutive leaves of up to `bucket_bytes`, the last ones first."""
    groups: list[list[str]] = []
    filled = 0
    for path in reversed(sizes):
        size = 4 * sizes[path]
        if not groups or filled + size > bucket_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(path)
        filled += size
    return groups


def _checked(plan: Sequence[Sequence[str]], paths: set[str]) -> list[list[str]]:
    if sorted(path for group in plan for path in group) != sorted(paths):
        raise ValueError(
            f"`plan` must list each leaf outside stacked layers once: {sorted(paths)}."
        )
    return [[*group] for group in plan if len(group)]


def divide(
    tree: PyTree, plan: Sequence[Sequence[str]] | None, stacked: PyTree, bucket_bytes: int
) -> Divided:
    """Divides a tree of parameters, or of gradients; `Layers` are stacks.

    Raises:
      ValueError: If the plan does not list each leaf outside stacks once, or `stacked` is no
        prefix of the tree.
    """
    marked = jax.tree_util.tree_map_with_path(_marked, stacked, tree)
    nodes, structure = jax.tree_util.tree_flatten_with_path(marked, is_leaf=_is_stack)
    named = [(jax.tree_util.keystr(path), node) for path, node in nodes]
    leaves = {path: node for path, node in named if not _is_stack(node)}
    stacks = [node for _, node in named if _is_stack(node)]
    sizes = {path: math.prod(jnp.shape(leaf)) for path, leaf in leaves.items()}
    groups = _by_size(sizes, bucket_bytes) if plan is None else _checked(plan, set(leaves))
    group_of = {path: number for number, group in enumerate(groups) for path in group}
    order = iter(range(len(groups), len(groups) + len(stacks)))
    return Divided(
        structure,
        len(groups),
        [*({path: leaves[path] for path in group} for group in groups), *(s.tree for s in stacks)],
        [stack.path for stack in stacks],
        [(group_of[path], path) if path in leaves else (next(order), None) for path, _ in named],
    )


@dataclasses.dataclass(frozen=True)
class _Stack:
    """A subtree whose leaves are stacked layers."""

    tree: PyTree
    path: str


def _is_stack(node: object) -> bool:
    return isinstance(node, _Stack)


def _marked(path: tuple[Any, ...], flag: object, subtree: PyTree) -> PyTree:
    return _Stack(subtree, jax.tree_util.keystr(path) or "the parameters") if flag else subtree


def workers_first(state: PyTree) -> PyTree:
    """State of stacked layers, its `PerWorker` leaves `[1, layers, ...]`, not `[layers, 1, ...]`.

    It is its own inverse.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.moveaxis(x, 1, 0) if _axis.per_worker_axes(path) else x, state
    )


WAIT_FREE = Taker(
    name="wait_free",
    divided="`wait_free` needs all parameters: place it before `optax.masked` and its like.",
    touched="Place `wait_free` first in `optax.chain`: it aggregates inside the backward pass.",
)


class WaitFreeState(NamedTuple):
    """The states of the aggregator; its leaves that are not `PerWorker` are equal on all."""

    groups: tuple[Any, ...]  # one per group of leaves
    layers: tuple[Any, ...]  # one per stack of layers; leaves are [layers, ...]


def _with_own_keys(state: PyTree, number: int | jax.Array) -> PyTree:
    """The state, whose keys differ from those of other groups: their errors are independent."""

    def fold(x: Any) -> Any:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.fold_in(x, number) if is_key else x

    return jax.tree.map(fold, state)


def _split(batch: PyTree, parts: int) -> PyTree:
    def split(x: jax.Array) -> jax.Array:
        return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])

    return jax.tree.map(split, batch)


def joined(parts: int, gradient: PyTree, sums: PyTree) -> PyTree:
    """The mean gradient of all parts, from that of the last part and the sum of the others."""
    if sums is None:
        return gradient
    return jax.tree.map(lambda x, y: (x + y) / parts, gradient, sums)


def mean_of_devices(backward: Backward, axes: tuple[str, ...], gradient: PyTree) -> PyTree:
    """The mean over the devices of one worker, each of which has a part of its rows."""
    if not backward.inner:
        return gradient
    average = mean(backward.inner)
    return average.update(gradient, average.init(gradient), outer_axes=axes)[0]


def run_in_parts(backward: Backward, parts: int, with_hooks: Callable[[PyTree], PyTree]) -> PyTree:
    """The gradient of the last part of a batch, after those of the other parts.

    Args:
      backward: The backward pass.
      parts: The number of parts.
      with_hooks: The function from the sum of earlier gradients to the parameters for the last
        part; the sum is `None` if there is only one part.

    Returns:
      The gradient of the last part, at `with_hooks(sum)`.
    """
    if parts == 1:
        backward.value, gradient = backward.evaluate(with_hooks(None), backward.batch)
        return gradient
    if backward.has_model_state:
        raise ValueError("`micro_batches` does not support `has_model_state=True`.")
    rows = _split(backward.batch, parts)
    local = _axis.local_params(backward.params, axis_name=backward.axes)

    def body(sums: PyTree, part: tuple[jax.Array, PyTree]) -> tuple[PyTree, PyTree]:
        number, batch = part
        value, gradient = backward.evaluate(local, batch, number)
        return jax.tree.map(jnp.add, sums, gradient), value

    zeros = _axis.local_params(
        jax.tree.map(jnp.zeros_like, backward.params), axis_name=backward.axes
    )
    earlier = (jnp.arange(parts - 1), jax.tree.map(lambda x: x[:-1], rows))
    sums, values = lax.scan(body, zeros, earlier)
    last = jax.tree.map(lambda x: x[-1], rows)
    value, gradient = backward.evaluate(with_hooks(sums), last, jnp.asarray(parts - 1))
    each = [jax.tree.map(lambda x, part=part: x[part], values) for part in range(parts - 1)]
    backward.value = _reduced.divided(functools.reduce(_reduced.added, [*each, value]), parts)
    return gradient


@checked
def wait_free(
    tx: optax.GradientTransformation | Sequence[optax.GradientTransformation],
    *,
    plan: Groups | None = None,
    stacked: PyTree = False,
    bucket_bytes: Positive = BUCKET_BYTES,
    ordered: bool = True,
    micro_batches: Positive = 1,
) -> optax.GradientTransformationExtraArgs:
    r"""Aggregates each group of gradients as soon as it is complete (WFBP).

    .. math:: (\Delta_j, s_j') = \mathrm{tx}(g_j, s_j, x_j) \quad\text{for each group } j
              \text{ or layer } j

    An aggregator alone sends one message for all leaves, and so waits for the whole backward pass.
    Here each group has messages, statistics and state of its own, and its messages depend on no
    gradient that comes later. Whether the compiled program then computes while it sends depends on
    the compiler; see :func:`jaxcomm.wire.overlap_report`. As many bytes are sent, and more
    messages.

    Args:
      tx: An aggregator, such as `jaxcomm.global_qsgd()`. Place the optimizer after `wait_free`. Or
        one for each group and then for each stack of layers, over the same axes, such as `top_k` of
        the ratios of a :func:`sparsified_plan`.
      plan: The groups, in the order in which they are sent, as lists of paths such as
        `"['head']['kernel']"`. :func:`backward_order` returns the paths in order, and
        `merge_plan(times, link).named(times)` the groups of a plan. Default: consecutive leaves of
        up to `bucket_bytes`, the last ones of the tree first.
      stacked: Which parameters are stacks of layers, `[layers, ...]`, over which the loss runs
        `jax.lax.scan`: a bool, or a tree of bools that is a prefix of the parameters, as for
        `optax.masked`. Each layer is aggregated separately, inside the scan of the backward pass.
        The loss must call :func:`aggregate_in_backward` on each layer.
      bucket_bytes: The size of a group, if there is no plan, in float32 bytes.
      ordered: Whether the messages of a group wait for those of the previous group. Otherwise
        compilers may combine the messages of several groups, which then wait for the last of them.
      micro_batches: The number of parts in which a device computes the gradient of its rows, one
        after the other. Only the last backward pass sends.

    Returns:
      A transformation in place of `tx`. Its updates are those of `tx` for each group. A non-finite
      coordinate makes the mean of its group NaN; `jaxcomm.skip_nonfinite` around the chain skips
      the whole step. A layer that the loss does not use has the mean 0, and keeps its state. One
      that it uses twice has the mean NaN: its gradient is complete only after both.

      Under :func:`jaxcomm.make_step` and :func:`jaxcomm.simulate`, it must come before all
      transformations that change gradients. Steps with `gradients=`, and your own calls of
      `update`, pass gradients that exist already: it then aggregates the same groups and layers at
      the end.

    Raises:
      ValueError: If `tx` is not an aggregator or has `scope="tree"`, `plan` does not list each
        leaf once, or there is another number of aggregators.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxcomm
      >>> tx = optax.chain(
      ...     jaxcomm.scheduling.wait_free(jaxcomm.global_qsgd(), plan=[["['b']"], ["['a']"]]),
      ...     optax.sgd(0.5),
      ... )
      >>> params = {"a": jnp.float32(1), "b": jnp.float32(3)}
      >>> step = jaxcomm.simulate(
      ...     lambda p, x: jnp.mean((p["a"] + p["b"] - x) ** 2), tx, workers=4
      ... )
      >>> params, _, metrics = step(params, jaxcomm.init(tx, params, 4), jnp.ones(4))
      >>> print(metrics["loss"])
      9.0

    Source: Poseidon (Zhang et al., USENIX ATC 2017) sends each layer as soon as its gradient is
    complete. Here the order of messages is a part of the compiled program, and not decided when it
    runs; state of the aggregator belongs to a group or layer.
    """
    aggregators = [*tx] if isinstance(tx, list | tuple) and not hasattr(tx, "update") else [tx]
    axes = common_axes(aggregators, "wait_free")
    if option := needs_whole(aggregators):
        raise ValueError(f"`wait_free` never has all gradients at once: leave out {option}.")
    groups = None if plan is None else [[*group] for group in plan]

    def divided(tree: PyTree) -> Divided:
        return divide(tree, groups, stacked, bucket_bytes)

    def aggregator_of_each(parts: list[PyTree]) -> list[Any]:
        found = aggregators * len(parts) if len(aggregators) == 1 else aggregators
        return [*map(optax.with_extra_args_support, found)]

    def init_fn(params: PyTree) -> WaitFreeState:
        held = divided(params)
        states: list[PyTree] = []
        number = 0
        for one, part in zip(aggregator_of_each(held.parts), held.parts, strict=True):
            if len(states) < held.groups:
                states.append(_with_own_keys(one.init(part), number))
                number += 1
                continue
            layers = jax.tree.leaves(part)[0].shape[0]
            each = jax.vmap(lambda layer, i, one=one: _with_own_keys(one.init(layer), i))
            states.append(workers_first(each(part, number + jnp.arange(layers))))
            number += layers
        return WaitFreeState(tuple(states[: held.groups]), tuple(states[held.groups :]))

    def update_fn(
        updates: PyTree, state: WaitFreeState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, WaitFreeState]:
        require_state(state, WaitFreeState, "`wait_free`")
        backward = backward_of(updates)
        if backward is not None:
            backward.begin(updates)
            params = backward.params
        held = divided(updates if params is None else params)
        states = [*state.groups, *map(workers_first, state.layers)]

        def aggregate(
            one: Any, gradient: PyTree, state: PyTree, params: PyTree, extra: PyTree
        ) -> tuple[PyTree, PyTree]:
            if backward is not None:
                gradient = mean_of_devices(backward, axes, gradient)
            return cast(tuple[PyTree, PyTree], one.update(gradient, state, params, **extra))

        aggregate_of_each = [partial(aggregate, one) for one in aggregator_of_each(held.parts)]
        earlier: list[PyTree] = [None] * len(held.parts)
        if backward is not None:
            parts = divided(_axis.local_params(params, axis_name=backward.axes)).parts

            def with_hooks(sums: PyTree) -> PyTree:
                if sums is not None:
                    earlier[:] = divided(sums).parts
                for number in range(held.groups, len(parts)):
                    parts[number] = hooked(
                        held.parts[number],
                        (states[number], extra_args, earlier[number]),
                        partial(joined, micro_batches),
                        aggregate_of_each[number],
                        backward.axes,
                        held.paths[number - held.groups],
                    )
                return held.joined(parts)

            updates = run_in_parts(backward, micro_batches, with_hooks)
        means: list[PyTree] = []
        new: list[PyTree] = []
        for one, gradient, sums, own, weights in zip(
            aggregate_of_each, divided(updates).parts, earlier, states, held.parts, strict=True
        ):
            weights = None if params is None else weights
            if isinstance(gradient, Layers):
                result = aggregated(gradient, own)
            elif len(means) >= held.groups:
                result = aggregate_at_end(gradient, own, weights, extra_args, one)
            else:
                ready = joined(micro_batches, gradient, sums)
                if ordered and means:
                    ready = after(ready, means[-1])
                result = one(ready, own, weights, extra_args)
            means.append(result[0])
            new.append(result[1])
        if backward is not None:
            backward.finite = all_finite(x for x in jax.tree.leaves(means) if x.size)
        layers = tuple(map(workers_first, new[held.groups :]))
        return held.joined(means), WaitFreeState(tuple(new[: held.groups]), layers)

    return Aggregator(init_fn, update_fn, axes, "backward", parts=WAIT_FREE)
