"""The bytes that a method sends for one update."""

from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

import jaxcomm
from experiments.cli.errors import ExperimentError
from experiments.methods import TrainableMethod


def count_bytes(method: TrainableMethod, gradients: Any, mesh: Mesh) -> float:
    """The bytes that a worker sends for one update, from the traced program.

    Args:
      method: The method.
      gradients: The gradients of all workers, or their shapes, with leaves `[workers, ...]`.
      mesh: The workers.

    Raises:
      ExperimentError: If the method does not support the number of workers.
    """

    def on_worker(gradients: Any) -> Any:
        gradient, aggregator = jax.tree.map(lambda x: x[0], gradients), method.build(0)
        return aggregator.update(gradient, aggregator.init(gradient))[0]

    update = jax.shard_map(
        on_worker, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec()
    )
    try:
        return jaxcomm.wire.account(update, gradients).bytes_per_worker
    except ValueError as error:
        raise ExperimentError(str(error)) from error
