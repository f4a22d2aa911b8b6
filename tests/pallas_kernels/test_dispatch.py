"""Which implementation runs: what names it, what replaces it, and what never breaks."""

import functools
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxcomm
from pallas_kernels import _dispatch, count_sketch
from pallas_kernels._dispatch import Choice, Device, choose
from pallas_kernels._measurements import Measured, Workload
from pallas_kernels.arg_specs import ROWS
from pallas_kernels.pack import mosaic_tpu, pack
from tests.pallas_kernels.lowering import CALLS, KINDS, lowered, on, read_again
from tests.pallas_kernels.workloads import FIRST_OF_EACH_OP, label
from tests.slow import slow

X = jax.ShapeDtypeStruct((2**17,), jnp.uint8)
IMPLEMENTATION = jaxcomm.implementation
H200, V5E = Device("cuda", KINDS["cuda"]), Device("tpu", KINDS["tpu"])


def pack_4(numbers: jax.Array) -> jax.Array:
    return pack(numbers, bits=4)


def has_kernel(platform: str, x: Any = X) -> bool:
    """Whether `pack`, traced now, becomes a kernel."""
    return CALLS[platform] in lowered(lambda numbers: pack_4(numbers), x, platform=platform)


@pytest.fixture
def environment() -> Iterator[pytest.MonkeyPatch]:
    with read_again(_dispatch._names_of_variable) as monkeypatch:
        yield monkeypatch


def test_the_context_reaches_ops_and_ends() -> None:
    assert has_kernel("tpu") and not has_kernel("cuda")
    with IMPLEMENTATION("reference"):
        assert not has_kernel("tpu")
        with IMPLEMENTATION("mosaic_gpu"):
            assert has_kernel("cuda")
        assert not has_kernel("tpu")
    assert has_kernel("tpu") and not has_kernel("cuda")


def test_the_context_reaches_the_steps_of_methods() -> None:
    tx = jaxcomm.global_qsgd("data", levels=1, bits=4)
    grads = {"w": jnp.ones((4, 8))}

    def update(grads: Any) -> Any:
        return tx.update(grads, tx.init(grads))[0]

    step = jax.vmap(update, axis_name="data")
    with (
        IMPLEMENTATION("mosaic_gpu"),
        pytest.raises(NotImplementedError, match=r"context `implementation`='mosaic_gpu'"),
    ):
        jax.eval_shape(step, grads)
    assert jax.eval_shape(step, grads)["w"].shape == (4, 8)


def test_the_environment_reaches_ops(environment: pytest.MonkeyPatch) -> None:
    environment.setenv(_dispatch.VARIABLE, "mosaic_gpu, reference")
    x = jax.ShapeDtypeStruct((3 * 2**15,), jnp.uint8)  # No other test has compiled it.
    assert has_kernel("cuda", x) and not has_kernel("tpu", x)
    with IMPLEMENTATION("reference"):  # The context goes first.
        assert not has_kernel("cuda", x)
    for wrong in ("triton", ",", "reference,,mosaic_gpu", "Reference", None):
        _dispatch._names_of_variable.cache_clear()
        environment.setenv(_dispatch.VARIABLE, wrong or "  ")
        if wrong is None:  # It names nothing.
            assert pack_4(jnp.zeros(8, jnp.uint8)).tolist() == [0]
            continue
        with pytest.raises(ValueError, match=f"variable {_dispatch.VARIABLE} must be one of"):
            pack_4(jnp.zeros(3, jnp.uint8))
        assert pack(jnp.zeros(8, jnp.uint8), bits=4, implementation="reference").tolist() == [0]


def test_wrong_names() -> None:
    for names, words in ((["triton"], "must be one of"), ([], "at least one name")):
        with pytest.raises(ValueError, match=words), IMPLEMENTATION(*names):
            pass


def test_names_are_tried_in_order() -> None:
    with IMPLEMENTATION("mosaic_gpu", "mosaic_tpu"):
        assert has_kernel("tpu") and has_kernel("cuda")
        with pytest.raises(NotImplementedError) as error:
            pack_4(jnp.zeros(3, jnp.uint8))
    for name, platform in (("mosaic_gpu", "cuda"), ("mosaic_tpu", "tpu")):
        reason = f"{name}: it runs on {platform}, this program is for cpu"
        assert reason in str(error.value)


def _refuse(*args: Any, **options: Any) -> jax.Array:
    raise NotImplementedError("no such tile\nand more lines")


def _refuse_when_lowered(numbers: jax.Array, **options: Any) -> jax.Array:
    """Traced without an error, as kernels are whose primitives Mosaic lacks."""
    from jax.experimental import pallas as pl

    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = jnp.sort(x_ref[...].astype(jnp.float32), axis=0).astype(jnp.uint32)

    result = jax.ShapeDtypeStruct((numbers.size // 128, 128), jnp.uint32)
    return pl.pallas_call(kernel, out_shape=result)(numbers.reshape(-1, 128)).ravel()


def _break(*args: Any, **options: Any) -> jax.Array:
    raise AttributeError("JAX has no attribute 'pltpu'")


@pytest.mark.parametrize("refuse", [_refuse, _refuse_when_lowered])
def test_kernels_that_do_not_apply_are_skipped(
    refuse: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is traced, and when it is lowered."""
    monkeypatch.setattr(mosaic_tpu, "pack", refuse)
    assert not has_kernel("tpu")
    with IMPLEMENTATION("mosaic_tpu", "reference"):
        assert not has_kernel("tpu")
    with (
        IMPLEMENTATION("mosaic_tpu", "mosaic_gpu"),
        pytest.raises(NotImplementedError, match=r"mosaic_tpu: \w+: .*mosaic_gpu: it runs on cuda"),
    ):
        has_kernel("tpu")


def test_broken_kernels_fail_only_when_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mosaic_tpu, "pack", _break)
    with pytest.warns(UserWarning, match="`pack.pack` uses plain JAX.*AttributeError: JAX has no"):
        assert not has_kernel("tpu")
    with monkeypatch.context() as absent:
        absent.setitem(sys.modules, "pallas_kernels.pack.mosaic_tpu", None)
        with pytest.warns(UserWarning, match="ModuleNotFoundError"):
            assert not has_kernel("tpu")
    with warnings.catch_warnings(), IMPLEMENTATION("reference"):
        warnings.simplefilter("error")
        assert not has_kernel("tpu")
    for names in (("mosaic_tpu",), ("mosaic_tpu", "reference")):
        with IMPLEMENTATION(*names), pytest.raises(AttributeError, match="JAX has no"):
            has_kernel("tpu")


def test_the_measured_choice_is_used() -> None:
    """By op, kind of device, size, dtype, bits, residual and rows; None is every value."""
    rows = (
        Measured("quantize.quantize", "H", 2**20, "mosaic_gpu", "r", "float32", 8, False),
        Measured("quantize.quantize", "H", 2**24, "reference", "r", "float32", 8, False),
        Measured("count_sketch.encode", "H", 0, "reference", "r", rows=3),
        Measured("pack.pack", "H", 0, "mosaic_gpu", "r"),
    )
    device = Device("cuda", "H")

    def chosen(op: str, size: int, dtype: str = "float32", *keys: Any) -> str:
        return choose(Workload(op, size, dtype, *keys), device, rows).implementation

    assert chosen("quantize.quantize", 2**22, "float32", 8) == "mosaic_gpu"
    assert chosen("quantize.quantize", 2**24, "float32", 8) == "reference"
    assert chosen("quantize.quantize", 2**19, "float32", 8) == "reference"
    for keys in (("bfloat16", 8, False), ("float32", 4, False), ("float32", 8, True)):
        assert chosen("quantize.quantize", 2**22, *keys) == "reference"
    assert chosen("pack.pack", 1, "uint8", 3) == "mosaic_gpu"
    assert choose(Workload("pack.pack", 2**20, "uint8", 3), V5E, rows) == Choice("mosaic_tpu")
    tiles = Workload("count_sketch.encode", 2**20, "float32", rows=3)
    measured = (Measured("count_sketch.encode", H200.kind, 0, "reference", "r", rows=3),)
    assert choose(tiles, H200, measured).implementation == "reference"
    assert choose(tiles._replace(rows=5), H200, measured) == Choice("mosaic_gpu")


def test_given_rows_are_tried_before_the_table_from_their_size_on() -> None:
    config = (("numbers", 16),)
    given = (
        Measured(
            "pack.pack", H200.kind, 2**24, "mosaic_gpu", "r", config=config, place="F, line 1"
        ),
        Measured("pack.pack", "another kind", 0, "mosaic_gpu", "r"),
    )
    table = (Measured("pack.pack", H200.kind, 2**20, "mosaic_gpu", "r", config=(("numbers", 8),)),)

    def chosen(exponent: int, *tables: Any) -> Choice:
        return choose(Workload("pack.pack", 2**exponent, "uint8", 4), H200, *tables)

    assert chosen(25, table, given) == Choice("mosaic_gpu", config, "F, line 1")
    assert chosen(23, table, given).config == (("numbers", 8),)
    assert chosen(19, table, given) == Choice("reference")
    assert chosen(23, (), given) == chosen(25, (), given[1:]) == Choice("reference")  # Assumed.


def test_workloads_match_the_rows() -> None:
    expected = {
        "quantize float32, 4 bits, residual": Workload(
            "quantize.quantize", 4096, "float32", 4, residual=True
        ),
        "dequantize, 8 bits, accumulate": Workload(
            "quantize.dequantize", 4096, "int8", 8, residual=True
        ),
        "unpack, 2 bits": Workload("pack.unpack", 4096, "uint32", 2),
        "sketch tiles, encode float32": Workload("count_sketch.encode", 4096, "float32", rows=3),
    }
    rows = {row.label: row for row in ROWS}
    assert {label: rows[label].workload(4096) for label in expected} == expected


def _sharded(f: Any) -> Any:
    mesh = jax.make_mesh((2,), ("w",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("w")
    return jax.shard_map(jax.vmap(f), mesh=mesh, in_specs=spec, out_specs=spec)


TRANSFORMS: dict[str, Any] = {
    "inner jit": lambda f: jax.vmap(jax.jit(f)),
    "map": lambda f: lambda x: jax.lax.map(f, x),
    "shard_map": _sharded,
}


@pytest.mark.parametrize("name", ["inner jit", slow("map"), slow("shard_map")])
def test_a_change_of_the_context_reaches_transformed_functions(name: str) -> None:
    """The same function object, called before, in and after the context, eagerly and jitted."""
    eager = TRANSFORMS[name](pack_4)
    x = jnp.arange(16, dtype=jnp.uint8).reshape(2, 8) % 16
    for f in (eager, jax.jit(eager)):
        expected = f(x)
        with IMPLEMENTATION("mosaic_gpu"), pytest.raises(NotImplementedError, match="for cpu"):
            f(x)
        with IMPLEMENTATION("mosaic_gpu", "reference"):
            assert (f(x) == expected).all()
        assert (f(x) == expected).all()


def test_a_context_reaches_sketches_without_a_kernel() -> None:
    """A context that names kernels alone never runs plain JAX instead."""
    seeds, table = jnp.array([1, 2], jnp.uint32), jnp.zeros((11, 1024))
    sketch = {"rows": 3, "columns": 1024, "hashing": "elements"}
    with IMPLEMENTATION("mosaic_gpu", "mosaic_tpu"):
        with pytest.raises(NotImplementedError, match=r"context `implementation`=.*no kernel for"):
            count_sketch.encode(jnp.ones(5), seeds, **sketch)
        with pytest.raises(NotImplementedError, match=r"context `implementation`=.*at most 9 rows"):
            count_sketch.decode(table, seeds, shape=(5,))
    with IMPLEMENTATION("mosaic_gpu", "reference"):
        encode = functools.partial(count_sketch.encode, seeds=seeds, **sketch)
        decode = functools.partial(count_sketch.decode, seeds=seeds, shape=(5,))
        assert jax.eval_shape(encode, jnp.ones(5)).shape == (3, 1024)
        assert jax.eval_shape(decode, table).shape == (5,)


def test_the_probe_can_be_rehearsed() -> None:
    """In a rehearsal, names with alternatives run the interpreted kernel for GPU."""
    x = jnp.arange(8, dtype=jnp.uint8)
    with _dispatch.rehearsal():
        with IMPLEMENTATION("mosaic_gpu"):
            named = str(jax.make_jaxpr(pack_4)(x))
        with IMPLEMENTATION("mosaic_tpu", "mosaic_gpu", "reference"):
            first = str(jax.make_jaxpr(lambda numbers: pack_4(numbers))(x))
        with IMPLEMENTATION("reference"):
            plain = str(jax.make_jaxpr(pack_4)(x))
    assert first == named != plain


@pytest.mark.slow
@pytest.mark.parametrize(("row", "name"), FIRST_OF_EACH_OP, ids=label)
def test_no_op_raises_at_2_to_the_31_elements(
    row: Any, name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was measured to be the fastest."""
    monkeypatch.setattr(_dispatch, "choose", lambda *_, **__: Choice(name))
    arguments = jax.eval_shape(lambda: row.arguments(2**31))
    platform = _dispatch.PLATFORMS.get(name, "cpu")
    with warnings.catch_warnings(), on(platform) if name in _dispatch.PLATFORMS else nullcontext():
        warnings.simplefilter("ignore", UserWarning)
        traced = jax.jit(row.function(2**31, None)).trace(*arguments)
        assert traced.lower(lowering_platforms=(platform,))
