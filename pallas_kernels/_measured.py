"""The implementation that is fastest for a workload: measured, or else assumed.

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

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from pallas_kernels._device import Device, is_hopper
from pallas_kernels._preference import Implementation

# Below this size, launching a kernel and padding to its blocks costs more than it saves.
FEWEST = 2**16


class Workload(NamedTuple):
    """What decides which implementation of an op is fastest."""

    op: str  # The folder and the function, such as "quantize.quantize".
    size: int  # Coordinates.
    dtype: str  # Of the first array.
    bits: int | None = None  # The width of a field, where the op has fields.
    residual: bool = False  # Whether a second array of this size is read or written in the pass.
    rows: int | None = None  # Of a sketch.


class Measured(NamedTuple):
    """The implementation that was fastest on this kind of device, from this size on.

    None stands for every value.
    """

    op: str
    kind: str
    size: int
    implementation: Implementation
    record: str
    dtype: str | None = None
    bits: int | None = None
    residual: bool | None = None
    rows: int | None = None

    def covers(self, workload: Workload, device: Device) -> bool:
        """Whether the row is of this workload, whatever its size."""
        if (self.op, self.kind) != (workload.op, device.kind):
            return False
        keys = ("dtype", "bits", "residual", "rows")
        return all(getattr(self, key) in (None, getattr(workload, key)) for key in keys)


# No GPU or TPU has been measured yet.
MEASURED: tuple[Measured, ...] = ()


def workload_of(
    op: str, size: int, arrays: Sequence[jax.Array], options: Mapping[str, Any]
) -> Workload:
    """The workload of a call of `op` with these arguments."""
    first, *others = arrays
    of_table = first.shape[0] if first.ndim == 2 and first.size != size else None
    return Workload(
        op,
        size,
        jax.numpy.dtype(first.dtype).name,
        options.get("bits"),
        options.get("residual", False) or any(other.size == size > 2 for other in others),
        options.get("rows", of_table),
    )


def choose(
    workload: Workload, device: Device, measured: tuple[Measured, ...] = MEASURED
) -> Implementation:
    """The implementation that runs on `device` if none is named."""
    rows = [row for row in measured if row.covers(workload, device)]
    if rows:
        reached = [row for row in rows if row.size <= workload.size]
        return max(reached, key=lambda row: row.size).implementation if reached else "reference"
    if workload.size < FEWEST:
        return "reference"
    if workload.op == "quantize.dequantize" and workload.bits in (8, 32):
        return "reference"
    if device.platform == "tpu":
        return "mosaic_tpu"
    if workload.op.startswith("count_sketch") and is_hopper(device):
        return "mosaic_gpu"
    return "reference"
