"""The training step of workers that one device simulates."""

import math
from collections.abc import Mapping

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jaxcomm import _axis
from jaxcomm._base import AxisName, LossFn, PyTree
from jaxcomm._mesh import (
    is_traced,
    require_kept,
    require_marked,
    require_workers,
    shard_map,
    strong,
    unshared,
)
from jaxcomm._state import over_workers, state_specs, worker_axes
from jaxcomm.training._metrics import Metrics, check_metrics
from jaxcomm.training._mistakes import (
    require_divisible,
    require_step_of,
    require_used,
)
from jaxcomm.training._worker_step import GradientFn, Step, worker_step
from jaxcomm.wire._walk import SIMULATED


def simulate(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    num_workers: int | Mapping[str, int],
    *,
    axis_name: AxisName = "data",
    has_aux: bool = False,
    gradients: GradientFn | None = None,
    metrics: Metrics = "mean",
    donate: bool = True,
) -> Step:
    """The step of :func:`jaxcomm.make_step`, all workers simulated on one device.

    The same transformations run under `jax.vmap`, with the same random draws: results are equal bit
    for bit where sums are of integers and gradients are, and to rounding elsewhere. Nothing is
    sent; :func:`jaxcomm.wire.account` reports what so many workers would send.

    Args:
      loss_fn: As for :func:`jaxcomm.make_step`.
      tx: As for :func:`jaxcomm.make_step`.
      num_workers: The number of workers, or the sizes of several axes by name, outermost first.
      axis_name: The axis of the workers; with a dict of sizes, the axis or axes that `tx` averages
        over. The others count the devices of one worker.
      has_aux: Whether `loss_fn` returns a pair.
      gradients: As for :func:`jaxcomm.make_step`.
      metrics: As for :func:`jaxcomm.make_step`.
      donate: Whether the buffers of params and state are given away to the new ones.

    Returns:
      A step called like that of :func:`jaxcomm.make_step`. Its state comes from
      `jaxcomm.init(tx, params, num_workers)` and has the same shapes as on a mesh.

    Raises:
      ValueError: As :func:`jaxcomm.make_step` does, or if the number of workers is no positive int.

    Example:
      >>> import jax.numpy as jnp, optax, jaxcomm
      >>> tx = optax.chain(jaxcomm.global_qsgd(), optax.sgd(0.5))
      >>> params = jnp.float32(3)
      >>> opt_state = jaxcomm.init(tx, params, 64)
      >>> step = jaxcomm.simulate(lambda w, x: jnp.mean((w - x) ** 2), tx, num_workers=64)
      >>> params, opt_state, metrics = step(params, opt_state, jnp.ones(64))
      >>> print(params, metrics["loss"])
      1.0 4.0
    """
    axes = worker_axes(num_workers, axis_name)
    names = _axis.names(axis_name)
    if names != tuple(name for name in axes if name in names):
        raise ValueError(
            f"`axis_name`={axis_name!r} must name axes of {num_workers!r}, in the same order."
        )
    require_step_of(loss_fn, tx, gradients)
    check_metrics(metrics)
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    inner = tuple(name for name in axes if name not in names)
    devices = math.prod(axes.values())
    of_worker = worker_step(loss_fn, tx, axis_name, inner, has_aux, gradients, metrics)
    batch_spec, whole = PartitionSpec((*names, *inner)), PartitionSpec()
    told_spec = PartitionSpec(names) if metrics == "own" else whole

    def specs_of(params: PyTree, opt_state: optax.OptState) -> tuple[PyTree, PyTree]:
        state = state_specs(params), state_specs(opt_state)
        return (*state, batch_spec, whole, whole), (*state, told_spec, whole)

    def on_mesh(
        params: PyTree,
        opt_state: optax.OptState,
        batch: PyTree,
        key: jax.Array | None,
        extra_args: dict[str, PyTree],
    ) -> tuple[PyTree, optax.OptState, dict[str, jax.Array]]:
        run = shard_map(of_worker, mesh, *specs_of(params, opt_state))
        new, after, told, diagnostics = run(params, opt_state, batch, key, extra_args)
        return new, after, told | diagnostics

    def simulated_workers(
        params: PyTree,
        opt_state: optax.OptState,
        batch: PyTree,
        key: jax.Array | None,
        extra_args: dict[str, PyTree],
    ) -> tuple[PyTree, optax.OptState, dict[str, jax.Array]]:
        # `jax.vmap` does not know what varies by worker; `jax.shard_map` does, and says so.
        jax.eval_shape(on_mesh, params, opt_state, batch, key, extra_args)
        run = over_workers(of_worker, axes, *specs_of(params, opt_state))
        new, after, told, diagnostics = run(params, opt_state, batch, key, extra_args)
        return new, after, told | diagnostics

    simulated_workers.__name__ = SIMULATED
    jitted = jax.jit(simulated_workers, donate_argnums=(0, 1) if donate else ())
    used: set[str] = set()

    def checked(
        params: PyTree,
        opt_state: optax.OptState,
        batch: PyTree,
        key: jax.Array | None,
        extra_args: dict[str, PyTree],
    ) -> None:
        require_divisible(batch, devices)
        require_marked(params)
        require_workers(params, axes, "The parameters")
        require_workers(opt_state, axes, "The optimizer state")
        require_kept(params, "params")
        require_kept(opt_state, "opt_state")
        require_used(on_mesh, params, opt_state, batch, key, extra_args, used, devices)

    def step(
        params: PyTree,
        opt_state: optax.OptState,
        batch: PyTree,
        *,
        key: jax.Array | None = None,
        **extra_args: PyTree,
    ) -> tuple[PyTree, optax.OptState, dict[str, jax.Array]]:
        checked(params, opt_state, batch, key, extra_args)
        if not is_traced((params, opt_state, batch, key, extra_args)):
            params, opt_state = jax.tree.map(strong, (params, opt_state))
            if donate:
                params, opt_state, batch = unshared(params, opt_state, batch)
        return jitted(params, opt_state, batch, key, extra_args)

    def accounted(
        params: PyTree,
        opt_state: optax.OptState,
        batch: PyTree,
        *,
        key: jax.Array | None = None,
        **extra_args: PyTree,
    ) -> tuple[PyTree, optax.OptState, dict[str, jax.Array]]:
        checked(params, opt_state, batch, key, extra_args)
        return on_mesh(params, opt_state, batch, key, extra_args)

    step.on_mesh = accounted  # type: ignore[attr-defined]  # What `wire.account` traces instead.
    return step
