"""Batches sharded over the workers of a mesh; each process loads its rows only."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.tasks.task import Task


def own_rows(sharding: NamedSharding, size: int) -> np.ndarray:
    """The row numbers, ascending, on the devices of this process if `size` rows are sharded."""
    slices = sharding.addressable_devices_indices_map((size,)).values()
    ranges = sorted({index[0].indices(size)[:2] for index in slices})
    return np.concatenate([np.arange(*each) for each in ranges])


def global_batches(task: Task, seed: int, size: int, mesh: Mesh) -> Iterator[Any]:
    """The batches of `task.batches(seed, size)` as arrays over the axis `"data"` of the mesh."""
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    for batch in task.batches(seed, size, own_rows(sharding, size)):
        yield jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(sharding, x, (size, *x.shape[1:])),
            batch,
        )
