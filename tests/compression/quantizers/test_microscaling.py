"""The standard block formats against ml_dtypes and the specification, bit for bit."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxcomm import Context, all_gather_mean, two_stage_mean
from jaxcomm.compression.feedback import error_feedback
from jaxcomm.compression.quantizers import microscaling
from jaxcomm.compression.quantizers._small_floats import FORMATS, of_codes, to_codes
from tests.steps import steps

DTYPES: dict[str, Any] = {
    "mxfp8_e4m3": ml_dtypes.float8_e4m3fn,
    "mxfp8_e5m2": ml_dtypes.float8_e5m2,
    "mxfp6_e2m3": ml_dtypes.float6_e2m3fn,
    "mxfp6_e3m2": ml_dtypes.float6_e3m2fn,
    "mxfp4": ml_dtypes.float4_e2m1fn,
    "nvfp4": ml_dtypes.float4_e2m1fn,
}
MX = [name for name in FORMATS if name != "nvfp4"]


def numbers(size: int, seed: int = 0) -> np.ndarray:
    """Of all magnitudes, with zeros of both signs, ties and blocks of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=size) * 2.0 ** rng.integers(-30, 30, size)
    x[::7], x[1::11] = 0.0, -0.0
    x[2::13] = 1.5 * 2.0 ** np.round(np.log2(np.abs(x[2::13]) + 1e-30))
    x[64:96] = 0
    return x.astype(np.float32)


def elements(payload: Any, name: str, size: int) -> np.ndarray:
    """The bits of each coordinate, uint8; planes of words are put together by hand."""
    bits, words = FORMATS[name].bits, np.asarray(payload.elements)
    if bits == 8:
        return words
    field = bits if 32 % bits == 0 else 1
    fields = words[None] >> np.arange(0, 32, field, dtype=np.uint32)[:, None] & (2**field - 1)
    planes = fields.ravel()[: bits // field * size].reshape(-1, size)
    places = np.arange(0, bits, field, dtype=np.uint32)[:, None]
    return (planes << places).sum(axis=0).astype(np.uint8)


def saturated(y: np.ndarray, name: str) -> np.ndarray:
    largest = float(ml_dtypes.finfo(DTYPES[name]).max)
    return np.clip(y, -largest, largest).astype(DTYPES[name])


def encoded(name: str, x: np.ndarray, **options: Any) -> Any:
    codec = microscaling(name, **options)  # type: ignore[arg-type]
    payload, _ = jax.jit(lambda x: codec.encode(Context.of(x), x))(jnp.asarray(x))
    return payload, np.asarray(codec.decode(Context.of(jnp.asarray(x)), payload))


def over_scales(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """E8M0 scales of the specification, and the blocks over them, in float64."""
    most = 0 if name == "mxint8" else int(np.log2(float(ml_dtypes.finfo(DTYPES[name]).max)))
    blocks = np.pad(x.astype(np.float64), (0, -x.size % 32)).reshape(-1, 32)
    peaks = np.abs(blocks).max(axis=1)
    exponents = np.floor(np.log2(np.maximum(peaks, 1e-300))) - most
    exponents = np.clip(exponents, -127, 127)
    return exponents + 127, (blocks / 2.0 ** exponents[:, None]).ravel()[: x.size]


@pytest.mark.parametrize("name", MX)
def test_elements_and_scales_are_those_of_the_specification(name: str) -> None:
    x = numbers(32 * 40 + 5)
    payload, found = encoded(name, x)
    scales, over = over_scales(x, name)
    np.testing.assert_array_equal(payload.scales, scales)
    if name == "mxint8":
        values = np.clip(np.round(over * 64), -127, 127)
        np.testing.assert_array_equal(elements(payload, name, x.size).view(np.int8), values)
        values = values / 64
    else:
        expected = saturated(over, name)
        np.testing.assert_array_equal(elements(payload, name, x.size), expected.view(np.uint8))
        values = expected.astype(np.float64)
    np.testing.assert_array_equal(found, values * 2.0 ** (np.repeat(scales, 32)[: x.size] - 127))


def test_nvfp4() -> None:
    x = numbers(16 * 40 + 3) / np.float32(2**20)
    payload, found = encoded("nvfp4", x)
    blocks = np.pad(x, (0, -x.size % 16)).reshape(-1, 16)
    unit = np.abs(x).max() / np.float32(6 * 448)
    scales = (np.abs(blocks).max(axis=1) / np.float32(6) / unit).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(payload.scales, scales.view(np.uint8))
    assert payload.scale == unit
    wide = scales.astype(np.float32)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        over = np.where(wide > 0, blocks / unit / wide, 0).ravel()[: x.size]
    expected = saturated(over, "nvfp4")
    np.testing.assert_array_equal(elements(payload, "nvfp4", x.size), expected.view(np.uint8))
    whole = expected.astype(np.float32) * np.repeat(scales.astype(np.float32), 16)[: x.size] * unit
    np.testing.assert_array_equal(found, whole)


@pytest.mark.parametrize("name", FORMATS)
def test_the_codes_are_those_of_ml_dtypes(name: str) -> None:
    form = FORMATS[name]
    codes = np.arange(form.last + 1)
    values = of_codes(jnp.asarray(codes), form)
    if name in DTYPES:
        expected = codes.astype(np.uint8).view(DTYPES[name]).astype(np.float32)
        np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(to_codes(values, form), codes)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_nan(name: str, bad: float) -> None:
    x = np.ones(70, np.float32)
    x[3] = bad
    found = encoded(name, x)[1]
    lost = 70 if name == "nvfp4" else 32
    assert np.isnan(found[:lost]).all() and (found[lost:] == 1).all()


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp4", "mxint8", "nvfp4"])
def test_stochastic_rounding_has_no_bias_below_the_largest(name: str) -> None:
    x = np.full(32 * 2000, 0.33, np.float32)
    x[::32] = 1.0  # Scales are powers of two, for those of NVFP4 too.
    x[::16] = 1.0
    found = encoded(name, x, rounding="stochastic")[1]
    rest = found[x < 1]
    assert abs(rest.mean() - 0.33) < 5 * rest.std() / np.sqrt(rest.size) + 1e-7
    assert len(np.unique(rest)) == 2


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_error_is_at_most_the_claim(name: Any, rounding: Any) -> None:
    """Also of the worst blocks: just below a power of two, and with small numbers beside it."""
    claim = 1 - microscaling(name).claims.contraction(32, 1)
    for seed, peak in enumerate([1.0, 1.249, 1.26, 1.749, 1.9999, 1.001]):
        rng = np.random.default_rng(seed)
        for spread in (0.5, 0.05, 0.01, 1e-3):
            x = (spread * rng.normal(size=32)).clip(-peak, peak).astype(np.float32)
            x[5] = peak
            found = encoded(name, x, rounding=rounding)[1]
            assert np.sum((found - x) ** 2) <= claim * np.sum(x**2) * (1 + 1e-6)


def test_in_one_and_in_two_stages_with_feedback() -> None:
    x = np.random.default_rng(0).normal(size=(30, 4, 70)).astype(np.float32)
    x[:] = x[:1]
    for tx in (
        all_gather_mean(error_feedback(microscaling("mxfp4"))),
        two_stage_mean(error_feedback(microscaling("mxfp4"))),
    ):
        found, _ = steps(tx, x)
        np.testing.assert_allclose(found.mean(axis=0)[0], x[0].mean(axis=0), atol=0.05)
