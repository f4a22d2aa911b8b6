"""The parts `codecs`, `step` and `power_sgd`: `python -m experiments.gpu.measure PART ...`.

They encode and decode the gradients of ResNet-50, and of a transformer of the size of GPT-2 small
with weights in float32 and products in bfloat16.
"""

import functools
import itertools
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen
from jax.sharding import AxisType, Mesh
from jax.stages import Compiled

import jaxcomm
from experiments.networks import NETWORKS
from jaxcomm import perf
from jaxcomm.compression import blockwise
from jaxcomm.compression.quantizers import dither
from jaxcomm.perf._calibrate import codec_seconds, prepared
from jaxcomm.perf._recommended import recommended
from pallas_kernels.benchmark import torch_equivalents
from pallas_kernels.benchmark.candidates import Session
from pallas_kernels.benchmark.parts import Result, Task, child, reason_of
from pallas_kernels.benchmark.record import Record
from pallas_kernels.benchmark.timing import Candidate, time_in_turn

AXIS, WORKERS = "data", 8  # `global_qsgd` sends integers whose sum fits for 8 workers.
CALIBRATION = "calibration.json"
LIMIT = 300  # Seconds of one measurement.

RANKS = (4, 1)
START = 2  # The least `start_powerSGD_iter` under error feedback.
BATCHES = (512, 256, 128, 64, 32, 16, 8, 4, 2, 1)
TRIED = 8  # Rows of the program whose memory is scaled to others.
FILLED = 0.8  # Of the device's memory: two programs have their own weights and state.

METHODS = {
    "mean": jaxcomm.mean(AXIS),
    "global_qsgd(bits=8)": jaxcomm.global_qsgd(AXIS, bits=8),
    "power_sgd(rank=4)": jaxcomm.power_sgd(AXIS, rank=4),
    "top_k(ratio=0.01)": jaxcomm.top_k_sgd(AXIS, ratio=0.01),
    # Last: XLA for GPUs compiles it for minutes.
    "two_stage_mean, dither(bits=4)": jaxcomm.two_stage_mean(
        blockwise(dither(bits=4), 256), axis_name=AXIS
    ),
}
SIGNS = {
    "global_qsgd(bits=8)": r"\bs8\[",
    "power_sgd(rank=4)": r"f32\[(\d+,4|4,\d+)\]\S* (dot|custom-call|fusion)",
    "top_k(ratio=0.01)": r"\b(sort|topk|TopK|top-k)\b",
    "two_stage_mean, dither(bits=4)": r"\bu32\[\d{4,}",
}
"""What encoding puts into the compiled program, more often than it is in that of `mean`."""


class Transformer(linen.Module):
    """GPT-2 small, with a padded vocabulary: it shares its embedding with its output.

    Attributes:
      attention: An implementation of `jax.nn.dot_product_attention`, "cudnn" or "xla".
    """

    attention: str = "xla"
    layers: int = 12
    width: int = 768
    heads: int = 12
    words: int = 50304
    length: int = 1024

    @linen.compact
    def __call__(self, words: jax.Array) -> jax.Array:
        """int32[rows, length] -> float32[rows, length, words]."""
        dense = functools.partial(linen.Dense, dtype=jnp.bfloat16)
        norm = functools.partial(linen.LayerNorm, dtype=jnp.bfloat16)
        start = linen.initializers.normal(0.02)
        embedding = linen.Embed(self.words, self.width, jnp.bfloat16, embedding_init=start)
        positions = self.param("positions", start, (self.length, self.width))
        x = embedding(words) + positions.astype(jnp.bfloat16)[None]
        for _ in range(self.layers):
            qkv = dense(3 * self.width)(norm()(x)).reshape(*words.shape, 3, self.heads, -1)
            mixed = jax.nn.dot_product_attention(
                *jnp.unstack(qkv, axis=2), is_causal=True, implementation=self.attention
            )
            x = x + dense(self.width)(mixed.reshape(x.shape))
            hidden = linen.gelu(dense(4 * self.width)(norm()(x)))
            x = x + dense(self.width)(hidden)
        return embedding.attend(norm()(x)).astype(jnp.float32)

    def loss(self, params: Any, batch: jax.Array) -> jax.Array:
        """The mean cross-entropy of each next word; int32[rows, length + 1]."""
        logits = self.apply(params, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    def weights(self) -> Any:
        """The first weights, in float32."""
        return self.init(jax.random.key(0), jnp.zeros((1, self.length), jnp.int32))


SMALL = Transformer(layers=2, width=32, heads=2, words=64, length=16)
"""For a rehearsal."""


def gradients(rehearse: bool) -> dict[str, Any]:
    """Shapes of the gradients that codecs are timed on, the larger model first."""
    model = SMALL if rehearse else Transformer()
    shapes = [(3, 3, 8, 16)] if rehearse else [shape for shape, _ in NETWORKS["resnet50"]]
    return {
        "transformer": jax.eval_shape(model.weights),
        "resnet50": [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
    }


def drawn(shapes: Any) -> Any:
    """Normal arrays of these shapes."""
    draw = np.random.default_rng(0).standard_normal
    return jax.tree.map(lambda x: np.float32(1e-3) * draw(x.shape, np.float32), shapes)


def _print(seconds: float, what: str) -> None:
    print(f"{1e3 * seconds:9.3f} ms  {what}", flush=True)


def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), (AXIS,), axis_types=(AxisType.Auto,))


def codecs(session: Session, options: Mapping[str, Any], record: Record) -> Iterator[Task]:
    """Times each of the methods that `advise` compares, on the gradients of each model."""

    def timed(model, shapes, method):
        updates, tx = drawn(shapes), {method: methods[method]}
        seconds = codec_seconds(tx, jax.devices()[0], AXIS, session.samples, updates)[method]
        coordinates = sum(x.size for x in jax.tree.leaves(shapes))
        _print(seconds * coordinates, f"{model}, {method}")
        about = {"model": model, "coordinates": coordinates, "per_coordinate": seconds}
        return [{"kind": "codec", "method": method, **about}]

    methods = {method.code: method.tx for method in recommended(AXIS, WORKERS)}
    for model, shapes in gradients(session.rehearse).items():
        # XLA for GPUs compiles the last one for minutes.
        for method in sorted(methods, key=lambda method: "two_stage" in method):
            run = functools.partial(timed, model, shapes, method)
            yield Task({"model": model, "method": method}, run, LIMIT)


def calibration(record: Record) -> perf.Calibration:
    """What `perf.predict` and `advise` read: of each method, the time on the largest gradients."""
    timed = [one for one in record.results(["codecs"]) if one["kind"] == "codec"]
    timed.sort(key=lambda one: one["coordinates"])
    seconds = {one["method"]: one["per_coordinate"] for one in timed}
    return perf.Calibration({}, seconds, record.config["device"], jax.__version__)


def _compiled(method: str, rows: int, model: Transformer) -> tuple[Candidate, Compiled]:
    """The training step with Adam and this method on one device, which continues; its program."""
    mesh = _mesh()
    tx = optax.chain(METHODS[method], optax.adamw(1e-4))
    params = jax.jit(model.weights)()
    carry = params, jaxcomm.init(tx, params, mesh, axis_name=AXIS)
    step = jaxcomm.make_step(model.loss, tx, mesh, axis_name=AXIS)
    batch = jax.random.randint(jax.random.key(1), (rows, model.length + 1), 0, model.words)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*carry, batch).compile()

    def call():
        nonlocal carry
        *carry, metrics = compiled(*carry, batch)
        return metrics

    return Candidate(call, jax.block_until_ready), compiled


_mean = functools.lru_cache(maxsize=1)(functools.partial(_compiled, "mean"))


def most_rows(kept: int, per_row: float, memory: float) -> int:
    """The most rows that fit, if temporaries grow with the rows."""
    return next((rows for rows in BATCHES if 2 * kept + rows * per_row <= memory), 1)


def _batch(session: Session) -> Result:
    """The rows that fill the device, from the memory of a program that is not run."""
    if session.rehearse:
        return {"kind": "batch", "rows": 2, "attention": "xla"}
    reason, model = "", Transformer("cudnn")
    try:
        memory = _compiled("mean", TRIED, model)[1].memory_analysis()
    except Exception as error:  # Not every device and version has it.
        reason, model = reason_of(error), Transformer("xla")
        memory = _compiled("mean", TRIED, model)[1].memory_analysis()
    limit = FILLED * (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 16e9)
    rows = most_rows(memory.argument_size_in_bytes, memory.temp_size_in_bytes / TRIED, limit)
    while rows > 1:
        try:
            candidate, _ = _mean(rows, model)
            candidate.wait(candidate.call())
            break
        except Exception as error:  # Its memory is not that of the model after all.
            print(f"{rows} rows: {reason_of(error)}", flush=True)
            rows //= 2
    print(f"{rows} rows of {model.length}, attention {model.attention} {reason}", flush=True)
    return {"kind": "batch", "rows": rows, "attention": model.attention, "no_cudnn": reason}


def steps(session: Session, options: Mapping[str, Any], record: Record) -> Iterator[Task]:
    """Times each method in turn with `mean`: the share of encoding and decoding in a step."""

    def timed(method):
        known = [one for one in record.results(["step"]) if one["kind"] == "batch"]
        batch = known[-1] if known else _batch(session)  # The first one finds it.
        rows, attention = batch["rows"], batch["attention"]
        model = SMALL if session.rehearse else Transformer(attention)
        mean, program_of_mean = _mean(rows, model)
        candidates = {"mean": mean}
        found = {"kind": "step", "method": method, "rows": rows, "attention": attention}
        if method in SIGNS:
            candidates[method], program = _compiled(method, rows, model)
            texts = (one.as_text() or "" for one in (program, program_of_mean))
            here, there = (len(re.findall(SIGNS[method], text)) for text in texts)
            found["encodes"] = here > there
        times = time_in_turn(candidates, session.samples, queue=session.queue)
        seconds = times[method].median
        found["seconds"] = times[method].seconds
        found["share"] = 1 - times["mean"].median / seconds
        _print(seconds, f"{found['share']:.1%} of it encodes and decodes, {method}")
        return [found] if known else [batch, found]

    for method in METHODS:
        yield Task({"method": method}, functools.partial(timed, method), LIMIT)


class Bucket:
    """One bucket of all gradients, with what the hook calls of `torch.distributed.GradBucket`."""

    def __init__(self, torch: Any, shapes: Any) -> None:
        # PyTorch has the outputs of a kernel first, and flattens all other dimensions.
        arrays = [
            np.moveaxis(x, (-1, -2), (0, 1)) if x.ndim > 2 else x
            for x in jax.tree.leaves(drawn(shapes))
        ]
        self._shapes = [x.shape for x in arrays]
        flat = np.concatenate([x.reshape(-1) for x in arrays])
        self._buffer = torch.from_numpy(flat).to(torch_equivalents.device_of(torch))

    def buffer(self) -> Any:
        """All gradients in one array."""
        return self._buffer

    def gradients(self) -> list[Any]:
        """Views of it."""
        parts = self._buffer.split([math.prod(shape) for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def index(self) -> int:
        """Of the only bucket."""
        return 0

    def is_last(self) -> bool:
        """It is."""
        return True


def _hook(torch: Any, shapes: Any, rank: int, backend: str) -> Candidate:
    """PyTorch's hook in a group of this process alone, which needs no network."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    if not torch.distributed.is_initialized():
        os.environ.setdefault(f"{backend.upper()}_SOCKET_IFNAME", "lo")
        store = f"file://{tempfile.mkdtemp()}/store"
        torch.distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=START
    )
    bucket = Bucket(torch, shapes)

    def wait(future):
        future.wait()
        torch_equivalents.wait(torch)

    candidate = Candidate(lambda: powerSGD_hook.powerSGD_hook(state, bucket), wait)
    for _ in range(START + 1):
        wait(candidate.call())
    return candidate


def power_sgd(session: Session, options: Mapping[str, Any], record: Record) -> Iterator[Task]:
    """Times `power_sgd` beside PyTorch's `powerSGD_hook`, for each rank and model."""

    def timed(shapes, model, rank, library):
        about = {"model": model, "rank": rank, "library": library}
        if library == "jaxcomm":
            updates = jax.device_put(drawn(shapes), jax.devices()[0])
            run = prepared(jaxcomm.power_sgd(AXIS, rank=rank), _mesh(), updates)
            candidate = Candidate(run, jax.block_until_ready)
        else:
            torch = torch_equivalents.load(on_cpu=session.rehearse)
            if torch is None:
                return [{"kind": "absent", **about, "reason": "no PyTorch that sees the device"}]
            on_gpu = torch_equivalents.device_of(torch) == "cuda"
            about["backend"] = "nccl" if on_gpu else "gloo"
            candidate = _hook(torch, shapes, rank, about["backend"])
        # The hook changes its bucket in callbacks, so no two calls of it may be under way.
        times = time_in_turn({library: candidate}, session.samples, queue=False)[library]
        _print(times.median, f"rank {rank}, {model}, {library}")
        return [{"kind": "power_sgd", **about, "calls": times.calls, "seconds": times.seconds}]

    models = gradients(session.rehearse)
    for rank, model, library in itertools.product(RANKS, models, ("jaxcomm", "PyTorch")):
        run = functools.partial(timed, models[model], model, rank, library)
        yield Task({"model": model, "rank": rank, "library": library}, run, LIMIT)


TASKS = {"codecs": codecs, "step": steps, "power_sgd": power_sgd}

if __name__ == "__main__":
    if sys.argv[1:2] == ["step"]:
        # In one block of memory, programs of different sizes have their temporaries in turn.
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true"
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.9"
    sys.exit(child(TASKS))
