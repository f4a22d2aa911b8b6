"""Bounds on the error of a selection of coordinates before another codec."""

from jaxcomm._contract import Claims, Codec
from jaxcomm.compression.sparsifiers._indices import Selection


def claims_of_chain(selecting: Codec, selection: Selection, of_values: Claims) -> Claims:
    """The claims of a selection before a codec with the claims `of_values`."""
    variance, contraction, _ = selecting.claims
    inner = of_values

    def count(size: int) -> int:
        return max(selection.layout(size).entries, 1)

    if variance is not None:
        if inner.variance is None:
            return Claims()
        omega = inner.variance
        return Claims(
            variance=lambda size, workers: (
                (1 + variance(size, workers)) * (1 + omega(count(size), workers)) - 1
            )
        )
    if contraction is None or (inner.contraction is None and inner.variance is None):
        return Claims()

    def product(size: int, workers: int) -> float:
        if inner.contraction is not None:
            delta = inner.contraction(count(size), workers)
        else:
            assert inner.variance is not None
            delta = 1 - inner.variance(count(size), workers)
        # A codec that enlarges errors does so for all of `x` at worst.
        return delta * contraction(size, workers) if delta > 0 else delta

    return Claims(contraction=product)


def for_one_worker(claims: Claims) -> Claims:
    """The claims of a codec whose statistics workers do not share."""
    variance, contraction, _ = claims
    return claims._replace(
        variance=variance and (lambda size, workers: variance(size, 1)),
        contraction=contraction and (lambda size, workers: contraction(size, 1)),
    )
