"""Local steps: every method, how to build it, and what it claims."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import optax
import pytest

import jaxcomm
from jaxcomm.compression import blockwise
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither, e3m0
from jaxcomm.synchronization import (
    diloco,
    eager_diloco,
    local_sgd,
    pr_sgd,
    slowmo,
    sparseloco,
    streaming_diloco,
)

PERIOD = 3


class LocalCase(NamedTuple):
    """A method and its claims.

    Attributes:
      name: Shown in test ids.
      make: `(inner, period, aggregator) -> transformation`, whole.
      neutral: The same in settings in which it is local SGD; `None` for `RECIPES`.
      meets: The state of its averaging rounds, from the state of the transformation.
      aggregates: Whether it takes an aggregator.
      agree: Whether workers are equal after an averaging round.
    """

    name: str
    make: Callable[..., optax.GradientTransformationExtraArgs]
    neutral: Callable[..., optax.GradientTransformationExtraArgs] | None = None
    meets: Callable[[Any], Any] = lambda state: state[1]
    aggregates: bool = True
    agree: bool = True

    def __repr__(self) -> str:
        return self.name


def _after(inner: Any, method: Any) -> Any:
    return optax.chain(jaxcomm.per_worker(inner), method)


def _outer() -> Any:
    return optax.sgd(0.7, momentum=0.5)


LOCAL = [
    LocalCase(
        "local_sgd",
        lambda inner, period=PERIOD, aggregator=None: _after(
            inner, local_sgd(period, aggregator=aggregator)
        ),
        lambda inner, period=PERIOD, aggregator=None: _after(
            inner, local_sgd(period, aggregator=aggregator)
        ),
    ),
    LocalCase(
        "slowmo",
        lambda inner, period=PERIOD, aggregator=None: _after(
            inner, slowmo(period, learning_rate=0.1, aggregator=aggregator)
        ),
        lambda inner, period=PERIOD, aggregator=None: _after(
            inner, slowmo(period, momentum=0.0, aggregator=aggregator)
        ),
    ),
    LocalCase(
        "diloco",
        lambda inner, period=PERIOD, aggregator=None: diloco(
            inner, _outer(), period, aggregator=aggregator
        ),
        lambda inner, period=PERIOD, aggregator=None: diloco(
            inner, optax.sgd(1.0), period, aggregator=aggregator
        ),
    ),
    LocalCase(
        "pr_sgd",
        lambda inner, period=PERIOD: pr_sgd(inner, period),
        lambda inner, period=PERIOD: pr_sgd(inner, period),
        meets=lambda state: state,
        aggregates=False,
    ),
    LocalCase(
        "streaming_diloco",
        lambda inner, period=PERIOD, aggregator=None: streaming_diloco(
            inner,
            _outer(),
            period,
            fragments=2,
            overlap=1,
            mixing_factor=0.5,
            aggregator=aggregator,
        ),
        lambda inner, period=PERIOD, aggregator=None: streaming_diloco(
            inner, optax.sgd(1.0), period, fragments=1, aggregator=aggregator
        ),
        agree=False,
    ),
]

# Methods that no setting makes local SGD: what they send is coarse, or late.
RECIPES = [
    LocalCase(
        "sparseloco",
        lambda inner, period=PERIOD: sparseloco(inner, period, k=2, block_size=4),
        aggregates=False,
    ),
    LocalCase(
        "muloco",
        lambda inner, period=PERIOD: diloco(
            inner,  # Muon in the method; it breaks strict promotion of dtypes.
            _outer(),
            period,
            aggregator=jaxcomm.all_gather_mean(error_feedback(blockwise(dither(bits=4), 32))),
        ),
        aggregates=False,
    ),
    LocalCase(
        "streaming_diloco_4_bits",
        lambda inner, period=PERIOD: streaming_diloco(
            inner,
            _outer(),
            period,
            fragments=2,
            overlap=1,
            mixing_factor=0.5,
            aggregator=jaxcomm.all_gather_mean(blockwise(e3m0(), 256)),
        ),
        aggregates=False,
        agree=False,
    ),
    LocalCase(
        "eager_diloco",
        lambda inner, period=PERIOD, aggregator=None: eager_diloco(
            inner, _outer(), period, aggregator=aggregator
        ),
        agree=False,
    ),
    LocalCase(
        "eager_diloco_delayed",
        lambda inner, period=PERIOD, aggregator=None: eager_diloco(
            inner, _outer(), period, aggregator=aggregator, eager=False
        ),
    ),
]

# An exchange around an optimizer, one of its state, and one in parts.
QUICK = {"diloco", "pr_sgd", "streaming_diloco"}


def local_rows(cases: list[LocalCase] = LOCAL, quick: set[str] = QUICK) -> list:
    """Rows for `pytest.mark.parametrize`, all but the `quick` ones in the slow run only."""
    return [pytest.param(c, marks=[] if c.name in quick else [pytest.mark.slow]) for c in cases]


@cache
def neutral(case: LocalCase, period: int) -> Any:
    """Local SGD with a rate of 1, one object for all tests."""
    return case.neutral(optax.sgd(1.0), period)


def by_hand(
    x: np.ndarray, gradients: np.ndarray, weights: np.ndarray, present: np.ndarray, period: int
) -> np.ndarray:
    """Local SGD of rate 1 in float64: x [n, d], the rest [steps, n, ...]; x after each step."""
    x, anchor, total = x.astype(np.float64), x[0].astype(np.float64), np.zeros(len(x))
    found = []
    for t, (gradient, weight, here) in enumerate(zip(gradients, weights, present, strict=True)):
        taken = np.isfinite(gradient).all(axis=1) & (weight != 0)
        x[taken] -= gradient[taken]
        total[taken] += weight[taken]
        if (t + 1) % period == 0:
            share = total * here
            if share.sum():
                anchor = anchor + share @ (x - anchor) / share.sum()
            x[here], total[here] = anchor, 0
        found.append(x.copy())
    return np.stack(found)
