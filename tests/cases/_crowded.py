"""Rows of codecs with a fixed capacity and twice as much input: see `tests/laws/test_capacity.py`.

A leaf has 40 rows of two coordinates, of which 20 are not zero on any worker. The capacity is 10
rows, or 20 coordinates.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

import jaxcomm
from jaxcomm import all_gather_mean, all_reduce_mean, recursive_doubling_mean, two_stage_mean
from jaxcomm.compression import scaled
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import dither, sparse_dither
from jaxcomm.compression.sketches import s2_codes, s2_sketch
from jaxcomm.compression.sparsifiers import (
    ada_comp,
    nonzero,
    nonzero_union,
    threshold,
    variance_based,
)

ROWS, COLUMNS, FILLED, FITTING = 40, 2, 20, 10
DENSITY = FITTING / ROWS


class Crowded(NamedTuple):
    """A method whose capacity the update exceeds.

    Attributes:
      name: Shown in test ids.
      make: `overflow -> transformation`, with `diagnostics=True`; a row that keeps gets "nan",
        the default of its codec.
      of: The functions with an option `overflow` that it uses.
      keeps: Coordinates that did not fit are sent later.
      residual: `state -> [workers, ROWS, COLUMNS]`, what each worker still keeps; `None` where all
        has been sent after some more steps.
      lost: The value of `overflow` in `diagnostics` if it is dropped.
      exact: The mean is exact if everything fits.
      filled: How many rows are not zero if the capacity is exceeded.
    """

    name: str
    make: Callable[[Any], optax.GradientTransformationExtraArgs]
    of: tuple[Callable[..., Any], ...]
    keeps: bool = False
    residual: Callable[[Any], jax.Array] | None = None
    lost: float | None = None
    exact: bool = True
    filled: int = FILLED

    def __repr__(self) -> str:
        return self.name


def _own(state: Any) -> jax.Array:
    """The residual of the first of two leaves, which have one shape and so are one unit."""
    return state.own.per_worker["data"][0].kept[:, 0]


def _gathered(codec: Any, **options: Any) -> Any:
    return all_gather_mean(codec, scope="leaf", diagnostics=True, **options)


def _summed(codec: Any) -> Any:
    return all_reduce_mean(codec, scope="leaf", diagnostics=True)


_S2 = {
    "density": DENSITY,
    "sketch_ratio": 4,
    "rows": 3,
}  # Of a quarter of the cells nearly all draws peel.

CROWDED = [
    Crowded(
        "nonzero",
        lambda overflow: _gathered(nonzero(density=DENSITY, overflow=overflow)),
        (nonzero,),
        lost=FILLED - FITTING,
    ),
    Crowded(
        "threshold",
        lambda overflow: _gathered(threshold(1e-3, k=2 * FITTING, overflow=overflow)),
        (threshold,),
        lost=2 * (FILLED - FITTING),
    ),
    Crowded(
        "nonzero_union",
        lambda overflow: _summed(nonzero_union(density=DENSITY, overflow=overflow)),
        (nonzero_union,),
        lost=1 / 2,
    ),
    Crowded(
        "sparse_global_qsgd",
        lambda overflow: jaxcomm.sparse_global_qsgd(
            capacity=2 * FITTING, levels=32767, overflow=overflow, scope="leaf", diagnostics=True
        ),
        (jaxcomm.sparse_global_qsgd, sparse_dither),
        lost=2 * (FILLED - FITTING),
        exact=False,
    ),
    Crowded(
        "s2_reducer",
        lambda overflow: jaxcomm.s2_reducer(
            density=DENSITY, sketch_ratio=1, overflow=overflow, diagnostics=True
        ),
        (jaxcomm.s2_reducer, s2_sketch),
        lost=1 / 2,
        exact=False,
    ),
    Crowded(
        "s2_reducer_peel",
        lambda overflow: jaxcomm.s2_reducer(
            decode="peel", overflow=overflow, diagnostics=True, **_S2
        ),
        (jaxcomm.s2_reducer, s2_sketch),
        lost=1 / 2,
    ),
    Crowded(
        "s2_reducer_8_bits",
        lambda overflow: jaxcomm.s2_reducer(
            decode="peel",
            bits=8,
            density=DENSITY,
            sketch_ratio=4,
            rows=3,
            overflow=overflow,
            diagnostics=True,
        ),
        (jaxcomm.s2_reducer, s2_codes),
        filled=ROWS,  # As many coordinates as cells do not peel.
        exact=False,
    ),
    Crowded(
        "nonzero_two_stage",
        lambda overflow: two_stage_mean(
            nonzero(density=DENSITY, overflow=overflow),
            mean_codec=dither(bits=16),
            # Which sends no NaN.
            ownership="cyclic",
            scope="leaf",
            diagnostics=True,
        ),
        (nonzero,),
        lost=FILLED - 12,  # Three of the ten rows of each of four servers.
        exact=False,
    ),
    Crowded(
        "nonzero_two_stage_of_the_mean",
        lambda overflow: two_stage_mean(
            dither(bits=16),
            mean_codec=nonzero(density=DENSITY, overflow=overflow),
            ownership="cyclic",
            scope="leaf",
            diagnostics=True,
        ),
        (nonzero,),
        exact=False,
    ),
    Crowded(
        "nonzero_doubling",
        lambda overflow: recursive_doubling_mean(
            lambda added: (
                nonzero(density=DENSITY, overflow=overflow) if added == 1 else dither(bits=16)
            ),
            scope="leaf",
            diagnostics=True,
        ),
        (nonzero,),
        lost=FILLED - FITTING,
        exact=False,
    ),
    Crowded(
        "error_feedback_nonzero",
        lambda overflow: _gathered(error_feedback(nonzero(density=DENSITY, overflow=overflow))),
        (nonzero,),
        keeps=True,
        residual=_own,
        lost=FILLED - FITTING,
    ),
    Crowded(
        "error_feedback_nonzero_union",
        lambda overflow: _summed(error_feedback(nonzero_union(density=DENSITY, overflow=overflow))),
        (nonzero_union,),
        keeps=True,
        residual=_own,
    ),
    Crowded(
        "error_feedback_threshold",
        lambda overflow: _gathered(error_feedback(threshold(1e-3, k=20, overflow=overflow))),
        (threshold,),
        keeps=True,
        residual=_own,
    ),
    Crowded(
        "error_feedback_s2_sketch",
        lambda overflow: _summed(
            error_feedback(s2_sketch(density=DENSITY, sketch_ratio=1.5, overflow=overflow))
        ),
        (s2_sketch,),
        keeps=True,
        residual=_own,
    ),
    Crowded(
        "error_feedback_s2_sketch_peel",
        lambda overflow: _summed(
            error_feedback(s2_sketch(decode="peel", overflow=overflow, **_S2))
        ),
        (s2_sketch,),
        keeps=True,
        residual=_own,
    ),
    Crowded(
        "error_feedback_scaled_s2_sketch",
        lambda overflow: _summed(
            error_feedback(scaled(s2_sketch(density=DENSITY, sketch_ratio=0.5, overflow=overflow)))
        ),
        (s2_sketch,),
        keeps=True,
        residual=_own,
    ),
    Crowded(
        "error_feedback_s2_codes",
        lambda overflow: _summed(
            error_feedback(s2_codes(density=DENSITY, sketch_ratio=1.5, overflow=overflow))
        ),
        (s2_codes,),
        keeps=True,
        residual=_own,
    ),
    Crowded(
        "variance_based",
        lambda overflow: _gathered(variance_based(alpha=0.5, k=2 * FITTING)),
        (),
        keeps=True,
        residual=_own,
    ),
    Crowded(
        "ada_comp",
        lambda overflow: _gathered(ada_comp(block_size=8, capacity=1)),
        (),
        keeps=True,
        residual=_own,
    ),
    Crowded(
        "sparcml",
        lambda overflow: jaxcomm.sparcml(density=DENSITY, union_density=DENSITY, diagnostics=True),
        (),
        keeps=True,
    ),
    Crowded(
        "parallax",
        lambda overflow: jaxcomm.parallax(
            sparse=lambda tree: jax.tree.map(lambda x: True, tree),
            density=DENSITY,
            union_density=DENSITY,
        ),
        (),
        keeps=True,
    ),
]
