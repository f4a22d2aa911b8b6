"""Sends the integers of a codec in a code whose length depends on them, in a fixed room."""

from collections.abc import Callable, Mapping
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
from jaxcomm._require import require_codec
from jaxcomm.compression import _bits
from jaxcomm.compression._integers import Integers
from jaxcomm.compression._overflow import (
    Overflow,
    Policy,
    choose_form,
    nan_unless,
    overflow_totals,
)
from jaxcomm.compression.codes._room import HEADER_BITS, Cut, cut, expected_bits, require_room
from jaxcomm.compression.codes._rows import RowCode, Stream, bits_of_rows, write

_LENGTH_BITS = 11  # of a header; the other 5 are the parameter of the row


class VariableLengthPayload(NamedTuple):
    """The payload of one unit (a bucket or a leaf)."""

    headers: jax.Array  # uint32[ceil(rows / 2)]: of each row, its length in words and a parameter
    words: jax.Array  # uint32[room], the rows; or a window of plain integers
    table: PyTree  # what the code sends for all rows: the counts of `rans`
    rest: PyTree  # the rest of the codec's payload


class Received(NamedTuple):
    """What a receiver finds in a payload."""

    integers: jax.Array  # int32[count]
    known: jax.Array  # bool[count], whether they were sent
    fits: jax.Array  # bool[], whether all were


def _to_gaps(indices: jax.Array) -> jax.Array:
    before = jnp.concatenate([jnp.full(1, -1, jnp.int32), indices[:-1]])
    return indices - before - 1


def _to_indices(gaps: jax.Array) -> jax.Array:
    return jnp.cumsum(gaps + 1, dtype=jnp.int32) - 1


def _filled(indices: jax.Array, known: jax.Array) -> jax.Array:
    """Ascending, distinct indices in place of those that are not known."""
    rank = lax.iota(jnp.int32, indices.size)
    return lax.cummax(jnp.where(known, indices - rank, 0)) + rank


def _start(public: jax.Array, count: int) -> jax.Array:
    """A random one of `count` integers, equal on all workers, int32[]."""
    drawn = _noise.bits(jax.random.fold_in(public, 0x5A), ())
    return (drawn % jnp.uint32(count)).astype(jnp.int32)


def _cyclic(difference: jax.Array, count: int) -> jax.Array:
    """Differences from `-count` on, modulo `count`, without an overflow."""
    return jnp.where(difference < 0, difference + count, difference)


def _place(public: jax.Array, count: int) -> jax.Array:
    """How far each integer is behind the random one, cyclically, int32[count]."""
    return _cyclic(lax.iota(jnp.int32, count) - _start(public, count), count)


def _integers_of(codec: Codec, codes: Mapping[str, RowCode], name: str) -> Integers:
    require_codec(codec, user=name)
    found: Integers | None = codec.fast.integers
    if found is None:
        raise ValueError(
            f"`{name}` needs a codec that states its integers: `dither`, `min_max_dither`, "
            "`ternary`, `blockwise` of these, `top_k` without blocks and samples, or `stc`. Put "
            f"feedback outside: `error_feedback({name}(codec))`."
        )
    if found.kind not in codes:
        raise ValueError(
            f"`{name}` sends levels, but this codec sends {found.kind}, which hardly repeat. Use "
            "`golomb_rice`."
        )
    return found


def variable_length(
    codec: Codec,
    codes: Mapping[str, RowCode],
    *,
    name: str,
    room: float | None,
    overflow: Policy,
) -> Codec:
    """The codec with its integers in another code; see :func:`elias`.

    Args:
      codec: The codec.
      codes: The code of each kind of integers.
      name: The name of the code in error messages.
      room: Bits per integer.
      overflow: What happens if a unit does not fit.
    """
    integers = _integers_of(codec, codes, name)
    require_room(room)
    code, are_indices = codes[integers.kind], integers.kind == "indices"

    def likely_of(size: int) -> Any:
        likely = integers.likely(size)
        if likely is None:
            raise ValueError(
                f"`{name}` needs `room`, the bits per integer, since the codec states no likely "
                f"integers for a unit of {size} coordinates: `measured_room` returns it."
            )
        return likely

    def cut_of(context: Context, count: int) -> Cut:
        def default(count: int) -> float:
            return expected_bits(code, likely_of(context.size), count)

        alphabet = integers.alphabet(context)
        code.require(alphabet)
        return cut(count, code, alphabet, room, default)

    def encode(context: Context, x: jax.Array) -> tuple[VariableLengthPayload, Memory]:
        inner, _ = codec.encode(context.replace(memory=Memory()), x)
        values, rest = integers.split(context, inner)
        alphabet, place = integers.alphabet(context), cut_of(context, values.size)
        padding = (0, place.rows * place.length - place.number)
        if not place.number:
            nothing = jnp.zeros(0, jnp.uint32)
            return VariableLengthPayload(nothing, nothing, (), rest), Memory(
                report=Overflow(jnp.zeros((), jnp.int32))
            )
        rows = jnp.pad(_to_gaps(values) if are_indices else values, padding)
        written = code.write(rows.reshape(place.rows, place.length).T, alphabet)
        lengths = (bits_of_rows(written.fields) + 31) >> 5
        ends = jnp.cumsum(lengths, dtype=jnp.int32)
        fits = ends[-1] <= place.room

        # `jax.vmap` of a step types all inputs of a branch as its predicate.
        start = _axis.varying_like(_start(context.coins.public, place.number), fits)

        def as_rows() -> jax.Array:
            return write(written.fields, ends - lengths, place.room)

        def as_window() -> jax.Array:
            before_end = lax.iota(jnp.int32, place.plain) - (place.number - start)
            chosen = values[_cyclic(before_end, place.number)] - alphabet.low
            packed = _bits.pack_numbers(chosen.astype(jnp.uint32), alphabet.width)
            return jnp.pad(packed, (0, place.room - packed.size))

        words = lax.cond(fits, as_rows, as_window)
        headers = (lengths | (written.parameter << _LENGTH_BITS)).astype(jnp.uint32)
        payload = VariableLengthPayload(
            _bits.pack_numbers(headers, HEADER_BITS), words, written.table, rest
        )
        dropped = jnp.where(fits, 0, place.number - place.plain).astype(jnp.int32)
        return payload, Memory(report=Overflow(dropped))

    def lengths_of(payload: VariableLengthPayload, place: Cut) -> tuple[jax.Array, jax.Array]:
        """The words and the parameter of each row, int32[rows]."""
        headers = _bits.unpack_numbers(payload.headers, HEADER_BITS, place.rows)
        lengths = headers & jnp.uint32(2**_LENGTH_BITS - 1)
        return lengths.astype(jnp.int32), (headers >> _LENGTH_BITS).astype(jnp.int32)

    def bits_of(context: Context, payload: VariableLengthPayload) -> jax.Array:
        """The bits per integer, whether they fit or not."""
        place = cut_of(context, integers.number(context))
        words = jnp.sum(lengths_of(payload, place)[0], dtype=jnp.int32)
        return 32 * words.astype(jnp.float32) / max(place.number, 1)

    def receive(context: Context, payload: VariableLengthPayload) -> Received:
        count = integers.number(context)
        alphabet, place = integers.alphabet(context), cut_of(context, count)
        if not count:
            nothing = jnp.zeros(0, jnp.int32)
            return Received(nothing, nothing == 0, jnp.bool(True))
        lengths, parameter = lengths_of(payload, place)
        ends = jnp.cumsum(lengths, dtype=jnp.int32)
        fits = ends[-1] <= place.room
        here = _axis.varying_like(_place(context.coins.public, count), fits)
        stream = Stream(payload.words, ends - lengths, parameter, payload.table)

        def from_rows() -> jax.Array:
            values = code.read(stream, place.length, alphabet).T.ravel()[:count]
            return _to_indices(values) if are_indices else values

        def from_window() -> jax.Array:
            used = payload.words[: _bits.words(alphabet.width * place.plain)]
            numbers = _bits.unpack_numbers(used, alphabet.width, place.plain)
            sent = numbers.astype(jnp.int32).at[here].get(mode="fill", fill_value=0) + alphabet.low
            return _filled(sent, here < place.plain) if are_indices else sent

        values = lax.cond(fits, from_rows, from_window)
        known = fits | (here < place.plain)
        return Received(values, known, fits)

    def joined(context: Context, found: Received, payload: VariableLengthPayload) -> PyTree:
        return integers.join(context, found.integers, payload.rest)

    def form(drops: bool) -> Codec:
        def corrected(found: Received, context: Context, mean: jax.Array) -> jax.Array:
            if not drops:
                return nan_unless(found.fits, mean)
            if are_indices:
                # Entries that are not known are those of other indices.
                lost = jnp.where(found.known, mean.size, found.integers)
                return mean.ravel().at[lost].set(0, mode="drop").reshape(mean.shape)
            return jnp.where(found.known[: mean.size].reshape(mean.shape), mean, 0)

        def decode(context: Context, payload: VariableLengthPayload) -> jax.Array:
            found = receive(context, payload)
            mean = codec.decode(context, joined(context, found, payload))
            return corrected(found, context, mean)

        def entries(context: Context, payload: VariableLengthPayload) -> Entries:
            found = receive(context, payload)
            assert codec.fast.entries is not None
            indices, values = codec.fast.entries(context, joined(context, found, payload))
            kept = jnp.where(found.known, values, 0) if drops else nan_unless(found.fits, values)
            return Entries(indices, kept)

        def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
            inner = codec.diagnose(context.replace(memory=Memory()), x, Memory())
            return inner._replace(totals=inner.totals | overflow_totals(after))

        return codec.replace(
            encode=encode,
            decode=scattered(entries) if codec.fast.entries else decode,
            init=no_memory,
            diagnose=diagnose,
            combine=None,
            claims=_claims_of_window(codec, integers, fraction) if drops else codec.claims,
            layout="concatenated",
            drop_overflow=None,
            fast=Fast(entries=entries if codec.fast.entries else None, code=name, bits=bits_of),
        )

    def fraction(size: int) -> float:
        """At least the fraction of the integers that the room holds in their plain form."""
        context = Context.of(jnp.zeros(0)).replace(shape=(size,))
        width = integers.alphabet(context).width
        bits = code.expected(likely_of(size)).mean if room is None else room
        return min(bits / width, 1.0)

    return choose_form(overflow, drop_overflow=form(True), strict=form(False))


def _claims_of_window(codec: Codec, integers: Integers, fraction: Callable[[int], float]) -> Claims:
    r"""The bound of the form that drops: each integer is sent with a probability of at least p.

    .. math:: \mathbb{E} \|C(x) - x\|^2 \le p\, \|Q(x) - x\|^2 + (1 - p) \|x\|^2

    if the integers do not fit, for the integers of this draw. Where the contraction
    :math:`\delta` holds in every draw, :math:`C` therefore is one with :math:`p \delta`. Where it
    holds in expectation, draws that do not fit may be the more accurate ones. Then only
    :math:`\delta - (1 - p)` follows.
    """
    variance, contraction, _ = codec.claims
    if variance is None and contraction is None:
        return Claims()

    def bound(size: int, workers: int) -> float:
        p = fraction(size)
        if variance is not None:
            return p - variance(size, workers)
        assert contraction is not None
        delta = contraction(size, workers)
        return p * delta if integers.certain else p - 1 + delta

    return Claims(contraction=bound)
