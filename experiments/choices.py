"""What the user has chosen of what there is."""

from collections.abc import Sequence

from experiments.errors import ExperimentError


def chosen(given: Sequence[str], known: Sequence[str], option: str) -> list[str]:
    """Those of `known` that are given, or all of them where `all` is; in their own order.

    Raises:
      ExperimentError: If one is given that there is not.
    """
    if "all" in given:
        return [*known]
    if unknown := [name for name in given if name not in known]:
        raise ExperimentError(f"{option} must be of {', '.join(known)} or all, got {unknown[0]!r}.")
    return [name for name in known if name in given]
