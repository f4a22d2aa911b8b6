"""Predictions against times by hand, for any composition, and what is refused."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import jaxcomm
from jaxcomm import gossip, perf, synchronization, wire
from jaxcomm.compression.quantizers import dither, natural
from jaxcomm.compression.sparsifiers import top_k
from jaxcomm.perf._predict import Prediction

N, D = 8, 1_000_000
PARAMS = {"w": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}
LINK = perf.Link(1e9, 1e-3)


def seen(tx: optax.GradientTransformation, **options: Any) -> Prediction:
    options = {"link": LINK, "compute_seconds": 0.3, "workers": N, **options}
    return perf.predict(tx, PARAMS, **options)


def test_an_all_reduce_by_hand() -> None:
    # The gradients, the loss and the weight: the scalars are in messages of their own.
    found = seen(jaxcomm.mean())
    assert found.bytes_per_worker == pytest.approx(2 * 7 / 8 * 4 * D, rel=1e-4)
    assert found.network_seconds == pytest.approx(found.messages * 1e-3 + 7e-3, rel=1e-3)
    assert found.codec_seconds == 0 and found.seconds == 0.3 + found.network_seconds


def test_an_account_and_a_step_predict_the_same() -> None:
    tx = optax.chain(jaxcomm.global_qsgd(), optax.sgd(0.1))
    params = {"w": jnp.zeros((100, 10))}
    opt_state = jaxcomm.init(tx, params, N)
    step = jaxcomm.simulate(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, workers=N)
    batch = jnp.ones((N, 100))
    options: Any = {"link": LINK, "compute_seconds": 0.1, "codec_seconds": 0.25}
    of_step = perf.predict(step, params, opt_state, batch, **options)
    account = wire.account(step, params, opt_state, batch)
    assert of_step == perf.predict(account, params, **options)
    assert of_step.network_seconds == pytest.approx(account.seconds(1e9, 1e-3))
    assert of_step.seconds == pytest.approx(0.35 + of_step.network_seconds)


def test_each_axis_has_its_own_link() -> None:
    tx = jaxcomm.hierarchical(jaxcomm.mean("ici"), jaxcomm.global_qsgd("dcn", bits=8))
    axes = ("dcn", "ici")
    links = {"dcn": perf.Link(1e6, 0.0), "ici": perf.Link(1e12, 0.0)}
    options: Any = {"workers": {"dcn": 2, "ici": 4}, "axis_name": axes}
    slow = seen(tx, link=links, **options)
    fast = seen(tx, link=dict.fromkeys(axes, links["ici"]), **options)
    # 8 bits of the whole gradient over the slow axis: D bytes from each of 2 workers.
    assert slow.network_seconds == pytest.approx(1.0, rel=1e-3)
    assert fast.network_seconds < 1e-5
    both = seen(jaxcomm.mean(axes), link=links, **options)  # By the slower one.
    assert both.network_seconds == pytest.approx(2 * 7 / 8 * 4, rel=1e-3)
    with pytest.raises(ValueError, match="no all_reduce over the axis 'dcn'; its axes: ici"):
        seen(tx, link={"ici": "1Gbit"}, **options)


def test_each_collective_has_its_own_calibrated_link() -> None:
    slow, fast = perf.Link(1e6, 0.0), perf.Link(1e12, 0.0)
    names = ("all_gather", "all_to_all", "reduce_scatter", "ppermute")
    calibration = perf.Calibration({"data": {"all_reduce": slow, **dict.fromkeys(names, fast)}}, {})
    gathered = jaxcomm.all_gather_mean(natural())
    assert seen(jaxcomm.mean(), link=calibration).network_seconds == pytest.approx(7, rel=1e-3)
    assert seen(gathered, link=calibration).network_seconds < 0.1
    with pytest.raises(KeyError, match="top_k"):
        seen(gathered, link=calibration, method="top_k")


def test_a_calibrated_codec_has_its_seconds() -> None:
    calibration = perf.Calibration({"data": {}}, {"mine": 2e-9})
    scalar = perf.predict(
        jaxcomm.mean(), PARAMS, link=calibration, compute_seconds=1.0, workers=1, method="mine"
    )
    assert scalar.codec_seconds == pytest.approx(2e-3) and scalar.network_seconds == 0


def of_workers(tx: optax.GradientTransformation) -> tuple[Any, ...]:
    """A step of workers with their own parameters, and the shapes of its arguments."""
    params = jax.eval_shape(lambda: jaxcomm.replicate({"w": jnp.zeros((1000, 1000))}, N))
    step = jaxcomm.simulate(lambda p, x: jnp.sum(p["w"] ** 2) * jnp.mean(x), tx, workers=N)
    state = jax.eval_shape(lambda p: jaxcomm.init(tx, p, N), params)
    return step, params, state, jax.ShapeDtypeStruct((N,), jnp.float32)


def test_gossip_is_predicted() -> None:
    # D-PSGD on a ring sends the parameters to two neighbors.
    tx = optax.chain(optax.sgd(0.1), gossip.dpsgd(gossip.ring(N)))
    step, params, *others = of_workers(tx)
    options: Any = {"link": LINK, "compute_seconds": 0.1, "codec_seconds": 0.01}
    found = perf.predict(step, params, *others, **options)
    assert found.bytes_per_worker == pytest.approx(2 * 4 * D, rel=1e-4)
    # Of a worker's own 4 MB, all are in the last bucket.
    assert found.overlapped == pytest.approx(found.seconds)
    assert perf.predict(tx, params, workers=N, **options).seconds == pytest.approx(found.seconds)


def test_local_steps_send_in_a_share_of_the_steps() -> None:
    given = of_workers(optax.chain(optax.sgd(0.1), synchronization.local_sgd(8)))
    options: Any = {"link": perf.Link(1e9, 0.0), "compute_seconds": 0.1, "codec_seconds": 0.0}
    every, eighth = (perf.predict(*given, share=share, **options) for share in (1.0, 1 / 8))
    assert eighth.network_seconds == pytest.approx(every.network_seconds / 8, rel=1e-3)
    assert eighth.bytes_per_worker == pytest.approx(every.bytes_per_worker / 8, rel=1e-3)


def test_overlap_hides_at_most_the_backward_pass() -> None:
    large = {"w": jax.ShapeDtypeStruct((100, 2**20), jnp.float32)}  # 400 MiB: 16 buckets.
    fast, slow = (
        perf.predict(
            jaxcomm.mean(), large, link=perf.Link(rate, 0.0), compute_seconds=0.3, workers=N
        )
        for rate in (1e10, 1e8)
    )
    assert fast.network_seconds < 0.2
    assert fast.overlapped == pytest.approx(0.3 + fast.network_seconds / 16)
    assert slow.overlapped == pytest.approx(0.1 + slow.network_seconds)
    # One bucket is sent when the backward pass is over.
    small = seen(jaxcomm.mean())
    assert small.overlapped == pytest.approx(small.seconds)


def test_a_slower_memory_takes_longer_to_encode() -> None:
    options: Any = {"link": LINK, "compute_seconds": 0.1, "workers": N}
    seconds = [
        perf.predict(jaxcomm.top_k_sgd(ratio=0.01), PARAMS, device=device, **options).codec_seconds
        for device in ("cpu-core", "a100")
    ]
    assert seconds[0] / seconds[1] == pytest.approx(2039 / 10)
    # Gradients and residuals, read and written, at a quarter of the bandwidth.
    assert seconds[0] > 16 * D / 2.5e9


def test_the_error_is_that_of_the_claims() -> None:
    unbiased = seen(jaxcomm.global_qsgd(bits=8), error=dither(bits=8).claims).error
    assert unbiased.kind == "unbiased" and unbiased.value is not None
    assert unbiased.steps == (1.0, 1.0 + unbiased.value)
    biased = seen(jaxcomm.top_k_sgd(ratio=0.01), error=top_k(ratio=0.01).claims).error
    assert (biased.kind, biased.value, biased.steps) == ("biased", 0.01, None)
    unknown = seen(jaxcomm.mean()).error
    assert (unknown.kind, unknown.value) == ("unknown", None) and "unknown" in str(unknown)


def test_a_loop_of_unknown_length_has_no_time() -> None:
    mesh = jax.make_mesh((N,), ("data",), axis_types=(AxisType.Auto,))
    send = lambda x: lax.psum(x, "data") / N  # noqa: E731

    def loop(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda x: jnp.sum(x) < 1, send, x)

    mapped = jax.shard_map(
        loop, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    with pytest.raises(
        ValueError, match=r"A loop of unknown length sends .*so the time is unknown"
    ):
        perf.predict(mapped, jnp.ones(4), link="1Gbit", compute_seconds=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "number of workers must be an int of at least 1.* got 0"),
        ({"share": 2}, "`share` must be from 0 to 1, got 2"),
        ({"compute_seconds": math.nan}, "`compute_seconds` must be a finite number above 0, got"),
    ],
)
def test_values_out_of_range_are_named(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        seen(jaxcomm.mean(), **options)


def test_layers_send_the_same_inside_and_after_the_backward_pass() -> None:
    params = {"w": jax.ShapeDtypeStruct((3, 100, 100), jnp.float32)}
    plain, layers = (
        perf.predict(tx, params, link="1Gbit", compute_seconds=1.0, workers=4)
        for tx in (jaxcomm.mean(), jaxcomm.scheduling.wait_free(jaxcomm.mean(), stacked=True))
    )
    assert layers.bytes_per_worker == plain.bytes_per_worker
    assert layers.messages > plain.messages
