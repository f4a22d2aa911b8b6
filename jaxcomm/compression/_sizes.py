"""How many coordinates a unit may have."""

MOST = 2**31 - 1


def require_countable(size: int, most: int = MOST) -> int:
    """The size, if positions in 32 bits can tell so many coordinates apart.

    Raises:
      ValueError: If they cannot.
    """
    if size > most:
        raise ValueError(
            f"A unit of {size} coordinates has more than {most}, the most that this codec can "
            "count: split the leaf."
        )
    return size
