"""Lazy aggregation: a worker uploads the change of its gradient only if it is worth it."""

from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxcomm import _axis
from jaxcomm._contract import AxisName, Codec, Context, Diagnostics, Fast, Memory, PyTree
from jaxcomm._mesh import collective_cond
from jaxcomm._require import Positive, Range, checked
from jaxcomm.aggregation._all_gather import decode_local, encode_local, gather_payloads
from jaxcomm.aggregation._all_reduce import combine_payloads
from jaxcomm.aggregation._coded import AggregatorOptions, coded_mean, takes_options
from jaxcomm.aggregation._exchange import (
    Exchange,
    Exchanged,
    Part,
    all_finite,
)
from jaxcomm.compression._means import headroom
from jaxcomm.compression._scaled import contraction_of, require_contraction
from jaxcomm.compression.feedback._shifted import add, no_sum


class ExactPayload(NamedTuple):
    """The payload of one unit, or a sum of such payloads over workers."""

    values: jax.Array  # float32[shape], scaled so that the sum cannot overflow


def _encode_exactly(context: Context, x: jax.Array) -> tuple[ExactPayload, Memory]:
    return ExactPayload(x * headroom(context.workers)), context.memory


def _decode_exactly(context: Context, payload: ExactPayload) -> jax.Array:
    # `workers` is that of `encode`; `count` payloads were added.
    return payload.values / (context.count * headroom(context.workers))


EXACT = Codec(
    encode=_encode_exactly,
    decode=_decode_exactly,
    combine="sum",
    layout="shared_statistics",
    fast=Fast(linear=("encode",), exposes_nonfinite=("encode",)),
)
"""All coordinates in float32."""


class Upload(NamedTuple):
    """What is kept of a worker's uploads; on a mesh `Memory.own`. All units have one `skipped`."""

    last: Any  # the sum of all uploaded innovations: what the others know of this worker
    error: Any  # float32[], the squared rounding error of the last upload; on a mesh its mean
    skipped: Any  # the steps since then; on a mesh float32[], so that it has a mean over workers


class Aggregate(NamedTuple):
    """What all workers keep for one unit: `Memory.shared`."""

    mean: Any  # Sum, the mean over workers of their last uploads
    squares: Any  # float32[memory], the mean squares of the last aggregates, the newest first


def uploads_now(
    sent: jax.Array,
    change: jax.Array,
    rounding: jax.Array,
    overdue: jax.Array,
    strict: bool = False,
) -> jax.Array:
    r"""The rule of lazy uploads: whether a worker uploads its innovation, bool[].

    .. math:: \|\delta_i\|^2 \ge \text{change}
              + 3 \big(\|\epsilon_i\|^2 + \|\hat\epsilon_i\|^2\big)

    Args:
      sent: The squared norm of the innovation, as others would decode it.
      change: That of recent changes, times the threshold.
      rounding: The sum of those of the rounding errors, of this innovation and the last upload.
      overdue: Whether it uploads in any case.
      strict: Whether the innovation must exceed the limit.
    """
    limit = change + 3 * rounding
    # Negated, so that NaN is uploaded.
    return ~(sent <= limit if strict else sent < limit) | overdue


def uploaded(own: Upload, uploads: jax.Array, last: PyTree, error: jax.Array) -> Upload:
    """What is kept after a step, with the new sum of innovations and the error of this one."""
    return Upload(
        last, jnp.where(uploads, error, own.error), jnp.where(uploads, 0, own.skipped + 1)
    )


def remembered(squares: jax.Array, newest: jax.Array) -> jax.Array:
    """The last squared changes, the newest first."""
    return jnp.concatenate([newest[None], squares[:-1]])


def _first_memory(x: jax.Array, memory: int, max_skip: int) -> Memory:
    """Nothing was uploaded, all aggregates were 0, and all must upload in the first step."""
    zero, overdue = jnp.zeros((), jnp.float32), jnp.array(max_skip, jnp.float32)
    squares = jnp.zeros(memory, jnp.float32)
    return Memory(Upload(no_sum(x), zero, overdue), Aggregate(no_sum(x), squares))


def _mean_square(x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(x))


def _aggregated(context: Context, payload: PyTree, mean: jax.Array) -> tuple[jax.Array, Memory]:
    """The `finalize` of lazy uploads: the mean of innovations is added to the aggregate."""
    del payload
    before = context.memory.shared
    total = add(before.mean, mean)
    squares = remembered(before.squares, _mean_square(total.total))
    return total.total, Memory(context.memory.own, Aggregate(total, squares))


def _exchange_of(axis_name: AxisName, codec: Codec) -> Exchange:
    if codec.combine == "sum":
        return combine_payloads(axis_name, codec)
    return gather_payloads(axis_name, codec, share_statistics=False)


def _anywhere(axis_name: AxisName, flags: list[jax.Array]) -> list[jax.Array]:
    """Which flags are true on any worker, bool[] each; one collective."""
    own = _axis.as_varying(jnp.stack(flags).astype(jnp.float32), axis_name)
    # Over axes of shards too: all shards of a worker run the same branch.
    others = sorted(_axis.varying(own) - {*_axis.names(axis_name)})
    with jax.named_scope("flags"):
        return [*(lax.pmax(own, (*_axis.names(axis_name), *others)) > 0)]


def _require_small_error(codec: Codec, size: int, workers: int, *, always: bool) -> None:
    """Raises if the rounding error may keep all workers from uploading; `always`: it never does.

    A worker uploads no less than 3 times its rounding error. The error of a projection is
    orthogonal to what is sent, so that it may be a quarter of the innovation.
    """
    if always:
        return require_contraction(codec, size, workers, "lazy")
    delta = contraction_of(codec, size, workers)
    if delta is not None and delta >= 3 / 4:
        return
    bound = "unknown" if delta is None else f"{1 - delta:.3g} for {size} coordinates"
    raise ValueError(
        "`lazy` needs a codec with a relative squared error of at most 1/4, such as "
        f"`blockwise(dither(bits=16), 64)`, or workers might never upload; here it is {bound}."
    )


@checked
@takes_options
def lazy(
    codec: Codec | None = None,
    *,
    threshold: Annotated[float, Range(least=0)] = 1.0,
    memory: Positive = 10,
    max_skip: Positive = 100,
    axis_name: AxisName = "data",
    **options: Unpack[AggregatorOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Lazily aggregated gradients: workers whose gradient has changed little skip the upload.

    .. math:: \delta_i = Q(x_i^t - \hat x_i), \qquad
              \hat x_i \gets \hat x_i + \delta_i \;\text{ for } i \in U, \qquad
              \bar x^t = \bar x^{t-1} + \frac{1}{n} \sum_{i \in U} \delta_i

    So :math:`\bar x = \frac{1}{n} \sum_i \hat x_i`, up to rounding: a worker that skips contributes
    its last upload :math:`\hat x_i`. Worker :math:`i` is in :math:`U`, i.e. uploads, if

    .. math:: \|\delta_i\|^2 \ge \frac{\xi}{D} \sum_{d=1}^{D} \|\bar x^{t-d}\|^2
              + 3 \big(\|\epsilon_i\|^2 + \|\hat\epsilon_i\|^2\big)

    or if it has skipped `max_skip` steps. All workers upload in the first step. Here :math:`\xi` is
    `threshold`, :math:`D` is `memory`, and :math:`\epsilon_i` and :math:`\hat\epsilon_i` are the
    rounding errors of this innovation and of the last upload. Without a codec this is LAG-WK with
    :math:`\xi_d = \xi / D`; with one, LAQ. If payloads can be summed, workers share their
    statistics when they upload: :math:`\hat x_i` and :math:`\hat\epsilon_i` are of this upload,
    and in the condition :math:`\delta_i` and :math:`\epsilon_i` are rounded with the worker's own.

    *On a mesh, bytes fall only in steps in which all workers skip.* A worker that skips still takes
    part in the collective, with zeros. Workers first agree whether any uploads, 8 bytes in an
    all-reduce. If one does, a worker sends the payload of `codec`: :math:`2 (n-1)/n` payloads if
    they can be summed, :math:`n - 1` otherwise. :func:`jaxcomm.wire.account` reports both branches
    and counts the larger one. With noisy gradients, innovations do not become small, and all
    workers upload: lazy uploads are for full or large batches.

    Args:
      codec: A codec without memory whose relative squared error is at most 1/4, such as
        `blockwise(dither(bits=16), 64)` for up to 128 workers; with a `threshold` of 0, any
        contraction. Default: innovations are sent in float32.
      threshold: :math:`\xi`, a Python float of at least 0. With 0, all workers upload in each step.
      memory: :math:`D`, a Python int.
      max_skip: The number of steps in a row that a worker may skip, a Python int.
      axis_name: The mesh axis, or axes, of the workers.
      **options: See :class:`jaxcomm.aggregation.AggregatorOptions`. `diagnostics` also reports
        `uploads`, the fraction of workers that upload.

    Returns:
      A transformation to place before the optimizer. Updates are equal on all workers and keep
      their shape and dtype. A non-finite coordinate on any worker makes them NaN on all workers,
      and changes no memory. `update(..., weight=w)` computes a weighted mean, in which a change of
      weights is an innovation.

    Raises:
      ValueError: If an option is out of range; in `init`, if the codec has memory; in `update`, if
        the codec's error is too large or no bound is known, if `axis_name` is not bound, or an
        update is already summed.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.lazy(threshold=0.1)
      >>> def two_steps(g, h):
      ...     first, state = tx.update(g, tx.init(g))
      ...     second, state = tx.update(h, state)
      ...     return first, second
      >>> g, h = jnp.array([4.0, 8.0]), jnp.array([4.5, 12.0])
      >>> for update in jax.jit(jax.vmap(two_steps, axis_name="data"))(g, h):
      ...     print(update)
      [6. 6.]
      [8. 8.]

    References:
      Chen et al., `LAG: Lazily Aggregated Gradient <https://arxiv.org/abs/1805.09965>`_, 2018. Sun
      et al., `Lazily Aggregated Quantized Gradients <https://arxiv.org/abs/1909.07588>`_, 2019.

    Differs from the papers: the thresholds there compare with changes of the parameters,
    :math:`\frac{1}{\alpha^2 n^2} \sum_d \xi_d \|\theta^{t+1-d} - \theta^{t-d}\|^2`. For gradient
    descent with the rate :math:`\alpha` and the sum of gradients this is the same; for other
    optimizers the aggregates are compared. LAQ rounds to nearest, and each worker has its own
    levels; with `dither`, the rounding is stochastic, and uploads have common levels. All workers
    upload in the first step. LAG has no `max_skip`.
    """
    # A later innovation has what this one drops.
    inner = EXACT if codec is None else codec.drop_overflow or codec
    exchange_innovations = _exchange_of(axis_name, inner)

    def init(x: jax.Array) -> Memory:
        if jax.tree.leaves(inner.init(x)):
            raise ValueError(
                "`lazy` takes a codec without memory: it is feedback, in place of the codec's."
            )
        return _first_memory(x, memory, max_skip)

    def exchange(parts: list[Part]) -> Exchanged:
        memories = [part.context.memory for part in parts]
        workers = _axis.size(axis_name) if inner.combine == "sum" else 1
        plain = [
            part._replace(
                codec=inner,
                context=part.context.replace(memory=Memory(), workers=workers),
                x=part.x - part.context.memory.own.last.total,
            )
            for part in parts
        ]
        if codec is not None:
            for part in plain:
                _require_small_error(inner, part.context.size, workers, always=threshold == 0)
        decoded = []
        for part in plain:
            content, _ = encode_local(inner, part.context, part.x)
            decoded.append(decode_local(inner, part.context, content))
        errors = [_mean_square(part.x - q) for part, q in zip(plain, decoded, strict=True)]

        def total(mean_squares: Iterable[jax.Array]) -> jax.Array:
            """The squared norm of all units together."""
            each = zip(decoded, mean_squares, strict=True)
            return sum((x.size * square for x, square in each), jnp.float32(0))

        uploads = uploads_now(
            total(map(_mean_square, decoded)),
            threshold * total(jnp.mean(each.shared.squares) for each in memories),
            total(errors) + total(each.own.error for each in memories),
            overdue=(memories[0].own.skipped >= max_skip) | (threshold == 0),
        )
        non_finite = ~all_finite(part.x for part in parts)
        none_finite, anyone = _anywhere(axis_name, [non_finite, uploads])
        given = [part._replace(x=jnp.where(uploads, part.x, 0)) for part in plain]

        def send() -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
            exchanged = exchange_innovations(given)
            assert exchanged.sent is not None
            return [part.mean for part in exchanged.parts], exchanged.sent(), exchanged.finite

        def skip(
            shapes: tuple[list[jax.Array], list[jax.Array], jax.Array],
        ) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
            zeros = [[jnp.zeros(x.shape, x.dtype) for x in arrays] for arrays in shapes[:2]]
            return zeros[0], zeros[1], jnp.array(True)

        means, sent, fits = collective_cond(anyone & ~none_finite, send, skip)
        owns = [
            uploaded(each.own, uploads, add(each.own.last, q), _mean_square(part.x - q))
            for each, part, q in zip(memories, plain, sent, strict=True)
        ]
        parts = [
            part._replace(memory=Memory(own, part.context.memory.shared), mean=mean)
            for part, own, mean in zip(parts, owns, means, strict=True)
        ]
        return Exchanged(parts, fits & ~none_finite, lambda: sent)

    def diagnose(context: Context, x: jax.Array, after: Memory) -> Diagnostics:
        one = jnp.ones((), jnp.float32)
        ratios = {"uploads": (jnp.where(after.own.skipped == 0, one, 0), one)}
        return Diagnostics(x - context.memory.own.last.total, ratios=ratios)

    unit_codec = inner.replace(
        init=init, finalize=_aggregated, diagnose=diagnose, drop_overflow=None
    )
    return coded_mean(axis_name, unit_codec, exchange, options)
