"""The majority vote of signs: one bit per coordinate in both directions."""

import itertools

import jax
import jax.numpy as jnp
import optax

from jaxcomm import _axis, _collectives, _noise
from jaxcomm._contract import AxisName, Codec
from jaxcomm._require import checked
from jaxcomm.aggregation._coded import AggregatorOptions, coded_mean
from jaxcomm.aggregation._exchange import Exchanged, Part, all_finite, everywhere
from jaxcomm.aggregation._rows import from_rows, to_rows
from jaxcomm.compression import _bits
from jaxcomm.compression.quantizers import signs
from jaxcomm.compression.quantizers._signs import SignsPayload


@jax.named_scope("votes")
def _elect(axis_name: AxisName, rows: jax.Array, random_bits: jax.Array) -> jax.Array:
    """The majority of each bit over workers, uint32[workers, words]; random bits break ties."""
    workers, width = rows.shape
    received = jax.vmap(lambda row: _bits.unpack_bits(row, _bits.WORD * width))(
        _collectives.exchange(rows, axis_name)
    )
    votes = jnp.sum(received, axis=0, dtype=jnp.uint32)
    tie = _bits.pack_bits(2 * votes == workers)
    own_bits = random_bits[_axis.index(axis_name)]
    return _collectives.gather(_bits.pack_bits(2 * votes > workers) | (tie & own_bits), axis_name)


@checked
def majority_vote(
    axis_name: AxisName = "data",
    *,
    codec: Codec | None = None,
    seed: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Replaces each worker's update by the sign of most workers, +1 or -1, per coordinate.

    .. math:: v = \operatorname{sgn} \sum_{i=1}^n \operatorname{sgn}(x_i), \qquad
              P(\operatorname{sgn}(0) = 1) = \tfrac{1}{2}

    If the votes of an even number of workers tie, a shared random bit decides. For a zero, each
    worker votes with a private random bit, so that zeros do not outvote the workers with a sign.
    For noise of mean 0 the vote is 0 on average, for any number of workers. The vote is not a mean,
    and it is biased: magnitudes are lost, so the learning rate alone determines the length of the
    step. One bit cannot encode 0, so a coordinate that is 0 on all workers moves too. It takes a
    random walk, up or down with probability 1/2 each. After :math:`T` steps it is about
    :math:`\sqrt T` step lengths away. Mask coordinates that must not move with `optax.masked`.

    Each of :math:`n` workers counts the votes for one :math:`n`-th of the :math:`d` coordinates,
    and all workers gather the results, with one bit per coordinate in both directions. A worker
    sends :math:`2 (n-1)/n` times :math:`d / 8` bytes, in uint32 words. :math:`d` is padded to a
    multiple of :math:`32 n` for each leaf of :math:`2^{16}` coordinates or more, and for the
    remaining leaves of each bucket of 32 MiB of float32. A flag that reports non-finite updates
    takes :math:`2 (n-1)/n` times 4 bytes. This is 32 times less than a float32 all-reduce, for any
    :math:`n`.

    Args:
      axis_name: The mesh axis, or axes, of the workers.
      codec: A codec without statistics that turns an update into signs. Its payload must be that of
        :func:`jaxcomm.compression.quantizers.signs`, the default. Its memory is each worker's own:
        with `momentum(signs())` of `jaxcomm.compression.feedback`, workers vote with their
        momentum, which is :func:`jaxcomm.signum`.
      seed: Seed of the random bits; may be traced.

    Returns:
      A transformation to place before the optimizer. Its state is that of every aggregator with a
      codec: a key, a step count, and the memory of the codec, which is empty by default. Updates
      are equal on all workers and keep their shape and dtype. A non-finite coordinate on any worker
      makes them NaN on all workers, and no memory changes.

    Raises:
      ValueError: If the codec sends more than signs; in `update`, if a `weight` is passed, since
        votes are not weighted; if `axis_name` is not bound, or an update is already summed or not
        floating-point.
      TypeError: If an update is differentiated: rounding has no derivative.

    Example:
      >>> import jax, jax.numpy as jnp, jaxcomm
      >>> tx = jaxcomm.majority_vote("data")
      >>> elect = lambda x: tx.update(x, tx.init(x))[0]
      >>> gradients = jnp.array([[0.1, -2.0], [0.2, 5.0], [-9.0, -1.0]])
      >>> print(jax.vmap(elect, axis_name="data")(gradients))
      [[ 1. -1.]
       [ 1. -1.]
       [ 1. -1.]]

    References:
      Bernstein et al., `signSGD: Compressed Optimisation for Non-Convex Problems
      <https://arxiv.org/abs/1802.04434>`_, 2018.

    Differs from the paper: each worker counts the votes of its part, and there is no server. Random
    bits decide zeros and ties; the paper's sign leaves them at 0, which one bit cannot encode.
    """

    sign = signs() if codec is None else codec
    if jax.tree.leaves(sign.reduce_statistics):
        raise ValueError("`codec` must send only signs: a vote has no magnitudes.")

    def exchange(parts: list[Part]) -> Exchanged:
        workers = _axis.size(axis_name)
        finite = everywhere(axis_name, all_finite(part.x for part in parts))
        encoded = [sign.encode(part.context, part.x) for part in parts]
        # The bits of all units are concatenated: one message in each direction.
        rows = [to_rows(payload.bits, workers) for payload, _ in encoded]
        random_bits = [
            to_rows(_noise.bits(part.context.keys.shared, payload.bits.shape), workers)
            for part, (payload, _) in zip(parts, encoded, strict=True)
        ]
        elected = _elect(
            axis_name, *(jnp.concatenate(each, axis=1) for each in (rows, random_bits))
        )
        ends = list(itertools.accumulate(row.shape[1] for row in rows))
        results = []
        for part, (payload, memory), bits in zip(
            parts, encoded, jnp.split(elected, ends[:-1], axis=1), strict=True
        ):
            winners = SignsPayload(from_rows(bits, payload.bits.shape))
            mean = sign.decode(part.context.received(), winners)
            results.append(part._replace(memory=memory, mean=mean))
        return Exchanged(results, finite)

    options: AggregatorOptions = {"scope": "bucket", "seed": seed}
    return coded_mean(axis_name, sign, exchange, options, weighted=False)
