"""Devices that are compiled for without being there.

Needs libtpu, or JAX's CUDA plugin and ptxas; `make test-aot` makes an environment with both
packages. What is missing is named where a test is passed over for it.
"""

import importlib.util
import os
import pathlib
import shutil

# Set before libtpu is loaded: ask no cloud for the machine's kind, and run beside another load.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh

# What is compiled for a device that is not here cannot be read back.
jax.config.update("jax_enable_compilation_cache", False)

HERE = pathlib.Path(__file__).parent


def tpu_mesh(topology: str, count: int) -> Mesh:
    """The first `count` chips of a topology, along the axis `data`."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("no libtpu: nothing can be compiled for TPU")
    described = topologies.get_topology_desc(topology, platform="tpu")
    return Mesh(np.array(described.devices[:count]), ("data",))


@pytest.fixture(params=["v5e:2x2", "v6e:2x2"])
def chip(request: pytest.FixtureRequest) -> Mesh:
    """A mesh of one TPU chip."""
    return tpu_mesh(request.param, 1)


@pytest.fixture
def eight_chips() -> Mesh:
    return tpu_mesh("v5e:2x4", 8)


@pytest.fixture
def eight_chips_of_two_axes(eight_chips: Mesh) -> Mesh:
    """Two workers of four chips each."""
    return Mesh(eight_chips.devices.reshape(2, 4), ("data", "model"))


def gpu_mesh(shape: tuple[int, ...], axes: tuple[str, ...]) -> Mesh:
    """H200s of one host."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip("no CUDA compiler: jax-cuda13-plugin is not installed")
    if shutil.which("ptxas") is None:
        pytest.skip("no CUDA compiler: there is no ptxas on PATH")
    count = int(np.prod(shape))
    described = topologies.get_topology_desc(
        platform="cuda",
        target_config=(HERE / "h200.txtpb").read_text(),
        topology=f"1x1x{count}",
    )
    return Mesh(np.array(described.devices).reshape(shape), axes)


@pytest.fixture
def eight_h200_of_two_axes() -> Mesh:
    """Two workers of four GPUs each."""
    return gpu_mesh((2, 4), ("data", "model"))


@pytest.fixture
def eight_h200() -> Mesh:
    """Eight workers of one GPU each."""
    return gpu_mesh((8,), ("data",))


@pytest.fixture
def h200() -> Mesh:
    """A mesh of one H200."""
    return gpu_mesh((1,), ("data",))


@pytest.fixture
def ptx(h200: Mesh, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The folder where Mosaic writes its PTX."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    return tmp_path


@pytest.fixture
def machine_code(ptx: pathlib.Path) -> pathlib.Path:
    """The same, where it can be disassembled."""
    if shutil.which("nvdisasm") is None:
        pytest.skip("no CUDA compiler: there is no nvdisasm on PATH")
    return ptx
