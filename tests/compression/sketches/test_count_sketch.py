"""A table is as large as was asked for, to a tenth, or an error says how large it would be."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxcomm
from jaxcomm.compression.sketches import count_sketch
from tests.codecs import payload_of
from tests.slow import slow


def table_size(size: int, ratio: float, **options: Any) -> int:
    return payload_of(count_sketch(sketch_ratio=ratio, **options), (size,)).table.size


@pytest.mark.parametrize("size", [10**3, slow(10**4), slow(10**5), slow(10**6), 2**22 + 1])
def test_tables_have_the_requested_size(size: int) -> None:
    for ratio in (0.01, 0.5, 2.0):
        for rows in (1, 5):
            made, asked = table_size(size, ratio, rows=rows), ratio * size
            assert asked <= made <= 1.1 * asked + rows  # And whole columns.


def test_large_tables_are_of_tiles() -> None:
    assert [table_size(1000, ratio, rows=5) for ratio in (0.5, 1, 2)] == [500, 1000, 2000]
    # Which a kernel fills: 1.5 million cells in one row.
    assert table_size(3 * 10**6, 0.5) % 1024 == 0
    assert table_size(3 * 10**6, 0.5, hashing="elements") == 1_500_000


@pytest.mark.parametrize(
    "make",
    [
        lambda **o: jaxcomm.all_reduce_mean(count_sketch(**o)),
        lambda **o: jaxcomm.fetch_sgd(k=8, **o),
        lambda **o: jaxcomm.sketched_sgd(k=8, **o),
    ],
    ids=["count_sketch", "fetch_sgd", "sketched_sgd"],
)
def test_tiles_that_change_the_table_size_are_refused(make: Callable[..., Any]) -> None:
    tx = make(sketch_ratio=0.5, hashing="tiles")
    first = jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data")
    with pytest.raises(ValueError, match=r"from (1 x 500|5 x 100) to . x 1024 cells: omit"):
        jax.eval_shape(first, jnp.zeros((2, 1000)))
