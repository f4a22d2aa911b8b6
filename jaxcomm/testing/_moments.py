"""Statistical tests over many draws: no bias, and a bounded second moment."""

import numpy as np

from jaxcomm.testing._law import quantile, require_law

ALPHA = 1e-6  # The probability that a correct method fails the test of bias.
MOMENT_ALPHA = 1e-7  # The probability that a correct method fails the test of the moment.


def require_unbiased(
    law: str,
    sample: np.ndarray,
    truth: np.ndarray,
    what: str,
    *,
    spread: float | None = None,
    rounding: float | np.ndarray = 0.0,
) -> None:
    """Tests with z-tests whether the average of draws is the truth.

    There is one test per coordinate, and one of the inner product with the truth.

    Args:
      law: The name of the law, for the message.
      sample: Float64, [draws, coordinates].
      truth: Float64, [coordinates].
      what: The input, for the message.
      spread: The largest possible error of a draw in a coordinate. Default: the largest error in
        the sample.
      rounding: The allowance for floating-point rounding, for all coordinates or for each.
    """
    draws, size = sample.shape
    largest = np.abs(sample - truth).max(initial=0) if spread is None else spread
    # A shrinkage is small in each coordinate and large in the inner product with the truth.
    sample = np.concatenate([sample, (sample @ truth)[:, None]], axis=1)
    ones = np.ones(size)
    along = rounding * np.abs(truth).max(initial=0)
    if isinstance(rounding, np.ndarray):
        along = np.abs(truth) @ rounding
    rounding = np.append(rounding * ones, along)
    # Bernstein's second term: values too rare to occur in the draws add nothing to the deviation.
    unseen = 2 * largest * np.log(2 * (size + 1) / ALPHA) / (3 * draws)
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
        f"for {what}, {draws} draws average {sample.mean(axis=0)[worst]:.6g} {where} instead of "
        f"{truth[worst]:.6g}: off by {off[worst]:.3g}, more than {allowed[worst]:.3g}.",
    )


def require_moment(
    law: str, errors: np.ndarray, bound: float, what: str, *, alpha: float = MOMENT_ALPHA
) -> None:
    """Checks that the mean of the squared errors [draws] is not significantly above the bound."""
    slack = quantile(alpha) * errors.std() / len(errors) ** 0.5
    require_law(
        errors.mean() - slack <= bound,
        law,
        f"for {what}, the squared error over {len(errors)} draws is {errors.mean():.6g} +- "
        f"{slack:.2g} on average, above the bound of {bound:.6g}.",
    )
