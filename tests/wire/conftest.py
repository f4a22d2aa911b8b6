from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def loose() -> Iterator[None]:
    """The promotion that users have: optax relies on it in places."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
