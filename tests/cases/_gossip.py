"""Gossip: every method with the mixing it runs, its equations in NumPy, and its bytes."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import optax

from jaxcomm import gossip
from jaxcomm.catalogue import METHODS, TINY
from tests.gossip import oracle


class GossipCase(NamedTuple):
    """A method and its claims.

    Attributes:
      name: Shown in test ids.
      make: `workers -> transformation`, cached so that tests share compiled programs.
      mixing: `workers -> Mixing`, the mixing that it runs.
      oracle: `(x, updates, W) -> x after each step`, in NumPy.
      drift: By how much the mean of workers may be off after 1000 steps, in float32.
      double: By how much float64 parameters may be off after a few steps.
      floor: By how many units in the last place bfloat16 workers may differ; `None`: no claim.
      message: Bytes sent to one neighbor, of 12 float32 parameters.
      sends: Messages that a worker of 8 sends in its costliest step.
      sums: Whether sums of parameters and masses are kept, in place of the mean of parameters.
      late: By how many steps updates come later.
      powers_of_2: Whether it requires a power of 2 of workers.
      absence: Whether workers may be absent; else `present` is refused by name.
      corrects: Whether equal workers may diverge again, by corrections of their steps.
      resumes: Whether a worker that comes back brings its steps, which is no equation of a step.
    """

    name: str
    make: Callable[[int], optax.GradientTransformationExtraArgs]
    mixing: Callable[[int], gossip.Mixing]
    oracle: Callable[..., np.ndarray]
    drift: float = 2e-5
    double: float = 1e-13
    floor: float | None = 6
    message: int = 12 * 4
    sends: int = 2
    sums: bool = False
    late: int = 0
    powers_of_2: bool = False
    absence: bool = True
    corrects: bool = False
    resumes: bool = False

    def __repr__(self) -> str:
        return self.name


def _case(name: str, oracle: Callable[..., np.ndarray], **claims: Any) -> GossipCase:
    """A method of the catalogue, with its equations."""
    method = METHODS[name]
    return GossipCase(
        name,
        cache(lambda workers: method.build(TINY, workers)),
        cache(lambda workers: gossip.to_mixing(method.graph(workers))),
        oracle,
        **claims,
    )


K, STEP_SIZE = 3, 0.3  # Of 12 parameters; both are those of the catalogue.
# Values, which are float32, and places of 4 bits in one word.
SPARSE = {"message": K * 4 + 4, "double": 2e-6}
MASS = {"message": 12 * 4 + 4, "sums": True}
COMPRESSED = {"k": K, "step_size": STEP_SIZE}
GOSSIP = [
    _case("dpsgd", oracle.combine_then_adapt),
    _case("dpsgd_adapt_then_combine", oracle.adapt_then_combine),
    _case("dpsgd_in_turns", oracle.combine_then_adapt, sends=1, powers_of_2=True),
    _case("matcha", oracle.adapt_then_combine),
    _case("matcha_periodic", oracle.combine_then_adapt),
    _case("choco_sgd", partial(oracle.choco, **COMPRESSED), absence=False, floor=30, **SPARSE),
    _case(
        "choco_sgd_over_matcha",
        partial(oracle.choco_by_neighbor, **COMPRESSED),
        floor=30,
        **SPARSE,
    ),
    # The codec's error is far above the floor.
    _case("deep_squeeze", partial(oracle.deep_squeeze, **COMPRESSED), floor=None, **SPARSE),
    _case("d2", oracle.d2, drift=1e-4, corrects=True),
    _case("sgp", oracle.push, sends=1, **MASS),
    _case("sgp_directed", oracle.push, sends=7, **MASS),
    _case("overlap_sgp", partial(oracle.push, delay=2), sends=7, **MASS),
    _case("ad_psgd", partial(oracle.late_steps, staleness=2), sends=1, late=2),
    # Its momentum and rates have a test of their own.
    _case("noloco", oracle.adapt_then_combine, sends=1, resumes=True),
    _case("gasloc", oracle.adapt_then_combine, resumes=True),
    # XLA divides by 3 by a rounded third: each of 333 averages of up to 4.4 grows by 2.9e-8 of it.
    _case("periodic_averaging", partial(oracle.exact_now_and_then, every=3), drift=3e-5),
]


def gossip_rows(workers: int) -> list[GossipCase]:
    """Rows that allow this number of workers."""
    return [case for case in GOSSIP if not (case.powers_of_2 and workers & (workers - 1))]
