"""The version of PyTorch that the lab runs."""

import importlib.metadata

from experiments.cli.errors import ExperimentError

TORCH = "2.13.0"  # As in the extra `peers`.
REMEDY = "pip install 'jaxcomm[peers]'"


def require_torch() -> None:
    """Checks the installed version without importing PyTorch, which takes seconds.

    Raises:
      ExperimentError: If PyTorch is missing, or another version is installed.
    """
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError as error:
        raise ExperimentError(f"PyTorch is not installed: {REMEDY}") from error
    if version.split("+")[0] != TORCH:  # Builds are marked, e.g. 2.13.0+cpu.
        raise ExperimentError(f"The lab runs PyTorch {TORCH}, found {version}: {REMEDY}")
