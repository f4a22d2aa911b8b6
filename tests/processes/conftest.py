"""One launch a cluster: every check is made of what its processes have left."""

import functools
import json
import os
import pathlib
import shutil
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from tests.processes.families import FAMILIES, WORKERS, Run, train
from tests.processes.running import run
from tests.processes.sending import PROGRAMS

# Processes and devices of each.
CLUSTERS = [pytest.param((2, 2), id="2x2"), pytest.param((4, 1), id="4x1", marks=pytest.mark.slow)]


class Ended(NamedTuple):
    """What a cluster has left: of each process what it wrote, of the first the parameters."""

    processes: list[dict[str, Any]]
    params: dict[str, np.ndarray]


@pytest.fixture(params=CLUSTERS)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The families of this run trained by so many processes, as `launch` starts them, once."""
    asked = {each.get("name") for each in _params(request) if each.get("cluster") == request.param}
    names = tuple(name for name in FAMILIES if name in asked)
    return _trained(*request.param, names, tmp_path_factory.mktemp)


def _params(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    specs = [getattr(item, "callspec", None) for item in request.session.items]
    return [spec.params for spec in specs if spec]


@functools.cache
def _trained(
    processes: int, devices: int, names: tuple[str, ...], mktemp: Callable[[str], pathlib.Path]
) -> Ended:
    folder = mktemp("cluster")
    written = launched(processes, devices, folder, "tests.processes.program", *names)
    return Ended(written, {name: np.load(folder / f"{name}.npy") for name in names})


def launched(
    processes: int,
    devices: int,
    folder: pathlib.Path,
    module: str,
    *names: str,
    inside: tuple[str, ...] = (),
) -> list[Any]:
    """What each process of a module has left in the folder."""
    assert processes * devices == WORKERS
    shape = ["--processes", str(processes), "--devices-per-process", str(devices)]
    # Compiled as in this process: another optimization of LLVM's may change a last bit.
    flags = os.environ.get("XLA_FLAGS", "").split()
    common = " ".join(flag for flag in flags if "device_count" not in flag)
    launch = ["-m", "jaxcomm.launch", *shape, "--", "-m", module, folder, *names]
    code, stdout, stderr = run(*launch, inside=inside, XLA_FLAGS=common)
    assert code == 0, stdout[-2000:] + stderr[-4000:]
    return [json.loads((folder / f"{process}.json").read_text()) for process in range(processes)]


class Counted(NamedTuple):
    """What was counted of programs: of each program what each process has written."""

    by_program: dict[str, list[dict[str, Any]]]
    isolated: bool  # Whether the network was of these processes only.


@pytest.fixture(scope="session")
def counted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Counted:
    """The programs of this run, run by a process for each worker."""
    asked = {each.get("program") for each in _params(request)}
    names = [name for name in PROGRAMS if name in asked]
    namespace = ("unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    can = (
        bool(shutil.which("unshare"))
        and not subprocess.run([*namespace, "true"], capture_output=True).returncode
    )
    folder, inside = tmp_path_factory.mktemp("counted"), namespace if can else ()
    written = launched(WORKERS, 1, folder, "tests.processes.count", *names, inside=inside)
    return Counted({name: [each[name] for each in written] for name in names}, can)


@pytest.fixture(scope="session")
def alone() -> Callable[[str], Run]:
    """A family trained on as many devices of this process."""
    mesh = jax.make_mesh(
        (WORKERS,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:WORKERS]
    )
    return functools.cache(lambda name: train(FAMILIES[name], mesh))
