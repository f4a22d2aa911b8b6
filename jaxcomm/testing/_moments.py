"""Laws of many draws: no bias, and a second moment within its bound."""

import numpy as np

from jaxcomm.testing._law import quantile, require_law

ALPHA = 1e-6  # Of a right method to be called biased.
BEYOND = 1e-7  # Of one to be called too far.


def require_unbiased(
    law: str,
    sample: np.ndarray,
    truth: np.ndarray,
    what: str,
    *,
    spread: float | None = None,
    rounding: float | np.ndarray = 0.0,
) -> None:
    """The average of draws is the truth: a z-test over all coordinates, and along the truth.

    Args:
      law: Its name, for the message.
      sample: Float64, [draws, coordinates].
      truth: Float64, [coordinates].
      what: What was drawn, for the message.
      spread: How far a draw may be from the truth in a coordinate. Default: the largest error of
        all coordinates that the sample shows.
      rounding: What is allowed for rounding of floats, in all coordinates together or in each.
    """
    draws, size = sample.shape
    far = np.abs(sample - truth).max(initial=0) if spread is None else spread
    # Along the truth too: a shrinking bias is small in a coordinate and large in the sum.
    sample = np.concatenate([sample, (sample @ truth)[:, None]], axis=1)
    ones = np.ones(size)
    along = rounding * np.abs(truth).max(initial=0)
    if isinstance(rounding, np.ndarray):
        along = np.abs(truth) @ rounding
    rounding = np.append(rounding * ones, along)
    # Bernstein's second term: values too rare to be seen in so many draws have no deviation yet.
    unseen = 2 * far * np.log(2 * (size + 1) / ALPHA) / (3 * draws)
    unseen = unseen * np.append(ones, np.abs(truth).sum())
    truth = np.append(truth, truth @ truth)
    deviation = sample.std(axis=0, ddof=1) / draws**0.5
    allowed = quantile(ALPHA / 2 / len(truth)) * deviation + unseen + rounding
    off = np.abs(sample.mean(axis=0) - truth)
    worst = int(np.argmax(off - allowed))
    where = f"in coordinate {worst}" if worst < size else "along the truth"
    require_law(
        np.all(off <= allowed),
        law,
        f"of {what}, {draws} draws average {sample.mean(axis=0)[worst]:.6g} {where}, where "
        f"{truth[worst]:.6g} is expected: off by {off[worst]:.3g}, more than {allowed[worst]:.3g}.",
    )


def require_moment(
    law: str, errors: np.ndarray, bound: float, what: str, *, alpha: float = BEYOND
) -> None:
    """The mean of squared errors, [draws], is not significantly above the bound."""
    slack = quantile(alpha) * errors.std() / len(errors) ** 0.5
    require_law(
        errors.mean() - slack <= bound,
        law,
        f"of {what}, the squared error is {errors.mean():.6g} +- {slack:.2g} on average of "
        f"{len(errors)} draws, above the bound of {bound:.6g}.",
    )
