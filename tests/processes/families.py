"""A representative of each family of methods, and the training that every cluster runs of it."""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxcomm
from experiments.trainer import own_rows
from jaxcomm import gossip
from jaxcomm.compression import blockwise
from jaxcomm.compression.feedback import ef21, error_feedback
from jaxcomm.compression.quantizers import dither
from jaxcomm.compression.sparsifiers import top_k

SIZE = 720_000  # Of 8 bits a coordinate, so many make over a megabyte on the wire.
STEPS = 10
UNMEASURED = 3  # Steps before bytes are counted: the first places parameters and compiles.
RATE = 0.1
WORKERS = 4


class Family(NamedTuple):
    """One method.

    Attributes:
      make: `() -> aggregator`.
      integer_sum: Contributions are added as integers, or each is decoded and added in the order
        of the workers: all ways to run it agree bit for bit.
      weighted: Whether workers count unequally.
      size: Coordinates; so many make over a megabyte on the wire, of votes half of it.
      slow: Left to the slow run.
      gossips: Whether it mixes parameters that differ by worker, after the optimizer.
      exchanges: In how many of the measured steps it sends.
    """

    make: Callable[[], optax.GradientTransformationExtraArgs]
    integer_sum: bool
    weighted: bool = False
    size: int = SIZE
    slow: bool = False
    gossips: bool = False
    exchanges: int = STEPS - UNMEASURED


def _dithering() -> jaxcomm.Codec:
    return blockwise(dither(bits=8), 4096)


FAMILIES: dict[str, Family] = {
    "mean": Family(jaxcomm.mean, False, size=SIZE // 4),
    "mean, weighted": Family(jaxcomm.mean, False, weighted=True, size=SIZE // 4),
    "ring": Family(jaxcomm.ring_mean, False, size=SIZE // 4, slow=True),
    "summed": Family(lambda: jaxcomm.global_qsgd(bits=8), True),
    "gathered": Family(lambda: jaxcomm.qsgd(bits=8), True, size=SIZE // 2, slow=True),
    "merged": Family(
        lambda: jaxcomm.global_qsgd(dithering="exponential", reduce="tree"), True, slow=True
    ),
    "two stages": Family(lambda: jaxcomm.two_stage_mean(_dithering()), True, slow=True),
    "two stages, feedback at both ends": Family(
        lambda: jaxcomm.two_stage_mean(error_feedback(_dithering())), True, slow=True
    ),
    "votes": Family(jaxcomm.majority_vote, True, size=4 * SIZE, slow=True),
    "feedback": Family(
        lambda: jaxcomm.all_gather_mean(error_feedback(top_k(ratio=0.75))),
        True,
        size=SIZE // 6,
    ),
    "feedback that is shared": Family(
        lambda: jaxcomm.all_gather_mean(ef21(_dithering())),
        True,
        size=SIZE // 2,
        slow=True,
    ),
    "delayed": Family(lambda: jaxcomm.delayed(jaxcomm.mean()), False, size=SIZE // 4, slow=True),
    # All skip after the first step.
    "lazy": Family(
        lambda: jaxcomm.lazy(threshold=1e9, memory=1),
        False,
        size=SIZE // 4,
        slow=True,
        exchanges=0,
    ),
    # Of random rounds one runs: with one other worker each, of three and of two.
    "noloco": Family(
        lambda: gossip.noloco(gossip.random_pairs(WORKERS), period=2, momentum=0.0),
        False,
        size=SIZE // 2,
        gossips=True,
        exchanges=4,
    ),
    "ad_psgd": Family(
        lambda: gossip.ad_psgd(gossip.ring(WORKERS)), False, size=SIZE // 4, gossips=True, slow=True
    ),
}


def phases() -> np.ndarray:
    """By which the workers' targets differ, float32[workers]."""
    return np.linspace(0.5, 1.5, WORKERS, dtype=np.float32)


def weights(weighted: bool) -> np.ndarray:
    """How much each worker counts, float32[workers]."""
    return np.arange(WORKERS, dtype=np.float32) if weighted else np.ones(WORKERS, np.float32)


def target(phase: Any, size: int) -> Any:
    """What a worker pulls the parameters to, in [-1, 1), float32[size]."""
    ramp = jnp.arange(size, dtype=jnp.float32) * phase / 1024
    return 2 * (ramp - jnp.floor(ramp)) - 1


def loss_fn(params: jax.Array, batch: Any) -> jax.Array:
    return jnp.sum((params - target(batch["phase"][0], params.size)) ** 2) / 2


def gradients(loss_fn: Any, params: jax.Array, batch: Any) -> tuple[Any, ...]:
    """With the weight of the worker."""
    value, gradient = jaxcomm.local_value_and_grad(loss_fn)(params, batch)
    return value, gradient, batch["weight"][0]


class Run(NamedTuple):
    """What one process knows after training."""

    params: np.ndarray
    replicas: list[str]  # a digest of the parameters on each device of this process
    states: list[str]  # and of the part of the optimizer's state that all share
    sent: int  # bytes counted in the measured steps, of all devices of this process
    account: float  # bytes that one worker should send in one step
    losses: list[float]


def _digests(tree: Any) -> list[str]:
    """Of the replicated leaves, one a device of this process."""
    found: dict[int, Any] = {}
    for leaf in jax.tree.leaves(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if leaf.is_fully_replicated:
            for shard in leaf.addressable_shards:
                digest = found.setdefault(shard.device.id, hashlib.sha256())
                digest.update(np.asarray(shard.data).tobytes())
    return [digest.hexdigest() for digest in found.values()]


def make_batch(family: Family, mesh: Mesh) -> Any:
    """The batch, of which this process makes the rows of its own devices."""
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    rows = own_rows(sharding, WORKERS)
    everything = {"phase": phases(), "weight": weights(family.weighted)}
    return {
        name: jax.make_array_from_process_local_data(sharding, values[rows], (WORKERS,))
        for name, values in everything.items()
    }


def train(
    family: Family,
    mesh: Mesh,
    count_sent: Callable[[], int] = lambda: 0,
    *,
    local_batch: bool = False,
) -> Run:
    """Trains for `STEPS` steps, the same on devices of one process and of many."""
    stages = [family.make(), optax.sgd(RATE)]
    tx = optax.chain(*(reversed(stages) if family.gossips else stages))
    step = jaxcomm.make_step(loss_fn, tx, mesh, gradients=gradients if family.weighted else None)
    params: Any = jnp.zeros(family.size)
    if family.gossips:
        params = jaxcomm.replicate(params, mesh)
    opt_state = jaxcomm.init(tx, params, mesh)
    batch = make_batch(family, mesh)
    if local_batch:
        batch = {"phase": phases(), "weight": weights(family.weighted)}
    share = family.exchanges / (STEPS - UNMEASURED)
    account = jaxcomm.wire.account(step, params, opt_state, batch).amortized_bytes_per_worker(share)
    losses, before = [], 0
    for number in range(STEPS):
        if number == UNMEASURED:
            before = count_sent()
        params, opt_state, metrics = step(params, opt_state, batch)
        losses.append(float(metrics["loss"]))
    jax.block_until_ready(params)
    sent = count_sent() - before
    if family.gossips:
        params = jaxcomm.consensus(params)
    return Run(np.asarray(params), _digests(params), _digests(opt_state), sent, account, losses)
