"""How far a method's update is from the mean that it stands for."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh, PartitionSpec

import jaxcomm


def make_compression_error(
    loss_fn: Callable[..., jax.Array],
    aggregator: optax.GradientTransformationExtraArgs,
    mesh: Mesh,
) -> Callable[..., jax.Array]:
    r"""The relative squared error of an aggregator on the gradients of one batch.

    .. math:: \frac{\|G - \bar x\|^2}{\|\bar x\|^2}

    with :math:`G` the update that `aggregator` makes of the workers' gradients :math:`x_i`, and
    :math:`\bar x` their mean.

    Returns:
      `(params, aggregator_state, batch) -> float32[]`. Changes neither.
    """
    exact = jaxcomm.mean()

    def on_worker(params: Any, state: Any, batch: Any) -> jax.Array:
        _, gradient = jaxcomm.local_value_and_grad(loss_fn)(params, batch)
        update, _ = aggregator.update(gradient, state, params)
        mean, _ = exact.update(gradient, exact.init(params), params)
        squares = lambda tree: optax.tree.norm(tree, squared=True)  # noqa: E731
        return squares(optax.tree.sub(update, mean)) / squares(mean)

    @jax.jit
    def compression_error(params: Any, state: Any, batch: Any) -> jax.Array:
        specs = jaxcomm.state_specs(params), jaxcomm.state_specs(state), PartitionSpec("data")
        return jax.shard_map(on_worker, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())(
            params, state, batch
        )

    return compression_error
