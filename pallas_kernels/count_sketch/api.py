"""Count-sketch of an array, and estimates of the coordinates from it."""

import functools
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch, _vma
from pallas_kernels._dispatch import Implementation
from pallas_kernels.count_sketch import elements, reference
from pallas_kernels.count_sketch.tiling import MOST_PLANES, PLANE

Hashing = Literal["tiles", "elements"]
Estimate = Literal["mean", "median"]

MOST_ROWS_OF_KERNELS = 9  # For decoding.


def round_columns(columns: int) -> int:
    """Rounds up to a number of columns that suits `hashing="tiles"`.

    Only multiples of 1024 are allowed. Larger powers of two make larger tiles, of up to 32768
    elements, and fewer steps of the kernels. Therefore the result is a multiple of the largest tile
    that fits sixteen times into the columns. It exceeds `columns` by at most a sixteenth if
    `columns` is at least 16384.

    Args:
      columns: The smallest acceptable number of columns.

    Returns:
      A multiple of 1024.

    Example:
      >>> from pallas_kernels import count_sketch
      >>> count_sketch.round_columns(1), count_sketch.round_columns(100_000)
      (1024, 102400)
    """
    if columns < 1:
        raise ValueError(f"`columns` must be at least 1, got {columns}.")
    planes = MOST_PLANES
    while planes > 1 and columns < 16 * planes * PLANE:
        planes //= 2
    return -(-columns // (planes * PLANE)) * planes * PLANE


def _require_table(seeds: jax.Array, rows: int, columns: int, hashing: str) -> None:
    if hashing not in get_args(Hashing):
        raise ValueError(f"`hashing` must be one of {get_args(Hashing)}, got {hashing!r}.")
    elements.require_table(seeds, rows, columns)
    if hashing == "tiles" and columns % PLANE:
        below = columns // PLANE * PLANE
        nearest = below + PLANE if columns - below > PLANE // 2 or not below else below
        raise ValueError(
            f'`columns` must be a multiple of {PLANE} for `hashing`="tiles", got {columns}: the '
            f'nearest is {nearest}, and any number is allowed for `hashing`="elements".'
        )


def _require_mask(mask: jax.Array | None, shape: tuple[int, ...]) -> None:
    if mask is not None and (mask.dtype != jnp.bool_ or mask.shape != shape):
        raise ValueError(f"`mask` must be bool{list(shape)}, got {jax.typeof(mask)}.")


def _run(
    function: str,
    hashing: str,
    implementation: Any,
    size: int,
    *arrays: jax.Array,
    **options: Any,
) -> jax.Array:
    """Runs `function` of `hashing`; only tiles, and not too many rows, have kernels."""
    if hashing == "elements":
        _dispatch.require_reference(
            implementation,
            'has no kernel for `hashing`="elements": Mosaic GPU has no atomic addition at indices, '
            'and Mosaic TPU has no scatter. Use `hashing`="tiles".',
        )
        result: jax.Array = getattr(elements, function)(*arrays, **options)
        return result
    rows = arrays[0].shape[0] if function == "decode" else 1
    if rows > MOST_ROWS_OF_KERNELS:
        _dispatch.require_reference(
            implementation,
            f"decodes at most {MOST_ROWS_OF_KERNELS} rows, got {rows}: use fewer rows or "
            "`implementation`='reference'.",
        )
        implementation = "reference"
    result = _dispatch.run("count_sketch", function, implementation, size, *arrays, **options)
    return result


# Up to a factor, each op is the transpose of the other.
@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _encode(x: jax.Array, seeds: jax.Array, options: Any) -> jax.Array:
    """See `encode`; `options` are rows, columns, hashing, implementation."""
    rows, columns, hashing, implementation = options
    sizes = {"rows": rows, "columns": columns}
    return _run("encode", hashing, implementation, x.size, x, seeds, **sizes)


def _encode_forward(x: jax.Array, seeds: jax.Array, options: Any) -> Any:
    return _encode(x, seeds, options), (seeds, jnp.zeros_like(x, shape=(0, *x.shape)))


def _encode_backward(options: Any, saved: Any, cotangent: jax.Array) -> Any:
    seeds, empty = saved
    if empty.dtype == jnp.int32:
        return None, None
    _, _, hashing, implementation = options
    sums = _decode(cotangent, seeds, (empty.shape[1:], "sum", hashing, implementation))
    return sums.astype(empty.dtype), None


_encode.defvjp(_encode_forward, _encode_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _decode(table: jax.Array, seeds: jax.Array, options: Any) -> jax.Array:
    """See `decode`; `options` are shape, estimate (or "sum"), hashing, implementation."""
    shape, estimate, hashing, implementation = options
    size = math.prod(shape)
    options = {"shape": shape, "estimate": estimate}
    return _run("decode", hashing, implementation, size, table, seeds, **options)


def _decode_forward(table: jax.Array, seeds: jax.Array, options: Any) -> Any:
    if options[1] == "median":
        raise TypeError(
            '`count_sketch.decode` with `estimate`="median" has no gradient. Use "mean", or hide '
            "the table behind `jax.lax.stop_gradient`."
        )
    return _decode(table, seeds, options), (seeds, jnp.zeros_like(table, shape=(0, *table.shape)))


def _decode_backward(options: Any, saved: Any, cotangent: jax.Array) -> Any:
    seeds, empty = saved
    _, estimate, hashing, implementation = options
    _, rows, columns = empty.shape
    if empty.dtype == jnp.int32:
        return None, None
    table = _encode(cotangent, seeds, (rows, columns, hashing, implementation))
    return table if estimate == "sum" else table * jnp.float32(1 / rows), None


_decode.defvjp(_decode_forward, _decode_backward)


def encode(
    x: jax.Array,
    seeds: jax.Array,
    *,
    rows: int,
    columns: int,
    mask: jax.Array | None = None,
    hashing: Hashing = "tiles",
    implementation: Implementation | None = None,
) -> jax.Array:
    r"""Adds every coordinate, with a random sign, to one random column of each row of a table.

    .. math:: S_{rj} = \sum_{i : h_r(i) = j} \sigma_r(i) x_i

    for hashes :math:`h_r` to `columns` and :math:`\sigma_r` to :math:`\{-1, 1\}`. The table is
    linear in x: you can add tables made with the same seeds. For the estimate :math:`\hat x_i =
    \sigma_r(i) S_{r h_r(i)}` from one row of c columns, both families of hashes satisfy

    .. math:: \mathbb{E} \hat x_i = x_i, \quad
              \mathbb{E} (\hat x_i - x_i)^2 \le \frac{1}{c} \sum_{j \ne i} x_j^2,

    with equality for `"elements"`. Therefore, the squared errors of K coordinates add to (K - 1)/c
    times their sum of squares. The mean over independent rows divides this error by the number of
    rows.

    `hashing="tiles"` moves whole tiles of up to 32768 elements. The tile size is the largest power
    of two that divides `columns` into eight tiles or more, but at least 1024. The columns of a row
    are divided into n slots of one tile each. Each row deals the tiles to the slots in rounds of n
    tiles, one for each slot, by a mixing bijection and an offset that are hashed of the round. It
    adds the tiles of a slot in a fixed order, each element with its own sign. Within a
    tile, planes are rolled, then pairs of sublanes along lanes, and then each lane along its
    sublanes, all by hashed amounts. For uniform and independent hashes this holds for any numbers
    of tiles and slots:

    - Each row is a bijection of tiles and places, and no place is empty.
    - Elements of one tile, or of two tiles of one round, never collide. Tiles of different rounds
      share a slot with probability 1/n, since their offsets are independent. The place of
      an element in its tile is uniform, so two elements collide with probability at most 1/c.
    - The estimate is unbiased whatever the slots and places are, since the signs of two elements
      that collide are independent.

    But elements of two tiles collide in groups, although not all together: for one draw of the
    seeds, errors on coordinates that have the same places within many tiles are clustered. There is
    no scatter and no atomic operation. The table is bit for bit the same in every run and on every
    backend that does not flush subnormal numbers. Memory traffic of the kernels: on GPUs 4 N bytes
    per row; on TPUs 4 N bytes for all rows that fit in 6 MiB; and the table once, with partial
    tables of up to 2 MiB per row. On TPUs arrays that do not fill their planes of 1024 are copied
    for padding, and bfloat16 is copied to float32.

    `hashing="elements"` hashes every element independently, for any number of columns, and uses
    XLA's scatter. It is slower, with about 12 N bytes per row and scattered access. Floats are
    added in fixed point, so the order does not matter. Let P be the largest magnitude and B the
    largest number of nonzero coordinates in one column. An entry with n of them has an error of at
    most n P B 2**-29 and one rounding to float32. A scatter of ones computes B, which makes
    overflow impossible. Subnormal numbers count as zero.

    NaN and infinite coordinates affect only the columns to which they are hashed. The gradient is
    the sum over rows of the signed entries, as in :func:`decode`.

    Args:
      x: float32, bfloat16 or int32 of any shape, of fewer than 2**32 elements.
      seeds: uint32[2], from which all hashes are derived. Equal on all workers.
      rows: Number of rows of the table, 1 to 32.
      columns: c. For `"tiles"` a multiple of 1024; :func:`round_columns` returns a good one.
      mask: bool of the shape of `x`: only coordinates where it is true are added. None adds all.
      hashing: `"tiles"` or `"elements"`.
      implementation: `"reference"`, `"mosaic_gpu"`, `"mosaic_tpu"`, or None for the fastest one, as
        measured or assumed.

    Returns:
      The table, [rows, columns]: int32 for an int32 `x`, with sums modulo 2**32, else float32.

    Raises:
      ValueError: If an argument is out of range or of a wrong shape or dtype.
      NotImplementedError: If the device cannot run the named implementation, or if a kernel is
        named for `"elements"`.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import count_sketch
      >>> x, seeds = jnp.arange(4.0), jnp.array([1, 2], jnp.uint32)
      >>> table = count_sketch.encode(x, seeds, rows=3, columns=1024)
      >>> table.shape
      (3, 1024)
      >>> count_sketch.decode(2 * table, seeds, shape=(4,), estimate="median").tolist()
      [0.0, 2.0, 4.0, 6.0]

    References:
      Charikar, Chen, Farach-Colton, `Finding frequent items in data streams
      <https://doi.org/10.1016/S0304-3975(03)00400-6>`_, 2004. The paper hashes elements, with
      functions that are provably pairwise independent. The hashes here are mixing functions, and
      tests check them. The tiles are not in the paper.
    """
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.int32):
        raise ValueError(f"`x` must be float32, bfloat16 or int32, got {x.dtype}.")
    _require_table(seeds, rows, columns, hashing)
    _require_mask(mask, x.shape)
    if mask is not None:
        x = jnp.where(mask, x, 0)
    x, seeds = _vma.equally_varying(x, seeds)
    if x.size == 0:
        (table, _) = _vma.equally_varying(
            jnp.zeros((rows, columns), reference.accumulator(x.dtype)), x
        )
        return table
    return _encode(x, seeds, (rows, columns, hashing, implementation))


def decode(
    table: jax.Array,
    seeds: jax.Array,
    *,
    shape: tuple[int, ...],
    estimate: Estimate = "mean",
    mask: jax.Array | None = None,
    hashing: Hashing = "tiles",
    implementation: Implementation | None = None,
) -> jax.Array:
    r"""Estimates every coordinate from its entries in a table of :func:`encode`.

    .. math:: \hat x_i = \operatorname{mean}_r \; \sigma_r(i) S_{r h_r(i)} \quad \text{or} \quad
              \operatorname{median}_r

    The mean is unbiased, with 1/rows of the variance of one row. The median ignores a minority of
    rows in which a large coordinate collides. For an odd number of rows, the median is unbiased if
    errors are symmetric, as they are under random signs. For an even number of rows, it is the
    midpoint of the middle two estimates, which is unbiased for the same reason; for two rows it is
    the mean. (The lower of two estimates would have a bias of about -0.8 standard deviations.) One
    NaN among the entries makes the median NaN.

    Memory traffic of the kernels: they write 4 N bytes, and read 4 N bytes of the table for every
    row, on GPUs mostly from the cache. On TPUs a table of up to 6 MiB is read once. The median uses
    minima and maxima of pairs instead of a sort.

    Args:
      table: float32 or int32 [rows, columns] from :func:`encode`, or a sum of such tables.
      seeds: As for :func:`encode`.
      shape: Shape of the array, as for :func:`encode`.
      estimate: `"mean"` or `"median"`.
      mask: bool of `shape`: coordinates where it is false are exactly 0. None keeps all.
      hashing: As for :func:`encode`.
      implementation: As for :func:`encode`.

    Returns:
      An array of `shape`: int32 for the median of an int32 table (rounded down for an even number
      of rows), else float32.

    Raises:
      ValueError: If an argument is out of range or of a wrong shape or dtype.
      NotImplementedError: If the device cannot run the named implementation, or if a kernel is
        named for `"elements"` or for more than 9 rows.
      TypeError: If the median is differentiated. The gradient of the mean is :func:`encode`
        divided by rows.

    Example:
      >>> import jax.numpy as jnp
      >>> from pallas_kernels import count_sketch
      >>> x, seeds = jnp.arange(4.0), jnp.array([1, 2], jnp.uint32)
      >>> table = count_sketch.encode(x, seeds, rows=2, columns=100, hashing="elements")
      >>> mask = jnp.array([True, False, True, True])
      >>> count_sketch.decode(table, seeds, shape=(4,), mask=mask, hashing="elements").tolist()
      [0.0, 0.0, 2.0, 3.0]
    """
    if table.ndim != 2 or table.dtype not in (jnp.float32, jnp.int32):
        raise ValueError(
            "`table` must be float32 or int32 [rows, columns], got "
            f"{table.dtype}{list(table.shape)}."
        )
    if estimate not in get_args(Estimate):
        raise ValueError(f"`estimate` must be one of {get_args(Estimate)}, got {estimate!r}.")
    rows, columns = table.shape
    _require_table(seeds, rows, columns, hashing)
    shape = tuple(shape)
    _require_mask(mask, shape)
    table, seeds = _vma.equally_varying(table, seeds)
    if math.prod(shape) == 0:
        dtype = table.dtype if estimate == "median" else jnp.float32
        (empty, _) = _vma.equally_varying(jnp.zeros(shape, dtype), table)
        return empty
    result = _decode(table, seeds, (shape, estimate, hashing, implementation))
    return result if mask is None else jnp.where(mask, result, 0)
