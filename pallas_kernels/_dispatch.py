"""Selects the implementation of an op: the requested one, or the one measured to be fastest.

On a device without measurements, the choice is an assumption:

| device               | quantize, pack, exponential | count_sketch, tiles |
|----------------------|-----------------------------|---------------------|
| CPU                  | reference                   | reference           |
| GPU before Hopper    | reference                   | reference           |
| GPU, Hopper or newer | reference                   | mosaic_gpu          |
| TPU                  | mosaic_tpu                  | mosaic_tpu          |

XLA fuses an elementwise op on a GPU into one pass, so a kernel is assumed to gain nothing there.
The same holds for `dequantize` of unpacked codes on any device: it is one multiplication, which XLA
fuses into the pass that reads the result.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
from jax import lax

Implementation = Literal["reference", "mosaic_gpu", "mosaic_tpu"]

PLATFORMS = {"mosaic_gpu": "cuda", "mosaic_tpu": "tpu"}

# Below this size, launching a kernel and padding to its blocks costs more than it saves.
FEWEST = 2**16

# Mosaic GPU supports devices whose kind contains one of these strings.
HOPPER_AND_NEWER = ("H100", "H200", "H800", "H20", "GH200", "B100", "B200", "B300", "GB200")


class Device(NamedTuple):
    """The device that a program runs on."""

    platform: str  # "cpu", "cuda" or "tpu"
    kind: str


class Measured(NamedTuple):
    """The implementation that was fastest on this kind of device, from this size on."""

    op: str
    kind: str
    size: int
    implementation: Implementation
    record: str


# No GPU or TPU has been measured yet.
MEASURED: tuple[Measured, ...] = ()


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
    else:
        platform, kind = described.platform, described.device_kind
    return Device("cuda" if platform == "gpu" else platform, kind)


def reason_against(implementation: Implementation, device: Device) -> str | None:
    """The reason why `device` cannot run `implementation`; None if it can."""
    platform = PLATFORMS.get(implementation, device.platform)
    if platform != device.platform:
        return f"it runs on {platform}, this program is for {device.platform} ({device.kind})"
    if implementation == "mosaic_gpu" and not is_hopper(device):
        return f"it needs a GPU of the Hopper generation or newer, not {device.kind}"
    return None


def is_hopper(device: Device) -> bool:
    """Whether `device` is a GPU of the Hopper generation or newer."""
    return device.platform == "cuda" and any(part in device.kind for part in HOPPER_AND_NEWER)


def choose(
    op: str, size: int, device: Device, measured: tuple[Measured, ...] = MEASURED
) -> Implementation:
    """The implementation that None selects for `size` coordinates on `device`."""
    rows = [row for row in measured if (row.op, row.kind) == (op, device.kind)]
    if rows:
        reached = [row for row in rows if row.size <= size]
        return max(reached, key=lambda row: row.size).implementation if reached else "reference"
    if size < FEWEST:
        return "reference"
    if device.platform == "tpu":
        return "mosaic_tpu"
    if op.startswith("count_sketch") and is_hopper(device):
        return "mosaic_gpu"
    return "reference"


def run(
    folder: str,
    function: str,
    implementation: Implementation | None,
    size: int,
    *arrays: jax.Array,
    **options: Any,
) -> Any:
    """Calls `function` of the requested implementation, or of the one that `choose` selects.

    Kernels are imported when they are used: programs for the CPU never load them.

    Args:
      folder: The folder of the op, whose modules are named after the implementations.
      function: The name of the function, which has the same arguments in each module.
      implementation: One of the names, or None.
      size: The number of coordinates, which `choose` depends on.
      *arrays: The array arguments.
      **options: The static arguments.

    Raises:
      ValueError: If `implementation` is not one of the names.
      NotImplementedError: If the device cannot run the requested implementation. There is no
        fallback.
    """

    def load(name: Implementation) -> Callable[..., Any]:
        module = importlib.import_module(f"pallas_kernels.{folder}.{name}")
        return functools.partial(getattr(module, function), **options)

    device = target()
    if implementation is not None:
        if implementation not in get_args(Implementation):
            raise ValueError(
                f"`implementation` must be None or one of {get_args(Implementation)}, "
                f"got {implementation!r}."
            )
        reason = reason_against(implementation, device)
        if reason:
            raise NotImplementedError(f"`implementation`={implementation!r}: {reason}.")
        return load(implementation)(*arrays)
    chosen = choose(f"{folder}.{function}", size, device)
    if chosen == "reference":
        return load("reference")(*arrays)
    # A program for an accelerator may have parts that run on the host.
    kernel = {PLATFORMS[chosen]: load(chosen)}
    return lax.platform_dependent(*arrays, **kernel, default=load("reference"))
