"""The part `codecs`: seconds of encoding and decoding real gradients, and a calibration of them."""

import functools
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import optax

from experiments.gpu import models
from jaxcomm import perf
from jaxcomm.perf._calibrate import codec_seconds
from jaxcomm.perf._recommended import recommended
from pallas_kernels.benchmark.candidates import Session
from pallas_kernels.benchmark.parts import Result, Task, child
from pallas_kernels.benchmark.record import Record

AXIS, WORKERS = "data", 8  # `global_qsgd` sends integers with room for a sum over 8 workers.
NAME = "codecs"
FILE = "calibration.json"

# Those whose time users ask for first; XLA for GPUs compiles the last one for minutes.
FIRST = ("mean", "global_qsgd", "power_sgd", "top_k_sgd", "ef_sign_sgd")


def _place(method: str) -> int:
    name = method.removeprefix("jaxcomm.").partition("(")[0]
    if "wire_dtype" in method:
        return len(FIRST)
    return FIRST.index(name) if name in FIRST else len(FIRST) + 1


def _timed(
    model: str, method: str, tx: optax.GradientTransformation, session: Session
) -> list[Result]:
    shapes = models.gradients(session.rehearse)[model]
    updates: Any = models.drawn(shapes)
    found = codec_seconds({method: tx}, jax.devices()[0], AXIS, session.samples, updates)
    coordinates = models.count(shapes)
    print(f"{model:<12} {1e3 * found[method] * coordinates:9.3f} ms  {method}", flush=True)
    about = {"model": model, "coordinates": coordinates, "leaves": len(shapes), "workers": WORKERS}
    return [{"kind": "codec", "method": method, **about, "per_coordinate": found[method]}]


def tasks(session: Session, options: Mapping[str, Any], record: Record) -> Iterator[Task]:
    """A task for each of the methods that `advise` compares, and each model."""
    methods = {method.code: method.tx for method in recommended(AXIS, WORKERS)}
    for model in models.gradients(session.rehearse):  # The first one is what is calibrated.
        for method in sorted(methods, key=_place):
            run = functools.partial(_timed, model, method, methods[method], session)
            yield Task({"model": model, "method": method}, run, 300)


def calibration(record: Record) -> perf.Calibration:
    """What `perf.predict` and `advise` read: of each method, the time on the largest gradients."""
    largest: dict[str, Result] = {}
    for one in record.results([NAME]):
        if one["kind"] == "codec":
            before = largest.get(one["method"], {"coordinates": -math.inf})
            largest[one["method"]] = max(before, one, key=lambda each: each["coordinates"])
    seconds = {method: one["per_coordinate"] for method, one in largest.items()}
    return perf.Calibration({}, seconds, record.config["device"], jax.__version__)


if __name__ == "__main__":
    sys.exit(child({NAME: tasks}))
