"""A contraction loses no more than it claims: E|C(x) - x|^2 <= (1 - delta) |x|^2."""

import jax
import numpy as np
import pytest

from jaxcomm import Codec
from jaxcomm.testing._codec import decoded, require_contraction
from tests.cases import CASES, Case
from tests.slow import slow

CONTRACTIONS = [c for c in CASES if c.contraction]
DRAWS, SIZE = 3000, 48  # As in the law of exact moments, to share its programs.


def compressed(codec: Codec, x: jax.Array, draws: int) -> np.ndarray:
    """The decoded payload of a single worker, [draws, *shape] in float64."""
    return decoded(codec, x[None], draws, seed=3)[:, 0]


def check_contraction(case: Case, size: int) -> None:
    draws = DRAWS if case.random else 1
    require_contraction(case.compressor, case.contraction(size), size=size, draws=draws, seed=3)


@pytest.mark.parametrize("size", [SIZE, slow(1), slow(7), slow(300)])
@pytest.mark.parametrize("case", CONTRACTIONS, ids=repr)
def test_contraction(case: Case, size: int) -> None:
    check_contraction(case, size)


@pytest.mark.parametrize("size", [7, slow(1), slow(64), slow(300)])
@pytest.mark.parametrize("case", CONTRACTIONS, ids=repr)
def test_codecs_claim_only_what_holds(case: Case, size: int) -> None:
    codec = case.compressor
    variance, contraction, _ = codec.claims
    stated = contraction(size, 1) if contraction else 1 - variance(size, 1)
    assert stated <= case.contraction(size) * (1 + 1e-9)
