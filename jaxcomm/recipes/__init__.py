"""Methods under their papers' names, each a composition of a codec and an aggregator."""

from jaxcomm.recipes._deep_gradient_compression import deep_gradient_compression
from jaxcomm.recipes._global_qsgd import global_qsgd, qsgd, sparse_global_qsgd
from jaxcomm.recipes._natural import natural_compression
from jaxcomm.recipes._one_bit import one_bit_sgd
from jaxcomm.recipes._parallax import parallax
from jaxcomm.recipes._s2_reducer import s2_reducer
from jaxcomm.recipes._signs import ef_sign_sgd, sign_sgd, signum
from jaxcomm.recipes._sparcml import sparcml
from jaxcomm.recipes._terngrad import terngrad

__all__ = [
    "deep_gradient_compression",
    "ef_sign_sgd",
    "global_qsgd",
    "natural_compression",
    "one_bit_sgd",
    "parallax",
    "qsgd",
    "s2_reducer",
    "sign_sgd",
    "signum",
    "sparcml",
    "sparse_global_qsgd",
    "terngrad",
]
