"""Local steps: every method, how to build it, and what it claims."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import optax

from jaxcomm.catalogue import METHODS, TINY

PERIOD = 3
OUTER = {"outer": optax.sgd(0.7, momentum=0.5)}
NEUTRAL = {"outer": optax.sgd(1.0)}


class LocalCase(NamedTuple):
    """A method and its claims.

    Attributes:
      name: Shown in test ids.
      make: `(inner, period, aggregator) -> transformation`, whole.
      neutral: The same in settings in which it is local SGD; `None` for `RECIPES`.
      meets: The state of its averaging rounds, from the state of the transformation.
      aggregates: Whether it takes an aggregator.
      agree: Whether workers are equal after an averaging round.
      anchored: Whether parameters of 16 bits are rounded anchors.
    """

    name: str
    make: Callable[..., optax.GradientTransformationExtraArgs]
    neutral: Callable[..., optax.GradientTransformationExtraArgs] | None = None
    meets: Callable[[Any], Any] = lambda state: state[1]
    aggregates: bool = True
    agree: bool = True
    anchored: bool = True

    def __repr__(self) -> str:
        return self.name


def _case(
    name: str, neutral: Mapping[str, Any] | None = None, outer: Any = OUTER, **claims: Any
) -> LocalCase:
    """A method of the catalogue, and the options in which it is local SGD."""
    make = partial(METHODS[name].build, TINY, **outer)
    return LocalCase(name, make, None if neutral is None else partial(make, **neutral), **claims)


LOCAL = [
    _case("local_sgd", {}, {}),
    _case("slowmo", {"momentum": 0.0, "learning_rate": 1.0}, {}),
    _case("diloco", NEUTRAL),
    _case("pr_sgd", {}, {}, meets=lambda state: state, aggregates=False),
    _case("des_loc", {}, {}),
    _case("sparta", {"share": 1.0}, {}, agree=False, anchored=False),
    _case(
        "streaming_diloco",
        {**NEUTRAL, "fragments": 1, "overlap": 0, "mixing_factor": 0.0},
        agree=False,
    ),
]

# Methods that no setting makes local SGD: what they send is coarse, or late.
RECIPES = [
    _case("sparseloco", None, {}, aggregates=False),
    _case("diloco_muloco", aggregates=False),
    _case("streaming_diloco_4_bits", aggregates=False, agree=False),
    _case("eager_diloco", agree=False),
    _case("eager_diloco_delayed"),
]


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
