"""The step of one worker, on a mesh and in simulation."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._base import AxisName, LossFn, PerWorker, PyTree, parts_of_value
from jaxcomm._deferred import Backward, Taker
from jaxcomm._local_gradients import local_value_and_grad, rebuilt_value_and_grad
from jaxcomm._require import explained
from jaxcomm._state import own_params
from jaxcomm.aggregation import mean
from jaxcomm.aggregation._zeroth_order import ZEROTH_ORDER, evaluates_loss
from jaxcomm.scheduling._layers import explain_guard, guarded
from jaxcomm.scheduling._wait_free import WAIT_FREE, aggregates_in_backward
from jaxcomm.training._carry import Carry, replica_axes
from jaxcomm.training._explanations import explain_loss_error, explain_update_error
from jaxcomm.training._metrics import Metrics, diagnostics_of, reduce_metrics
from jaxcomm.training._mistakes import (
    require_aux,
    require_gradients_of,
    require_means,
    require_parts,
)
from jaxcomm.training._model_state import reduce_model_state

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


def _taker_of(opt_state: optax.OptState) -> Taker | None:
    """The transformation that needs the loss or the backward pass in place of gradients."""
    if aggregates_in_backward(opt_state):
        return WAIT_FREE
    return ZEROTH_ORDER if evaluates_loss(opt_state) else None


def worker_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    axis_name: AxisName,
    inner: tuple[str, ...],
    has_aux: bool,
    has_model_state: bool,
    gradients: GradientFn | None,
    metrics: Metrics,
) -> Callable[..., tuple[Carry, dict[str, jax.Array], dict[str, jax.Array]]]:
    """Makes the step of one worker, which runs under `jax.shard_map` or `jax.vmap`.

    Args:
      loss_fn: As for `jaxcomm.make_step`, like all arguments except `inner`.
      tx: ...
      axis_name: ...
      inner: The other axes, which index the devices of one worker.
      has_aux: ...
      has_model_state: ...
      gradients: ...
      metrics: ...

    Returns:
      `(carry, batch, key, extra_args) -> (carry, metrics, diagnostics)`. Per-worker metrics are
      `[1, ...]`; all other results are equal on all workers.
    """
    update = optax.with_extra_args_support(tx).update
    all_axes = (*_axis.names(axis_name), *inner)
    has_rest = has_aux or has_model_state

    def checked_loss(loss_fn: LossFn, params: PyTree, args: tuple[PyTree, ...], key: Any) -> LossFn:
        require_gradients_of(loss_fn, params, args, has_key=bool(key))

        def loss(params: PyTree, *args: PyTree) -> Any:
            value = loss_fn(params, *args)
            require_parts(value, has_model_state, has_aux)
            return value

        return loss

    def differentiate(
        loss_fn: LossFn, params: PyTree, batch: PyTree, *key: jax.Array, **model_state: PyTree
    ) -> tuple[Any, ...]:
        args = (*model_state.values(), batch, *key)
        loss = checked_loss(loss_fn, params, args, key)
        return tuple(local_value_and_grad(loss, has_rest, axis_name=all_axes)(params, *args))

    def deferred(
        taker: Taker, params: PyTree, batch: PyTree, *key: jax.Array, **model_state: PyTree
    ) -> Backward:
        args = (*model_state.values(), batch, *key)
        loss = checked_loss(loss_fn, params, args, key)
        value_and_gradient = rebuilt_value_and_grad(
            lambda params, *args: loss(guarded(params), *args), has_rest, axis_name=all_axes
        )

        def evaluate(
            params: PyTree, rows: PyTree, part: jax.Array | None = None
        ) -> tuple[Any, PyTree]:
            keys = key if part is None else [jax.random.fold_in(each, part) for each in key]
            with explained(explain_guard), explained(explain_loss_error):
                result: tuple[Any, PyTree] = value_and_gradient(
                    params, *model_state.values(), rows, *keys
                )
            return result

        def loss_at(params: PyTree) -> Any:
            with explained(explain_loss_error):
                return loss(params, *jax.tree.map(lambda x: x, args))

        return Backward(taker, loss_at, evaluate, params, batch, all_axes, inner, has_model_state)

    local_gradients = gradients or differentiate

    def step(
        carry: Carry,
        batch: PyTree,
        key: jax.Array | None,
        extra_args: dict[str, PyTree],
    ) -> tuple[Carry, dict[str, jax.Array], dict[str, jax.Array]]:
        opt_state = carry.opt_state
        is_per_worker = isinstance(carry.params, PerWorker)
        params = own_params(carry.params)
        replica = replica_axes(carry.params, axis_name)
        # The axes of a replica's devices over which `tx` averages their gradients.
        within = _axis.names(axis_name)[len(replica) :]
        own_key = [] if key is None else [jax.random.fold_in(key, _axis.index(all_axes))]
        local_params = _axis.local_params(params, all_axes) if inner or within else params
        taken_state = {"model_state": own_params(carry.model_state)} if has_model_state else {}

        def value_and_gradient(rows: PyTree) -> tuple[Any, ...]:
            with explained(explain_loss_error):
                return local_gradients(loss_fn, local_params, rows, *own_key, **taken_state)

        def update_from(updates: PyTree, **extra: PyTree) -> tuple[PyTree, PyTree]:
            with explained(lambda error: explain_update_error(error, tx.init, params, opt_state)):
                return update(updates, opt_state, params, **extra, **extra_args)

        backward = None
        weight = None
        taker = _taker_of(opt_state)
        if gradients is None and taker is not None and jax.tree.leaves(params):
            backward = deferred(taker, params, batch, *own_key, **taken_state)
            updates, new_opt_state = update_from(backward.deferred())
            value = backward.value
        else:
            value, updates, *rest = value_and_gradient(batch)
            weight = rest[0] if rest else None
            if within and weight is not None:
                raise ValueError(
                    f"Gradients with weights differ over {list(within)} within a replica, whose "
                    f"parameters are equal there: name only {list(replica)} in `axis_name`."
                )
            require_parts(value, has_model_state, has_aux)
        loss, returned_state, aux = parts_of_value(value, has_model_state, has_aux)
        aux = aux if has_aux else {}
        require_aux(aux, {"loss"} if weight is None else {"loss", "weight"})
        if metrics != "own" or inner:
            require_means(
                lambda rows: parts_of_value(value_and_gradient(rows)[0], has_model_state, has_aux)[
                    2
                ],
                aux,
                batch,
                "" if inner else ", or make the step with `metrics='own'`",
            )
        new_state = carry.model_state
        if has_model_state:
            new_state = reduce_model_state(
                returned_state, carry.model_state, replica, (*within, *inner), weight
            )
        values = {"loss": loss, **aux}
        if backward is not None:
            values, _, _ = (
                _over_devices(axis_name, inner, values, (), None) if inner else (values, (), None)
            )
        else:
            if inner:
                values, updates, weight = _over_devices(axis_name, inner, values, updates, weight)
            updates, new_opt_state = update_from(
                updates, **({} if weight is None else {"weight": weight})
            )
        if within:
            _axis.require_replicated(
                updates,
                within,
                "The update",
                f"Parameters differ over {list(replica)} only, so average gradients over "
                f"{list(within)} first in `optax.chain`, as in `jaxcomm.hierarchical(jaxcomm.mean("
                f"{within[-1]!r}), outer_axes={replica!r})`; or name only {list(replica)} in "
                "`axis_name`, for the exact mean.",
            )
        if not is_per_worker:
            _axis.require_replicated(
                updates,
                axis_name,
                "The update",
                "Place an aggregator, such as `jaxcomm.mean()`, first in `optax.chain`. A frozen "
                "leaf needs `optax.stateless(lambda grads, params: optax.tree.zeros_like(params))` "
                "instead of `optax.set_to_zero()`, whose zeros have the type of the gradient. For "
                "gossip, let parameters differ by worker with `jaxcomm.replicate(params, mesh)`.",
            )
        _axis.require_replicated(
            new_opt_state,
            axis_name,
            "The optimizer state",
            "Mark it, as in `optax.chain(jaxcomm.per_worker(optax.adam(1e-3)), ...)`."
            if is_per_worker
            else "Place the aggregator before the transformation that keeps this state.",
        )
        reduced = reduce_metrics(metrics, axis_name, values, weight, opt_state)
        new = optax.apply_updates(params, updates)
        if is_per_worker:
            new = _axis.marked(new, replica)
        return Carry(new, new_state, new_opt_state), reduced, diagnostics_of(new_opt_state)

    return step
