"""Global top-k: the largest coordinates of the sum over workers, found by pairwise exchanges."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis, _collectives, _units
from jaxcomm._collectives import as_moved
from jaxcomm._contract import AxisName
from jaxcomm._require import Positive, Share, checked
from jaxcomm.aggregation._coded import AggregatorOptions, coded_mean
from jaxcomm.aggregation._exchange import Exchanged, Part, all_finite, to_vector
from jaxcomm.compression._means import headroom
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.sparsifiers import top_k
from jaxcomm.compression.sparsifiers._largest import largest
from jaxcomm.compression.sparsifiers._sparse import (
    choose_layout,
    make_count,
    pack_indices,
    to_dense,
    unpack_indices,
)


class _Entries(NamedTuple):
    """Coordinates of one unit, each at most once, in ascending order."""

    indices: jax.Array  # uint32[count]
    values: jax.Array  # float32[count]


def _words(entries: list[_Entries], sizes: list[int]) -> jax.Array:
    """The entries of all units as one message, uint32[words]."""
    parts = []
    for each, size in zip(entries, sizes, strict=True):
        layout = choose_layout(each.indices.size, size)
        parts += [
            pack_indices(each.indices, layout),
            lax.bitcast_convert_type(each.values, jnp.uint32),
        ]
    message, _ = to_vector(parts)
    return message


def _received(
    axis_name: AxisName,
    message: jax.Array,
    move: Callable[[jax.Array], jax.Array],
    sent: list[_Entries],
    sizes: list[int],
) -> list[_Entries]:
    """The entries of all units, unpacked from the message of `_words` that `move` moved."""
    if _axis.is_simulated(axis_name):
        return jax.tree.map(move, sent)
    start, found = 0, []
    for (indices, _), size in zip(sent, sizes, strict=True):
        count = indices.size
        layout = choose_layout(count, size)
        middle = start + -(-layout.bits // 32)
        values = message[middle : middle + count]
        found.append(
            _Entries(
                unpack_indices(message[start:middle], layout),
                lax.bitcast_convert_type(values, jnp.float32),
            )
        )
        start = middle + count
    return cast(list[_Entries], as_moved(move, sent, found))


def _merge(mine: _Entries, theirs: _Entries) -> tuple[_Entries, _Entries]:
    """The `count` largest sums, for `count` entries on each side; and the dropped sums, or zeros.

    Both partners get the same result, since the addition of two numbers commutes.
    """
    count = mine.indices.size
    if not count:
        return mine, mine
    indices, values = lax.sort(
        tuple(jnp.concatenate(pair) for pair in zip(mine, theirs, strict=True)), num_keys=1
    )
    is_first = jnp.concatenate([indices[1:] == indices[:-1], jnp.zeros(1, bool)])
    sums = values + jnp.where(is_first, jnp.roll(values, -1), 0)
    second = jnp.roll(is_first, 1)  # Its value is in the sum before it.
    best = largest(jnp.where(second, -1, jnp.abs(sums)), count)
    taken = jnp.zeros(indices.size, bool).at[best].set(True) | second
    return _Entries(indices[best], sums[best]), _Entries(indices, jnp.where(taken, 0, sums))


def _add(residual: jax.Array, entries: _Entries) -> jax.Array:
    if not entries.indices.size:
        return residual
    flat = residual.ravel().at[entries.indices].add(entries.values)
    return flat.reshape(residual.shape)


@checked
def gtop_k(
    axis_name: AxisName = "data",
    *,
    ratio: Share | None = None,
    k: Positive | None = None,
    scope: _units.Scope = "bucket",
    bucket_bytes: int | None = None,
    diagnostics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Global top-k: sends :math:`k` coordinates of the sum over workers, with error feedback.

    .. math:: a_i = g_i + e_i, \qquad s = \mathrm{top}_k a_1 \oplus \dots \oplus \mathrm{top}_k a_n,
              \qquad u \oplus v = \mathrm{top}_k (u + v), \qquad \bar x = \frac{s}{n}

    In round :math:`r`, worker :math:`i` exchanges its entries with worker :math:`i \oplus 2^r`
    (exclusive or), and both keep the :math:`k` largest sums. After :math:`\lceil \log_2 n \rceil`
    rounds, the first worker has :math:`s` and sends it to all workers. The first worker of each
    pair adds the dropped sums to its residual, so nothing is lost:

    .. math:: \sum_i e_i^{t+1} + n \bar x = \sum_i (e_i^t + g_i)

    A worker sends :math:`\lceil \log_2 n \rceil B + 2 (n-1)/n\, (B + 4)` bytes. A payload of
    :math:`B` bytes has 4 bytes and an index of about :math:`2 + \log_2 (d / k)` bits per entry. The
    other 4 bytes are a flag that reports non-finite updates. A gather of the payloads would take
    :math:`(n - 1) B` bytes.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      ratio: :math:`k / d`, in (0, 1]; at least one coordinate is sent.
      k: The number :math:`k` itself, in place of `ratio`.
      scope: The unit that sends :math:`k` coordinates: each `"leaf"`, or each `"bucket"` of leaves.
        `"tree"` means `"bucket"` here.
      bucket_bytes: The maximum size of a bucket in float32 bytes. Default: 32 MiB.
      diagnostics: Whether the state's field `diagnostics` reports `compression_error`, `density`
        and `residual_norm` of the step, measured before the pairwise rounds; see
        :func:`jaxcomm.global_qsgd`.

    Returns:
      A transformation to place before the optimizer. Updates are equal on all workers, with at most
      :math:`k` nonzero coordinates per unit. A non-finite coordinate on any worker makes them NaN
      on all workers, and changes no residual. `update(..., weight=w)` computes a weighted mean. Its
      derivative is that of the sent values, for the selection that it made.

    Raises:
      ValueError: If an option is out of range; in `update`, if `axis_name` is not bound or an
        update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.gtop_k(k=1)
      >>> average = jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data")
      >>> print(jax.jit(average)(jnp.array([[4.0, 0.0, 3.0], [5.0, 6.0, 0.0]])))
      [[0. 3. 0.]
       [0. 3. 0.]]

    References:
      Shi et al., `A Distributed Synchronous SGD Algorithm with Global Top-k Sparsification for Low
      Bandwidth Networks <https://arxiv.org/abs/1901.04359>`_, 2019.

    Differs from the paper: there, a worker adds the entries it sent back to its residual if their
    coordinates are not in the result. If a coordinate was dropped in one pair and survived in
    another, the dropped part is lost. Here the first worker of the pair keeps the dropped sums, so
    worker 0 has the largest residual. Any number of workers is supported.
    """
    kept = make_count(ratio, k)
    codec = error_feedback(top_k(ratio=ratio, k=k))

    def of_first(x: jax.Array) -> jax.Array:
        """`x` of worker 0 and zeros of the others, whose sum is typed as equal on all workers."""
        return jnp.where(_axis.index(axis_name) == 0, x, jnp.zeros((), x.dtype))

    def exchange(parts: list[Part]) -> Exchanged:
        workers, worker = _axis.size(axis_name), _axis.index(axis_name)
        scale = headroom(workers)
        sizes = [part.x.size for part in parts]
        counts = [*map(kept, sizes)]
        encoded = [codec.encode(part.context, part.x) for part in parts]
        residuals = [memory.own.kept for _, memory in encoded]
        entries = [
            _Entries(
                unpack_indices(payload.indices, choose_layout(count, size)), payload.values * scale
            )
            for (payload, _), count, size in zip(encoded, counts, sizes, strict=True)
        ]
        for distance in (2**r for r in range((workers - 1).bit_length())):
            swap = partial(_collectives.swap, axis_name=axis_name, distance=distance)
            with jax.named_scope("entries"):
                message = swap(_words(entries, sizes))
                received = _received(axis_name, message, swap, entries, sizes)
            has_partner = (worker ^ distance) < workers
            is_first = has_partner & (worker % (2 * distance) == 0)
            for unit, theirs in enumerate(received):
                merged, dropped = _merge(entries[unit], theirs)
                entries[unit] = jax.tree.map(
                    lambda new, old, real=has_partner: jnp.where(real, new, old),
                    merged,
                    entries[unit],
                )
                returned = jnp.where(is_first, dropped.values / scale, 0)
                residuals[unit] = _add(residuals[unit], _Entries(dropped.indices, returned))
        finite = all_finite(part.x for part in parts).astype(jnp.uint32)[None]
        message = jnp.concatenate([finite, of_first(_words(entries, sizes))])
        send_first = lambda x: lax.psum(of_first(x), axis_name)  # noqa: E731
        with jax.named_scope("result"):
            total = lax.psum(_axis.as_varying(message, axis_name), axis_name)
            results = _received(axis_name, total[1:], send_first, entries, sizes)
        units = [
            part._replace(
                memory=memory._replace(own=memory.own._replace(kept=residual)),
                mean=to_dense(each.values * (1 / scale / workers), each.indices, part.x.shape),
            )
            for part, (_, memory), residual, each in zip(
                parts, encoded, residuals, results, strict=True
            )
        ]

        def sent() -> list[jax.Array]:
            return [
                codec.decode(part.context.received(), payload)
                for part, (payload, _) in zip(parts, encoded, strict=True)
            ]

        return Exchanged(units, total[0] == workers, sent)

    options: AggregatorOptions = {
        "scope": scope,
        "bucket_bytes": bucket_bytes,
        "diagnostics": diagnostics,
    }
    return coded_mean(axis_name, codec, exchange, options)
