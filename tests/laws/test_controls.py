"""Laws of rows and of local methods catch mistakes; those of `check_*` are in `test_testing`."""

from collections.abc import Callable
from typing import Any

import jax
import optax
import pytest

import jaxcomm
from jaxcomm import Codec, Context
from jaxcomm.compression.quantizers import dither
from jaxcomm.synchronization import diloco, local_sgd
from jaxcomm.testing import AGGREGATOR_LAWS, check_local
from tests.cases import CASES, Case
from tests.laws.test_draws import check_workers_draw_independently
from tests.laws.test_wire import check_bytes

(HONEST,) = (c for c in CASES if c.name == "global_qsgd_8_bits")


def row(make: Callable[[], Any]) -> Case:
    """The row of Global-QSGD at 8 bits, built otherwise under the same claims."""
    return HONEST._replace(make=lambda axis="data", seed=0: make())


def _keys_of_another_worker() -> Any:
    codec = dither(bits=8)
    return jaxcomm.all_reduce_mean(
        codec.replace(encode=lambda context, x: codec.encode(context.received(), x))
    )


def _one_bit_too_narrow() -> Any:
    codec = dither(bits=8)
    half = lambda count: max(count // 2, 1)  # noqa: E731

    def with_half(context: Context) -> Context:
        """Half the workers, so that the codec does not refuse a sum that overflows."""
        return context.replace(workers=half(context.workers), count=half(context.count))

    def decode(context: Context, payload: object) -> jax.Array:
        doubled = codec.decode(with_half(context), payload)
        return doubled * half(context.count) / context.count

    narrow: Codec = codec.replace(
        encode=lambda context, x: codec.encode(with_half(context), x), decode=decode
    )
    return jaxcomm.all_reduce_mean(narrow)


def _overflow(case: Case) -> None:
    AGGREGATOR_LAWS["overflow"](case.trial(8))


LAWS: dict[str, tuple[Callable[[Case], None], Callable[[], Any]]] = {
    "another's keys": (check_workers_draw_independently, _keys_of_another_worker),
    "too narrow a sum": (_overflow, _one_bit_too_narrow),
    "floats in place of 8 bits": (lambda case: check_bytes(case, 8), jaxcomm.mean),
}


@pytest.mark.parametrize("mistake", LAWS)
def test_a_row_with_a_mistake_is_caught(mistake: str) -> None:
    law, make = LAWS[mistake]
    law(HONEST)
    with pytest.raises(AssertionError):
        law(row(make))


def of_updates(change: Callable[..., Any]) -> Any:
    """DiLoCo with SGD, whose updates are changed by `change(updates, state, extra)`."""
    tx = diloco(optax.sgd(0.1, momentum=0.5), optax.sgd(1.0), 3)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        updates, extra = change(updates, extra)
        return tx.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def doubled(updates: Any, extra: Any) -> Any:
    by = 1 + 1e-3 * extra["weight"]
    return jax.tree.map(lambda x: x * by, updates), extra


def on_a_mesh(updates: Any, extra: Any) -> Any:
    by = 2 if jax.sharding.get_abstract_mesh().manual_axes else 1
    return jax.tree.map(lambda x: x * by, updates), extra


def weightless(updates: Any, extra: Any) -> Any:
    return updates, {k: v for k, v in extra.items() if k != "weight"}


LOCAL_MISTAKES: dict[str, tuple[str, Callable[[], Any]]] = {
    "exchanges late": ("agreement", lambda: diloco(optax.sgd(0.1), optax.sgd(1.0), 4)),
    "a weight that scales": ("factor", lambda: of_updates(doubled)),
    "a weight that is forgotten": ("no weight", lambda: of_updates(weightless)),
    "NaN for all": (
        "nonfinite",
        lambda: optax.chain(jaxcomm.mean(), jaxcomm.per_worker(optax.sgd(0.1)), local_sgd(3)),
    ),
    "more on a mesh": ("modes", lambda: of_updates(on_a_mesh)),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", LOCAL_MISTAKES)
def test_a_local_method_with_a_mistake_is_caught(mistake: str) -> None:
    law, make = LOCAL_MISTAKES[mistake]
    with pytest.raises(AssertionError, match=f"law '{law}'"):
        check_local(make())
