"""Batches over the workers of a mesh, of which each process loads its own rows."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.task import Task


def own_rows(sharding: NamedSharding, size: int) -> np.ndarray:
    """The rows of `size` that the devices of this process hold, ascending."""
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
