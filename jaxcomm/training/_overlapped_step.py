"""A training step whose exchanges are programs of their own, beside the next steps."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxcomm import _axis
from jaxcomm._axis import own_params, state_specs
from jaxcomm._collectives import after
from jaxcomm._contract import Aggregator, AxisName, PerWorker, PyTree
from jaxcomm._gradients import LossFn
from jaxcomm._mesh import is_traced, place, require_axes, shard_map
from jaxcomm._require import checked, presence
from jaxcomm.synchronization._averaging_round import Averaging, displacement, takes_part
from jaxcomm.synchronization._streaming_diloco import (
    Counted,
    Fragment,
    Streaming,
    StreamingState,
    joined,
)
from jaxcomm.synchronization._trees import narrow, wide
from jaxcomm.training._arguments import Step, typed_as, unshared
from jaxcomm.training._make_step import make_step
from jaxcomm.training._means import Metrics
from jaxcomm.training._worker_step import GradientFn


def second_mesh(mesh: Mesh) -> Mesh:
    """A mesh like `mesh` over other devices of the same processes, for exchanges beside steps.

    On CPU, `jax.config.update("jax_num_cpu_devices", 2)` gives a process two devices. It is called
    before JAX starts, and `mesh` then has one device of each process.

    Args:
      mesh: The mesh of the steps.

    Returns:
      A mesh of the same shape, axis names and axis types. Its device at each position belongs to
      the process of the device of `mesh` there. Nothing is sent.

    Raises:
      LookupError: If a process has too few devices that are not in `mesh`.

    Example:
      >>> import jax, jaxcomm
      >>> mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
      >>> jaxcomm.training.second_mesh(mesh).devices.flat[0] == jax.devices()[0]
      False
    """
    used = set(mesh.devices.flat)
    spare: dict[int, list[jax.Device]] = {}
    for device in jax.devices(mesh.devices.flat[0].platform):
        if device not in used:
            spare.setdefault(device.process_index, []).append(device)

    devices = np.empty(mesh.devices.shape, object)
    devices.flat = [spare[device.process_index].pop(0) for device in mesh.devices.flat]
    return Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)


def moved(tree: PyTree, source: Mesh, target: Mesh) -> PyTree:
    """Copies arrays to the devices at the same positions of another mesh, within each process."""
    if source == target:
        return tree
    device_of = dict(zip(source.devices.flat, target.devices.flat, strict=True))

    def one(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = one(jax.random.key_data(x), spec)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        parts = [jax.device_put(s.data, device_of[s.device]) for s in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(target, spec), parts)

    return jax.tree.map(one, tree, state_specs(tree))


def _over_workers(
    fn: Callable[..., PyTree], mesh: Mesh, like: Callable[..., PyTree]
) -> Callable[..., Any]:
    """`fn` on the workers of a mesh; its results have the types of the arguments `like(*args)`."""

    @functools.wraps(fn)
    def run(*args: PyTree) -> PyTree:
        on_mesh = shard_map(fn, mesh, state_specs(args), state_specs(like(*args)))
        return typed_as(on_mesh(*args), like(*args))

    return run


class _Arrival(NamedTuple):
    """What a finished exchange changes in the workers."""

    anchor: Fragment
    succeeded: jax.Array
    counts: dict[str, jax.Array]


@checked
def make_overlapped_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    exchange_mesh: Mesh | None = None,
    *,
    axis_name: AxisName = "data",
    has_aux: bool = False,
    gradients: GradientFn | None = None,
    metrics: Metrics = "own",
    rows_differ: bool = False,
    donate: bool = True,
) -> Step:
    r"""Makes a step whose exchanges run while the next steps compute.

    .. math:: t \equiv o_p: \quad a' = \mathrm{exchange}(a, x_i)
              \quad\text{begins}, \qquad
              t \equiv o_p + \tau: \quad x_i \gets \alpha x_i + (1 - \alpha)\, a'

    for the fragments, offsets and overlap of :func:`jaxcomm.synchronization.streaming_diloco`. The
    results are those of :func:`jaxcomm.make_step` with the same `tx`, up to rounding. An exchange
    is a program on `exchange_mesh`, and the step that begins it does not wait for it. The step that
    applies it does. Steps send nothing but `metrics`; an exchange sends what `tx` sends.

    On CPU, programs of one device wait for each other, so `exchange_mesh` is necessary there. To
    trace several steps into one program, leave out `exchange_mesh` and pass `number`.

    Args:
      loss_fn: As for :func:`jaxcomm.make_step`.
      tx: A `streaming_diloco`. With one fragment it is DiLoCo that is merged late.
      mesh: The devices of the steps.
      exchange_mesh: The devices of the exchanges, from :func:`second_mesh`; by default, `mesh`.
      axis_name: The mesh axis, or axes, of the workers. Other axes index devices of one worker.
      has_aux: As for :func:`jaxcomm.make_step`.
      gradients: As for :func:`jaxcomm.make_step`.
      metrics: As for :func:`jaxcomm.make_step`. The mean over workers makes them wait for each
        other in each step, beside an exchange.
      rows_differ: As for :func:`jaxcomm.make_step`.
      donate: Whether to donate the buffers of params and state to the new ones.

    Returns:
      `step(params, opt_state, batch, *, key=None, shared=None, present=None, number=None) ->
      (params, opt_state, metrics)`, for params from :func:`jaxcomm.replicate` and a state from
      :func:`jaxcomm.init`.

      - In the new state, the fragments are on `exchange_mesh`. Those under way are arrays that are
        not ready yet. So nothing is outside the state: to save it waits for the exchange.
      - `present` is as for `streaming_diloco`.
      - `number` is the number of the step, a Python int from 1. Inside `jax.jit` it is necessary,
        because there the counter in the state is not known; only its remainder modulo the period
        counts after the first two periods. Outside, the counter is used.
      - The diagnostics of an exchange appear in the step that applies it.

      On CPU devices, a call waits for the previous step, and the begin of an exchange for the
      previous exchange. So no two steps and no two exchanges are in flight.

    Raises:
      ValueError: As :func:`jaxcomm.make_step` does; or if the meshes share devices, or `number` is
        missing inside `jax.jit` or differs from the counter.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxcomm
      >>> mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
      >>> beside = jaxcomm.training.second_mesh(mesh)
      >>> tx = jaxcomm.synchronization.streaming_diloco(
      ...     optax.sgd(0.5), optax.sgd(1.0), 2, fragments=1, overlap=1
      ... )
      >>> params = jaxcomm.replicate(jnp.float32(3), mesh)
      >>> state = jaxcomm.init(tx, params, mesh)
      >>> loss = lambda w, x: jnp.mean((w - x) ** 2)
      >>> step = jaxcomm.training.make_overlapped_step(loss, tx, mesh, beside)
      >>> for _ in range(3):
      ...     params, state, metrics = step(params, state, jnp.ones(1))
      >>> print(params.per_worker["data"])
      [1.]

    References:
      Douillard et al., `Streaming DiLoCo <https://arxiv.org/abs/2501.18512>`_, 2025.
    """
    require_axes(mesh, axis_name)
    if exchange_mesh and {*mesh.devices.flat} & {*exchange_mesh.devices.flat}:
        raise ValueError(
            "`exchange_mesh` shares devices with `mesh`, and programs of one device wait for each "
            "other: use `jaxcomm.training.second_mesh(mesh)`."
        )
    streaming: Streaming = cast(Aggregator, tx).parts
    beside, schedule = exchange_mesh or mesh, streaming.schedule
    local_step = make_step(
        loss_fn,
        streaming.local,
        mesh,
        axis_name=axis_name,
        has_aux=has_aux,
        gradients=gradients,
        metrics=metrics,
        rows_differ=rows_differ,
        donate=donate,
    )
    workers = math.prod(mesh.shape[name] for name in _axis.names(axis_name))

    @jax.named_scope("make_overlapped_step")
    def exchange(
        fragment: Averaging, x: PerWorker, done: PerWorker, present: Any, earlier: PyTree
    ) -> Averaging:
        own, done = own_params(x), after(done, earlier)
        still = jax.tree.map(jnp.zeros_like, own)
        displacements = displacement(fragment.anchor, own, still)
        return streaming.exchange(fragment, displacements, done, takes_part(present, axis_name))

    def merge(
        x: PerWorker, diagnostics: PyTree, arrival: _Arrival, present: Any
    ) -> tuple[PerWorker, PyTree]:
        own = own_params(x)
        merged = narrow(streaming.mixed(wide(own), arrival.anchor), own)
        applies = takes_part(present, axis_name) & arrival.succeeded
        new = jax.tree.map(lambda a, b: jnp.where(applies, a, b)[None], merged, own)
        # Every fragment counts each step, but each exchange only once.
        most = jnp.maximum(diagnostics["skipped_steps"], arrival.counts["skipped_steps"])
        failed = diagnostics["skipped_exchanges"] + jnp.where(arrival.succeeded, 0.0, 1.0)
        report = {"skipped_steps": most, "skipped_exchanges": failed}
        return PerWorker({_axis.label(axis_name): new}), report

    def cleared(done: PyTree) -> PyTree:
        return typed_as(jax.tree.map(jnp.zeros_like, done), done)

    first = 0 if donate else ()
    exchange_of_all = _over_workers(exchange, beside, lambda *args: args[0])
    merge_of_all = _over_workers(merge, mesh, lambda *args: args[:2])
    compiled_exchange = jax.jit(exchange_of_all, donate_argnums=first)
    compiled_merge = jax.jit(merge_of_all, donate_argnums=first)
    per_worker = NamedSharding(mesh, PartitionSpec(_axis.names(axis_name)))
    compiled_cleared = jax.jit(cleared, out_shardings=per_worker)
    compiled_landed = jax.jit(cleared, out_shardings=NamedSharding(beside, PartitionSpec()))
    began: list[bool] = []

    def number_of(step: Any, number: int | None) -> int:
        if isinstance(step, jax.core.Tracer):
            if exchange_mesh is not None or number is None:
                raise ValueError(
                    "Inside `jax.jit`, make the step without `exchange_mesh`, and pass the number "
                    "of each step, as in `step(params, opt_state, batch, number=1)`."
                )
            return number
        found = int(step) + 1
        if number not in (None, found):
            raise ValueError(f"`number` is {number}, but the state is before step {found}.")
        return found

    def placed(fragments: tuple[Averaging, ...]) -> tuple[Averaging, ...]:
        there = set(beside.devices.flat)
        leaves = jax.tree.leaves(fragments)
        if all(isinstance(x, jax.Array) and x.sharding.device_set == there for x in leaves):
            return fragments
        specs = state_specs(fragments)
        on_mesh = place(fragments, mesh, specs, "opt_state")
        found: tuple[Averaging, ...] = moved(on_mesh, mesh, beside)
        return found

    def step(
        params: PyTree,
        opt_state: optax.OptState,
        batch: PyTree,
        *,
        key: jax.Array | None = None,
        shared: PyTree = None,
        present: jax.Array | None = None,
        number: int | None = None,
    ) -> tuple[PyTree, optax.OptState, dict[str, jax.Array]]:
        inner, streams = opt_state
        if present is not None:
            present = presence(present, workers)
        now = number_of(streams.step, number)
        traced = is_traced((params, opt_state, batch))
        exchange_, merge_, cleared_, landed_ = (
            (exchange_of_all, merge_of_all, cleared, cleared)
            if traced
            else (compiled_exchange, compiled_merge, compiled_cleared, compiled_landed)
        )
        params, (inner, counted), values = local_step(
            params, (inner, Counted(streams.step, streams.done)), batch, key=key, shared=shared
        )
        if not traced and present is not None:
            present = cast(jax.Array, np.asarray(present))  # It is for both meshes.
        fragments = [*(streams.fragments if traced else placed(streams.fragments))]
        done, diagnostics = [*counted.done], streams.diagnostics
        under_way = [False] * schedule.fragments
        if not traced and not began:  # The first state may be of another period or overlap.
            under_way = [bool(fragment.succeeded) for fragment in fragments]
            began.append(True)
        (axis,) = params.per_worker
        own = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), params.per_worker[axis]
        )
        parts = streaming.parts_of(params.per_worker[axis], own)

        for index in range(schedule.fragments):
            if schedule.begins(index, now) and not under_way[index]:
                if not traced:  # Two exchanges in flight might need more threads than there are.
                    jax.block_until_ready(fragments)
                    fragments[index] = unshared(fragments[index])
                sent = moved((PerWorker({axis: parts[index]}), done[index]), mesh, beside)
                # In one program XLA would combine the counts of this exchange with the message of
                # an earlier one, which would then wait for them.
                earlier = [x.anchor for x in fragments if traced and x is not fragments[index]]
                fragments[index] = exchange_(fragments[index], sent[0], sent[1], present, earlier)
                done[index] = cleared_(done[index])
        for index in range(schedule.fragments):
            late = under_way[index] and schedule.is_over(index, now)
            if schedule.arrives(index, now) or late:
                new = fragments[index]
                arrival = _Arrival(new.anchor, new.succeeded, new.counts)
                arrived = moved(arrival, beside, mesh)
                x = PerWorker({axis: parts[index]})
                x, diagnostics = merge_(x, diagnostics, arrived, present)
                parts[index] = x.per_worker[axis]
                fragments[index] = new._replace(succeeded=landed_(new.succeeded))

        report = {f"diagnostics/{name}": value for name, value in diagnostics.items()}
        streams = StreamingState(counted.step, tuple(done), tuple(fragments), diagnostics)
        return PerWorker({axis: joined(parts)}), (inner, streams), values | report

    return step
