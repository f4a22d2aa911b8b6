"""Where a step runs in these tests: on a mesh of automatic or explicit axes, or simulated."""

import math
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

import jaxcomm

SGD = optax.chain(jaxcomm.mean(), optax.sgd(0.1))
KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def mesh_of(kind: AxisType, *sizes: int, names: tuple[str, ...] = ("data", "inner")) -> Mesh:
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, names[: len(sizes)], (kind,) * len(sizes), devices=devices)


def at(place: str) -> Any:
    """The workers of "auto", "explicit" or "simulated", 8 of them.

    Of "auto 4" there are 4, and of "simulated 4x2" there are 4 of 2 devices each.
    """
    kind, _, shape = place.partition(" ")
    sizes = tuple(map(int, (shape or "8").split("x")))
    if kind in KINDS:
        return mesh_of(KINDS[kind], *sizes)
    return dict(zip(("data", "inner"), sizes, strict=True)) if len(sizes) > 1 else sizes[0]


def devices_at(place: str) -> int:
    workers = at(place)
    if isinstance(workers, int):
        return workers
    return math.prod(dict(getattr(workers, "shape", workers)).values())


def begun(loss: Any, tx: Any, workers: Any, params: Any, **options: Any) -> tuple[Any, Any]:
    """The step, which keeps its arguments, and the first state of the optimizer."""
    make: Any = jaxcomm.make_step if isinstance(workers, Mesh) else jaxcomm.simulate
    named = {name: options[name] for name in ("axis_name", "shard_axes") if name in options}
    step = make(loss, tx, workers, **{"donate": False, **options})
    return step, jaxcomm.init(tx, params, workers, **named)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)
