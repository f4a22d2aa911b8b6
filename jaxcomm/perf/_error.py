"""What a codec's error is known to cost in steps."""

from typing import NamedTuple

from jaxcomm._contract import Claims


class ErrorModel(NamedTuple):
    r"""The error of one step and its known price.

    Attributes:
      kind: "exact", "unbiased", "biased" or "unknown".
      value: :math:`\omega` of an unbiased codec, :math:`\delta` of a biased one; None if no bound
        is known.
      steps: The least and the largest factor on the number of steps that theory allows; None if
        none is known.
      source: What the factor is from, and what it leaves out.
    """

    kind: str
    value: float | None
    steps: tuple[float, float] | None
    source: str

    def _size(self) -> str:
        """The error of a step in words."""
        if self.kind == "unbiased":
            return f", with a variance of at most {self.value:.3g} squared norms of the gradients"
        if self.kind == "biased":
            assert self.value is not None
            sent = f"{self.value:.2g}" if self.value >= _LITTLE else "next to nothing"
            return (
                f": in the worst case, a step sends {sent} of the squared norm of a gradient, and "
                "feedback keeps the rest for later steps"
            )
        return ""

    def __str__(self) -> str:
        steps = "steps: unknown"
        if self.steps is not None:
            low, high = self.steps
            steps = f"steps: x {low:g}" + ("" if low == high else f" to {high:.3g}")
        return f"{self.kind}{self._size()}; {steps} ({self.source})"


_LITTLE = 1e-3  # Of a contraction: a guarantee after more than 10^6 steps is no guarantee.

EXACT = ErrorModel("exact", 0.0, (1.0, 1.0), "the mean is exact up to rounding")
UNKNOWN = ErrorModel("unknown", None, None, "no claim is given: train with both and compare")


def error_of(claims: Claims | None, size: int, workers: int) -> ErrorModel:
    r"""Returns the error model of a codec's claims.

    An unbiased codec of variance :math:`\omega` multiplies the variance of stochastic gradients by
    at most :math:`1 + \omega`, and with it the steps of SGD where noise dominates (Alistarh et al.
    2017, theorem 3.2; the bound of Xin et al. 2023 is the same). A contraction with error feedback
    has the leading term of SGD after of the order of :math:`1/\delta^2` steps (Karimireddy et al.
    2019); no factor is known before that, or with Adam.

    Args:
      claims: The claims of the codec; None if there are none.
      size: The coordinates that share statistics.
      workers: The workers that share statistics.

    Returns:
      The error model; "unknown" without claims.

    Example:
      >>> from jaxcomm import perf
      >>> from jaxcomm.compression.quantizers import natural
      >>> perf.error_of(natural().claims, 1000, 8).steps
      (1.0, 1.125)
    """
    if claims is not None and claims.variance is not None:
        omega = float(claims.variance(size, workers))
        source = "bound of SGD where noise dominates; unknown with Adam"
        return ErrorModel("unbiased", omega, (1.0, 1.0 + omega), source)
    if claims is not None and claims.contraction is not None:
        delta = float(claims.contraction(size, workers))
        after = f"as SGD after of the order of {delta**-2:.1e} steps, unknown before"
        source = after if delta > _LITTLE else "no useful bound"
        return ErrorModel("biased", delta, None, source)
    return UNKNOWN
