"""The codecs of docs/extending.md are one short file each, and the last one is PowerSGD."""

import functools
import pathlib
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from jaxcomm import Claims
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.testing import check_codec
from tests.low_rank import of_matrices, power_sgd, updates
from tests.programs import program
from tests.slow import slow
from tests.steps import steps

ROOT = pathlib.Path(__file__).parent.parent.parent
PUBLIC = {"jax", "jax.numpy", "jaxcomm", "typing", "math"}


@functools.cache
def files() -> list[str]:
    """The three blocks of the page that are a codec's whole file."""
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    codes = [block.code for block in program("run_readme").python_blocks(page)]
    return [code for code in codes if "Codec(" in code and "import Claims" in code]


@functools.cache
def low_rank() -> Any:
    defined: dict[str, Any] = {"__name__": "low_rank"}
    exec(files()[2], defined)
    return defined["low_rank"]


def test_each_codec_is_a_file_of_60_lines_without_private_imports() -> None:
    assert len(files()) == 3
    for code in files():
        assert len(code.splitlines()) <= 60
        imports = [
            line.split() for line in code.splitlines() if line.startswith(("import", "from"))
        ]
        assert {words[1] for words in imports} <= PUBLIC
        assert not re.search(r"[. ]_(?!replace)", code)


@pytest.mark.parametrize("feedback", [True, slow(False)])
def test_is_power_sgd(feedback: bool) -> None:
    given = updates((12, 7))
    plain = low_rank()(2, drawn=0)
    start = np.asarray(plain.init(jnp.zeros((12, 7))).shared, np.float64)
    expected = power_sgd(given.astype(np.float64), start, feedback=feedback)
    # The page says why PowerSGD itself claims no bound, so feedback would refuse it.
    codec = error_feedback(plain.replace(claims=Claims(bounded=True))) if feedback else plain
    means, _ = steps(jaxcomm.all_reduce_mean(codec), given)
    for worker in range(3):
        np.testing.assert_allclose(means[:, worker], expected, atol=1e-4)


@pytest.mark.slow
def test_keeps_the_laws_of_codecs() -> None:
    check_codec(of_matrices(low_rank()(2), columns=6))
