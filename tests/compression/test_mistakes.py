"""What is wrapped must be a codec: one line says what else it was."""

import re
from typing import Any

import pytest

import jaxcomm
from jaxcomm.compression import blockwise, feedback, rotated, scaled
from jaxcomm.compression.sparsifiers import top_k

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
def test_invalid_codecs_are_refused(name: str) -> None:
    mistakes: list[tuple[Any, str]] = [
        (top_k, "got the function `top_k`: call it, as in `top_k(...)`."),
        (jaxcomm.mean(), ", such as"),
    ]
    for mistake, message in mistakes:
        with pytest.raises(ValueError, match=r"`codec` must be a codec.*" + re.escape(message)):
            WRAPPERS[name](mistake)


def test_every_wrapper_checks_its_codec() -> None:
    makers = {"error_feedback", *feedback.__all__}
    assert {*WRAPPERS} == makers | {"blockwise", "rotated", "scaled"}
