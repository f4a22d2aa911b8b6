"""What the lab measures: every method of the experiments, as a whole transformation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.flatten_util
import optax
from jax import lax

import jaxcomm
from experiments.lab.peers import START
from experiments.methods import BLOCK_SIZE, METHODS, parse_method
from jaxcomm import catalogue
from jaxcomm.compression import blockwise
from jaxcomm.compression.quantizers import dither

CONTROL, PLAIN = "no_communication", "plain_jax_psum"
FREED = "_freed_memory"  # In processes that give freed memory back, without `jaxcomm.launch`.
PERIODS = (2, 4, 8, 16)  # of local steps


class LabMethod(NamedTuple):
    """A method of the lab.

    Attributes:
      build: `(workers, optimizer) -> tx`.
      own_parameters: Whether each worker has its own parameters.
      period: The steps after which what is sent repeats; a measurement has whole periods.
      share: The part of the steps that send the bytes of `jaxcomm.wire.account`, which counts the
        heaviest step; None if it is random or depends on the state.
      clusters: Whether the mesh has the axes `cluster` and `data` instead of `data` only.
      exact_steps: The number of first steps that send what `mean` does.
    """

    build: Callable
    own_parameters: bool = False
    period: int = 1
    share: float | None = 1.0
    clusters: bool = False
    exact_steps: int = 0


def before(aggregator: Callable) -> LabMethod:
    """The method that aggregates before the optimizer."""
    return LabMethod(lambda workers, optimizer: optax.chain(aggregator(), optimizer))


def _psum(updates: Any, params: Any = None) -> Any:
    """The mean as a JAX user writes it: one message."""
    vector, restore = jax.flatten_util.ravel_pytree(updates)
    return restore(lax.psum(vector, "data") / lax.axis_size("data"))


def _clusters(between: Callable) -> LabMethod:
    """The exact mean in each cluster, and another one between clusters."""
    aggregator = lambda: jaxcomm.hierarchical(jaxcomm.mean("data"), between())  # noqa: E731
    return before(aggregator)._replace(clusters=True)


def _started(rank: int, **options: Any) -> LabMethod:
    """PowerSGD with exact steps first."""
    return before(
        lambda: jaxcomm.warmup([jaxcomm.mean(), jaxcomm.power_sgd(rank=rank, **options)], START)
    )._replace(share=None, exact_steps=START)


def _gossip(name: str) -> LabMethod:
    def build(workers, optimizer):
        mixing = catalogue.METHODS[name].build(catalogue.LARGE, workers=workers)
        return optax.chain(jaxcomm.per_worker(optimizer), mixing)

    return LabMethod(build, own_parameters=True)


def _local(name: str, period: int, aggregator: Callable = jaxcomm.mean) -> LabMethod:
    def build(workers, optimizer):
        options = {"aggregator": aggregator()} if aggregator is not jaxcomm.mean else {}
        return catalogue.METHODS[name].build(catalogue.LARGE, optimizer, period, **options)

    return LabMethod(build, own_parameters=True, period=period, share=1 / period)


def _two_stage() -> Any:
    return jaxcomm.two_stage_mean(blockwise(dither(bits=4), BLOCK_SIZE))


LOCAL = {
    "local_sgd": ("local_sgd", jaxcomm.mean),
    "local_sgd_8_bits": ("local_sgd", lambda: jaxcomm.global_qsgd(bits=8)),
    "local_sgd_4_bits": ("local_sgd", _two_stage),
    "diloco": ("diloco", jaxcomm.mean),
    "diloco_4_bits": ("diloco", _two_stage),
    "streaming_diloco_4_bits": ("streaming_diloco_4_bits", jaxcomm.mean),
}


OWN = {
    CONTROL: LabMethod(lambda workers, optimizer: jaxcomm.per_worker(optimizer), True),
    PLAIN: before(lambda: optax.stateless(_psum)),
    "hierarchical": _clusters(lambda: jaxcomm.global_qsgd("cluster")),
    "hierarchical_sliced": _clusters(
        lambda: jaxcomm.sliced(jaxcomm.global_qsgd("cluster"), axis_name="data")
    ),
    **{f"power_sgd_rank_{rank}_start_2": _started(rank) for rank in (1, 2, 4, 8, 16, 32)},
    **{
        f"power_sgd_rank_{rank}_16_bits_start_2": _started(
            rank, alternate=True, factor_codec=dither(bits=16)
        )
        for rank in (4, 8, 16, 32)
    },
    "delayed": before(lambda: jaxcomm.delayed(jaxcomm.mean())),
    **{name: _gossip(name) for name in ("dpsgd", "choco_sgd", "deep_squeeze", "d2")},
    **{
        f"{label}_{period}": _local(name, period, aggregator)
        for label, (name, aggregator) in LOCAL.items()
        for period in PERIODS
    },
}

LABELS = (*OWN, *METHODS)

CODES = {
    "mean": 'jaxcomm.mean("data")',
    "mean_bfloat16": 'jaxcomm.mean("data", wire_dtype="bfloat16")',
    "global_qsgd:8": 'jaxcomm.global_qsgd("data")',
    "two_stage:4": (
        "jaxcomm.two_stage_mean(jaxcomm.compression.blockwise("
        'jaxcomm.quantizers.dither(bits=4), 256), axis_name="data")'
    ),
    "local_sgd_4_bits_8": (
        'jaxcomm.synchronization.local_sgd(8, axis_name="data", aggregator=jaxcomm.two_stage_mean('
        'jaxcomm.compression.blockwise(jaxcomm.quantizers.dither(bits=4), 256), axis_name="data"))'
    ),
    "ef_top_1_percent": 'jaxcomm.top_k_sgd("data", ratio=0.01)',
    "ef_sign_sgd": 'jaxcomm.ef_sign_sgd("data")',
    "power_sgd_rank_4": 'jaxcomm.power_sgd("data", rank=4)',
    "power_sgd_rank_1": 'jaxcomm.power_sgd("data", rank=1)',
}
"""The methods that `jaxcomm.advise` compares, and their code there."""


def find(label: str, seed: int = 0) -> LabMethod:
    """The method of a label, such as `power_sgd_rank_1`, `global_qsgd:8` or `dpsgd`.

    Args:
      label: The label; the ending `_freed_memory` says how the lab starts the workers.
      seed: The seed of its rounding. Methods of the lab only, such as `dpsgd`, have the seed 0.

    Raises:
      ExperimentError: If there is none.
    """
    label = label.removesuffix(FREED)
    if label in OWN:
        return OWN[label]
    variant = parse_method(label)
    method = before(lambda: variant.build(seed=seed))
    return method if variant.stage is None else method._replace(share=None)
