"""Checks the error bounds that a codec claims."""

import numpy as np

from jaxcomm._contract import Claims, Codec
from jaxcomm.testing._inputs import inputs
from jaxcomm.testing._law import require_law
from jaxcomm.testing._moments import require_moment, require_unbiased
from jaxcomm.testing._single_worker import decoded

UNBIASED, VARIANCE, CONTRACTION = "unbiased", "variance", "contraction"


def _overflowed(codec: Codec, sample: np.ndarray) -> bool:
    """Whether the sample is NaN because of an overflow, which `codec.drop_overflow` permits."""
    return codec.drop_overflow is not None and bool(np.isnan(sample).any())


def require_contraction(
    codec: Codec, bound: float, *, size: int, workers: int = 1, draws: int = 2000, seed: int = 3
) -> None:
    """Checks `sum_i E|Q(x_i) - x_i|^2 <= (1 - bound) sum_i |x_i|^2`."""
    for name, x in inputs(size, workers).items():
        sample = decoded(codec, x, draws, seed)
        # Error feedback uses the form that drops.
        if codec.drop_overflow is not None and _overflowed(codec, sample):
            sample = decoded(codec.drop_overflow, x, draws, seed)
        errors = np.sum((sample - x) ** 2, axis=(1, 2))
        squares = np.sum(x**2)
        limit = (1 - bound) * squares * (1 + 1e-5) + 1e-12 * squares
        what = f"input {name!r}, {workers} workers, size {size}, delta {bound:.6g}"
        require_moment(CONTRACTION, errors, limit, what)


def require_variance(
    codec: Codec, bound: float, *, size: int, workers: int = 1, draws: int = 2000, seed: int = 3
) -> None:
    """Checks `E Q(x_i) = x_i` and `sum_i E|Q(x_i) - x_i|^2 <= bound sum_i |x_i|^2`."""
    for name, x in inputs(size, workers).items():
        sample = decoded(codec, x, draws, seed)
        what = f"input {name!r}, {workers} workers, size {size}"
        if _overflowed(codec, sample):
            require_law(x.any(), UNBIASED, f"for {what}, zeros overflow the capacity.")
            continue
        peak = np.abs(x).max(initial=0)
        require_unbiased(
            UNBIASED,
            sample.reshape(draws, -1),
            x.ravel(),
            what,
            rounding=2.0**-21 * peak * x.size,
        )
        errors = np.sum((sample - x) ** 2, axis=(1, 2))
        squares = np.sum(x**2)
        limit = bound * squares * (1 + 1e-5) + (2.0**-42 + 1e-12) * squares
        require_moment(VARIANCE, errors, limit, f"{what}, omega {bound:.6g}")


def require_claims(
    codec: Codec, claims: Claims, *, size: int, workers: int, draws: int, seed: int
) -> None:
    """Checks the claims that are not None; per worker if workers do not share statistics."""
    together = workers if codec.combine is not None else 1
    if claims.variance is not None:
        omega = claims.variance(size, together)
        require_variance(codec, omega, size=size, workers=workers, draws=draws, seed=seed)
    if claims.contraction is not None:
        delta = claims.contraction(size, together)
        require_contraction(codec, delta, size=size, workers=workers, draws=draws, seed=seed)
