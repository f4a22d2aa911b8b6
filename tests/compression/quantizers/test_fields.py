"""Fields against arithmetic by hand: what fits, what does not, and that nothing carries."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcomm.compression.quantizers._dither import Field, choose_field, most_levels, pack, unpack
from tests.slow import slow


@pytest.mark.parametrize(
    ("workers", "width"),
    [
        (1, 5),
        (2, 6),
        (4, 8),
        (8, 8),
        (9, 10),
        (34, 10),
        (35, 16),
        (2184, 16),
        (2185, 32),
        (10**6, 32),
    ],
)
def test_the_width_follows_from_15_levels(workers: int, width: int) -> None:
    assert choose_field(15, None, workers) == Field(15, width)


@pytest.mark.parametrize(
    ("workers", "levels"),
    [(2, 63), (4, 31), (8, 15), (16, 7), (32, 3), (64, 1), (127, 1), (128, 0)],
)
def test_int8_holds_the_levels_of_the_paper(workers: int, levels: int) -> None:
    assert most_levels(8, workers) == levels


@pytest.mark.parametrize(
    ("levels", "bits", "workers", "smallest"),
    [(None, 8, 128, 9), (16, 8, 8, 9), (15, 16, 4096, 32), (None, 2, 2, 3)],
)
def test_too_few_bits(levels: int | None, bits: int, workers: int, smallest: int) -> None:
    with pytest.raises(
        ValueError, match=rf"`bits`={bits} .* {workers} .* works is {smallest} bits"
    ):
        choose_field(levels, bits, workers)


def test_nothing_fits() -> None:
    with pytest.raises(ValueError, match="smallest width that works is over 32 bits"):
        choose_field(3, None, 10**9)


@pytest.mark.quick(3)
@pytest.mark.parametrize("width", [*range(2, 17), 32])
@pytest.mark.parametrize("shape", [(3, 5), slow(()), slow((1,)), slow((7,)), slow((0,))])
@pytest.mark.parametrize("workers", [3, slow(1), slow(64)])
def test_sums_of_extreme_codes_unpack(width: int, shape: tuple[int, ...], workers: int) -> None:
    field = Field(most_levels(width, workers), width)
    if field.levels == 0:
        with pytest.raises(ValueError, match=f"`bits`={width} cannot hold"):
            choose_field(None, width, workers)
        return
    rng = np.random.default_rng(0)
    extremes = field.levels * rng.choice([-1, 0, 1], size=(workers, *shape))
    extremes[:, ...] = np.where(rng.random(shape) < 0.5, field.levels, extremes)
    packed = [np.asarray(pack(jnp.asarray(codes, jnp.int32), field)) for codes in extremes]
    lanes = 32 // width
    words = extremes[0].size if width == 32 else -(-extremes[0].size // lanes)
    assert packed[0].nbytes == (extremes[0].size if width == 8 else 4 * words)
    total = np.sum(
        packed, axis=0, dtype=packed[0].dtype
    )  # Wraps in its own dtype, as the wire does.
    unpacked = unpack(jnp.asarray(total), field, workers, shape)
    np.testing.assert_array_equal(unpacked, extremes.sum(axis=0))
