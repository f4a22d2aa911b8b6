"""The laws of codecs, `jaxcomm.testing.CODEC_LAWS`, hold of every row's codec: `law[method]`."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest

from jaxcomm.testing import CODEC_LAWS, CodecTrial
from jaxcomm.testing._laws import codec_laws_of
from tests.cases import CASES

WORKERS: Mapping[str, tuple[int, ...]] = {
    "repeats": (1,),
    "NaN shows": (1,),
    "sums": (3, 1, 2, 5, 8),
}
"""The numbers of workers, if not 3 and 1."""

MOST = {"qsgd_4_bits": 7}
"""How many workers' sum fits in the bits of a codec, where these are few."""


class Row(NamedTuple):
    """A codec under the name of the first row that has it."""

    name: str
    trial: CodecTrial


def _rows() -> list[Row]:
    """The codecs of all rows, each once, with and without feedback."""
    first: dict[Any, str] = {}
    for case in CASES:
        for codec in filter(None, (case.codec, case.compressor)):
            inner = codec is case.compressor and codec is not case.codec
            first.setdefault(codec, f"{case.name}_without_feedback" if inner else case.name)
    return [Row(name, CodecTrial(codec, codec.claims)) for codec, name in first.items()]


ROWS = _rows()


def _law(law: str) -> Any:
    first, *more = WORKERS.get(law, (3, 1))

    def parameter(case: Row, workers: int) -> Any:
        label = case.name if workers == first else f"{case.name}-{workers}"
        return pytest.param(case, workers, id=label)

    held = [row for row in ROWS if law in codec_laws_of(row.trial)]

    @pytest.mark.filterwarnings("ignore:`bits`=.* leaves .* levels:UserWarning")
    @pytest.mark.parametrize(
        ("case", "workers"),
        [parameter(row, n) for n in (first, *more) for row in held if n <= MOST.get(row.name, n)],
    )
    def test(case: Row, workers: int) -> None:
        CODEC_LAWS[law](case.trial._replace(workers=(workers,)))

    return test


globals().update({f"test_{law.replace(' ', '_')}": _law(law) for law in CODEC_LAWS})
