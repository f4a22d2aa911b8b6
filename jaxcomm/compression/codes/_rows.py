"""Sends the integers of a codec in rows of bit fields, whose lengths vary; a fixed capacity.

A row is a bit string that starts at a word. Its fields follow each other along the first axis of
arrays of `[fields, rows]`, so that what runs along a row is one step for all rows.
"""

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm import _axis, _noise
from jaxcomm._contract import (
    Claims,
    Codec,
    Context,
    Diagnostics,
    Entries,
    Fast,
    Memory,
    PyTree,
    no_memory,
    scattered,
)
from jaxcomm.compression import _bits, _overflow
from jaxcomm.compression._bits import Alphabet, Integers
from jaxcomm.compression._scaled import contraction_of

SLACK = 64
"""Words beyond `capacity`, so that short units, whose lengths vary more, fit."""

FITS = 0.999
"""The probability that a unit of normal, independent coordinates fits into the default capacity."""

HEADER_BITS = 16
LENGTH_BITS = 11  # of a header; the other 5 are the parameter of the row

PLAIN = 31
"""The parameter of a row in its plain form, a fixed number of bits per integer."""

CONSTANT = 30
"""The parameter of a row of equal integers, which has the plain form of one of them."""


class BitFields(NamedTuple):
    """Rows of bit strings, side by side: some zeros each, then up to 32 bits, the lowest first."""

    zeros: jax.Array  # int32[fields, rows]
    bits: jax.Array  # uint32[fields, rows], 0 where `width` is 0
    width: jax.Array  # int32[fields, rows], 0 to 32


class Stream(NamedTuple):
    """What a receiver reads."""

    words: jax.Array  # uint32[capacity]
    starts: jax.Array  # int32[rows], the first word of each row
    parameter: jax.Array  # int32[rows]
    table: PyTree  # what all rows share


class RowCode(NamedTuple):
    """A code of rows of integers of one kind.

    Attributes:
      write: `(int32[n, rows], alphabet) -> (BitFields, int32[rows], table)`: the fields, a
        parameter of each row from 0 to 31, and what all rows share.
      read: `(stream, n, alphabet) -> int32[n, rows]`.
      expected: `likely -> (mean, variance)` of the bits of one of many independent integers, for
        what `Integers.likely` returns.
      most: The most integers in a row: the number of sequential steps that reading takes.
      levels: The most integers in an alphabet for which the code has words.
      state: The bits of a row in its plain form beside those of its integers.
    """

    write: Callable[[jax.Array, Alphabet], tuple[BitFields, jax.Array, PyTree]]
    read: Callable[[Stream, int, Alphabet], jax.Array]
    expected: Callable[[Any], tuple[float, float]]
    most: int = 1024
    levels: int = 2**31 - 1
    state: int = 0


class _Payload(NamedTuple):
    """The payload of one unit (a bucket or a leaf)."""

    headers: jax.Array  # uint32[ceil(rows / 2)]: of each row, its length in words and a parameter
    words: jax.Array  # uint32[capacity], the rows; or a window of plain integers
    table: PyTree  # what the code sends for all rows: the counts of `rans`
    rest: PyTree  # the rest of the codec's payload


class _Cut(NamedTuple):
    """How the integers of a unit are cut, and the capacity of their words."""

    rows: int
    length: int  # integers of a row; the last rows are padded with zeros
    capacity: int  # words
    plain: int  # how many integers fit into the capacity in a plain form


def low_bits(width: jax.Array) -> jax.Array:
    """uint32 whose lowest `width` bits are set, for widths of 0 to 31."""
    return (jnp.uint32(1) << width.astype(jnp.uint32)) - jnp.uint32(1)


def _sums_before(x: jax.Array) -> jax.Array:
    """The sum of int32[n, rows] before each element along its row; `n - 1` steps on CPUs."""

    def by_steps(x: jax.Array) -> jax.Array:
        def add(total: jax.Array, more: jax.Array) -> tuple[jax.Array, jax.Array]:
            return total + more, total + more

        nothing = _axis.varying_like(jnp.zeros(x.shape[1], jnp.int32), x)
        return jnp.concatenate([nothing[None], lax.scan(add, nothing, x[:-1])[1]])

    # XLA for CPUs takes 60 times as long for a `cumsum`.
    return lax.platform_dependent(
        x, cpu=by_steps, default=lambda x: jnp.cumsum(x, axis=0, dtype=jnp.int32) - x
    )


def _words_of_rows(fields: BitFields) -> jax.Array:
    """The length of each row in words, int32[rows]."""
    return (jnp.sum(fields.zeros + fields.width, axis=0, dtype=jnp.int32) + 31) >> 5


def _write(fields: BitFields, starts: jax.Array, capacity: int) -> jax.Array:
    r"""Writes each row from the word `starts` on, in order, into uint32[capacity].

    A field lies in one word, or in two. The fields of a word are disjoint, so that

    .. math:: w_j = \sum_{i: a_i = j} \mathrm{low}_i + \sum_{i: a_i = j - 1} \mathrm{high}_i

    with :math:`a_i` the word in which field :math:`i` begins. Words beyond `capacity` are dropped.
    """
    begins = _sums_before(fields.zeros + fields.width) + fields.zeros
    words = starts[None] + (begins >> 5)
    shift = (begins & 31).astype(jnp.uint32)
    low, high = fields.bits << shift, (fields.bits >> 1) >> (31 - shift)
    # XLA for CPUs would compute all of this in the loops that scatter, one field at a time.
    words, low, high = lax.optimization_barrier((words, low, high))
    nothing = jnp.zeros(capacity, jnp.uint32)
    return nothing.at[words].add(low, mode="drop").at[words + 1].add(high, mode="drop")


def bits_at(stream: Stream, bit: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The 64 bits from a bit of each row on, int32[rows], as two uint32[rows]."""
    first, shift = stream.starts + (bit >> 5), (bit & 31).astype(jnp.uint32)
    one, two, three = (stream.words.at[first + i].get(mode="clip") for i in range(3))
    return (one >> shift) | ((two << 1) << (31 - shift)), (two >> shift) | (
        (three << 1) << (31 - shift)
    )


def or_plain(
    fields: BitFields, parameter: jax.Array, rows: jax.Array, alphabet: Alphabet
) -> tuple[BitFields, jax.Array, PyTree]:
    """The rows in their plain form where the code is not shorter, or all integers are equal."""
    shape, padding = rows.shape, ((0, len(fields.bits) - len(rows)), (0, 0))
    is_constant = jnp.all(rows == rows[:1], axis=0)
    is_sent = ~is_constant[None] | (lax.broadcasted_iota(jnp.int32, shape, 0) == 0)
    plain = BitFields(
        jnp.zeros(fields.zeros.shape, jnp.int32),
        jnp.pad(jnp.where(is_sent, (rows - alphabet.low).astype(jnp.uint32), 0), padding),
        jnp.pad(jnp.where(is_sent, jnp.int32(alphabet.width), 0), padding),
    )
    fields = BitFields(*lax.optimization_barrier(tuple(fields)))
    of_plain = _bits.words(len(rows) * alphabet.width)
    is_plain = is_constant | (_words_of_rows(fields) >= of_plain)
    chosen = BitFields(
        *(jnp.where(is_plain[None], *each) for each in zip(plain, fields, strict=True))
    )
    parameter = jnp.where(is_plain, PLAIN, parameter)
    return chosen, jnp.where(is_constant, CONSTANT, parameter), ()


def read(
    step: Callable[..., tuple[Any, jax.Array, jax.Array]],
    stream: Stream,
    n: int,
    alphabet: Alphabet,
    begin: tuple[jax.Array, Any] | None = None,
) -> jax.Array:
    """Reads the next integer of all rows at once, `n` times, of rows from `or_plain`.

    Args:
      step: `(state, bit, low, high) -> (state, used, int32[rows])`: from the 64 bits that begin at
        `bit` of each row, the next integer and how many of the bits it takes.
      stream: The words.
      n: The number of integers in each row.
      alphabet: Their range.
      begin: The first bit of each row, int32[rows], and the first state. Default: 0, and none.

    Returns:
      int32[n, rows].
    """
    is_plain, width = stream.parameter >= CONSTANT, jnp.int32(alphabet.width)
    of_plain = jnp.where(stream.parameter == CONSTANT, 0, width)

    def next_integers(carry: tuple[jax.Array, Any], _: None) -> tuple[Any, jax.Array]:
        bit, state = carry
        low, high = bits_at(stream, bit)
        state, used, integer = step(state, bit, low, high)
        plain = (low & low_bits(width)).astype(jnp.int32) + alphabet.low
        after = bit + jnp.where(is_plain, of_plain, used)
        return (after, state), jnp.where(is_plain, plain, integer)

    begin = begin or (jnp.zeros(len(stream.starts), jnp.int32), ())
    varying = jax.tree.map(lambda x: _axis.varying_like(x, stream), begin)
    return lax.scan(next_integers, varying, None, length=n)[1]


def variable_length(
    codec: Codec,
    codes: Mapping[str, RowCode],
    *,
    name: str,
    capacity: float | None,
    overflow: _overflow.Policy,
) -> Codec:
    """The codec with its integers in another code; see :func:`elias`.

    Args:
      codec: The codec.
      codes: The code of each kind of integers.
      name: The name of the code in error messages.
      capacity: Bits per integer.
      overflow: What happens if a unit does not fit.
    """
    integers: Integers | None = codec.fast.integers
    if integers is None or integers.kind not in codes:
        raise ValueError(
            f"`{name}` needs a codec of {' or '.join(codes)}, such as `dither` or `blockwise` of "
            f"it. Put feedback outside: `error_feedback({name}(codec))`."
        )
    code, are_indices = codes[integers.kind], integers.kind == "indices"

    def likely_of(size: int) -> Any:
        likely = integers.likely(size)
        if likely is None:
            raise ValueError(
                f"`{name}` needs `capacity` for a unit of {size} coordinates: use "
                "`measured_capacity`."
            )
        return likely

    def cut_of(context: Context) -> tuple[Alphabet, _Cut]:
        """The integers of a unit, cut into rows, which share `capacity` bits per integer."""
        alphabet = integers.alphabet(context)
        count, levels = _bits.require_countable(alphabet.number), alphabet.high - alphabet.low + 1
        if levels > code.levels and not are_indices:
            raise ValueError(
                f"`{name}` has words for at most {code.levels} levels, but the codec has {levels}."
            )
        rows = -(-count // code.most)
        length = -(-count // max(rows, 1))
        words = rows * _bits.words(code.state + length * alphabet.width)
        if _bits.words(count * alphabet.width) > SLACK:
            if capacity is None:
                mean, variance = code.expected(likely_of(context.size))
                spread = NormalDist().inv_cdf(FITS) * math.sqrt(max(variance, 0) * count)
                bits = mean * count + spread + 40 * rows  # Rows are whole words.
            else:
                bits = capacity * count
            words = min(math.ceil(bits / 32) + SLACK, words)
        return alphabet, _Cut(rows, length, words, min(32 * words // alphabet.width, count))

    def placed(
        context: Context, lengths: jax.Array, capacity: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The first word of each row, whether all fit, and the first integer of a window."""
        ends = jnp.cumsum(lengths, dtype=jnp.int32)
        fits = ends[-1] <= capacity
        drawn = _noise.bits(jax.random.fold_in(context.keys.shared, 0x5A), ())
        first = (drawn % jnp.uint32(integers.alphabet(context).number)).astype(jnp.int32)
        # `jax.vmap` of a step types all inputs of a branch as its predicate.
        return ends - lengths, fits, _axis.varying_like(first, fits)

    def encode(context: Context, x: jax.Array) -> tuple[PyTree, Memory]:
        inner, _ = codec.encode(context.replace(memory=Memory()), x)
        alphabet, place = cut_of(context)
        if not alphabet.number:
            return inner, Memory(report=_overflow.Overflow(jnp.zeros((), jnp.int32)))
        values, rest = integers.split(context, inner)
        gaps = jnp.diff(values, prepend=jnp.int32(-1)) - 1 if are_indices else values
        rows = jnp.pad(gaps, (0, place.rows * place.length - alphabet.number))
        fields, parameter, table = code.write(rows.reshape(place.rows, place.length).T, alphabet)
        lengths = _words_of_rows(fields)
        starts, fits, first = placed(context, lengths, place.capacity)

        def as_rows() -> jax.Array:
            return _write(fields, starts, place.capacity)

        def as_window() -> jax.Array:
            chosen = jnp.roll(values, -first)[: place.plain] - alphabet.low
            packed = _bits.pack_numbers(chosen.astype(jnp.uint32), alphabet.width)
            return jnp.pad(packed, (0, place.capacity - packed.size))

        words = lax.cond(fits, as_rows, as_window)
        headers = (lengths | (parameter << LENGTH_BITS)).astype(jnp.uint32)
        payload = _Payload(_bits.pack_numbers(headers, HEADER_BITS), words, table, rest)
        dropped = jnp.where(fits, 0, alphabet.number - place.plain).astype(jnp.int32)
        return payload, Memory(report=_overflow.Overflow(dropped))

    def bits_of(context: Context, payload: _Payload) -> jax.Array:
        """The bits per integer, whether they fit or not."""
        alphabet, place = cut_of(context)
        headers = _bits.unpack_numbers(payload.headers, HEADER_BITS, place.rows)
        words = jnp.sum(headers & jnp.uint32(2**LENGTH_BITS - 1), dtype=jnp.int32)
        return 32 * words.astype(jnp.float32) / alphabet.number

    def receive(
        context: Context, payload: PyTree
    ) -> tuple[PyTree, jax.Array, jax.Array, jax.Array]:
        """The payload of `codec`, its integers, whether each was sent, and whether all fit."""
        alphabet, place = cut_of(context)
        if not alphabet.number:
            return payload, jnp.zeros(0, jnp.int32), jnp.zeros(0, bool), jnp.bool(True)
        headers = _bits.unpack_numbers(payload.headers, HEADER_BITS, place.rows).astype(jnp.int32)
        lengths, parameter = headers & (2**LENGTH_BITS - 1), headers >> LENGTH_BITS
        starts, fits, first = placed(context, lengths, place.capacity)
        known = jnp.roll(lax.iota(jnp.int32, alphabet.number) < place.plain, first)

        def from_rows() -> jax.Array:
            stream = Stream(payload.words, starts, parameter, payload.table)
            values = code.read(stream, place.length, alphabet).T.ravel()[: alphabet.number]
            return jnp.cumsum(values + 1, dtype=jnp.int32) - 1 if are_indices else values

        def from_window() -> jax.Array:
            used = payload.words[: _bits.words(alphabet.width * place.plain)]
            numbers = _bits.unpack_numbers(used, alphabet.width, place.plain).astype(jnp.int32)
            padded = jnp.pad(numbers, (0, alphabet.number - place.plain))
            sent = jnp.roll(padded, first) + alphabet.low
            # Ascending, distinct indices in place of those that are not known.
            rank = lax.iota(jnp.int32, alphabet.number)
            return lax.cummax(jnp.where(known, sent - rank, 0)) + rank if are_indices else sent

        values = lax.cond(fits, from_rows, from_window)
        return integers.join(context, values, payload.rest), values, fits | known, fits

    def form(drops: bool) -> Codec:
        def kept(values: jax.Array, known: jax.Array, fits: jax.Array) -> jax.Array:
            return jnp.where(known, values, 0) if drops else _overflow.nan_unless(fits, values)

        def decode(context: Context, payload: PyTree) -> jax.Array:
            inner, values, known, fits = receive(context, payload)
            mean = codec.decode(context, inner)
            if are_indices:  # Those that are not known are the indices of others.
                lost = jnp.where(known, mean.size, values)
                known = jnp.ones(mean.size, bool).at[lost].set(False, mode="drop")
            return kept(mean, known[: mean.size].reshape(mean.shape), fits)

        def entries(context: Context, payload: PyTree) -> Entries:
            inner, _, known, fits = receive(context, payload)
            assert codec.fast.entries is not None
            indices, values = codec.fast.entries(context, inner)
            return Entries(indices, kept(values, known, fits))

        def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
            inner = codec.diagnose(context.replace(memory=Memory()), x, Memory())
            return inner._replace(totals=inner.totals | _overflow.overflow_totals(after))

        return codec.replace(
            encode=encode,
            decode=scattered(entries) if codec.fast.entries else decode,
            init=no_memory,
            diagnose=diagnose,
            combine=None,
            claims=claims_of_window if drops else codec.claims,
            layout="concatenated",
            drop_overflow=None,
            fast=Fast(entries=entries if codec.fast.entries else None, code=name, bits=bits_of),
        )

    def bound(size: int, workers: int) -> float:
        r"""Each integer is sent with a probability of at least p.

        .. math:: \mathbb{E} \|C(x) - x\|^2 \le p\, \|Q(x) - x\|^2 + (1 - p) \|x\|^2

        if the integers do not fit, for the integers of this draw. Where the contraction
        :math:`\delta` holds in every draw, :math:`C` therefore is one with :math:`p \delta`. Where
        it holds in expectation, draws that do not fit may be the more accurate ones. Then only
        :math:`\delta - (1 - p)` follows.
        """
        context, delta = Context.of(jnp.zeros(0)), contraction_of(codec, size, workers)
        assert delta is not None
        bits = code.expected(likely_of(size))[0] if capacity is None else capacity
        p = min(bits / integers.alphabet(context.replace(shape=(size,))).width, 1.0)
        return p * delta if integers.certain else p - 1 + delta

    has_bound = contraction_of(codec, 1, 1) is not None
    claims_of_window = Claims(contraction=bound if has_bound else None)
    return _overflow.choose_form(overflow, form(True), form(False))


def measured_capacity(codec: Codec, updates: jax.Array, *, seed: int = 0) -> float:
    r"""The bits per integer in which all of the given updates fit.

    .. math:: r = \max\Big(\frac{\ell(x_1)}{m}, \frac{\ell(x_2)}{m}, \ldots\Big)

    with :math:`\ell` the words that the rows of an update take, in bits, for its :math:`m`
    integers. Each update is encoded once, with separate PRNG keys. This does not depend on the
    `capacity` of `codec`, and sends nothing. Run it outside of the training program, with updates
    of the size of the units that are sent: a bucket of leaves, or a leaf.

    Args:
      codec: A codec of this package, such as `elias(dither(levels=7), capacity=8.0)`.
      updates: `[samples, ...]`, updates of one unit, for instance of several steps and workers.
      seed: The seed of the PRNG keys.

    Returns:
      The `capacity`, a Python float. Units that differ more over time than these need more: a
      margin of some percent avoids overflows.

    Raises:
      ValueError: If `updates` has one axis.

    Example:
      >>> import jax
      >>> from jaxcomm.compression.codes import elias, measured_capacity
      >>> from jaxcomm.compression.quantizers import dither
      >>> updates = jax.random.normal(jax.random.key(0), (20, 5_000))
      >>> 2.5 < measured_capacity(elias(dither(levels=7)), updates) < 4
      True
    """
    bits_of = codec.fast.bits
    assert bits_of is not None
    if updates.ndim < 2:
        raise ValueError(f"`updates` must be [samples, ...], got the shape {updates.shape}.")

    @jax.jit
    def length(key: jax.Array, x: jax.Array) -> jax.Array:
        keys = Context.of(x).keys._replace(shared=key, private=jax.random.fold_in(key, 1))
        context = Context(keys, codec.init(x), shape=x.shape)
        context = context.replace(statistics=codec.measure(context, x))
        return bits_of(context, codec.encode(context, x)[0])

    keys = jax.random.split(jax.random.key(seed, impl="threefry2x32"), len(updates))
    each = zip(keys, updates.astype(jnp.float32), strict=True)
    return max(float(length(key, x)) for key, x in each)
