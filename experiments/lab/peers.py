"""PyTorch's methods in the lab, described without importing PyTorch, which takes seconds."""

import importlib.metadata
from collections.abc import Collection
from typing import NamedTuple

from experiments.cli.errors import ExperimentError

TORCH = "2.13.0"  # As in the extra `peers`.
REMEDY = "pip install 'jaxcomm[peers]'"


class Peer(NamedTuple):
    """How `DistributedDataParallel` is set up; everything else has its default.

    Attributes:
      is_fp16: Whether `fp16_compress_hook` is registered.
      rank: The rank of `powerSGD_hook`; None: the hook is not registered.
      communicates: Whether gradients are averaged. Otherwise all steps run under `no_sync()`.
      keeps_memory: Whether the allocator keeps freed memory, as it does under `jaxcomm.launch`. The
        launcher of PyTorch does not change it.
      is_one_bucket: Whether all gradients are in one bucket, which is sent after the backward pass.
    """

    is_fp16: bool = False
    rank: int | None = None
    communicates: bool = True
    keeps_memory: bool = False
    is_one_bucket: bool = False


AS_SHIPPED = {
    "ddp_none": Peer(communicates=False),
    "ddp": Peer(),
    "ddp_fp16": Peer(is_fp16=True),
    "ddp_power_sgd_1": Peer(rank=1),
    "ddp_power_sgd_2": Peer(rank=2),
    "ddp_power_sgd_4": Peer(rank=4),
}
KEPT = "_kept_memory"
ONE_BUCKET = "_one_bucket"
METHODS = (
    AS_SHIPPED
    | {f"{name}{KEPT}": peer._replace(keeps_memory=True) for name, peer in AS_SHIPPED.items()}
    | {
        f"{name}{ONE_BUCKET}": AS_SHIPPED[name]._replace(is_one_bucket=True)
        for name in ("ddp", "ddp_fp16")
    }
)


def trained_as(name: str, methods: Collection[str]) -> str:
    """The method of `methods` with the same arithmetic as `name`, which may be `name`.

    Example:
      >>> trained_as("ddp_kept_memory", ["ddp"]), trained_as("ddp_kept_memory", ["mean"])
      ('ddp', 'ddp_kept_memory')
    """
    shipped = name.removesuffix(KEPT).removesuffix(ONE_BUCKET)
    return shipped if shipped in methods else name


def require_torch() -> None:
    """Checks the installed version without importing PyTorch.

    Raises:
      ExperimentError: If PyTorch is missing, or another version is installed.
    """
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError as error:
        raise ExperimentError(f"PyTorch is not installed: {REMEDY}") from error
    if version.split("+")[0] != TORCH:  # Builds are marked, e.g. 2.13.0+cpu.
        raise ExperimentError(f"The lab runs PyTorch {TORCH}, found {version}: {REMEDY}")
