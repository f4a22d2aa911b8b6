"""A mean and an optimizer in one, with each worker as the server of a slice (ZeRO-1 and ZeRO-2)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from jaxcomm import _axis, _noise
from jaxcomm._axis import require_shards
from jaxcomm._contract import Aggregator, AxisName, Codec, Keys, PerWorker, PyTree, require_state
from jaxcomm._require import AboveZero, checked, own_weight, weight_dtype
from jaxcomm._resize import resized_by
from jaxcomm._units import Scope, explicit_spec, require_floating, resharded
from jaxcomm.aggregation._coded import keep_if
from jaxcomm.aggregation._elementwise import follows_leaves, require_elementwise
from jaxcomm.aggregation._gradient_norms import square_norm
from jaxcomm.aggregation._rows import from_rows, to_slices, without_padding
from jaxcomm.aggregation._server_ends import End, leaves_finite


class ShardedServerState(NamedTuple):
    """The state of `sharded_server`, equal on all workers except its `PerWorker` parts."""

    key: jax.Array  # key[]
    step: jax.Array  # uint32[]
    push: PerWorker  # the memory of the codec of the rows that a worker sends, one per unit
    inner: Any  # the state of the optimizer; moments and the like are `PerWorker`, of its slices
    pull: PerWorker  # the memory of the codec of the updates of its slices, one per unit


def _is_marked(node: Any) -> bool:
    """Whether a node of a state differs by worker."""
    return isinstance(node, PerWorker)


@jax.named_scope("norm")
def _clip_slices(axis_name: AxisName, slices: PyTree, max_norm: float) -> PyTree:
    """Scales slices of all workers down together if the norm of all of them exceeds `max_norm`.

    They become NaN if that norm overflows. Workers send one float32.
    """
    own = _axis.as_varying(square_norm(slices), axis_name)
    norm = jnp.sqrt(lax.psum(own, _axis.names(axis_name)))
    factor = jnp.where(norm > max_norm, max_norm / norm, 1)
    factor = jnp.where(jnp.isfinite(norm), factor, jnp.nan)
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), slices)


def _recut(old: PerWorker, new: PerWorker) -> PerWorker:
    """The slices for other owners: they follow each other, with zeros at the end."""

    def recut(slices: jax.Array, like: jax.Array) -> jax.Array:
        flat = slices.ravel()[: like.size]
        return jnp.pad(flat, (0, like.size - flat.size)).reshape(like.shape)

    return jax.tree.map(recut, old, new)


@checked
def sharded_server(
    tx: optax.GradientTransformation,
    push: Codec | None = None,
    pull: Codec | None = None,
    *,
    axis_name: AxisName = "data",
    scope: Scope | None = None,
    bucket_bytes: int | None = None,
    max_norm: AboveZero | None = None,
    seed: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Averages and optimizes, with the optimizer state of each coordinate on one worker (ZeRO-2).

    .. math:: \bar g_k = \frac{1}{n} \sum_i \mathrm{decode}(\mathrm{encode}(g_{i,k})), \qquad
              (\Delta_k, s_k') = \mathrm{tx}(\bar g_k, s_k, x_k), \qquad
              \Delta = (\mathrm{decode}(\mathrm{encode}(\Delta_1)), \ldots,
              \mathrm{decode}(\mathrm{encode}(\Delta_n)))

    Worker :math:`k` owns slice :math:`k` of each leaf. It receives this slice of all gradients,
    averages in float32, updates the optimizer state that it keeps for this slice only, and sends
    the update of the slice to all workers. So the optimizer state takes :math:`1/n` of the memory
    per worker. Messages take temporary memory of two to four gradients during the update.
    Parameters stay whole and equal on all workers. It replaces `optax.chain(aggregator, tx)`.
    Without codecs, results are those of `optax.chain(jaxcomm.mean(), tx)` up to rounding.

    A worker sends :math:`(n-1)/n` payloads of gradients to the owners and :math:`n - 1` payloads of
    its slices' updates, in two collectives. Without codecs these are :math:`2 (n-1)/n` times 4
    bytes per coordinate, as in `mean`, and 2 bytes where leaves have 16 bits. A flag that reports
    non-finite values travels with each payload, 4 bytes. A weight travels with the exact gradients,
    4 bytes; with `push` it takes an all-reduce of one float32. Leaves are padded to n equal slices,
    and a message of 2^16 words or more to a multiple of 4096 words.

    As the last stage of :func:`jaxcomm.hierarchical`, it divides the state over the last axis only,
    and other aggregators reduce gradients over the axes before.

    Slices have the tree structure of the parameters and as many dimensions per leaf, so masks by
    path or by `ndim` are correct. If n divides the first axis of a leaf, a slice consists of whole
    rows of that axis; otherwise all its coordinates are on the last axis. Leaves that are sharded
    over other mesh axes are gathered over these axes first. Leaves of the optimizer state whose
    shape does not depend on that of the parameters, such as a step count, are equal on all workers.

    Args:
      tx: An element-wise optimizer, such as `optax.adamw`: each coordinate of the update depends on
        the same coordinate of gradients, parameters and state, and on scalars such as a step count.
        It receives the slices of parameters, and the extra arguments except `weight`. Place
        :func:`jaxcomm.skip_nonfinite` and :func:`jaxcomm.accumulate` around `sharded_server`.
      push: The codec of gradients. Each slice (or bucket of slices) has separate statistics. Its
        memory must be each worker's own, such as that of
        :func:`jaxcomm.compression.feedback.error_feedback`. Default: exact.
      pull: The codec of updates, kept by the owner of a slice; for instance
        `jaxcomm.quantizers.cast("bfloat16")`. Default: exact.
      axis_name: The mesh axis, or axes, of the workers.
      scope: Which slices of a worker share statistics: those of each `"leaf"`, or of a `"bucket"`
        of leaves. Default: the `scope` of each codec.
      bucket_bytes: The maximum size of a bucket of slices in float32 bytes. Default: 32 MiB.
      max_norm: The largest norm of the mean gradient of all slices and leaves, a positive Python
        float: a larger one is scaled down, as by `optax.clip_by_global_norm` between a mean and the
        optimizer. It takes an all-reduce of one float32. Default: no clipping.
      seed: Seed of the randomness; may be traced.

    Returns:
      A transformation to use in place of the aggregator and the optimizer, for
      :func:`jaxcomm.init`, :func:`jaxcomm.make_step` and :func:`jaxcomm.simulate`. Updates are
      equal on all workers. If a gradient or a result is not finite on any worker, the update is NaN
      on all workers and no memory and optimizer state changes. `update(..., weight=w)` uses a
      weighted mean.

    Raises:
      ValueError: If an option is out of range or an axis is named twice; in `init` and `update`, if
        `axis_name` is not bound, or if `tx` is not element-wise or communicates; in `init`, if
        parameters differ by worker, or a codec has memory that workers share; in `update`, if an
        update is already summed or not floating-point, or the state is for another number of
        workers.

    Example:
      >>> import jax.numpy as jnp, optax, jaxcomm
      >>> tx = jaxcomm.sharded_server(optax.sgd(0.5, momentum=0.9))
      >>> params = jnp.float32([3.0, 3.0, 3.0, 3.0])
      >>> state = jaxcomm.init(tx, params, 2)
      >>> state.inner[0].trace.per_worker["data"].shape
      (2, 2)
      >>> step = jaxcomm.simulate(lambda w, x: 2 * jnp.mean((w - jnp.mean(x)) ** 2), tx, 2)
      >>> params, state, _ = step(params, state, jnp.ones(2))
      >>> print(params)
      [2. 2. 2. 2.]

    References:
      Rajbhandari et al., `ZeRO: Memory Optimizations Toward Training Trillion Parameter Models
      <https://arxiv.org/abs/1910.02054>`_, 2020. Differences: parameters change by gathered
      updates and not by gathered parameters, so that both messages can be compressed with feedback.
      Li et al., `Scaling Distributed Machine Learning with the Parameter Server
      <https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu>`_, 2014.
    """
    inner = optax.with_extra_args_support(tx)
    axis = _axis.label(axis_name)
    push_end = End(axis_name, push, scope, bucket_bytes, of_rows=True)
    pull_end = End(axis_name, pull, scope, bucket_bytes, of_rows=False)
    accepted: set[Any] = set()  # Cases that have been checked, since a step is traced repeatedly.

    def mark(tree: PyTree) -> PerWorker:
        return _axis.marked(tree, axis_name)

    def whole(tree: PyTree) -> PyTree:
        """Leaves that are sharded over other, Explicit axes, replicated over these."""
        return jax.tree.map(lambda x: resharded(x, PartitionSpec()), tree)

    def rows_of(tree: PyTree) -> PyTree:
        workers = _axis.size(axis_name)
        return jax.tree.map(lambda x: to_slices(x, workers), tree)

    def slices_of(tree: PyTree) -> PyTree:
        me = _axis.index(axis_name)
        return jax.tree.map(lambda rows: rows[me], rows_of(tree))

    def check(
        updates: PyTree, params: PyTree, own: list[bool], extra_args: dict[str, Any] | None
    ) -> None:
        # A state for one worker must suit several, so it is checked with slices of at least two.
        workers = max(_axis.size(axis_name), 2)
        slices = lambda tree: jax.tree.map(lambda x: to_slices(x, workers)[0], tree)  # noqa: E731
        leaves, treedef = jax.tree.flatten((updates, params))
        shapes = tuple((x.shape, jnp.dtype(x.dtype)) for x in leaves)
        case = (treedef, shapes, tuple(own), workers, extra_args is None)
        if case in accepted and not extra_args:
            return
        require_elementwise(inner, axis_name, updates, params, own, slices, extra_args)
        if not extra_args:
            accepted.add(case)

    def mark_some(state: PyTree, own: list[bool]) -> PyTree:
        """The state of the optimizer, in which leaves that differ by worker are `PerWorker`."""
        leaves, treedef = jax.tree.flatten(state)
        return jax.tree.unflatten(
            treedef,
            [
                resized_by(mark(x), _recut) if differs else x
                for x, differs in zip(leaves, own, strict=True)
            ],
        )

    def init_fn(params: PyTree) -> ShardedServerState:
        require_shards()
        _axis.require_replicated(
            params,
            _axis.names(axis_name),
            "The parameter",
            "`sharded_server` needs parameters that are equal on all workers: do not nest it.",
        )
        params = whole(params)
        own = follows_leaves(inner, params)
        check(params, params, own, None)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)

        def memory_of(end: End, tree: PyTree) -> PerWorker:
            def resized(old: PerWorker, new: PerWorker) -> PerWorker:
                memories = old.per_worker[axis], new.per_worker[axis]
                return PerWorker({axis: end.resize(like, *memories)})

            return resized_by(mark(end.init(tree)), resized)

        slices = slices_of(params)
        return ShardedServerState(
            key=_noise.make_key(seed),
            step=jnp.zeros((), jnp.uint32),
            push=memory_of(push_end, rows_of(params)),
            inner=mark_some(inner.init(slices), own),
            pull=memory_of(pull_end, slices),
        )

    def update_fn(
        updates: PyTree,
        state: ShardedServerState,
        params: PyTree = None,
        *,
        weight: jax.Array | float | None = None,
        outer_axes: tuple[str, ...] = (),
        shard_axes: tuple[str, ...] = (),
        **extra_args: Any,
    ) -> tuple[PyTree, ShardedServerState]:
        require_state(state, ShardedServerState, "`sharded_server`")
        if outer_axes or shard_axes:
            raise ValueError(
                "`sharded_server` has the optimizer: it must be the last stage of `hierarchical`, "
                f"outside `shard_local`; updates also differ over {[*outer_axes, *shard_axes]}."
            )
        require_floating(updates)
        require_shards()
        _axis.require_local(updates, axis_name)
        specs = jax.tree.map(explicit_spec, updates)
        updates, params = whole(updates), whole(params)
        nodes, treedef = jax.tree.flatten(state.inner, is_leaf=_is_marked)
        own = [*map(_is_marked, nodes)]
        check(updates, params, own, extra_args)
        workers, me = _axis.size(axis_name), _axis.index(axis_name)
        push_memory = _axis.own(state.push, axis_name)
        take = lambda x: _axis.own(x, axis_name, "The optimizer state") if _is_marked(x) else x  # noqa: E731
        before = jax.tree.unflatten(treedef, map(take, nodes))
        pull_memory = _axis.own(state.pull, axis_name)
        if weight is not None:
            weight = _axis.as_varying(own_weight(weight, weight_dtype(updates)), axis_name)
        if not any(x.size for x in jax.tree.leaves(updates)):  # Nothing to send.
            slices, after = inner.update(
                slices_of(updates), before, slices_of(params), **extra_args
            )
            result = jax.tree.map(lambda u, x: jnp.zeros(x.shape, u.dtype), slices, updates)
            return result, state._replace(step=state.step + 1, inner=mark_some(after, own))
        first = push_end.key_count(slices_of(updates))
        units = first + pull_end.key_count(slices_of(updates))
        place = _noise.placed_key(state.key, axis_name, updates)
        keys = _noise.keys_of_units(place, state.step, max(units, 1), me)
        push_keys = Keys(*(key[:first] for key in keys))
        pull_keys = Keys(*(key[first:] for key in keys))

        def padded_with_zeros(slices: PyTree) -> PyTree:
            return jax.tree.map(
                lambda x, update: without_padding(x, me, update.size, workers), slices, updates
            )

        pushed = push_end.push(rows_of(updates), push_keys, push_memory, weight)
        means = lax.optimization_barrier(padded_with_zeros(pushed.tree))
        if max_norm is not None:
            means = _clip_slices(axis_name, means, max_norm)
        slices, after = inner.update(means, before, slices_of(params), **extra_args)
        slices = padded_with_zeros(slices)
        finite = pushed.finite & leaves_finite((means, slices))
        pulled = pull_end.pull(slices, pull_keys, pull_memory, finite)

        def joined(x: jax.Array, update: jax.Array, spec: PartitionSpec) -> jax.Array:
            result = jnp.where(pulled.finite, from_rows(x, update.shape), jnp.nan)
            return resharded(result, spec)

        result = jax.tree.map(joined, pulled.tree, updates, specs)
        sent, after, resent = keep_if(
            pulled.finite,
            (pushed.memory, after, pulled.memory),
            (push_memory, before, pull_memory),
        )
        return result, ShardedServerState(
            state.key, state.step + 1, mark(sent), mark_some(after, own), mark(resent)
        )

    return Aggregator(init_fn, update_fn, axis_name)
