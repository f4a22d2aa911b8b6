"""The device that a program is for, and which implementations it can run."""

from contextlib import AbstractContextManager
from typing import NamedTuple

import jax

PLATFORMS = {"mosaic_gpu": "cuda", "mosaic_tpu": "tpu"}

# Mosaic GPU supports devices whose kind contains one of these strings.
HOPPER_AND_NEWER = ("H100", "H200", "H800", "H20", "GH200", "B100", "B200", "B300", "GB200")


# JAX does not mix programs of a rehearsal with others.
_rehearsal = jax.make_user_context(False)


def rehearsal(enabled: bool = True) -> AbstractContextManager[None]:
    """A context in which a CPU runs the kernels for GPU, in JAX's interpreter, if `enabled`."""
    context: AbstractContextManager[None] = _rehearsal(enabled)
    return context


def rehearses() -> bool:
    """Whether the kernels for GPU are interpreted."""
    return bool(_rehearsal.value)


class Device(NamedTuple):
    """The device that a program runs on."""

    platform: str  # "cpu", "cuda" or "tpu"
    kind: str
    cores: int = 1


def target() -> Device:
    """The device of the program that is being traced.

    This is the device of the mesh in the current context, else JAX's default device.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is None:
        default = jax.config.jax_default_device or jax.devices()[0]
        if isinstance(default, str):
            default = jax.devices(default)[0]
        platform, kind = default.platform, default.device_kind
        cores = getattr(default, "num_cores", None)
    else:
        platform, kind = described.platform, described.device_kind
        cores = described.num_cores
    return Device("cuda" if platform == "gpu" else platform, kind, cores or 1)


def reason_against(implementation: str, device: Device) -> str | None:
    """The reason why `device` cannot run `implementation`; None if it can."""
    if implementation == "mosaic_gpu" and device.platform == "cpu" and rehearses():
        return None
    platform = PLATFORMS.get(implementation, device.platform)
    if platform != device.platform:
        return f"it runs on {platform}, this program is for {device.platform} ({device.kind})"
    if implementation == "mosaic_gpu" and not is_hopper(device):
        return f"it needs a GPU of the Hopper generation or newer, not {device.kind}"
    return None


def is_hopper(device: Device) -> bool:
    """Whether `device` is a GPU of the Hopper generation or newer."""
    return device.platform == "cuda" and any(part in device.kind for part in HOPPER_AND_NEWER)
