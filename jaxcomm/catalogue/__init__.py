"""Every method once: how it is called and built, what it claims and sends, and its paper.

It is data, which the laws of the tests, the benchmark and docs/methods.md read.

Example:
  >>> from jaxcomm.catalogue import LARGE, METHODS
  >>> method = METHODS["top_k_sgd"]
  >>> method.call, method.bytes, method.paper
  ('jaxcomm.all_gather_mean(error_feedback(top_k(k=k)))', '(n-1) k (4 + i)', 'Stich et al. 2018')
  >>> aggregator = method.build(LARGE, axis_name="data")
"""

from collections.abc import Iterable, Mapping

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

METHODS: Mapping[str, Method] = {
    method.name: method._replace(family=family)
    for family, methods in FAMILIES.items()
    for method in methods
}
"""The methods by name."""


def listing(methods: Iterable[Method] = METHODS.values()) -> list[tuple[str, str, str]]:
    """Returns the name, the bytes and the paper of methods, those of a variant from its line.

    Args:
      methods: All of them, or some.

    Example:
      >>> from jaxcomm.catalogue import METHODS, listing
      >>> listing([METHODS["qsgd_4_bits"]])
      [('qsgd_4_bits', 'b d (n-1)', 'Alistarh et al. 2017')]
    """
    lines = [(method.name, METHODS[method.like or method.name]) for method in methods]
    return [(name, line.bytes, line.paper) for name, line in lines]


__all__ = ["CLAIMS", "FAMILIES", "LARGE", "METHODS", "TINY", "Method", "Size", "listing"]
