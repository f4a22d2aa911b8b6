"""The wire cost of S2 Reducer: a count-sketch of the nonzero entries, and a bitmap of them."""

from jaxcomm.perf._require import require_at_least, require_positive


def s2_reducer_bytes(
    columns: int, rows: int, positions: int, *, bits_per_position: int = 1
) -> float:
    """Returns the bytes that S2 Reducer all-reduces for one array.

    Args:
      columns: The columns of the sketch, in float32.
      rows: The rows of the sketch.
      positions: The positions of the bitmap: rows of a matrix, or coordinates.
      bits_per_position: 1 for packed bits; 32 in the authors' code, which sends float32.

    Returns:
      Bytes of the table and of the bitmap.

    Raises:
      ValueError: If a number is out of range.

    References:
      Ge, Fu, Lai, Deng, Li: S2 Reducer, 2021, arXiv 2110.02140.

    Example:
      >>> from jaxcomm.perf import models
      >>> models.s2_reducer_bytes(columns=1000, rows=1, positions=800)
      4100.0
    """
    require_positive(columns, "columns")
    require_positive(rows, "rows")
    require_at_least(0, positions, "positions")
    require_positive(bits_per_position, "bits_per_position")
    return 4 * columns * rows + positions * bits_per_position / 8


def s2_reducer_variance(support: int, columns: int) -> float:
    r"""Returns the variance :math:`\omega = (K - 1) / c` of a sketch with one row.

    Args:
      support: :math:`K`, the number of nonzero coordinates in the union over workers.
      columns: :math:`c`, the columns of the sketch.

    Returns:
      The variance, with ideal hashes.

    Raises:
      ValueError: If a number is below 1.

    References:
      Ge, Fu, Lai, Deng, Li: S2 Reducer, 2021, arXiv 2110.02140.

    Example:
      >>> from jaxcomm.perf import models
      >>> models.s2_reducer_variance(support=1001, columns=4000)
      0.25
    """
    require_at_least(1, support, "support")
    require_at_least(1, columns, "columns")
    return (support - 1) / columns
