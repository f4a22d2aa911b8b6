"""The largest number of coordinates of a unit."""

MOST = 2**31 - 1


def require_countable(size: int, most: int = MOST) -> int:
    """Returns `size` if a codec with 32-bit positions can address that many coordinates.

    Raises:
      ValueError: If `size` exceeds `most`.
    """
    if size > most:
        raise ValueError(
            f"A bucket or leaf has {size} coordinates, but this codec supports at most {most}: "
            "split the leaf."
        )
    return size
