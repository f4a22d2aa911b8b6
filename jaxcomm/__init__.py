"""Communication-efficient distributed training in JAX: compressors as optax transformations."""

from jaxcomm import aggregation, compression, wire
from jaxcomm._axis import local_params, local_value_and_grad
from jaxcomm._base import Codec, Coins, Memory, PerWorker
from jaxcomm._state import init, state_specs
from jaxcomm.aggregation import (
    accumulate,
    adaptive_ratio,
    gathered_mean,
    gtop_k,
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
    warm_up,
    warm_up_schedule,
)
from jaxcomm.recipes import (
    deep_gradient_compression,
    ef_sign_sgd,
    global_qsgd,
    natural_compression,
    one_bit_sgd,
    qsgd,
    s2_reducer,
    sign_sgd,
    signum,
    sparse_global_qsgd,
    terngrad,
)
from jaxcomm.training import make_step, simulate

__all__ = [
    "Codec",
    "Coins",
    "Memory",
    "PerWorker",
    "accumulate",
    "adaptive_ratio",
    "aggregation",
    "compression",
    "ef_sign_sgd",
    "deep_gradient_compression",
    "gathered_mean",
    "gtop_k",
    "global_qsgd",
    "hierarchical",
    "init",
    "local_params",
    "local_value_and_grad",
    "make_step",
    "mean",
    "merged_mean",
    "natural_compression",
    "one_bit_sgd",
    "or_reduce",
    "qsgd",
    "ring_mean",
    "s2_reducer",
    "shard_local",
    "sign_sgd",
    "signum",
    "simulate",
    "skip_nonfinite",
    "sparse_global_qsgd",
    "state_specs",
    "summed_mean",
    "terngrad",
    "two_stage_mean",
    "votes",
    "warm_up",
    "warm_up_schedule",
    "wire",
]

__version__ = "0.1.0"
