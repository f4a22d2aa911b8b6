"""What rings send, counted by hand; arrays on a mesh; the lines that a comment marks."""

import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm.wire._source import Line

N = 8
SCALAR = 4


def all_reduce(size: float, devices: int = N) -> float:
    """The bytes that one device sends if all hold arrays of `size` bytes."""
    return 2 * (devices - 1) / devices * size


def reduce_scatter(size: float, devices: int = N) -> float:
    return (devices - 1) / devices * size


def all_to_all(size: float, devices: int = N) -> float:
    return (devices - 1) / devices * size


def all_gather(shard: float, devices: int = N) -> float:
    return (devices - 1) * shard


def size_of(tree: Any) -> int:
    """The bytes of all arrays, whole."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def array(mesh: Mesh, spec: P, *shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """The shape of an array that is sharded over a mesh; nothing runs, so it needs no values."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def marked(file: str, word: str) -> set[str]:
    """The lines, as reports name them, that end in a comment `# word`."""
    lines = pathlib.Path(file).read_text(encoding="utf-8").splitlines()
    return {str(Line(file, n)) for n, text in enumerate(lines, 1) if text.endswith(f"  # {word}")}
