"""The part `step`: the share of a training step that encoding and decoding take."""

import functools
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

import jaxcomm
from experiments.gpu import models
from pallas_kernels.benchmark.candidates import Session
from pallas_kernels.benchmark.parts import Result, Task, child, reason_of
from pallas_kernels.benchmark.record import Record
from pallas_kernels.benchmark.timing import Candidate, time_in_turn

NAME, AXIS = "step", "data"
ROWS = (512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
TRIED = 8  # Rows of the program whose memory is scaled to others.
FILLED = 0.8  # Of the device's memory: two programs have their own weights and state.


class Method(NamedTuple):
    """A method, and what its encoding puts into the compiled program, more often than `mean`."""

    build: Callable[[], optax.GradientTransformation]
    sign: str | None = None


METHODS: dict[str, Method] = {
    "mean": Method(lambda: jaxcomm.mean(AXIS)),
    "global_qsgd(bits=8)": Method(lambda: jaxcomm.global_qsgd(AXIS, bits=8), r"\bs8\["),
    "power_sgd(rank=4)": Method(
        lambda: jaxcomm.power_sgd(AXIS, rank=4), r"f32\[(\d+,4|4,\d+)\]\S* (dot|custom-call|fusion)"
    ),
    "top_k(ratio=0.01)": Method(
        lambda: jaxcomm.top_k_sgd(AXIS, ratio=0.01), r"\b(sort|topk|TopK|top-k)\b"
    ),
    # Last: XLA for GPUs compiles it for minutes.
    "two_stage_mean, dither(bits=4)": Method(
        lambda: jaxcomm.two_stage_mean(
            jaxcomm.compression.blockwise(jaxcomm.quantizers.dither(bits=4), 256), axis_name=AXIS
        ),
        r"\bu32\[\d{4,}",
    ),
}


class Program(NamedTuple):
    """A compiled step, with the arguments of its first call."""

    compiled: Any
    carry: tuple[Any, Any]
    batch: jax.Array

    def candidate(self) -> Candidate:
        """Steps that continue from each other."""
        carry = self.carry

        def call() -> Any:
            nonlocal carry
            *carry, metrics = self.compiled(*carry, self.batch)  # type: ignore[assignment]
            return metrics

        return Candidate(call, jax.block_until_ready)


def _sizes(session: Session) -> models.Sizes:
    return models.SMALL if session.rehearse else models.Sizes()


def compiled(method: str, rows: int, attention: str, session: Session) -> Program:
    """The training step with Adam and this method, on one device."""
    sizes = _sizes(session)
    mesh = Mesh(np.array(jax.devices()[:1]), (AXIS,), axis_types=(AxisType.Auto,))
    tx = optax.chain(METHODS[method].build(), optax.adamw(1e-4))
    params: Any = jax.device_put(models.weights(sizes), jax.devices()[0])
    state = jaxcomm.init(tx, params, mesh, axis_name=AXIS)
    step = jaxcomm.make_step(models.loss_of(sizes, attention), tx, mesh, axis_name=AXIS)
    batch = jax.device_put(models.tokens(sizes, rows), jax.devices()[0])
    jitted = jax.jit(lambda params, state, batch: step(params, state, batch), donate_argnums=(0, 1))
    return Program(jitted.lower(params, state, batch).compile(), (params, state), batch)


def _memory(program: Program) -> tuple[int, int]:
    """Bytes of arguments, and of temporaries."""
    found = program.compiled.memory_analysis()
    return found.argument_size_in_bytes, found.temp_size_in_bytes


def _most_rows(kept: int, per_row: float, room: float) -> int:
    """The most rows that fit, if temporaries grow with the rows."""
    return next((rows for rows in ROWS if 2 * kept + rows * per_row <= room), 1)


def _batch(session: Session) -> Result:
    """The rows that fill the device, from the memory of a program that is not run."""
    if session.rehearse:
        return {"kind": "batch", "rows": 2, "attention": "xla"}
    reason, attention = "", "cudnn"
    try:
        program = compiled("mean", TRIED, attention, session)
    except Exception as error:  # Not every device and version has it.
        reason, attention = reason_of(error), "xla"
        program = compiled("mean", TRIED, attention, session)
    kept, temporaries = _memory(program)
    del program
    stats = jax.devices()[0].memory_stats() or {}
    room = FILLED * stats.get("bytes_limit", 16e9)
    rows = _most_rows(kept, temporaries / TRIED, room)
    while rows > 1:
        try:
            candidate, _ = _mean(rows, attention, session)
            candidate.wait(candidate.call())
            break
        except Exception as error:  # Its memory is not that of the model after all.
            print(f"{rows} rows: {reason_of(error)}", flush=True)
            rows //= 2
    print(f"{rows} rows of {_sizes(session).length}, attention {attention} {reason}", flush=True)
    memory = {"arguments": kept, "temporaries_of_8_rows": temporaries, "room": room}
    found = {"kind": "batch", "rows": rows, "attention": attention, "no_cudnn": reason}
    return {**found, **memory}


@functools.lru_cache(maxsize=1)
def _mean(rows: int, attention: str, session: Session) -> tuple[Candidate, str]:
    """Its steps, and the text of its program."""
    program = compiled("mean", rows, attention, session)
    return program.candidate(), program.compiled.as_text()


def _number(sign: str, text: str) -> int:
    return len(re.findall(sign, text))


def _timed(method: str, session: Session, record: Record) -> list[Result]:
    known = [one for one in record.results([NAME]) if one["kind"] == "batch"]
    batch = known[-1] if known else _batch(session)
    rows, attention = batch["rows"], batch["attention"]
    mean, without = _mean(rows, attention, session)
    candidates = {"mean": mean}
    found: Result = {"kind": "step", "method": method, "rows": rows, "attention": attention}
    if method != "mean":
        program = compiled(method, rows, attention, session)
        sign = METHODS[method].sign
        assert sign is not None
        kept, temporaries = _memory(program)
        found |= {
            "encodes": _number(sign, program.compiled.as_text()) > _number(sign, without),
            "argument_bytes": kept,
            "temporary_bytes": temporaries,
        }
        candidates[method] = program.candidate()
    times = time_in_turn(candidates, session.samples, queue=session.queue)
    found |= {"seconds": times[method].seconds, "mean_seconds": times["mean"].seconds}
    ratio = statistics.median(found["mean_seconds"]) / statistics.median(found["seconds"])
    found |= {"share": 1 - ratio, "tokens_per_second": rows * _sizes(session).length}
    found["tokens_per_second"] /= times[method].median
    print(
        f"{1e3 * times[method].median:9.2f} ms a step, {100 * found['share']:5.1f} % of it "
        f"encodes and decodes  {method}",
        flush=True,
    )
    return [found] if known else [batch, found]


def tasks(session: Session, options: Mapping[str, Any], record: Record) -> Iterator[Task]:
    """A task for each method, timed in turn with `mean`; the first one finds the batch."""
    for method in METHODS:
        run = functools.partial(_timed, method, session, record)
        yield Task({"method": method}, run, 300)


if __name__ == "__main__":
    # In one block of memory, programs of different sizes have their temporaries in turn.
    os.environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}
    sys.exit(child({NAME: tasks}))
