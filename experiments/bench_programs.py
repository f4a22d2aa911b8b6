"""What the compiled programs of a step cost: nothing here needs the devices that it is about.

Run in the tree of another commit, it tells what changed since: `python -m
experiments.bench_programs`.
"""

import functools
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

import jaxcomm
from experiments.timing import medians
from experiments.train import make_mesh
from jaxcomm import gathered_mean, two_stage_mean
from jaxcomm.compression import blockwise
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import top_k

WIDTH, LAYERS = 64, 24
LEVELS = 7

_COLLECTIVE = re.compile(
    r" (?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)

Build = Callable[[], optax.GradientTransformation]


class Program(NamedTuple):
    """A compiled step."""

    seconds: float  # to compile
    lines: int  # of HLO
    collectives: int
    temporaries: float  # float32 gradients


def by_hand() -> optax.GradientTransformation:
    """8-bit dithering of all leaves in one vector, in as few lines of plain JAX as will do.

    Without state, weights, checks of mistakes and of what is not finite; noise is a hash of the
    position.
    """

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(updates)
        x = jnp.concatenate([leaf.ravel() for leaf in leaves])
        workers = lax.axis_size("data")
        levels = 127 // workers
        top = lax.pmax(jnp.max(jnp.abs(x)), "data")
        word = jnp.arange(x.size, dtype=jnp.uint32) * jnp.uint32(2654435761)
        word = (word ^ (word >> 16)) * jnp.uint32(0x7FEB352D)
        noise = (word >> 8).astype(jnp.float32) * 2.0**-24
        codes = jnp.floor(x / top * levels + noise).astype(jnp.int8)
        mean = lax.psum(codes, "data").astype(jnp.float32) * (top / (levels * workers))
        ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
        parts = jnp.split(lax.optimization_barrier(mean), [int(end) for end in ends])
        pairs = zip(parts, leaves, strict=True)
        return jax.tree.unflatten(treedef, [part.reshape(x.shape) for part, x in pairs]), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


METHODS: Mapping[str, Build] = {
    "mean": jaxcomm.mean,
    "by hand, 8 bits": by_hand,
    "global_qsgd, 8 bits": lambda: jaxcomm.global_qsgd(bits=8),
    "global_qsgd, 8 bits, by leaf": lambda: jaxcomm.global_qsgd(bits=8, scope="leaf"),
    "qsgd": jaxcomm.qsgd,
    "terngrad, by leaf": jaxcomm.terngrad,
    "ef_sign_sgd, by leaf": jaxcomm.ef_sign_sgd,
    "two stages, blocks of 4 bits": lambda: two_stage_mean(
        "data", blockwise(dither(levels=LEVELS), 256)
    ),
    "top-k with feedback": lambda: gathered_mean("data", error_feedback(top_k(ratio=0.01))),
    "top-k with feedback, by leaf": lambda: gathered_mean(
        "data", error_feedback(top_k(ratio=0.01)), scope="leaf"
    ),
    "deep_gradient_compression": lambda: jaxcomm.deep_gradient_compression(ratio=0.01),
}

TIMED = ("mean", "global_qsgd, 8 bits", "global_qsgd, 8 bits, by leaf", "top-k with feedback")


def transformer(width: int = WIDTH, layers: int = LAYERS) -> dict[str, jax.Array]:
    """Zeros in the shapes of a transformer: 12 leaves a layer, of which 8 are vectors."""
    shapes = {
        "query, key and value": (width, 3 * width),
        "attended": (width, width),
        "wide": (width, 4 * width),
        "narrow": (4 * width, width),
    }
    vectors = {f"{name}, bias": shape[1:] for name, shape in shapes.items()}
    norms = {f"norm {i}, {name}": (width,) for i in (1, 2) for name in ("scale", "bias")}
    layer = shapes | vectors | norms
    return {f"{i:02} {name}": jnp.zeros(layer[name]) for i in range(layers) for name in layer}


def _step(tx: optax.GradientTransformation, mesh: Mesh) -> Any:
    """A worker's gradient is its number in every coordinate, so that all else costs little."""
    loss = lambda params, row: sum(jnp.sum(x) for x in jax.tree.leaves(params)) * row[0]  # noqa: E731
    return jaxcomm.make_step(loss, optax.chain(tx, optax.sgd(0.1)), mesh, donate=False)


def compile_step(build: Build, params: dict[str, jax.Array], mesh: Mesh) -> Program:
    """Traced before, so that the seconds are XLA's alone."""
    step, tx = _step(build(), mesh), optax.chain(build(), optax.sgd(0.1))
    state = jaxcomm.init(tx, params, mesh)
    lowered = jax.jit(step).lower(params, state, jnp.ones(mesh.size))
    began = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - began
    text = compiled.as_text()
    memory: Any = compiled.memory_analysis()
    size = 4 * sum(x.size for x in params.values())
    return Program(
        seconds,
        text.count("\n"),
        len(_COLLECTIVE.findall(text)),
        memory.temp_size_in_bytes / size,
    )


def time_updates(repetitions: int, leaves: int = 10, side: int = 1024) -> dict[str, float]:
    """Median ns a coordinate of an update of one worker, leaves of `side * side`."""
    mesh = make_mesh(1)
    params = {f"layer {i}": jnp.ones((side, side)) for i in range(leaves)}
    runs = {}
    for name in TIMED:
        step, tx = _step(METHODS[name](), mesh), optax.chain(METHODS[name](), optax.sgd(0.1))
        state = jaxcomm.init(tx, params, mesh)
        runs[name] = functools.partial(step, params, state, jnp.ones(1))
    return {
        name: 1e9 * seconds / (leaves * side**2)
        for name, seconds in medians(runs, repetitions).items()
    }


def to_table(programs: Mapping[str, Program], nanoseconds: Mapping[str, float]) -> Table:
    """One row a method."""
    table = Table(title=f"a step of {12 * LAYERS} leaves compiled for 8 CPU devices")
    headings = ("method", "seconds to compile", "HLO lines", "collectives", "temporaries")
    for heading in (*headings, "ns/coordinate, one device"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for name, (seconds, lines, collectives, temporaries) in programs.items():
        spent = f"{nanoseconds[name]:.2f}" if name in nanoseconds else ""
        table.add_row(
            name, f"{seconds:.2f}", f"{lines:,}", str(collectives), f"{temporaries:.2f}", spent
        )
    return table


def measure(repetitions: int) -> Table:
    """The table of this commit."""
    mesh, params = make_mesh(None), transformer()
    programs = {name: compile_step(build, params, mesh) for name, build in METHODS.items()}
    return to_table(programs, time_updates(repetitions))


if __name__ == "__main__":
    Console(width=140).print(measure(repetitions=9))
