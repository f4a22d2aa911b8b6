"""Published methods under their papers' names; each composes a codec and an aggregator."""

from jaxcomm.methods._demo import demo
from jaxcomm.methods._dion import dion
from jaxcomm.methods._fetch_sgd import fetch_sgd
from jaxcomm.methods._global_qsgd import (
    global_qsgd,
    natural_compression,
    qsgd,
    sparse_global_qsgd,
    terngrad,
)
from jaxcomm.methods._gtop_k import gtop_k
from jaxcomm.methods._parallax import parallax, sparcml
from jaxcomm.methods._power_sgd import atomo, power_sgd
from jaxcomm.methods._s2_reducer import s2_reducer
from jaxcomm.methods._signs import ef_sign_sgd, one_bit_sgd, sign_sgd, signum
from jaxcomm.methods._sketched_sgd import sketched_sgd
from jaxcomm.methods._top_k import deep_gradient_compression, top_k_sgd

__all__ = [
    "atomo",
    "deep_gradient_compression",
    "demo",
    "dion",
    "ef_sign_sgd",
    "fetch_sgd",
    "global_qsgd",
    "gtop_k",
    "natural_compression",
    "one_bit_sgd",
    "parallax",
    "power_sgd",
    "qsgd",
    "s2_reducer",
    "sign_sgd",
    "signum",
    "sketched_sgd",
    "sparcml",
    "sparse_global_qsgd",
    "terngrad",
    "top_k_sgd",
]
