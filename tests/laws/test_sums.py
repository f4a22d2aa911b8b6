"""Added or merged payloads decode to the mean of the decoded payloads."""

import numpy as np
import pytest

import jaxcomm
from jaxcomm.compression import blockwise, rotated
from tests.cases import CASES, Case
from tests.workers import draws, flat, gradients

MERGED = [c for c in CASES if c.codec and callable(c.codec.combine)]
WRAPPERS = {
    "blocks": lambda codec: blockwise(codec, 4),
    "rotated": rotated,
    "rotated blocks": lambda codec: blockwise(rotated(codec), 4),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("case", MERGED, ids=repr)
def test_wrapped_codecs_still_merge(case: Case, wrapper: str) -> None:
    updates, times = gradients(5), 1000
    sample = draws(jaxcomm.merged_mean(WRAPPERS[wrapper](case.codec)), updates, times)
    off = np.abs(sample.mean(axis=0) - flat(updates).mean(axis=0))
    assert np.all(off <= 6 * sample.std(axis=0, ddof=1) / times**0.5 + 1e-6)
