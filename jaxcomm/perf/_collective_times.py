"""Times collectives over one axis of a mesh, and fits seconds per message and per byte."""

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcomm.perf._link import Link
from jaxcomm.wire import Collective

SENT_BYTES = (2**12, 2**16, 2**19, 2**21)
"""The bytes that a worker sends in each collective that is timed, about."""

FEW, MANY = 1, 5
"""Collectives in a program; the difference of the times has no overhead of the program."""

_LARGEST = 1e18  # Bytes per second, of a link whose bytes take no time that can be measured.


_Timed: TypeAlias = Callable[[jax.Array, str, int], jax.Array]
"""`(x, axis, workers)`: a collective whose result has the shape of x, float32[workers, columns]."""


def _all_gather(x: jax.Array, axis: str, n: int) -> jax.Array:
    # What comes from the neighbor, so that the compiler keeps the collective.
    gathered = lax.all_gather(x, axis)
    return lax.dynamic_index_in_dim(gathered, (lax.axis_index(axis) + 1) % n, keepdims=False)


def _reduce_scatter(x: jax.Array, axis: str, n: int) -> jax.Array:
    scattered = lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True)
    return jnp.tile(scattered / n, (n, 1))


_TIMED: dict[str, _Timed] = {
    "all_reduce": lambda x, axis, n: lax.psum(x, axis) / n,
    "all_gather": _all_gather,
    "all_to_all": lambda x, axis, n: lax.all_to_all(x, axis, 0, 0, tiled=True),
    "reduce_scatter": _reduce_scatter,
    "ppermute": lambda x, axis, n: lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)]),
}


def _collective(primitive: str, axis: str, n: int, columns: int) -> Collective:
    return Collective(primitive, (axis,), n, np.dtype(np.float32), (n, columns), 1, (), 0)


def automatic(mesh: Mesh) -> Mesh:
    """The mesh with automatic axes."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


def slowest(mesh: Mesh, seconds: Sequence[float]) -> list[float]:
    """The largest of each number over all processes, the same in all of them."""
    spec = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    own = np.asarray(seconds, np.float32)[None]
    shape = (mesh.devices.size, own.shape[1])
    all_of_them = jax.make_array_from_callback(shape, spec, lambda index: own)
    replicated = NamedSharding(mesh, PartitionSpec())
    largest = jax.jit(lambda x: jnp.max(x, axis=0), out_shardings=replicated)(all_of_them)
    return [float(each) for each in np.asarray(largest.addressable_data(0))]


def _seconds(mesh: Mesh, axis: str, timed: _Timed, columns: int, repeats: int) -> float:
    """The seconds of one collective in this process: the median over repeats."""
    n = mesh.shape[axis]
    spec = PartitionSpec(mesh.axis_names)

    def several(x: jax.Array, count: jax.Array) -> jax.Array:
        return lax.fori_loop(0, count, lambda _, x: timed(x, axis, n), x[0])[None]

    run = jax.jit(
        jax.shard_map(
            several, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False
        )
    )
    shape = (mesh.devices.size, n, columns)
    x = jax.make_array_from_callback(
        shape, NamedSharding(mesh, spec), lambda index: np.ones((1, n, columns), np.float32)
    )
    counts = {each: np.int32(each) for each in (FEW, MANY)}
    for count in counts.values():
        jax.block_until_ready(run(x, count))

    def once(count: int) -> float:
        started = time.perf_counter()
        jax.block_until_ready(run(x, counts[count]))
        return time.perf_counter() - started

    differences = [once(MANY) - once(FEW) for _ in range(repeats)]
    return max(float(np.median(differences)), 0.0) / (MANY - FEW)


def fit(messages: Sequence[float], sent: Sequence[float], seconds: Sequence[float]) -> Link:
    r"""Returns the link of least relative squared error, with no negative part.

    .. math:: \min_{\alpha, \beta \ge 0} \sum_i \left( \frac{\alpha m_i + \beta b_i}{t_i} - 1
              \right)^2
    """
    t = np.maximum(np.asarray(seconds, np.float64), 1e-9)
    parts = np.stack([np.asarray(messages), np.asarray(sent)], axis=1) / t[:, None]
    ones = np.ones(len(t))
    alpha, beta = (float(part) for part in np.linalg.lstsq(parts, ones, rcond=None)[0])
    if alpha < 0:
        alpha, beta = 0.0, float(np.linalg.lstsq(parts[:, 1:], ones, rcond=None)[0][0])
    elif beta < 0:
        alpha, beta = float(np.linalg.lstsq(parts[:, :1], ones, rcond=None)[0][0]), 0.0
    return Link(1 / max(beta, 1 / _LARGEST), alpha)


def links_of_axis(mesh: Mesh, axis: str, repeats: int) -> dict[str, Link]:
    """Times every collective over an axis, in several sizes; all processes take part.

    Args:
      mesh: A mesh with automatic axes.
      axis: The axis, of at least two devices.
      repeats: The times that a size is measured.
    """
    n = mesh.shape[axis]
    links = {}
    for primitive, timed in _TIMED.items():
        per_column = _collective(primitive, axis, n, 1).bytes_per_worker
        sizes = [max(1, round(sent / per_column)) for sent in SENT_BYTES]
        taken = slowest(mesh, [_seconds(mesh, axis, timed, size, repeats) for size in sizes])
        counted = [_collective(primitive, axis, n, size) for size in sizes]
        fitted = fit([c.messages for c in counted], [c.bytes_per_worker for c in counted], taken)
        links[primitive] = Link(
            fitted.bytes_per_second, fitted.latency, f"{axis} {primitive}", "calibrated"
        )
    return links
