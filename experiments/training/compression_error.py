"""The relative squared error of a method's update."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

import jaxcomm
from jaxcomm._gradients import backward_of

UPDATE_ERROR = "update_error"


def _relative_error(update: Any, mean: Any) -> jax.Array:
    squares = lambda tree: optax.tree.norm(tree, squared=True)  # noqa: E731
    return squares(optax.tree.sub(update, mean)) / squares(mean)


def _mean(gradient: Any) -> Any:
    exact = jaxcomm.mean()
    return exact.update(gradient, exact.init(gradient))[0]


class WithErrorState(NamedTuple):
    """The state of `with_error`."""

    inner: Any
    diagnostics: dict[str, jax.Array]  # A step copies this field into its metrics.


def with_error(
    aggregator: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """The aggregator, which also reports the relative squared error of its update.

    The diagnostic is `UPDATE_ERROR`, NaN for methods without gradients. Aggregators with
    `diagnostics=True` report another error, of the payload of one worker.
    """

    def init(params: Any) -> WithErrorState:
        return WithErrorState(aggregator.init(params), {UPDATE_ERROR: jnp.zeros(())})

    def update(
        updates: Any, state: WithErrorState, params: Any = None, **extra: Any
    ) -> tuple[Any, WithErrorState]:
        update, inner = aggregator.update(updates, state.inner, params, **extra)
        # A method that evaluates the loss itself gets no gradient, so there is no mean to compare.
        has_gradient = backward_of(updates) is None
        error = _relative_error(update, _mean(updates)) if has_gradient else jnp.full((), jnp.nan)
        return update, WithErrorState(inner, {UPDATE_ERROR: error})

    return optax.GradientTransformationExtraArgs(init, update)


def make_compression_error(
    loss_fn: Callable[..., jax.Array],
    aggregator: optax.GradientTransformationExtraArgs,
    mesh: Mesh,
) -> Callable[..., jax.Array]:
    r"""The relative squared error of an aggregator on the gradients of one batch.

    .. math:: \frac{\|G - \bar x\|^2}{\|\bar x\|^2}

    with :math:`G` the update of `aggregator` for the workers' gradients :math:`x_i`, and
    :math:`\bar x` their mean.

    Returns:
      `(params, aggregator_state, batch) -> float32[]`, which changes neither.
    """

    def on_worker(params: Any, state: Any, batch: Any) -> jax.Array:
        _, gradient = jaxcomm.local_value_and_grad(loss_fn)(params, batch)
        update, _ = aggregator.update(gradient, state, params)
        return _relative_error(update, _mean(gradient))

    @jax.jit
    def compression_error(params: Any, state: Any, batch: Any) -> jax.Array:
        specs = jaxcomm.state_specs(params), jaxcomm.state_specs(state), PartitionSpec("data")
        return jax.shard_map(on_worker, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())(
            params, state, batch
        )

    return compression_error
