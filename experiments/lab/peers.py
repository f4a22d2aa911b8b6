"""PyTorch's methods in the lab, described without importing PyTorch, which takes seconds."""

import importlib.metadata
from collections.abc import Collection, Sequence
from typing import NamedTuple

from experiments.errors import ExperimentError

TORCH = "2.13.0"  # As in the extra `peers`.
START = 2  # The least `start_powerSGD_iter` under error feedback: DDP rebuilds its buckets first.


class Peer(NamedTuple):
    """How `DistributedDataParallel` is set up; everything else has its default.

    Attributes:
      hook: Which of the hooks `fp16_compress`, `bf16_compress`, `powerSGD` and `batched_powerSGD`
        is registered; none by default.
      rank: The rank of the last two.
      keeps_memory: Whether the allocator keeps freed memory, as it does under `jaxcomm.launch`. The
        launcher of PyTorch does not change it.
      is_one_bucket: Whether all gradients are in one bucket, which is sent after the backward pass.
    """

    hook: str = ""
    rank: int = 1
    keeps_memory: bool = False
    is_one_bucket: bool = False


AS_SHIPPED = {
    "ddp": Peer(),
    "ddp_fp16": Peer("fp16_compress"),
    "ddp_bf16": Peer("bf16_compress"),
    **{f"ddp_power_sgd_{rank}": Peer("powerSGD", rank) for rank in (1, 2, 4, 8, 16)},
    "ddp_batched_power_sgd_4": Peer("batched_powerSGD", 4),
}
KEPT, ONE_BUCKET = "_kept_memory", "_one_bucket"
PEERS = (
    AS_SHIPPED
    | {f"{name}{KEPT}": peer._replace(keeps_memory=True) for name, peer in AS_SHIPPED.items()}
    | {
        f"{name}{ONE_BUCKET}": AS_SHIPPED[name]._replace(is_one_bucket=True)
        for name in ("ddp", "ddp_fp16", "ddp_bf16")
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


def has_torch() -> bool:
    """Whether PyTorch is installed, in any version; does not import it."""
    try:
        importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def installed(names: Sequence[str]) -> list[str]:
    """The methods of `names` that need no PyTorch, or all if it is installed."""
    return [name for name in names if name not in PEERS or has_torch()]


def require_torch() -> None:
    """Checks the installed version without importing PyTorch.

    Raises:
      ExperimentError: If PyTorch is missing, or another version is installed.
    """
    version = importlib.metadata.version("torch") if has_torch() else "none"
    if version.split("+")[0] != TORCH:  # Builds are marked, e.g. 2.13.0+cpu.
        raise ExperimentError(
            f"The lab runs PyTorch {TORCH}, found {version}: pip install 'jaxcomm[peers]'"
        )
