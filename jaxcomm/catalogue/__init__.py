"""Every method once: how it is called and built, what it claims and sends, and its paper.

It is data, which the laws of the tests, the benchmark and docs/methods.md read.

Example:
  >>> from jaxcomm.catalogue import LARGE, METHODS
  >>> method = METHODS["top_k_sgd"]
  >>> method.call, method.bytes, method.paper
  ('jaxcomm.all_gather_mean(error_feedback(top_k(k=k)))', '(n-1) k (4 + i)', 'Stich et al. 2018')
  >>> aggregator = method.build(LARGE, axis_name="data")
"""

from collections.abc import Mapping

from jaxcomm.catalogue import _dense, _parameters, _sparse
from jaxcomm.catalogue._method import CLAIMS, LARGE, TINY, Method, Size

FAMILIES: Mapping[str, list[Method]] = {
    "quantized": _dense.QUANTIZED,
    "signs": _dense.SIGNS,
    "sparse": _sparse.SPARSE,
    "binary": [*_sparse.BINARY, *_dense.BINARY],
    "coded": _dense.CODED,
    "chained": _sparse.CHAINED,
    "sampled": _sparse.SAMPLED,
    "blocks": _sparse.IN_TURNS,
    "low_rank": _sparse.LOW_RANK,
    "sketched": _sparse.SKETCHED,
    "exchanged": _dense.EXCHANGED,
    "feedback": _dense.SHIFTED,
    "zeroth_order": _sparse.ZEROTH_ORDER,
    "switched": _sparse.SWITCHED,
    "around": _parameters.AROUND,
    "local": _parameters.LOCAL_STEPS,
    "gossip": _parameters.NEIGHBORS,
}
"""The methods by family: those of one share most of their code."""

_NAMED = {
    method.name: method._replace(family=family)
    for family, methods in FAMILIES.items()
    for method in methods
}

METHODS: Mapping[str, Method] = {
    name: method.filled(_NAMED[method.like]) if method.like else method
    for name, method in _NAMED.items()
}
"""The methods by name."""

__all__ = ["CLAIMS", "FAMILIES", "LARGE", "METHODS", "TINY", "Method", "Size"]
