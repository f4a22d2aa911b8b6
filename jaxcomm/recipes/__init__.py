"""Methods under their papers' names, each a composition of a codec and an aggregator."""

from jaxcomm.recipes._global_qsgd import global_qsgd, qsgd, sparse_global_qsgd

__all__ = ["global_qsgd", "qsgd", "sparse_global_qsgd"]
