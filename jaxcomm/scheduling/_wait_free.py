"""Aggregation of groups of leaves and of layers, while the backward pass goes on."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis
from jaxcomm._base import PyTree
from jaxcomm._buckets import BUCKET_BYTES
from jaxcomm._deferred import backward_of
from jaxcomm._require import require_state
from jaxcomm.aggregation import mean
from jaxcomm.aggregation._agreement import all_finite
from jaxcomm.aggregation._stages import axes_of, needs_whole
from jaxcomm.aggregation._warmup import require_steps
from jaxcomm.scheduling._layers import Layers, aggregate_at_end, aggregated, hooked
from jaxcomm.scheduling._micro_batches import run_in_parts
from jaxcomm.scheduling._ordered import after
from jaxcomm.scheduling._partition import Divided, divide, layers_first, workers_first

Plan: TypeAlias = Sequence[Sequence[str]]
"""Groups of leaves, by path as `jax.tree_util.keystr` prints it, in the order of their messages."""


class WaitFreeState(NamedTuple):
    """The states of the aggregator; its leaves that are not `PerWorker` are equal on all."""

    groups: tuple[Any, ...]  # one per group of leaves
    layers: tuple[Any, ...]  # one per stack of layers; leaves are [layers, ...]


def aggregates_in_backward(opt_state: optax.OptState) -> bool:
    """Whether the state has a part of `wait_free`."""
    is_ours = lambda node: isinstance(node, WaitFreeState)  # noqa: E731
    return any(map(is_ours, jax.tree.leaves(opt_state, is_leaf=is_ours)))


def _with_own_coins(state: PyTree, number: int | jax.Array) -> PyTree:
    """The state, whose keys differ from those of other groups: their errors are independent."""

    def fold(x: Any) -> Any:
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.fold_in(x, number) if is_key else x

    return jax.tree.map(fold, state)


def wait_free(
    tx: optax.GradientTransformation,
    *,
    plan: Plan | None = None,
    stacked: PyTree = False,
    bucket_bytes: int = BUCKET_BYTES,
    ordered: bool = True,
    micro_batches: int = 1,
) -> optax.GradientTransformationExtraArgs:
    r"""Aggregates each group of gradients as soon as it is complete (WFBP).

    .. math:: (\Delta_j, s_j') = \mathrm{tx}(g_j, s_j, x_j) \quad\text{for each group } j
              \text{ or layer } j

    An aggregator alone sends one message for all leaves, and so waits for the whole backward pass.
    Here each group has messages, statistics and state of its own, and its messages depend on no
    gradient that comes later. Whether the compiled program then computes while it sends depends on
    the compiler; see :func:`overlap_report`. As many bytes are sent, and more messages.

    Args:
      tx: An aggregator, such as `jaxcomm.global_qsgd()`. Place the optimizer after `wait_free`.
      plan: The groups, in the order in which they are sent, as lists of paths such as
        `"['head']['kernel']"`; for instance from :func:`backward_order`. Default: consecutive
        leaves of up to `bucket_bytes`, the last ones of the tree first.
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
      ValueError: If `tx` is not an aggregator or has `scope="tree"`; if `plan` does not list each
        leaf once; if `stacked` layers differ in number.

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
    axes = axes_of(tx, "wait_free")
    if option := needs_whole([tx]):
        raise ValueError(
            "`wait_free` aggregates groups of leaves as soon as they are complete, but this "
            f"aggregator has {option}, which needs all gradients first: leave it out."
        )
    require_steps("micro_batches", micro_batches)
    update = optax.with_extra_args_support(tx).update

    def divided(tree: PyTree) -> Divided:
        return divide(tree, plan, stacked, bucket_bytes)

    def init_fn(params: PyTree) -> WaitFreeState:
        _axis.require_bound(axes)
        parts = divided(params)
        groups = tuple(
            _with_own_coins(tx.init(group), number) for number, group in enumerate(parts.groups)
        )
        layers = []
        for number, stack in enumerate(parts.stacks):
            count = jax.tree.leaves(stack)[0].shape[0]
            own = jax.vmap(lambda layer, i: _with_own_coins(tx.init(layer), i))
            state = own(stack, len(groups) + number * count + jnp.arange(count))
            layers.append(workers_first(state))
        return WaitFreeState(groups, tuple(layers))

    def update_fn(
        updates: PyTree, state: WaitFreeState, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, WaitFreeState]:
        require_state(state, WaitFreeState, "`wait_free`")
        backward, total, without_params = backward_of(updates), None, params is None
        states = [*map(layers_first, state.layers)]

        def aggregate(
            gradient: PyTree, state: PyTree, params: PyTree, extra: PyTree
        ) -> tuple[PyTree, PyTree]:
            if backward is not None and backward.inner:
                average = mean(backward.inner)
                gradient, _ = average.update(
                    gradient, average.init(gradient), outer_axes=_axis.names(axes)
                )
            return update(gradient, state, None if without_params else params, **extra)

        def joined(gradient: PyTree, earlier: PyTree) -> PyTree:
            if earlier is None:
                return gradient
            return jax.tree.map(lambda x, y: (x + y) / micro_batches, gradient, earlier)

        held = divided(updates if params is None else params)
        if backward is not None:
            local = _axis.local_params(params, backward.axes)

            def with_hooks(earlier: PyTree) -> PyTree:
                sums = [None] * len(states) if earlier is None else divided(earlier).stacks
                stacks = [
                    hooked(stack, own, extra_args, one_sum, joined, aggregate, backward.axes, where)
                    for stack, own, one_sum, where in zip(
                        held.stacks, states, sums, held.paths, strict=True
                    )
                ]
                return held.joined(divided(local).groups, stacks)

            updates, total = run_in_parts(backward, local, micro_batches, with_hooks)
        gradients = divided(updates)
        means: list[PyTree] = []
        groups: list[PyTree] = []
        sums = [None] * len(held.groups) if total is None else divided(total).groups
        for group, earlier, own, weights in zip(
            gradients.groups, sums, state.groups, held.groups, strict=True
        ):
            group = joined(group, earlier)
            ready = after(group, means[-1]) if ordered and means else group
            one_mean, new = aggregate(ready, own, weights, extra_args)
            means.append(one_mean)
            groups.append(new)
        of_stacks: list[PyTree] = []
        layers: list[PyTree] = []
        for stack, own, weights in zip(gradients.stacks, states, held.stacks, strict=True):
            if isinstance(stack, Layers):
                one_mean, new = aggregated(stack, own)
            else:
                one_mean, new = aggregate_at_end(stack, own, weights, extra_args, aggregate)
            of_stacks.append(one_mean)
            layers.append(workers_first(new))
        if backward is not None:
            backward.finite = all_finite(x for x in jax.tree.leaves((means, of_stacks)) if x.size)
        return gradients.joined(means, of_stacks), WaitFreeState(tuple(groups), tuple(layers))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
