"""What the user has chosen of what there is."""

from collections.abc import Sequence

from experiments.errors import ExperimentError


def select(requested: Sequence[str], available: Sequence[str], option: str) -> list[str]:
    """Those of `known` that are given, or all of them where `all` is; in their own order.

    Raises:
      ExperimentError: If one is given that there is not.
    """
    if "all" in requested:
        return [*available]
    if unknown := [name for name in requested if name not in available]:
        raise ExperimentError(
            f"{option} must be of {', '.join(available)} or all, got {unknown[0]!r}."
        )
    return [name for name in available if name in requested]
