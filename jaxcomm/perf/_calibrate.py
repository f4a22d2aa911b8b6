"""Measures the links of a mesh and the codecs on its devices."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcomm._axis import state_specs
from jaxcomm._contract import PyTree
from jaxcomm._workers import init
from jaxcomm.perf._link import Calibration, Link
from jaxcomm.perf._recommended import recommended
from jaxcomm.scheduling._times import require_number
from jaxcomm.wire._collective import Collective

SENT_BYTES = (2**12, 2**16, 2**19, 2**21)
"""The bytes that a worker sends in each collective that is timed, about."""

FEW, MANY = 1, 5
"""Collectives in a program; the difference of the times has no overhead of the program."""

Methods: TypeAlias = Mapping[str, optax.GradientTransformation]
"""Transformations by name."""

_LARGEST = 1e18  # Bytes per second, of a link whose bytes take no time that can be measured.


def seconds_of(run: Callable[[], Any]) -> float:
    """The seconds until all results of a run are there."""
    started = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - started


def median(measure: Callable[[], float], repeats: int) -> float:
    """The median of several measurements, after one that compiles."""
    _, *found = (measure() for _ in range(repeats + 1))
    return float(np.median(found))


def prepared(tx: optax.GradientTransformation, mesh: Mesh, updates: PyTree) -> Callable[[], Any]:
    """A compiled update of a single worker, which continues from its own state."""
    (axis,) = mesh.axis_names
    state = init(tx, updates, mesh, axis_name=axis)
    specs = (PartitionSpec(), state_specs(state))

    def update(updates: Any, state: Any) -> tuple[Any, Any]:
        return tx.update(updates, state, updates)

    mapped = jax.shard_map(update, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    # XLA would place results on the device and not on its mesh: the second call would compile too.
    run = jax.jit(mapped, out_shardings=jax.tree.map(lambda s: NamedSharding(mesh, s), specs))

    def once() -> Any:
        nonlocal state
        mean, state = run(updates, state)
        return mean

    return once


def codec_seconds(
    methods: Methods, device: jax.Device, axis_name: str, repeats: int, updates: PyTree
) -> dict[str, float]:
    """The seconds per coordinate of each method on one device, beyond those of a copy.

    Args:
      methods: Transformations by name, each without an optimizer.
      device: A device of this process.
      axis_name: The axis that the methods name.
      repeats: The updates that are timed.
      updates: The update.
    """
    mesh = Mesh(np.array([device]), (axis_name,), axis_types=(AxisType.Auto,))
    placed = jax.device_put(updates, device)
    coordinates = sum(x.size for x in jax.tree.leaves(placed))
    prepared_ones = (prepared(tx, mesh, placed) for tx in (optax.identity(), *methods.values()))
    copy, *taken = (median(partial(seconds_of, run), repeats) for run in prepared_ones)
    each = zip(methods, taken, strict=True)
    return {name: max(seconds - copy, 0.0) / coordinates for name, seconds in each}


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


def slowest(seconds: Sequence[float]) -> list[float]:
    """The largest of each number over all processes, the same in all of them."""
    each = multihost_utils.process_allgather(np.asarray(seconds, np.float32))
    return [float(largest) for largest in each.max(axis=0)]


def _collective_seconds(mesh: Mesh, axis: str, timed: _Timed, columns: int, repeats: int) -> float:
    """The seconds of one collective in this process: the median over repeats."""
    n, spec = mesh.shape[axis], PartitionSpec(mesh.axis_names)

    @jax.named_scope("calibrate/timed")
    def several(x: jax.Array, count: jax.Array) -> jax.Array:
        return lax.fori_loop(0, count, lambda _, x: timed(x, axis, n), x[0])[None]

    specs = (spec, PartitionSpec())
    run = jax.jit(
        jax.shard_map(several, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)
    )
    shape, sharding = (mesh.devices.size, n, columns), NamedSharding(mesh, spec)
    own = np.ones((1, *shape[1:]), np.float32)
    x = jax.make_array_from_callback(shape, sharding, lambda index: own)

    def seconds(count: int) -> float:
        return seconds_of(lambda: run(x, np.int32(count)))

    return max(median(lambda: seconds(MANY) - seconds(FEW), repeats), 0.0) / (MANY - FEW)


def fit(
    messages: Sequence[float], sent: Sequence[float], seconds: Sequence[float]
) -> tuple[float, float]:
    r"""Returns the bandwidth and latency of least relative squared error, neither negative.

    .. math:: \min_{\alpha, \beta \ge 0} \sum_i \left( \frac{\alpha m_i + \beta b_i}{t_i} - 1
              \right)^2
    """
    t = np.maximum(np.asarray(seconds, np.float64), 1e-9)
    parts = np.stack([messages, sent], axis=1) / t[:, None]
    found = np.linalg.lstsq(parts, np.ones(len(t)), rcond=None)[0]
    if (found < 0).any():
        other = found >= 0
        found[~other] = 0.0
        found[other] = np.linalg.lstsq(parts[:, other], np.ones(len(t)), rcond=None)[0]
    alpha, beta = map(float, found)
    return 1 / max(beta, 1 / _LARGEST), alpha


def _links_of_axis(mesh: Mesh, axis: str, repeats: int) -> dict[str, Link]:
    """Times every collective over an axis, in several sizes; all processes take part."""
    n, links = mesh.shape[axis], {}
    for primitive, timed in _TIMED.items():
        one = Collective(primitive, (axis,), n, np.dtype(np.float32), (n, 1), 1, (), 0)
        columns = [max(1, round(sent / one.bytes_per_worker)) for sent in SENT_BYTES]
        taken = slowest([_collective_seconds(mesh, axis, timed, c, repeats) for c in columns])
        messages = [one.messages] * len(columns)
        fitted = fit(messages, [one.bytes_per_worker * c for c in columns], taken)
        links[primitive] = Link(*fitted, f"{axis} {primitive}", "calibrated")
    return links


def calibrate(
    mesh: Mesh, methods: Methods | None = None, *, axis_name: str = "data", repeats: int = 5
) -> Calibration:
    """Measures what messages and codecs cost on a mesh.

    Each collective is timed over each axis in four sizes, and seconds per message and per byte are
    fitted. Each method is timed in updates of 4 million coordinates by one worker, which also
    decodes only its own payload. In a program of several processes all of them call this function.
    It returns the same calibration in all: the time of the slowest process.

    Args:
      mesh: The mesh that trains. Axes of one device send nothing and have no link.
      methods: Transformations by name, without an optimizer. By default the nine methods that
        `jaxcomm.advise` compares; their names are their code. An empty dict measures links only.
      axis_name: The axis that the methods name. The methods that are measured by default name it.
      repeats: The times that each is measured; the median counts.

    Returns:
      The calibration: print it, pass it to `perf.predict` as `link`, or save it.

    Raises:
      ValueError: If a method is not a transformation, or `repeats` is below 1.

    Example:
      >>> import jax
      >>> from jaxcomm import perf
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> measured = perf.calibrate(mesh, methods={}, repeats=1)
      >>> measured.codecs
      {}
    """
    require_number(repeats, "repeats", 1)
    if methods is None:
        workers = mesh.shape.get(axis_name, mesh.devices.size)
        methods = {method.code: method.tx for method in recommended(axis_name, workers)}
    automatic = (AxisType.Auto,) * mesh.devices.ndim
    plain = Mesh(mesh.devices, mesh.axis_names, axis_types=automatic)
    links = {
        axis: _links_of_axis(plain, axis, repeats) for axis, size in mesh.shape.items() if size > 1
    }
    device = next(each for each in mesh.devices.flat if each.process_index == jax.process_index())
    draw = np.random.default_rng(0).standard_normal
    # Square matrices, since low-rank methods factor matrices.
    updates = {f"matrix_{i}": draw((1024, 1024), np.float32) for i in range(4)}
    own = codec_seconds(methods, device, axis_name, repeats, updates)
    codecs = dict(zip(own, slowest([*own.values()]), strict=True))
    return Calibration(links, codecs, device.device_kind, jax.__version__)
