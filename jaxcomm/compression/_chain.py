"""Compositions: selections and a codec of their values; extremes, and the rest."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxcomm._contract import (
    Claims,
    Codec,
    Context,
    Diagnostics,
    Entries,
    Fast,
    Keys,
    Memory,
    PyTree,
    no_statistics,
    scattered,
)
from jaxcomm._require import checked
from jaxcomm.compression._scaled import bounds_at, combined_with, contraction_of, without_memory
from jaxcomm.compression.quantizers import cast
from jaxcomm.compression.sparsifiers._sparse import (
    IndexCode,
    Selection,
    choose_layout,
    pack_indices,
    unpack_indices,
)


def claims_of_chain(selecting: Codec, selection: Selection, of_values: Codec) -> Claims:
    """The claims of a selection before a codec of its values."""
    variance, contraction, _ = selecting.claims
    inner = of_values.claims

    def count(size: int) -> int:
        return max(selection.layout(size).entries, 1)

    if variance is not None:
        if inner.variance is None:
            return Claims()
        omega = inner.variance
        return Claims(
            variance=lambda size, workers: (
                (1 + variance(size, workers)) * (1 + omega(count(size), workers)) - 1
            )
        )
    if contraction is None or (inner.contraction is None and inner.variance is None):
        return Claims()

    def product(size: int, workers: int) -> float:
        delta = contraction_of(of_values, count(size), workers)
        assert delta is not None
        # A codec that enlarges errors does so for all of `x` at worst.
        return delta * contraction(size, workers) if delta > 0 else delta

    return Claims(contraction=product)


class ChainPayload(NamedTuple):
    """The payload of one unit, if receivers cannot draw all of the selection."""

    indices: jax.Array  # uint32[ceil(bits / 32)], within what receivers draw
    statistics: PyTree  # of the values, as the last codec measures them
    values: PyTree  # the payload of the last codec


def _keys_of_codec(keys: Keys, number: int) -> Keys:
    """The keys of codec `number`: the shared ones must not repeat the draws of another codec."""
    shared = jax.random.fold_in(keys.shared, number) if number else keys.shared
    return keys._replace(shared=shared)


def _exactly(dtype: jnp.dtype) -> Codec:
    """Sends values in the dtype in which a selection sends them."""
    codec = cast(dtype)
    is_exact = dtype == jnp.float32
    return codec.replace(claims=Claims(variance=lambda size, workers: 0.0)) if is_exact else codec


def _divided(codecs: Sequence[Codec]) -> tuple[list[Codec], list[Selection], Codec]:
    """The codecs that select, how they do, and the codec of the values.

    Raises:
      ValueError: If one before the last does not select, in float32.
    """
    selections = [codec.fast.selection for codec in codecs if codec.fast.selection]
    for number, codec in enumerate(codecs[:-1], 1):
        if getattr(codec.fast.selection, "value_dtype", None) != jnp.float32:
            raise ValueError(
                f"Codec {number} of {len(codecs)} of `chain` must select coordinates and send them "
                "in float32, such as `top_k`, `random_k` or `scaled(random_k)`."
            )
    if len(selections) < len(codecs) or all(each.drawn for each in selections[:-1]):
        return [*codecs[:-1]], selections[: len(codecs) - 1], codecs[-1]
    return [*codecs], selections, _exactly(selections[-1].value_dtype)


def chain(*codecs: Codec) -> Codec:
    r"""Selects coordinates by all codecs but the last, and encodes their values by the last.

    .. math:: C(x) = C_1 \circ \ldots \circ C_{m-1} \circ Q\, (x)

    Each codec gets the values at the coordinates that the one before it has selected.
    `chain(scaled(random_k(ratio=0.1)), top_k(ratio=0.2), scaled(dither(bits=8)))` is CocktailSGD:
    the largest fifth of a random tenth of the coordinates, in 8 bits. Feedback needs the factors of
    both `scaled`, the second one if many coordinates share a norm.

    Sends the payload of the last codec, for the values of the coordinates that remain, and the
    indices of these coordinates. Those that :func:`jaxcomm.compression.sparsifiers.random_k`
    selects at the beginning of a chain cost no indices, since receivers draw them too. An index
    then takes about :math:`2 + \log_2 (k_1 / k)` bits for :math:`k` coordinates among the
    :math:`k_1` drawn ones. If all are drawn, no index is sent, and payloads can be summed if those
    of the last codec can.

    Args:
      *codecs: At least two. All but the last are `top_k`, `random_k` or `scaled(random_k)`. The
        last is any codec without memory; one of these as the last sends float32, or its
        `value_dtype`.

    Returns:
      A codec with the claims that hold for the whole chain. If all codecs are unbiased, the
      `variance` is :math:`\prod_l (1 + \omega_l) - 1`. If all codecs but the last are contractions,
      the `contraction` is :math:`\prod_l \delta_l`, where an unbiased last codec has
      :math:`\delta = 1 - \omega`; if that is not positive, it is that of the chain. An unbiased
      selection before a biased codec claims nothing: its factor :math:`d / k` would multiply the
      bias. Wrap it in :func:`jaxcomm.compression.scaled`.

    Raises:
      ValueError: If one before the last is not one of these, or sets `value_dtype`. In `init`, if
        the last codec has memory: put feedback outside. In `measure`, if several units share
        statistics.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression import chain
      >>> from jaxcomm.compression.quantizers import dither
      >>> from jaxcomm.compression.sparsifiers import top_k
      >>> codec, x = chain(top_k(k=2), dither(bits=8)), jnp.array([1.0, -4.0, 0.5, 4.0])
      >>> payload, _ = codec.encode(Context.of(x), x)
      >>> payload.values.codes.dtype, payload.values.codes.shape
      (dtype('int8'), (2,))
      >>> print(codec.decode(Context.of(x), payload))
      [ 0. -4.  0.  4.]

    References:
      Wang et al., `CocktailSGD: Fine-tuning Foundation Models over 500Mbps Networks
      <https://proceedings.mlr.press/v202/wang23t.html>`_, 2023.

    Differs from the paper: indices of the composed selection are within the random one, in an
    Elias-Fano code; rounding is unbiased.
    """
    first, selections, last = _divided(codecs)
    leading = [*itertools.takewhile(lambda selection: selection.drawn, selections)]
    sent = selections[len(leading) :]

    def sizes_of(size: int) -> list[int]:
        """The number of coordinates before each codec."""
        sizes = [size]
        for selection in selections:
            sizes.append(selection.layout(sizes[-1]).entries)
        return sizes

    def layout_of(size: int) -> IndexCode:
        """Of the indices that are sent, within the coordinates that are drawn."""
        sizes = sizes_of(size)[len(leading) :]
        layouts = [each.layout(before) for each, before in zip(sent, sizes, strict=False)]
        if len(layouts) == 1:
            return layouts[0]
        has_unused = [layout.size > before for layout, before in zip(layouts, sizes, strict=False)]
        end = max(layouts[0].size, sizes[0] + any(has_unused[1:]))
        return choose_layout(layouts[-1].entries, end, distinct=not any(has_unused))

    def drawn_places(context: Context) -> jax.Array | None:
        """The coordinates that receivers draw too; `None` if all are left."""
        places = None
        for number, size in enumerate(sizes_of(math.prod(context.shape))[: len(leading)]):
            shared = _keys_of_codec(context.keys, number).shared
            chosen = leading[number].choose(shared, jnp.zeros(size, jnp.float32))
            places = chosen if places is None else places[chosen]
        return places

    def select(context: Context, x: jax.Array) -> tuple[jax.Array | None, jax.Array]:
        """The indices that are sent, and the values at the composed selection."""
        values, indices = x.ravel(), None
        if sent:
            unused = layout_of(x.size).size - 1
        for number, selection in enumerate(selections):
            if not selection.drawn:
                # Otherwise XLA computes it again for each use in the selection.
                values = lax.optimization_barrier(values)
            chosen = selection.choose(_keys_of_codec(context.keys, number).shared, values)
            values = values.at[chosen].get(mode="fill", fill_value=0)
            if number == len(leading):
                indices = chosen
            elif indices is not None:
                indices = indices.at[chosen].get(mode="fill", fill_value=unused)
        return indices, values.astype(jnp.float32)

    def of_values(context: Context, statistics: PyTree) -> Context:
        size = sizes_of(math.prod(context.shape))[-1]
        return context.replace(
            keys=_keys_of_codec(context.keys, len(selections)),
            statistics=statistics,
            shape=(size,),
            statistics_size=None,
            workers=1 if sent else context.workers,
        )

    def init(x: jax.Array) -> Memory:
        return without_memory(last.init(jnp.zeros(sizes_of(x.size)[-1])), "chain")

    def measure(context: Context, x: jax.Array) -> PyTree:
        if context.statistics_size is not None and last.reduce_statistics:
            raise ValueError(
                "`chain` cannot share statistics among buckets: use `scope`='bucket' or 'leaf'."
            )
        return last.measure(of_values(context, ()), select(context, x)[1])

    def encode(context: Context, x: jax.Array) -> tuple[PyTree, Memory]:
        indices, values = select(context, x)
        if indices is None:
            return last.encode(of_values(context, context.statistics), values)
        statistics = last.measure(of_values(context, ()), values)
        payload, after = last.encode(of_values(context, statistics), values)
        return ChainPayload(pack_indices(indices, layout_of(x.size)), statistics, payload), after

    def factor(size: int) -> float:
        unbiased = [codec.claims.variance for codec in first]
        return math.prod(
            1 + omega(max(before, 1), 1)
            for omega, before in zip(unbiased, sizes_of(size), strict=False)
            if omega is not None
        )

    def entries(context: Context, payload: PyTree) -> Entries:
        size, places = math.prod(context.shape), drawn_places(context)
        if not sent:
            assert places is not None
            values = last.decode(of_values(context, context.statistics), payload)
            return Entries(places, values * factor(size))
        values = last.decode(of_values(context, payload.statistics), payload.values)
        indices = unpack_indices(payload.indices, layout_of(size))
        if places is not None:
            indices = places.at[indices].get(mode="fill", fill_value=size)
        return Entries(indices, values * factor(size))

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        values = select(context, x)[1]
        measured = last.measure(of_values(context, ()), values) if sent else context.statistics
        return last.diagnose(of_values(context, measured), values, after)._replace(target=x)

    combine = combined_with(last.combine, lambda keys: _keys_of_codec(keys, len(selections)))
    inner = last
    if sent:  # Workers do not share the statistics.
        inner = last.replace(claims=bounds_at(last.claims, lambda size, workers: (size, 1)))
    for codec, selection in zip(reversed(first), reversed(selections), strict=True):
        inner = inner.replace(claims=claims_of_chain(codec, selection, inner))
    return Codec(
        encode=encode,
        decode=scattered(entries),
        init=init,
        diagnose=diagnose,
        claims=inner.claims,
        drop_overflow=last.drop_overflow and chain(*first, last.drop_overflow),
        scope="leaf" if any(codec.scope == "leaf" for codec in codecs) else "bucket",
        measure=no_statistics if sent else measure,
        reduce_statistics=() if sent else last.reduce_statistics,
        combine=None if sent else combine,
        fast=Fast(entries=entries),
    )


class ReservedPayload(NamedTuple):
    """The payload of one unit."""

    spikes: PyTree  # the payload of the codec of the extremes
    statistics: PyTree  # of the extremes, and of the rest
    rest: PyTree  # the payload of the codec of the rest


def _claims(codec: Codec, spikes: Codec) -> Claims:
    """The bounds on the error of `codec` for what `spikes` leaves."""
    if contraction_of(spikes, 1, 1) is None:
        return Claims()

    def left(size: int) -> float:
        delta = contraction_of(spikes, size, 1)
        assert delta is not None
        return 1 - delta

    variance, contraction, _ = codec.claims
    return Claims(
        variance=variance and (lambda size, workers: variance(size, 1) * left(size)),
        contraction=contraction
        and (lambda size, workers: 1 - (1 - contraction(size, 1)) * left(size)),
    )


@checked
def reserved(codec: Codec, spikes: Codec) -> Codec:
    r"""Sends the extremes by `spikes`, and what remains by `codec`: spike reserving.

    .. math:: C(x) = T(x) + Q(x - T(x)), \qquad
              \mathbb{E}\|C(x) - x\|^2 \le \omega\, (1 - \delta) \|x\|^2

    A few large coordinates widen the levels of all others. `reserved(blockwise(dither(bits=4), 64),
    top_k(k=2, block_size=64))` keeps two of each 64 coordinates in float32 and rounds the other 62
    to levels of their own largest magnitude. Sends the payloads of both codecs with their
    statistics: here 4.5 bits per coordinate for the rest, and 2.4 for the extremes.

    Args:
      codec: :math:`Q`, a codec without memory, for :math:`x - T(x)`.
      spikes: :math:`T`, a codec without memory, such as
        :func:`jaxcomm.compression.sparsifiers.top_k`.

    Returns:
      A codec; `combine` is `None`. It is unbiased if `codec` is, whatever `spikes` is: it states
      the `variance` :math:`\omega (1 - \delta)` if `spikes` states a contraction :math:`\delta`.
      Of two contractions it states the `contraction` :math:`1 - (1 - \delta_Q) (1 - \delta)`.

    Raises:
      ValueError: If an argument is not a codec, or, in `init`, if it has memory.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxcomm import Context
      >>> from jaxcomm.compression import reserved
      >>> from jaxcomm.compression.quantizers import dither
      >>> from jaxcomm.compression.sparsifiers import top_k
      >>> codec = reserved(dither(levels=1), top_k(k=1))
      >>> x = jnp.array([0.5, 1000.0, -0.5, 0.5])
      >>> payload, _ = codec.encode(Context.of(x), x)
      >>> print(codec.decode(Context.of(x), payload))
      [ 5.e-01  1.e+03 -5.e-01  5.e-01]

    References:
      Li et al., `Flash Communication: Reducing Tensor Parallelism Bottleneck for Fast Large
      Language Model Inference <https://arxiv.org/abs/2412.04964>`_, 2024.

    Differs from the paper: extremes are those of largest magnitude, and not the least and the
    largest coordinate; they are in float32, with indices in few bits; rounding is unbiased.
    """
    spikes = spikes.drop_overflow or spikes  # The rest has what `spikes` drops.

    def of(context: Context, number: int, statistics: PyTree) -> Context:
        """The context of one of both codecs, which must not draw the same numbers."""
        keys = Keys(*(jax.random.fold_in(key, 1) for key in context.keys))
        return context.replace(
            keys=keys if number else context.keys,
            memory=Memory(),
            statistics=statistics,
            workers=1,
            statistics_size=None,
        )

    def once(each: Codec, number: int, context: Context, x: jax.Array) -> tuple[PyTree, PyTree]:
        statistics = each.measure(of(context, number, ()), x)
        return statistics, each.encode(of(context, number, statistics), x)[0]

    def init(x: jax.Array) -> Memory:
        for each in (codec, spikes):
            without_memory(each.init(x), "reserved")
        return Memory()

    def encode(context: Context, x: jax.Array) -> tuple[ReservedPayload, Memory]:
        measured, large = once(spikes, 0, context, x)
        kept = spikes.decode(of(context, 0, measured).received(), large)
        of_rest, rest = once(codec, 1, context, x - kept)
        return ReservedPayload(large, (measured, of_rest), rest), context.memory

    def decode(context: Context, payload: ReservedPayload) -> jax.Array:
        measured, of_rest = payload.statistics
        large = spikes.decode(of(context, 0, measured), payload.spikes)
        return large + codec.decode(of(context, 1, of_rest), payload.rest)

    return Codec(
        encode=encode,
        decode=decode,
        init=init,
        claims=_claims(codec, spikes),
        scope="leaf" if "leaf" in (codec.scope, spikes.scope) else "bucket",
    )
