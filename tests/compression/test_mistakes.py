"""What is wrapped must be a codec: one line says what else it was."""

import re
from typing import Any

import optax
import pytest

import jaxcomm
from jaxcomm.compression import blockwise, feedback, rotated, scaled
from jaxcomm.compression.sparsifiers import random_k, top_k

WRAPPERS = {
    "blockwise": lambda codec: blockwise(codec, 8),
    "rotated": rotated,
    "scaled": scaled,
    "diana": feedback.diana,
    "ecq": feedback.ecq,
    "ef21": feedback.ef21,
    "error_feedback": feedback.error_feedback,
    "local_clip": lambda codec: feedback.local_clip(codec, 1.0),
    "momentum": feedback.momentum,
    "momentum_correction": feedback.momentum_correction,
}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (top_k, "got the function `top_k`: call it, as in `top_k(...)`."),
        (random_k, "got the function `random_k`: call it, as in `random_k(...)`."),
        ("data", "must be a codec, such as"),
        (jaxcomm.mean(), "must be a codec, such as"),
        (optax.identity(), "must be a codec, such as"),
    ],
    ids=["top_k", "random_k", "axis", "aggregator", "optimizer"],
)
def test_what_is_no_codec(name: str, mistake: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        WRAPPERS[name](mistake)
    assert "`codec` must be a codec" in str(error.value)
    assert "\n" not in str(error.value)


def test_every_wrapper_is_asked() -> None:
    makers = {"error_feedback", *feedback.__all__}
    assert {*WRAPPERS} == makers | {"blockwise", "rotated", "scaled"}
