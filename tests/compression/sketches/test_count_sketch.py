"""A table is as large as was asked for, to a tenth, or an error says how large it would be."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxcomm
from jaxcomm import Coins
from jaxcomm.compression.sketches import count_sketch
from tests.codecs import context_of

MAKERS: dict[str, Callable[..., Any]] = {
    "count_sketch": lambda ratio, **o: jaxcomm.all_reduce_mean(
        count_sketch(sketch_ratio=ratio, **o)
    ),
    "fetch_sgd": lambda ratio, **o: jaxcomm.fetch_sgd(sketch_ratio=ratio, k=8, **o),
    "sketched_sgd": lambda ratio, **o: jaxcomm.sketched_sgd(sketch_ratio=ratio, k=8, **o),
}


def table_size(size: int, **options: Any) -> int:
    codec = count_sketch(**options)
    payload = jax.eval_shape(
        lambda key, x: codec.encode(context_of(codec, x, Coins(key, key)), x)[0],
        jax.random.key(0),
        jax.ShapeDtypeStruct((size,), jnp.float32),
    )
    return payload.table.size


@pytest.mark.quick(7)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("ratio", [0.01, 0.5, 2.0])
@pytest.mark.parametrize("size", [10**3, 10**4, 10**5, 10**6, 2**22 + 1])
def test_a_table_has_the_size_that_was_asked_for(size: int, ratio: float, rows: int) -> None:
    made, asked = table_size(size, sketch_ratio=ratio, rows=rows), ratio * size
    assert asked <= made <= 1.1 * asked + rows  # And whole columns.


def test_more_cells_are_more_cells() -> None:
    sizes = [table_size(1000, sketch_ratio=ratio, rows=5) for ratio in (0.5, 1, 2)]
    assert sizes == [500, 1000, 2000]


def test_large_tables_are_of_tiles() -> None:
    # Which a kernel fills: 1.5 million cells in one row.
    assert table_size(3 * 10**6, sketch_ratio=0.5) % 1024 == 0
    assert table_size(3 * 10**6, sketch_ratio=0.5, hashing="elements") == 1_500_000


@pytest.mark.parametrize("name", MAKERS)
def test_tiles_that_make_another_size_say_so(name: str) -> None:
    tx = MAKERS[name](0.5, hashing="tiles")
    with pytest.raises(ValueError, match=r"from (1 x 500|5 x 100) to . x 1024 cells: omit"):
        jax.eval_shape(
            jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name="data"), jnp.zeros((2, 1000))
        )
