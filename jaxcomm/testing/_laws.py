"""The laws by name, and the checks of one method of your own."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import optax

from jaxcomm._contract import Claims, Codec, PyTree
from jaxcomm._require import require_option, require_transformation
from jaxcomm.testing._aggregator import AggregatorTrial, Nonfinite
from jaxcomm.testing._aggregator_laws import (
    require_equal_weights,
    require_jit,
    require_kept_memory,
    require_modes,
    require_no_bias,
    require_nonfinite,
    require_overflow,
    require_permutation,
    require_replicas,
    require_resolution,
    require_shapes,
    require_state_types,
    require_update_types,
    require_variance,
    require_weights,
    require_zeros,
)
from jaxcomm.testing._codec import (
    require_claims,
    require_exposed,
    require_form,
    require_layout,
    require_memory,
    require_repeats,
    require_sums,
)

AGGREGATOR_LAWS: Mapping[str, Callable[[AggregatorTrial], None]] = {
    "update types": require_update_types,
    "state types": require_state_types,
    "replicas": require_replicas,
    "modes": require_modes,
    "jit": require_jit,
    "nonfinite": require_nonfinite,
    "memory after nonfinite": require_kept_memory,
    "zeros": require_zeros,
    "shapes": require_shapes,
    "resolution": require_resolution,
    "overflow": require_overflow,
    "weights": require_weights,
    "equal weights": require_equal_weights,
    "unbiased": require_no_bias,
    "variance": require_variance,
    "permutation": require_permutation,
}
"""What every aggregator is held to, by name."""

# Laws that hold only of an aggregator that claims them.
_OF_AGGREGATORS: Mapping[str, Callable[[AggregatorTrial], bool]] = {
    "zeros": lambda trial: trial.silent,
    "resolution": lambda trial: trial.resolution is not None,
    "overflow": lambda trial: trial.resolution is not None,
    "weights": lambda trial: trial.weighted,
    "equal weights": lambda trial: trial.weighted,
    "unbiased": lambda trial: trial.unbiased,
    "variance": lambda trial: trial.variance is not None,
}


def aggregator_laws_of(trial: AggregatorTrial) -> dict[str, Callable[[AggregatorTrial], None]]:
    """Returns the laws that hold of the aggregator by what it claims."""
    return {
        name: law
        for name, law in AGGREGATOR_LAWS.items()
        if name not in _OF_AGGREGATORS or _OF_AGGREGATORS[name](trial)
    }


def check_aggregator(
    tx: optax.GradientTransformation,
    *,
    workers: int = 3,
    axis_name: str = "data",
    params: PyTree = None,
    resolution: float | None = None,
    unbiased: bool = False,
    variance: Callable[[int, int], float] | None = None,
    weighted: bool = False,
    zeros: bool = True,
    nonfinite: Nonfinite = "all",
    draws: int = 2000,
) -> None:
    r"""Checks that a transformation that averages over workers satisfies the aggregator laws.

    Workers are simulated with `jax.vmap`. If there are enough devices, they also run in
    `jax.shard_map` with `check_vma=True`. The check itself sends nothing; only `tx` does. The laws,
    with the names that error messages use:

    - `update types`, `state types`: updates and state keep structure, shapes and dtypes.
    - `replicas`: results are equal on all workers, bit for bit.
    - `modes`, `jit`: results are the same on a mesh and on one device, compiled or not.
    - `permutation`: the result does not depend on the order of the workers.
    - `shapes`: scalars and leaves without elements are leaves like any other.
    - `nonfinite`, `memory after nonfinite`: a NaN or an infinity on one worker makes the update NaN
      on all workers and leaves each worker's memory unchanged.
    - `zeros`: a coordinate that is zero on all workers is zero in the first update.
    - `weights`, `equal weights`, with `weighted`: the result is the weighted mean, a common factor
      changes nothing, and weights that are negative or overflow make it NaN.
    - `resolution`, `overflow`, if `resolution` is set: the error of each coordinate is within it,
      also for the smallest and largest numbers, and if all workers hold the extreme value.
    - `unbiased`, `variance`, if set: the average over draws is the mean over workers, and the
      squared error is within the bound. A correct method fails in one run of a million.

    Args:
      tx: The aggregator, without an optimizer.
      workers: The number of workers.
      axis_name: The mesh axis over which `tx` averages.
      params: A pytree of arrays or `jax.ShapeDtypeStruct` with the shapes and dtypes of one
        worker's update. Default: a vector, a matrix and a scalar in float32, and for the laws of
        types a tree with bfloat16 and float16 as well.
      resolution: The largest error of a coordinate, relative to the largest magnitude on any
        worker; 0 for a mean that is exact up to floating-point rounding. Default: not tested.
      unbiased: Whether the expectation of the result is the mean.
      variance: `(coordinates, workers) -> theta`, with
        `E|result - mean|^2 <= theta / workers * sum |x_i|^2`. Default: not tested.
      weighted: Whether `tx.update` takes `weight=`.
      zeros: Whether zeros must give zeros.
      nonfinite: `"all"` if a non-finite coordinate on a worker must make the whole update NaN,
        `"coordinate"` if only this coordinate must be non-finite.
      draws: The number of steps over which `unbiased` averages the result.

    Returns:
      Nothing.

    Raises:
      AssertionError: If a law is violated. The message names the law, the input and the numbers.
      ValueError: If `tx` is not a transformation, or rejects its input.

    Example:
      >>> import optax, jaxcomm
      >>> from jaxcomm.testing import check_aggregator
      >>> check_aggregator(jaxcomm.global_qsgd(levels=3), resolution=1 / 3, unbiased=True)
      >>> half = optax.chain(jaxcomm.global_qsgd(levels=3), optax.scale(0.5))
      >>> check_aggregator(half, unbiased=True)
      Traceback (most recent call last):
      AssertionError: law 'unbiased': ...
    """
    require_transformation(tx)
    trial = AggregatorTrial(
        tx,
        workers,
        axis_name,
        leaves=None if params is None else jax.eval_shape(lambda tree: tree, params),
        resolution=None if resolution is None else lambda workers, size: resolution,
        unbiased=unbiased,
        variance=variance,
        weighted=weighted,
        silent=zeros,
        nonfinite=nonfinite,
        draws=draws,
    )
    for law in aggregator_laws_of(trial).values():
        law(trial)


class CodecTrial(NamedTuple):
    """A codec, what it claims, and the settings in which the laws are checked.

    Attributes:
      codec: The codec.
      claims: The bounds to check.
      size: The number of coordinates of the unit.
      workers: The numbers of workers, which share statistics.
      draws: How many steps are averaged for a claim.
      seed: The seed of the PRNG keys.
    """

    codec: Codec
    claims: Claims
    size: int = 48
    workers: Sequence[int] = (1, 3)
    draws: int = 2000
    seed: int = 0


def _law(
    law: Callable[..., None], *options: str, of_workers: bool = True
) -> Callable[[CodecTrial], None]:
    """The law with some of the settings, for each number of workers if it depends on them."""

    @functools.wraps(law)
    def check(trial: CodecTrial) -> None:
        given = {name: getattr(trial, name) for name in ("size", *options)}
        for count in trial.workers if of_workers else [None]:
            law(trial.codec, **given, **({} if count is None else {"workers": count}))

    return check


CODEC_LAWS: Mapping[str, Callable[[CodecTrial], None]] = {
    "types": _law(require_form),
    "repeats": _law(require_repeats, "seed", of_workers=False),
    "NaN shows": _law(require_exposed, "seed", of_workers=False),
    "memory": _law(require_memory, "seed"),
    "layout": _law(require_layout, "seed"),
    "sums": _law(require_sums, "seed"),
    "claims": _law(require_claims, "claims", "draws", "seed"),
}
"""What every codec is held to, by name."""

# Laws that hold only of a codec that claims them.
_OF_CODECS: Mapping[str, Callable[[CodecTrial], bool]] = {
    "NaN shows": lambda trial: bool(trial.codec.fast.exposes_nonfinite),
    "layout": lambda trial: trial.codec.layout == "shared_statistics",
    "sums": lambda trial: trial.codec.combine == "sum",
    "claims": lambda trial: (trial.claims.variance or trial.claims.contraction) is not None,
}


def codec_laws_of(trial: CodecTrial) -> dict[str, Callable[[CodecTrial], None]]:
    """Returns the laws that hold of the codec by what it claims."""
    return {
        name: law
        for name, law in CODEC_LAWS.items()
        if name not in _OF_CODECS or _OF_CODECS[name](trial)
    }


def check_codec(
    codec: Codec,
    claims: Claims | None = None,
    *,
    size: int = 48,
    workers: Sequence[int] = (1, 3),
    draws: int = 2000,
    seed: int = 0,
) -> None:
    r"""Checks that a codec satisfies the laws of :class:`jaxcomm.Codec` and its own claims.

    Workers are simulated with `jax.vmap` on one device. Nothing is sent. A *unit* is the array that
    the codec encodes. *Keys* are the PRNG keys in its context: the shared key is equal on all
    workers, the private key is not. The laws, with the names that error messages use:

    - `payload`, `statistics`, `decoded`, `memory types`: the payload is a pytree of arrays,
      statistics have the structure of `reduce_statistics`, `decode` returns float32 of the unit's
      shape, and memory keeps its structure, shapes and dtypes.
    - `same keys`, `jit`, `vmap`: the same keys give the same payload, compiled or not.
    - `receivers decode`: `decode` depends neither on the private key nor on memory.
    - `entries`, for a codec that states them in `fast`: each coordinate occurs at most once.
    - `NaN shows`, for what `exposes_nonfinite` of `fast` names: a NaN is visible in the result.
    - `layout`, if it is `"shared_statistics"`: statistics of parts combine to those of the whole,
      and with these statistics coordinates are encoded independently.
    - `encode leaves shared memory`: `encode` does not change `memory.shared`.
    - `finalize is equal on all workers`: the update and `memory.shared` that `finalize` returns are
      the same on all workers.
    - `sums`, with `combine="sum"`: the sum of payloads, added in their own dtypes, decodes to the
      mean of the decoded payloads, even if all workers have the extreme value.
    - `unbiased`, `variance`, `contraction`: claims hold on various inputs (normal, heavy-tailed,
      sparse, one-hot, constant, zero, tiny, huge). Each is tested so that a correct codec fails in
      one run of a million.

    If a codec has a variant that drops overflow (`codec.drop_overflow`), NaN from the other variant
    is not a violation.

    Args:
      codec: The codec.
      claims: The bounds to check. Default: `codec.claims`.
      size: The number of coordinates of the unit.
      workers: The numbers of workers to test, which share statistics.
      draws: The number of steps for measuring the claims, each with separate keys.
      seed: The seed of the PRNG keys. Inputs are always the same.

    Returns:
      Nothing.

    Raises:
      AssertionError: If a law is violated. The message names the law, the input and the numbers.
      ValueError: If `codec` is not a codec, or rejects the number of workers.

    Example:
      >>> from jaxcomm.compression.quantizers import dither
      >>> from jaxcomm.testing import check_codec
      >>> check_codec(dither(levels=3))
      >>> truncating = dither(levels=3).replace(decode=lambda context, payload: ...)
      >>> check_codec(truncating)
      Traceback (most recent call last):
      AssertionError: law 'decoded': ...
    """
    require_option(codec, "codec", Codec)
    claims = codec.claims if claims is None else claims
    trial = CodecTrial(codec, claims, size, workers, draws, seed)
    for law in codec_laws_of(trial).values():
        law(trial)
