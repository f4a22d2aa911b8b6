"""Programs of which is counted what they send: traced, compiled, and by sockets."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

import jaxcomm
from jaxcomm import gossip
from jaxcomm.compression import blockwise
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import top_k

WORKERS = 4
WIDTH = 512

Program = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
"""Makes a program and its arguments."""


def _mesh(sizes: dict[str, int], kind: AxisType = AxisType.Auto) -> Mesh:
    devices = jax.devices()[:WORKERS]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), (kind,) * len(sizes), devices=devices)


def _ones(mesh: Mesh, spec: P, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    """Made where it belongs, as its devices may be of several processes."""
    make = jax.jit(lambda: jnp.ones(shape, dtype), out_shardings=NamedSharding(mesh, spec))
    return make()


def _step(tx: Callable[[], Any], *, gossips: bool = False) -> Program:
    """A step of this library."""

    def program() -> Any:
        mesh = _mesh({"data": WORKERS})
        stages = [tx(), optax.sgd(0.1)]
        whole = optax.chain(*(reversed(stages) if gossips else stages))
        loss = lambda params, x: jnp.mean((x @ params["w"] + params["b"]) ** 2)  # noqa: E731
        shapes = {"w": (2 * WIDTH, 2 * WIDTH), "b": (1, 2 * WIDTH)}
        params: Any = {name: _ones(mesh, P(), *shape) for name, shape in shapes.items()}
        params = jaxcomm.replicate(params, mesh) if gossips else params
        step = jaxcomm.make_step(loss, whole, mesh, donate=False)
        batch = _ones(mesh, P("data"), 4 * WORKERS, 2 * WIDTH)
        return step, (params, jaxcomm.init(whole, params, mesh), batch)

    return program


OURS: dict[str, Program] = {
    "mean": _step(jaxcomm.mean),
    "global_qsgd": _step(lambda: jaxcomm.global_qsgd(bits=8)),
    "top_k": _step(lambda: jaxcomm.all_gather_mean(top_k(ratio=0.25))),
    "power_sgd": _step(lambda: jaxcomm.power_sgd(rank=128)),
    "two_stage": _step(lambda: jaxcomm.two_stage_mean(blockwise(dither(bits=8), 4096))),
    "dpsgd": _step(lambda: gossip.dpsgd(gossip.ring(WORKERS)), gossips=True),
}


def _descent(
    loss: Callable[[Any, jax.Array], jax.Array],
    sizes: dict[str, int],
    weights: tuple[P, ...],
    rows: P,
    *layers: int,
    kind: AxisType = AxisType.Auto,
    dtype: Any = jnp.float32,
) -> Program:
    """Gradient descent that XLA partitions; weights stay as they are sharded."""

    def program() -> Any:
        mesh = _mesh(sizes, kind)
        shape = *layers, WIDTH, WIDTH
        params = [_ones(mesh, spec, *shape, dtype=dtype) for spec in weights]

        def step(params: Any, x: jax.Array) -> Any:
            return jax.tree.map(jnp.subtract, params, jax.grad(loss)(params, x))

        run = jax.jit(step, out_shardings=[x.sharding for x in params])
        return run, (params, _ones(mesh, rows, 4 * WIDTH, WIDTH, dtype=dtype))

    return program


def _two_layers(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params[0]) @ params[1]) ** 2)


def _scanned(params: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params[0])[0] ** 2)


def _along_rows(params: Any, x: jax.Array) -> jax.Array:
    """All rows of some columns are sorted on one device, between two layers."""
    mesh = jax.typeof(x).sharding.mesh
    columns = reshard(x @ params[0], NamedSharding(mesh, P(None, "sequence")))
    rows = reshard(jnp.sort(columns, 0), NamedSharding(mesh, P("sequence")))
    return jnp.mean((rows @ params[1]) ** 2)


_FOUR, _GRID = {"data": 4}, {"data": 2, "model": 2}
_WHOLE, _ROWS = P(), P("data")
PARTITIONED: dict[str, Program] = {
    "data parallel": _descent(_two_layers, _FOUR, (_WHOLE, _WHOLE), _ROWS),
    "fsdp": _descent(_two_layers, _FOUR, (_ROWS, _ROWS), _ROWS),
    "tensor": _descent(_two_layers, {"model": 4}, (P(None, "model"), P("model")), _WHOLE),
    "fsdp and tensor": _descent(
        _two_layers, _GRID, (P("data", "model"), P("model", "data")), _ROWS
    ),
    "all-to-all": _descent(
        _along_rows, {"sequence": 4}, (_WHOLE, _WHOLE), P("sequence"), kind=AxisType.Explicit
    ),
    "gathers in a scan": _descent(_scanned, _FOUR, (P(None, "data"),), _ROWS, 3),
    "bfloat16": _descent(_two_layers, _FOUR, (_WHOLE, _WHOLE), _ROWS, dtype=jnp.bfloat16),
}


def _message(collective: Callable[[jax.Array], jax.Array]) -> Program:
    """One message, with a megabyte from each worker."""

    def program() -> Any:
        mesh = _mesh({"data": WORKERS})
        run = jax.shard_map(collective, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        return run, (_ones(mesh, P("data"), WORKERS * WIDTH, WIDTH),)

    return program


_NEXT = [(i, (i + 1) % WORKERS) for i in range(WORKERS)]
KINDS: dict[str, Program] = {
    "all_reduce": _message(lambda x: lax.psum(x, "data") + x),
    "all_gather": _message(lambda x: lax.all_gather(x, "data", tiled=True)),
    "reduce_scatter": _message(lambda x: lax.psum_scatter(x, "data", tiled=True)),
    "all_to_all": _message(lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True)),
    "ppermute": _message(lambda x: lax.ppermute(x, "data", _NEXT)),
    "ppermute of one": _message(lambda x: lax.ppermute(x, "data", [(2, 0)])),
}
PROGRAMS = OURS | PARTITIONED | KINDS
