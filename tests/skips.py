"""Why a test may be skipped: what a machine lacks, and nothing else.

The reason that a test gives begins with one of these; any other skip is a failure.
"""

REASONS = (
    "no GPU",
    "no libtpu",
    "no CUDA compiler",
    "no PyTorch",
    "no root or no tc",
    "not Linux",
    "no checkout",
    "this JAX",
    "the time is over",  # With `--minutes` only.
)


def reason_of(skipped: str) -> str | None:
    """Which of the reasons it is; None if it is another."""
    given = skipped.removeprefix("Skipped: ")
    return next((reason for reason in REASONS if given.startswith(reason)), None)
