"""On a host with several GPUs: nothing more is needed than to name the backend."""

import importlib.util
import shutil
import subprocess

import pytest

from tests.processes.running import finish, start
from tests.processes.test_train import experiments

pytestmark = pytest.mark.xdist_group("processes")


def count_gpus() -> int:
    """GPUs that the driver shows and that the installed JAX can use."""
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if not shutil.which("nvidia-smi") or not any(map(importlib.util.find_spec, plugins)):
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


GPUS = count_gpus()
needs_two = pytest.mark.skipif(
    GPUS < 2, reason=f"no GPU: needs two and a JAX that can use them, found {GPUS}"
)
SHORT = ["--batch", str(8 * max(GPUS, 1)), "--steps", "4", "--log-every", "2"]


@needs_two
def test_one_process_trains_on_all_gpus() -> None:
    code, stdout, stderr = finish(experiments("train", *SHORT, JAX_PLATFORMS="cuda"))
    assert code == 0, stderr
    assert f"{GPUS} workers on gpu" in stdout and "step 4: training loss" in stdout


@needs_two
def test_one_process_per_gpu() -> None:
    command = ["--processes", str(GPUS), "--", "-m", "experiments", "train", "--distributed"]
    process = start("-m", "jaxcomm.launch", *command, *SHORT, JAX_PLATFORMS="cuda")
    code, stdout, stderr = finish(process)
    assert code == 0, stderr
    assert f"{GPUS} workers on gpu, {GPUS} processes" in stdout
