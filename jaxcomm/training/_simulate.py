"""A training step that simulates all workers on one device."""

from collections.abc import Mapping

import jax
import optax
from jax.sharding import AbstractMesh, AxisType

from jaxcomm import _axis
from jaxcomm._contract import AxisName, PyTree
from jaxcomm._gradients import LossFn
from jaxcomm._mesh import is_traced, strong
from jaxcomm._require import checked
from jaxcomm._workers import over_workers, worker_axes
from jaxcomm.training._arguments import (
    Carry,
    Given,
    Step,
    public_step,
    require_carry,
    require_carry_kept,
    require_rows,
    unshared,
)
from jaxcomm.training._means import Metrics
from jaxcomm.training._worker_step import GradientFn, WorkerStep
from jaxcomm.wire._walk import SIMULATED


@checked
def simulate(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    workers: int | Mapping[str, int],
    *,
    axis_name: AxisName = "data",
    has_aux: bool = False,
    has_model_state: bool = False,
    gradients: GradientFn | None = None,
    metrics: Metrics = "mean",
    rows_differ: bool = False,
    donate: bool = True,
) -> Step:
    """Makes the step of :func:`jaxcomm.make_step`, with all workers simulated on one device.

    The same transformations run under `jax.vmap`, with the same random draws as on a mesh. For
    equal gradients, methods that add integers give bit-for-bit equal results in both; other methods
    give equal results up to rounding. Nothing is sent; :func:`jaxcomm.wire.account` reports what
    this number of workers would send.

    Args:
      loss_fn: As for :func:`jaxcomm.make_step`.
      tx: As for :func:`jaxcomm.make_step`.
      workers: The number of workers, or the sizes of several axes by name, outermost first.
      axis_name: The axis of the workers; with a dict of sizes, the axis or axes over which `tx`
        averages. The other axes index the devices of one worker.
      has_aux: Whether `loss_fn` returns metrics.
      has_model_state: Whether `loss_fn` takes and returns a model state.
      gradients: As for :func:`jaxcomm.make_step`.
      metrics: As for :func:`jaxcomm.make_step`.
      rows_differ: As for :func:`jaxcomm.make_step`.
      donate: Whether to donate the buffers of params and state to the new ones.

    Returns:
      A step with the same signature as from :func:`jaxcomm.make_step`. Its state comes from
      `jaxcomm.init(tx, params, workers)` and has the same shapes as on a mesh.

    Raises:
      ValueError: Under the conditions of :func:`jaxcomm.make_step`, or if the number of workers is
        not a positive int.

    Example:
      >>> import jax.numpy as jnp, optax, jaxcomm
      >>> tx = optax.chain(jaxcomm.global_qsgd(), optax.sgd(0.5))
      >>> params = jnp.float32(3)
      >>> opt_state = jaxcomm.init(tx, params, 64)
      >>> step = jaxcomm.simulate(lambda w, x: jnp.mean((w - x) ** 2), tx, workers=64)
      >>> params, opt_state, metrics = step(params, opt_state, jnp.ones(64))
      >>> print(params, metrics["loss"])
      1.0 4.0
    """
    axes = worker_axes(workers, axis_name)
    names = _axis.names(axis_name)
    if names != tuple(name for name in axes if name in names):
        raise ValueError(
            f"`axis_name`={axis_name!r} must name axes of {workers!r}, in the same order."
        )
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    inner = tuple(name for name in axes if name not in names)
    of_worker = WorkerStep(loss_fn, tx, names, inner, has_aux, has_model_state, gradients, metrics)

    def on_mesh(
        carry: Carry, given: Given, extra_args: dict[str, PyTree]
    ) -> tuple[Carry, dict[str, jax.Array]]:
        new, values, diagnostics = of_worker.on_mesh(mesh, carry, given, extra_args)
        return new, values | diagnostics

    def simulated_workers(
        carry: Carry, given: Given, extra_args: dict[str, PyTree]
    ) -> tuple[Carry, dict[str, jax.Array]]:
        # Trace `jax.shard_map` first: it checks what varies by worker, and `jax.vmap` does not.
        jax.eval_shape(on_mesh, carry, given, extra_args)
        run = over_workers(of_worker.at_once, axes, *of_worker.specs(carry))
        new, values, diagnostics = run(carry, given, extra_args)
        return new, values | diagnostics

    simulated_workers.__name__ = SIMULATED
    jitted = jax.jit(simulated_workers, donate_argnums=0 if donate else ())

    def checked(carry: Carry, given: Given, extra_args: dict[str, PyTree]) -> None:
        require_rows(given.batch, rows_differ or gradients is not None)
        require_carry(carry, axes, axis_name)
        require_carry_kept(carry)

    def run(
        carry: Carry, given: Given, extra_args: dict[str, PyTree]
    ) -> tuple[Carry, dict[str, jax.Array]]:
        checked(carry, given, extra_args)
        if not is_traced((carry, given, extra_args)):
            carry = jax.tree.map(strong, carry)
            if donate:
                carry = unshared(carry, given, extra_args)
        return jitted(carry, given, extra_args)

    def accounted(
        carry: Carry, given: Given, extra_args: dict[str, PyTree]
    ) -> tuple[Carry, dict[str, jax.Array]]:
        checked(carry, given, extra_args)
        return on_mesh(carry, given, extra_args)

    step = public_step(run, has_model_state)
    # `wire.account` traces this instead.
    step.on_mesh = public_step(accounted, has_model_state)  # type: ignore[attr-defined]
    return step
