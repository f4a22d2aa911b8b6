"""One launch a cluster: every check is made of what its processes have left."""

import functools
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from tests.processes.families import FAMILIES, WORKERS, Run, train
from tests.processes.running import run

# Processes and devices of each.
CLUSTERS = [pytest.param((2, 2), id="2x2"), pytest.param((4, 1), id="4x1", marks=pytest.mark.slow)]


class Ended(NamedTuple):
    """What a cluster has left: of each process what it wrote, of the first the parameters."""

    processes: list[dict[str, Any]]
    params: dict[str, np.ndarray]


@pytest.fixture(params=CLUSTERS)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The families of this run trained by so many processes, as `launch` starts them, once."""
    specs = [getattr(item, "callspec", None) for item in request.session.items]
    params = [spec.params for spec in specs if spec]
    asked = {each.get("name") for each in params if each.get("cluster") == request.param}
    names = tuple(name for name in FAMILIES if name in asked)
    return launched(*request.param, names, tmp_path_factory.mktemp)


@functools.cache
def launched(
    processes: int, devices: int, names: tuple[str, ...], mktemp: Callable[[str], pathlib.Path]
) -> Ended:
    assert processes * devices == WORKERS
    shape = ["--processes", str(processes), "--devices-per-process", str(devices)]
    folder = mktemp("cluster")
    # Compiled as in this process: another optimization of LLVM's may change a last bit.
    flags = os.environ.get("XLA_FLAGS", "").split()
    common = " ".join(flag for flag in flags if "device_count" not in flag)
    program = ["--", "-m", "tests.processes.program", folder, *names]
    code, stdout, stderr = run("-m", "jaxcomm.launch", *shape, *program, XLA_FLAGS=common)
    assert code == 0, stdout[-2000:] + stderr[-4000:]
    return Ended(
        [json.loads((folder / f"{process}.json").read_text()) for process in range(processes)],
        {name: np.load(folder / f"{name}.npy") for name in names},
    )


@pytest.fixture(scope="session")
def alone() -> Callable[[str], Run]:
    """A family trained on as many devices of this process."""
    mesh = jax.make_mesh(
        (WORKERS,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:WORKERS]
    )
    return functools.cache(lambda name: train(FAMILIES[name], mesh))
