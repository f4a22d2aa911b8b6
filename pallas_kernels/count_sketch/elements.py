r"""The textbook count-sketch, which hashes each element, in plain JAX with a scatter.

There is no kernel for it. Mosaic GPU adds atomically to contiguous slices only, not at indices, and
a TPU has no scatter. On a GPU the order in which XLA's scatter adds floats changes from run to run,
so floats are added as integers.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import _hash, _vma
from pallas_kernels.count_sketch.reference import ESTIMATES
from pallas_kernels.count_sketch.tiling import below

SMALLEST_NORMAL = 2.0**-126
MOST_ROWS = 32


def _row_seeds(seeds: jax.Array, row: int) -> jax.Array:
    """The seeds of one row, uint32[2]."""
    position = jnp.arange(2 * row, 2 * row + 2, dtype=jnp.uint32)
    return _hash.bits(position, seeds[0], seeds[1])


def _locate(
    position: jax.Array, seeds: jax.Array, row: int, columns: int
) -> tuple[jax.Array, jax.Array]:
    """The column of each position in `row`, int32, and whether its sign is negative."""
    first, second = _row_seeds(seeds, row)
    word = _hash.bits(position, first, second)
    # The column comes from the high bits; the sign is the lowest bit.
    return below(word, columns).astype(jnp.int32), (word & 1) != 0


def require_table(seeds: jax.Array, rows: int, columns: int) -> None:
    """Raises unless a table may have these seeds and numbers of rows and columns."""
    if seeds.dtype != jnp.uint32 or seeds.shape != (2,):
        raise ValueError(f"`seeds` must be uint32[2], got {seeds.dtype}{list(seeds.shape)}.")
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"`rows` must be in [1, {MOST_ROWS}], got {rows}.")
    if not 1 <= columns < 2**31:
        raise ValueError(f"`columns` must be in [1, 2**31), got {columns}.")


def locations(
    indices: jax.Array, seeds: jax.Array, *, rows: int, columns: int
) -> tuple[jax.Array, jax.Array]:
    r"""The columns and signs of coordinates in a sketch with `hashing="elements"`.

    .. math:: h_r(i) = \lfloor w_r(i) c / 2^{32} \rfloor, \quad \sigma_r(i) = 1 - 2 (w_r(i) \bmod 2)

    for a hash :math:`w_r` to words of 32 bits.

    Args:
      indices: int32[k] or uint32[k], positions in the flat array.
      seeds: uint32[2], as for :func:`encode`.
      rows: Number of rows of the table.
      columns: :math:`c`.

    Returns:
      Columns, int32[rows, k], and signs, int32[rows, k], each -1 or 1.

    Raises:
      ValueError: If an argument is out of range or of a wrong shape or dtype.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import count_sketch
      >>> seeds, x = jnp.array([1, 2], jnp.uint32), jnp.array([0, 0, 0, 5], jnp.int32)
      >>> options = {"rows": 1, "columns": 64}
      >>> column, sign = count_sketch.locations(jnp.array([3]), seeds, **options)
      >>> table = count_sketch.encode(x, seeds, hashing="elements", **options)
      >>> int(sign[0, 0] * table[0, column[0, 0]])
      5
    """
    require_table(seeds, rows, columns)
    if indices.ndim != 1 or indices.dtype not in (jnp.int32, jnp.uint32):
        raise ValueError(
            f"`indices` must be int32[k] or uint32[k], got {indices.dtype}{list(indices.shape)}."
        )
    position = indices.astype(jnp.uint32)
    located = [_locate(position, seeds, row, columns) for row in range(rows)]
    signs = jnp.stack([jnp.where(negative, -1, 1) for _, negative in located])
    return jnp.stack([column for column, _ in located]), signs.astype(jnp.int32)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    """2**exponent, float32, of an int32 in [-126, 127]."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _scaled(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """`x` times 2**exponent, for an int32 in [-252, 254].

    The power may exceed the range of float32, so this multiplies in two steps.
    """
    half = exponent >> 1
    return x * _power_of_two(half) * _power_of_two(exponent - half)


def _add(column: jax.Array, values: jax.Array, columns: int) -> jax.Array:
    """The sums of the values of each column."""
    zeros, _, _ = _vma.equally_varying(jnp.zeros(columns, values.dtype), column, values)
    return zeros.at[column].add(values, mode="promise_in_bounds")


def _any(column: jax.Array, flags: jax.Array, columns: int) -> jax.Array:
    """Whether any value of each column has its flag set."""
    zeros, _, _ = _vma.equally_varying(jnp.zeros(columns, jnp.int32), column, flags)
    return zeros.at[column].max(flags.astype(jnp.int32), mode="promise_in_bounds") != 0


def _add_floats(column: jax.Array, values: jax.Array, columns: int) -> jax.Array:
    """The sums of float32 in fixed point, independent of their order.

    If every |x| < 2**e, and at most 2**b values per column are nonzero, each value is rounded to a
    multiple of 2**(e + b - 30). The sum of a column is at most 2**30 + 2**(b - 1) of these steps.
    """
    magnitude = jnp.abs(values)
    usable = (magnitude >= SMALLEST_NORMAL) & jnp.isfinite(values)
    peak = jnp.max(jnp.where(usable, magnitude, SMALLEST_NORMAL))
    # The exponent is biased by 127: [1, 2) has 127, and is below 2**1.
    above = (lax.bitcast_convert_type(peak, jnp.int32) >> 23) - 126
    most = jnp.max(_add(column, usable.astype(jnp.int32), columns))
    count_bits = 32 - lax.clz(jnp.maximum(most, 1) - 1)
    exponent = above + count_bits - 30
    steps = jnp.round(_scaled(jnp.where(usable, values, 0), -exponent)).astype(jnp.int32)
    sums = _scaled(_add(column, steps, columns).astype(jnp.float32), exponent)

    def with_nonfinite() -> jax.Array:
        """Treats NaN as infinities of both signs. GPUs may add floats themselves in a loop."""
        up = _any(column, (values == jnp.inf) | jnp.isnan(values), columns)
        down = _any(column, (values == -jnp.inf) | jnp.isnan(values), columns)
        infinite = jnp.where(up, jnp.where(down, jnp.nan, jnp.inf), -jnp.inf)
        return jnp.where(up | down, infinite, sums)

    return lax.cond(jnp.all(jnp.isfinite(values)), lambda: sums, with_nonfinite)


def encode(x: jax.Array, seeds: jax.Array, *, rows: int, columns: int) -> jax.Array:
    """The table of `x`, computed row by row."""
    position = _hash.positions(x.shape).ravel()
    flat = x.ravel()
    table = []
    for row in range(rows):
        column, negative = _locate(position, seeds, row, columns)
        if flat.dtype == jnp.int32:
            table.append(_add(column, jnp.where(negative, -flat, flat), columns))
        else:
            wide = flat.astype(jnp.float32)
            table.append(_add_floats(column, jnp.where(negative, -wide, wide), columns))
    return jnp.stack(table)


def decode(
    table: jax.Array, seeds: jax.Array, *, shape: tuple[int, ...], estimate: str
) -> jax.Array:
    """The estimates of an array of `shape`."""
    rows, columns = table.shape
    position = _hash.positions(shape)
    values = []
    for row in range(rows):
        column, negative = _locate(position, seeds, row, columns)
        value = table[row].at[column].get(mode="promise_in_bounds")
        values.append(jnp.where(negative, -value, value))
    return ESTIMATES[estimate](values)
