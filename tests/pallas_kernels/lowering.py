"""Lowers programs for a TPU or GPU on a machine that has neither, and interprets kernels."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from pallas_kernels._gpu import gpu_interpret_params

KINDS = {"tpu": "TPU v5 lite", "cuda": "NVIDIA H200"}
# What a program must contain if it has a kernel.
CALLS = {"tpu": "tpu_custom_call", "cuda": "mosaic_gpu"}

INTERPRET_TPU = pltpu.InterpretParams(detect_races=True)
INTERPRET_GPU = gpu_interpret_params(detect_races=True)


@contextlib.contextmanager
def read_again(once: Any) -> Iterator[pytest.MonkeyPatch]:
    """A variable that the cached function `once` reads is read again here, and after it."""
    once.cache_clear()
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            yield monkeypatch
    finally:
        once.cache_clear()


def abstract_mesh(platform: str, **axes: int) -> AbstractMesh:
    """A mesh of devices of this platform, with manual axes of these sizes."""
    device = AbstractDevice(device_kind=KINDS[platform], num_cores=1, platform=platform)
    return AbstractMesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
        abstract_device=device,
    )


@contextlib.contextmanager
def on(platform: str, **axes: int) -> Iterator[AbstractMesh]:
    """What is traced in this context is meant for `platform`, "tpu" or "cuda"."""
    mesh = abstract_mesh(platform, **axes)
    with use_abstract_mesh(mesh):
        yield mesh


def lowered(f: Callable[..., Any], *args: Any, platform: str) -> str:
    """The text of `f`, lowered for `platform`; `args` are arrays or `jax.ShapeDtypeStruct`."""
    with on(platform):
        return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()
