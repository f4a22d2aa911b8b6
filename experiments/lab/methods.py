"""What the lab measures: every method of the experiments, as a whole transformation."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.flatten_util
import jax.numpy as jnp
import optax
from jax import lax

import jaxcomm
from experiments.methods import METHODS, parse_variant
from jaxcomm import gossip, synchronization

CONTROL, PLAIN = "no_communication", "plain_jax_psum"
START = "_start_2"  # The end of labels of methods whose first two steps are exact.


class LabMethod(NamedTuple):
    """A method of the lab.

    Attributes:
      build: `(workers, optimizer) -> tx`.
      own_parameters: Whether each worker has its own parameters.
      period: The steps after which what is sent repeats; a measurement has whole periods.
      share: The part of the steps that send the bytes of `jaxcomm.wire.account`, which counts the
        heaviest step; None if it is random or depends on the state.
      clusters: Whether the mesh has the axes `cluster` and `data` instead of `data` only.
    """

    build: Callable[[int, optax.GradientTransformation], optax.GradientTransformation]
    own_parameters: bool = False
    period: int = 1
    share: float | None = 1.0
    clusters: bool = False


def _psum(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    """The mean as a JAX user writes it: one message."""
    vector, restore = jax.flatten_util.ravel_pytree(updates)
    return restore(lax.psum(vector, "data") / lax.axis_size("data")), state


def _int8_psum(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    """8 bits as a JAX user writes them: rounded to nearest, with one scale for all leaves."""
    vector, restore = jax.flatten_util.ravel_pytree(updates)
    workers = lax.axis_size("data")
    scale = lax.pmax(jnp.max(jnp.abs(vector)), "data") / (127 // workers)
    codes = jnp.round(vector / scale).astype(jnp.int8)  # int8 holds the sum.
    return restore(lax.psum(codes, "data").astype(jnp.float32) * (scale / workers)), state


def _stateless(update: Callable[..., tuple[Any, Any]]) -> LabMethod:
    return before(lambda: optax.GradientTransformation(lambda params: optax.EmptyState(), update))


def before(aggregator: Callable[[], optax.GradientTransformation]) -> LabMethod:
    """The method that aggregates before the optimizer."""
    return LabMethod(lambda workers, optimizer: optax.chain(aggregator(), optimizer))


def _power_sgd(rank: int, alternate: bool = False) -> optax.GradientTransformation:
    return jaxcomm.power_sgd("data", rank=rank, alternate=alternate)


def _alternating(rank: int) -> LabMethod:
    # The two factors differ in size.
    return before(lambda: _power_sgd(rank, alternate=True))._replace(period=2, share=None)


def _started(aggregator: Callable[[], Any], period: int = 1) -> LabMethod:
    """The method with two exact steps first, as PyTorch's hook of PowerSGD has at least."""
    stages = lambda: [jaxcomm.mean("data"), aggregator()]  # noqa: E731
    return before(lambda: jaxcomm.warmup(stages(), every=2))._replace(period=period, share=None)


def _after(
    stage: Callable[[int], optax.GradientTransformation],
    period: int = 1,
    share: float | None = 1.0,
) -> LabMethod:
    return LabMethod(
        lambda workers, optimizer: optax.chain(optimizer, stage(workers)),
        own_parameters=True,
        period=period,
        share=share,
    )


def _top(ratio: float) -> jaxcomm.Codec:
    return jaxcomm.compression.sparsifiers.top_k(ratio=ratio)


OWN: Mapping[str, LabMethod] = {
    CONTROL: LabMethod(lambda workers, optimizer: optimizer, own_parameters=True),
    PLAIN: _stateless(_psum),
    "plain_jax_int8_psum": _stateless(_int8_psum),
    "hierarchical": LabMethod(
        lambda workers, optimizer: optax.chain(
            jaxcomm.hierarchical(jaxcomm.mean("data"), jaxcomm.global_qsgd("cluster")), optimizer
        ),
        clusters=True,
    ),
    "hierarchical_sliced": LabMethod(
        lambda workers, optimizer: optax.chain(
            jaxcomm.hierarchical(
                jaxcomm.mean("data"),
                jaxcomm.sliced(jaxcomm.global_qsgd("cluster"), axis_name="data"),
            ),
            optimizer,
        ),
        clusters=True,
    ),
    **{f"acp_sgd_rank_{rank}": _alternating(rank) for rank in (1, 2, 4)},
    **{
        f"power_sgd_rank_{rank}{START}": _started(lambda rank=rank: _power_sgd(rank))
        for rank in (1, 2, 4)
    },
    f"acp_sgd_rank_4{START}": _started(lambda: _power_sgd(4, alternate=True), period=2),
    f"ef_top_1_percent{START}": _started(lambda: jaxcomm.top_k_sgd(ratio=0.01)),
    "dpsgd": _after(lambda n: gossip.dpsgd(gossip.ring(n))),
    "matcha": _after(lambda n: gossip.matcha(gossip.matcha_plan(gossip.ring(n), 0.5)), 4, None),
    "choco_sgd": _after(lambda n: gossip.choco_sgd(gossip.ring(n), _top(0.01), step_size=0.1)),
    "deep_squeeze": _after(
        lambda n: gossip.deep_squeeze(
            gossip.ring(n), jaxcomm.compression.quantizers.dither(bits=4), step_size=0.5
        )
    ),
    "d2": _after(lambda n: gossip.d2(gossip.lazy_mixing(gossip.ring(n)))),
    "sgp": _after(lambda n: gossip.sgp(gossip.one_peer_exponential(n)), 2),
    "overlap_sgp": _after(lambda n: gossip.sgp(gossip.one_peer_exponential(n), overlap=1), 2),
    "ad_psgd": _after(lambda n: gossip.ad_psgd(gossip.ring(n), staleness=1), 4, None),
    "local_sgd_8": _after(lambda n: synchronization.local_sgd(8), 8, 1 / 8),
    "local_sgd_8_global_qsgd": _after(
        lambda n: synchronization.local_sgd(8, aggregator=jaxcomm.global_qsgd()), 8, 1 / 8
    ),
    "diloco_8": LabMethod(
        lambda workers, optimizer: synchronization.diloco(
            optimizer, optax.sgd(0.7, momentum=0.9, nesterov=True), 8, aggregator=jaxcomm.mean()
        ),
        own_parameters=True,
        period=8,
        share=1 / 8,
    ),
}

LABELS = (*OWN, *(label for label in METHODS))


def find(label: str, seed: int = 0) -> LabMethod:
    """The method of a label, such as `power_sgd_rank_1`, `global_qsgd:8` or `dpsgd`.

    Args:
      label: The label.
      seed: The seed of its rounding. Methods of the lab only, such as `dpsgd`, have the seed 0.

    Raises:
      ExperimentError: If there is none.
    """
    if label in OWN:
        return OWN[label]
    variant = parse_variant(label)
    method = before(lambda: variant.build(seed))
    return method if variant.stage is None else method._replace(share=None)
