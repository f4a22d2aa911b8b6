"""The implementation that is fastest for a workload, and its config: measured, or else assumed.

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

from pallas_kernels._configs import Fields
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

    None stands for every value. Fields that `config` does not have are those that are assumed.
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
    config: Fields = ()
    place: str = "A row"  # Where the row is written.

    def covers(self, workload: Workload, device: Device) -> bool:
        """Whether the row is of this workload, whatever its size."""
        if (self.op, self.kind) != (workload.op, device.kind):
            return False
        keys = ("dtype", "bits", "residual", "rows")
        return all(getattr(self, key) in (None, getattr(workload, key)) for key in keys)


class Choice(NamedTuple):
    """What runs, and where that is written; without a config, the assumed one."""

    implementation: Implementation
    config: Fields = ()
    place: str = ""


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


def _assumed(workload: Workload, device: Device) -> Implementation:
    if workload.size < FEWEST:
        return "reference"
    if workload.op == "quantize.dequantize" and workload.bits in (8, 32):
        return "reference"
    if device.platform == "tpu":
        return "mosaic_tpu"
    if workload.op.startswith("count_sketch") and is_hopper(device):
        return "mosaic_gpu"
    return "reference"


def choose(
    workload: Workload,
    device: Device,
    measured: Sequence[Measured] = (),
    given: Sequence[Measured] = (),
) -> Choice:
    """What runs on `device` if no implementation is named.

    The row of the largest size that the workload reaches: of `given`, else of `measured`. Below all
    sizes that were `measured` for it, the reference runs. What was not measured is assumed.
    """
    for rows in (given, measured):
        covering = [row for row in rows if row.covers(workload, device)]
        reached = [row for row in covering if row.size <= workload.size]
        if reached:
            row = max(reached, key=lambda row: row.size)
            return Choice(row.implementation, row.config, row.place)
    return Choice("reference" if covering else _assumed(workload, device))
