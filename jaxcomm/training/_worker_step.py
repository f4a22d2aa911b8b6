"""The step of one worker, on a mesh and in simulation."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._base import AxisName, LossFn, PerWorker, PyTree
from jaxcomm._state import own_params
from jaxcomm.aggregation import mean
from jaxcomm.training._metrics import Metrics, diagnostics_of, reduce_metrics
from jaxcomm.training._mistakes import (
    explain_update_error,
    require_aux,
    require_gradients_of,
    require_means,
    require_pair,
)

Step: TypeAlias = Callable[..., tuple[PyTree, optax.OptState, dict[str, jax.Array]]]
GradientFn: TypeAlias = Callable[..., tuple[Any, ...]]


def _over_devices(
    axis_name: AxisName,
    inner: tuple[str, ...],
    values: PyTree,
    gradient: PyTree,
    weight: jax.Array | None,
) -> tuple[PyTree, PyTree, jax.Array | None]:
    """Averages over the devices of one worker, each of which has a part of its rows."""
    average = mean(inner)
    values = jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.float32), values)
    per_device = _axis.local_params((values, gradient), inner)
    (values, gradient), _ = average.update(
        per_device, average.init(per_device), weight=weight, outer_axes=_axis.names(axis_name)
    )
    return values, gradient, None if weight is None else lax.psum(weight, inner)


def worker_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    axis_name: AxisName,
    inner: tuple[str, ...],
    has_aux: bool,
    gradients: GradientFn | None,
    metrics: Metrics,
) -> Callable[..., tuple[PyTree, optax.OptState, dict[str, jax.Array], dict[str, jax.Array]]]:
    """Makes the step of one worker, which runs under `jax.shard_map` or `jax.vmap`.

    Args:
      loss_fn: As for `jaxcomm.make_step`, like all arguments except `inner`.
      tx: ...
      axis_name: ...
      inner: The other axes, which index the devices of one worker.
      has_aux: ...
      gradients: ...
      metrics: ...

    Returns:
      `(params, opt_state, batch, key, extra_args) -> (params, opt_state, metrics, diagnostics)`.
      Per-worker metrics are `[1, ...]`; all other results are equal on all workers.
    """
    update = optax.with_extra_args_support(tx).update
    all_axes = (*_axis.names(axis_name), *inner)

    def differentiate(loss_fn: LossFn, params: PyTree, *args: PyTree) -> tuple[Any, ...]:
        require_gradients_of(loss_fn, params, keyed=len(args) > 1)

        def loss(params: PyTree, *args: PyTree) -> Any:
            value = loss_fn(params, *args)
            if has_aux:
                require_pair(value)
            return value

        local = _axis.local_value_and_grad(loss, has_aux, axis_name=all_axes)
        return tuple(local(params, *args))

    local_gradients = gradients or differentiate

    def step(
        worker_params: PyTree,
        opt_state: optax.OptState,
        batch: PyTree,
        key: jax.Array | None,
        extra_args: dict[str, PyTree],
    ) -> tuple[PyTree, optax.OptState, dict[str, jax.Array], dict[str, jax.Array]]:
        is_per_worker = isinstance(worker_params, PerWorker)
        if is_per_worker and [*worker_params.per_worker] != [_axis.label(axis_name)]:
            raise ValueError(
                f"The parameters differ over the axes {[*worker_params.per_worker]}, but "
                f"`axis_name` is {axis_name!r}."
            )
        params = own_params(worker_params)
        own_key = [] if key is None else [jax.random.fold_in(key, _axis.index(all_axes))]
        local_params = _axis.local_params(params, all_axes) if inner else params
        value, updates, *rest = local_gradients(loss_fn, local_params, batch, *own_key)
        weight = rest[0] if rest else None
        if has_aux:
            require_pair(value)
        loss, aux = value if has_aux else (value, {})
        taken = {"loss"} if weight is None else {"loss", "weight"}
        require_aux(aux, taken)
        if metrics != "own" or inner:
            require_means(
                lambda rows: local_gradients(loss_fn, local_params, rows, *own_key)[0][1],
                aux,
                batch,
                "" if inner else ", or make the step with `metrics='own'`",
            )
        values = {"loss": loss, **aux}
        if inner:
            values, updates, weight = _over_devices(axis_name, inner, values, updates, weight)
        extra = {} if weight is None else {"weight": weight}
        try:
            updates, new_state = update(updates, opt_state, params, **extra, **extra_args)
        except Exception as error:
            cause = explain_update_error(error, tx.init, params, opt_state)
            if cause is error:
                raise
            raise cause from error
        if not is_per_worker:
            _axis.require_replicated(
                updates,
                axis_name,
                "The update",
                "Place an aggregator, such as `jaxcomm.mean()`, first in `optax.chain`; or, for "
                "gossip, let parameters differ by worker with `jaxcomm.replicate(params, mesh)`.",
            )
        _axis.require_replicated(
            new_state,
            axis_name,
            "The optimizer state",
            "Mark it, as in `optax.chain(jaxcomm.per_worker(optax.adam(1e-3)), ...)`."
            if is_per_worker
            else "Place the aggregator before the transformation that keeps this state.",
        )
        reduced = reduce_metrics(metrics, axis_name, values, weight, opt_state)
        new = optax.apply_updates(params, updates)
        if is_per_worker:
            new = PerWorker({_axis.label(axis_name): jax.tree.map(lambda x: x[None], new)})
        return new, new_state, reduced, diagnostics_of(new_state)

    return step
