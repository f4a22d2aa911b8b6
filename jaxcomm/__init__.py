"""Communication-efficient distributed training in JAX: compressors as optax transformations."""

from jaxcomm import aggregation, compression, wire
from jaxcomm._axis import local_params, local_value_and_grad
from jaxcomm._base import Codec, Coins, Memory, PerWorker
from jaxcomm._state import init, state_specs
from jaxcomm.aggregation import gathered_mean, mean, summed_mean
from jaxcomm.recipes import global_qsgd, qsgd
from jaxcomm.training import make_step, simulate

__all__ = [
    "Codec",
    "Coins",
    "Memory",
    "PerWorker",
    "aggregation",
    "compression",
    "gathered_mean",
    "global_qsgd",
    "init",
    "local_params",
    "local_value_and_grad",
    "make_step",
    "mean",
    "qsgd",
    "simulate",
    "state_specs",
    "summed_mean",
    "wire",
]

__version__ = "0.1.0"
