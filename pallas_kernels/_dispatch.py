"""Which implementation of an op runs: the one that was named, or the one measured to be fastest.

Where nothing was measured, the choice is an assumption:

| device               | quantize, pack, exponential | count_sketch, tiles |
|----------------------|-----------------------------|---------------------|
| CPU                  | reference                   | reference           |
| GPU before Hopper    | reference                   | reference           |
| GPU, Hopper or newer | reference                   | mosaic_gpu          |
| TPU                  | mosaic_tpu                  | mosaic_tpu          |

XLA makes one pass of an elementwise op on a GPU by itself, which is why a kernel is not assumed to
be worth it there. Nor is one for `dequantize` of codes that are not packed, on any device: it is
one multiplication, which XLA makes in the pass that reads the result.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
from jax import lax

Implementation = Literal["reference", "mosaic_gpu", "mosaic_tpu"]

PLATFORMS = {"mosaic_gpu": "cuda", "mosaic_tpu": "tpu"}

# Below so many coordinates, launching a kernel and padding to its blocks is not worth it.
FEWEST = 2**16

# Devices, by a part of their kind, that Mosaic GPU is written for.
HOPPER_AND_NEWER = ("H100", "H200", "H800", "H20", "GH200", "B100", "B200", "B300", "GB200")


class Device(NamedTuple):
    """Where a program is to run."""

    platform: str  # "cpu", "cuda" or "tpu"
    kind: str


class Measured(NamedTuple):
    """On devices of this kind, from this size on, this implementation was the fastest."""

    op: str
    kind: str
    size: int
    implementation: Implementation
    record: str


# No GPU or TPU has been measured yet.
MEASURED: tuple[Measured, ...] = ()


def target() -> Device:
    """The device that what is being traced is meant for.

    That of the mesh in whose context this is called, else JAX's default device.
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
    """Why `device` cannot run `implementation`; None if it can."""
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
    """What `implementation=None` means for `size` coordinates on `device`."""
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
    """Calls `function` of the implementation that is named, or of the one that `choose` takes.

    Kernels are imported where they are used: programs for the CPU never load them.

    Args:
      folder: Of the op, whose modules are named after the implementations.
      function: Its name in each of them; their arguments are the same.
      implementation: One of the names, or None.
      size: Coordinates, by which `choose` decides.
      *arrays: The arguments that are arrays.
      **options: The static ones.

    Raises:
      ValueError: If `implementation` is none of the names.
      NotImplementedError: If the device cannot run the one that is named. Nothing is tried in its
        place.
    """

    def of(name: Implementation) -> Callable[..., Any]:
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
        return of(implementation)(*arrays)
    chosen = choose(f"{folder}.{function}", size, device)
    if chosen == "reference":
        return of("reference")(*arrays)
    # A program for an accelerator may still have parts that are placed on the host.
    kernel = {PLATFORMS[chosen]: of(chosen)}
    return lax.platform_dependent(*arrays, **kernel, default=of("reference"))
