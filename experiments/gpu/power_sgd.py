"""The part `power_sgd`: its encoding and decoding, beside PyTorch's `powerSGD_hook`."""

import functools
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import jaxcomm
from experiments.gpu import models
from jaxcomm.perf._calibrate import prepared
from pallas_kernels.benchmark import torch_equivalents
from pallas_kernels.benchmark.candidates import Session
from pallas_kernels.benchmark.parts import Result, Task, child
from pallas_kernels.benchmark.record import Record
from pallas_kernels.benchmark.timing import Candidate, time_in_turn

NAME, AXIS = "power_sgd", "data"
RANKS = (4, 1)
START = 2  # The least `start_powerSGD_iter` under error feedback.


def _of_jax(shapes: models.Shapes, rank: int) -> Candidate:
    mesh = Mesh(np.array(jax.devices()[:1]), (AXIS,), axis_types=(AxisType.Auto,))
    updates: Any = jax.device_put(models.drawn(shapes), jax.devices()[0])
    return Candidate(
        prepared(jaxcomm.power_sgd(AXIS, rank=rank), mesh, updates), jax.block_until_ready
    )


class Bucket:
    """One bucket of all gradients, with what the hook calls of `torch.distributed.GradBucket`."""

    def __init__(self, torch: Any, shapes: models.Shapes) -> None:
        device = torch_equivalents.device_of(torch)
        drawn = models.drawn(shapes)
        # PyTorch has the outputs of a kernel first, and flattens all other dimensions.
        arrays = [np.moveaxis(x, (-1, -2), (0, 1)) if x.ndim > 2 else x for x in drawn.values()]
        flat = np.concatenate([one.reshape(-1) for one in arrays])
        self._buffer = torch.from_numpy(flat).to(device)
        self._shapes = [one.shape for one in arrays]

    def buffer(self) -> Any:
        """All gradients in one array."""
        return self._buffer

    def gradients(self) -> list[Any]:
        """Views of it."""
        sizes = [int(np.prod(shape)) for shape in self._shapes]
        parts = zip(self._buffer.split(sizes), self._shapes, strict=True)
        return [part.view(shape) for part, shape in parts]

    def index(self) -> int:
        """Of the only bucket."""
        return 0

    def is_last(self) -> bool:
        """It is."""
        return True


def _group(torch: Any) -> str:
    """A group of this process alone, which needs no network; returns its backend."""
    distributed = torch.distributed
    backend = "nccl" if torch_equivalents.device_of(torch) == "cuda" else "gloo"
    if not distributed.is_initialized():
        os.environ.setdefault(f"{backend.upper()}_SOCKET_IFNAME", "lo")
        store = os.path.join(tempfile.mkdtemp(), "store")
        distributed.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    return backend


def _of_torch(torch: Any, shapes: models.Shapes, rank: int) -> Candidate:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=START
    )
    bucket: Any = Bucket(torch, shapes)
    call = lambda: powerSGD_hook.powerSGD_hook(state, bucket)  # noqa: E731
    for _ in range(START + 1):
        call().wait()

    def wait(future: Any) -> None:
        future.wait()
        torch_equivalents.wait(torch)

    return Candidate(call, wait)


def _timed(model: str, rank: int, library: str, session: Session) -> list[Result]:
    shapes = models.gradients(session.rehearse)[model]
    about: Result = {"model": model, "rank": rank, "library": library}
    if library == "jaxcomm":
        candidate = _of_jax(shapes, rank)
    else:
        torch = torch_equivalents.load(on_cpu=session.rehearse)
        if torch is None:
            print("PyTorch is not installed or sees no GPU", flush=True)
            return [{"kind": "absent", **about, "reason": "PyTorch is not installed"}]
        about["backend"] = _group(torch)
        candidate = _of_torch(torch, shapes, rank)
    # The hook changes its bucket in callbacks, so no two calls of it may be under way.
    timing = time_in_turn({library: candidate}, session.samples, queue=False)[library]
    print(f"{1e3 * timing.median:9.3f} ms  rank {rank}, {model}, {library}", flush=True)
    return [{"kind": "power_sgd", **about, "calls": timing.calls, "seconds": timing.seconds}]


def tasks(session: Session, options: Mapping[str, Any], record: Record) -> Iterator[Task]:
    """A task for each model, rank and library."""
    for rank in RANKS:
        for model in models.gradients(session.rehearse):
            for library in ("jaxcomm", "PyTorch"):
                run = functools.partial(_timed, model, rank, library, session)
                yield Task({"model": model, "rank": rank, "library": library}, run, 300)


if __name__ == "__main__":
    sys.exit(child({NAME: tasks}))
