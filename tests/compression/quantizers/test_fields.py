"""Fields against arithmetic by hand: what fits, what does not, and that nothing carries."""

import pytest

from jaxcomm.compression.quantizers._dither import Field, choose_field, most_levels


def test_the_width_follows_from_15_levels() -> None:
    widths = {1: 5, 2: 6, 4: 8, 8: 8, 9: 10, 34: 10, 35: 16, 2184: 16, 2185: 32, 10**6: 32}
    for workers, width in widths.items():
        assert choose_field(15, None, workers) == Field(15, width)


def test_int8_holds_the_levels_of_the_paper() -> None:
    levels = {2: 63, 4: 31, 8: 15, 16: 7, 32: 3, 64: 1, 127: 1, 128: 0}
    assert {workers: most_levels(8, workers) for workers in levels} == levels


@pytest.mark.parametrize(
    ("levels", "bits", "workers", "words"),
    [
        (None, 8, 128, "`bits`=8 .* 128 .* works is 9 bits"),
        (15, 16, 4096, "`bits`=16 .* 4096 .* works is 32 bits"),
        (None, 2, 2, "`bits`=2 .* 2 .* works is 3 bits"),
        (3, None, 10**9, "smallest width that works is over 32 bits"),
    ],
)
def test_too_few_bits(levels: int | None, bits: int | None, workers: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choose_field(levels, bits, workers)
