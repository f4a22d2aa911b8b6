"""Communication-efficient distributed training in JAX: compressors as optax transformations."""

from jaxcomm import aggregation, compression, wire
from jaxcomm._axis import local_params, local_value_and_grad
from jaxcomm._base import Codec, Coins, Memory, PerWorker
from jaxcomm._state import init, state_specs
from jaxcomm.aggregation import (
    accumulate,
    gathered_mean,
    hierarchical,
    mean,
    merged_mean,
    or_reduce,
    ring_mean,
    shard_local,
    skip_nonfinite,
    summed_mean,
    two_stage_mean,
    votes,
)
from jaxcomm.recipes import global_qsgd, qsgd, sparse_global_qsgd
from jaxcomm.training import make_step, simulate

__all__ = [
    "Codec",
    "Coins",
    "Memory",
    "PerWorker",
    "accumulate",
    "aggregation",
    "compression",
    "gathered_mean",
    "global_qsgd",
    "hierarchical",
    "init",
    "local_params",
    "local_value_and_grad",
    "make_step",
    "mean",
    "merged_mean",
    "or_reduce",
    "qsgd",
    "ring_mean",
    "shard_local",
    "simulate",
    "skip_nonfinite",
    "sparse_global_qsgd",
    "state_specs",
    "summed_mean",
    "two_stage_mean",
    "votes",
    "wire",
]

__version__ = "0.1.0"
