"""A file of measurements: what names it, what it changes, and what is wrong with it."""

import json
import pathlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import _dispatch, _measurements, implementation, measured
from pallas_kernels._measurements import Measured
from pallas_kernels.pack import pack
from tests.pallas_kernels.lowering import CALLS, KINDS, lowered, read_again

SIZE = 2**17
X = jax.ShapeDtypeStruct((SIZE,), jnp.uint8)
LINE: dict[str, Any] = {
    "op": "pack.pack",
    "kind": KINDS["cuda"],
    "size": 1000,
    "implementation": "mosaic_gpu",
    "config": {"numbers": 16},
}


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "measured.jsonl"


@pytest.fixture
def environment() -> Iterator[pytest.MonkeyPatch]:
    with read_again(_measurements.of_variable) as monkeypatch:
        yield monkeypatch


def write(file: pathlib.Path, *lines: Any) -> pathlib.Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def traced(size: int = SIZE, platform: str = "cuda") -> str:
    """The program of `pack`, traced now."""
    x = jax.ShapeDtypeStruct((size,), jnp.uint8)
    return lowered(lambda numbers: pack(numbers, bits=4), x, platform=platform)


def rows_of_128_words(text: str, numbers: int) -> bool:
    """Whether the kernel's operand is in rows of so many numbers for each of 128 threads."""
    return f"x{128 * numbers}xui8>" in text


def test_the_rows_of_the_package_come_last(
    file: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the file that the context names."""
    assert CALLS["cuda"] not in traced(size=17 * SIZE)
    monkeypatch.setattr(_measurements, "OF_PACKAGE", _measurements.read(write(file, LINE)))
    assert rows_of_128_words(traced(size=19 * SIZE), 16)
    other = write(file.with_name("other.jsonl"), LINE | {"config": {"numbers": 8}})
    with measured(other):
        assert rows_of_128_words(traced(size=19 * SIZE), 8)


def test_a_row_names_the_implementation_and_its_config(file: pathlib.Path) -> None:
    assert CALLS["cuda"] not in traced()
    with measured(write(file, LINE)):
        tuned = traced()
        assert CALLS["cuda"] in tuned and rows_of_128_words(tuned, 16)
        assert CALLS["cuda"] not in traced(size=999)
        with implementation("mosaic_gpu"):
            assert rows_of_128_words(traced(size=3 * SIZE), 16)
            assert rows_of_128_words(traced(size=992), 4)  # No row of this size: assumed.
        with implementation("reference"):
            assert CALLS["cuda"] not in traced(size=5 * SIZE)
    assert CALLS["cuda"] not in traced()


def test_a_function_that_was_traced_is_traced_again(file: pathlib.Path) -> None:
    """In a rehearsal, whose device runs the kernel for GPU; the context is part of JAX's keys."""
    step = jax.jit(lambda x: pack(x, bits=4))
    x = jnp.arange(1024, dtype=jnp.uint8) % 16
    expected = step(x)
    line = LINE | {"kind": _dispatch.target().kind}
    with _dispatch.rehearsal():
        plain = str(jax.make_jaxpr(step)(x))
        with measured(write(file, line)):
            tuned = str(jax.make_jaxpr(step)(x))
            assert (step(x) == expected).all()
        with measured(write(file, line | {"config": {"numbers": 8}})):
            other = str(jax.make_jaxpr(step)(x))
        assert len({plain, tuned, other}) == 3
        assert str(jax.make_jaxpr(step)(x)) == plain


def test_the_environment_reaches_all_threads(
    file: pathlib.Path, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv(_measurements.VARIABLE, f" {write(file, LINE)} ")
    with ThreadPoolExecutor(1) as threads:
        assert rows_of_128_words(threads.submit(traced, 7 * SIZE).result(), 16)
    with measured(write(file)):  # The context goes first, and this file says nothing.
        assert CALLS["cuda"] not in traced(size=9 * SIZE)
    _measurements.of_variable.cache_clear()
    environment.setenv(_measurements.VARIABLE, str(file.parent / "missing"))
    with pytest.raises(FileNotFoundError, match="missing") as error:
        traced(size=11 * SIZE)
    assert _measurements.VARIABLE in error.value.__notes__[0]


MALFORMED: list[tuple[Any, str]] = [
    ("not JSON", "it is not JSON"),
    (LINE | {"speed": 3}, r"`speed` is none of its names, \['op'"),
    (LINE | {"size": "large"}, "`size` must be int, got 'large'"),
    (LINE | {"op": "pack.sort"}, "there is no op 'pack.sort'"),
    (LINE | {"config": {"numbers": 8.0}}, "`config` must have integers, got numbers=8.0"),
]


def test_a_malformed_line_is_one_error(file: pathlib.Path) -> None:
    for line, words in MALFORMED:
        text = line if isinstance(line, str) else json.dumps(line)
        file.write_text(f"{json.dumps(LINE)}\n\n{text}\n")
        with pytest.raises(ValueError, match=words) as error, measured(file):
            pass
        message = str(error.value)
        assert message.startswith(f"{file}, line 3: ") and "Remove the line, or write" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config": {"blocks": 2}}, r"'mosaic_gpu', `blocks` is no field .*\['numbers'\]"),
        ({"config": {"numbers": 5}}, "`numbers` must be 4, 8, 16 or 32, got 5"),
        (
            {"implementation": "mosaic_tpu", "config": {}},
            "`implementation`='mosaic_tpu' of `pack.pack`: it runs on tpu, this program",
        ),
    ],
)
def test_a_row_that_cannot_run_is_an_error(
    file: pathlib.Path, change: dict[str, Any], words: str
) -> None:
    """When it is needed; rows of other kinds may be of other versions."""
    with measured(write(file, LINE | change)):
        with pytest.raises(ValueError, match=words) as error:
            traced(size=13 * SIZE)
        assert str(error.value).startswith(f"{file}, line 1: ")
        with implementation("reference"):  # No config is needed.
            assert CALLS["cuda"] not in traced(size=15 * SIZE)
        assert CALLS["tpu"] in traced(platform="tpu")


def test_written_rows_are_read(file: pathlib.Path) -> None:
    rows = (
        Measured("pack.pack", "H", 0, "reference", "r", "uint8", 4, False),
        Measured("count_sketch.encode", "H", 5, "mosaic_gpu", "r", rows=3, config=(("stages", 2),)),
    )
    _measurements.write(file, rows)
    found = _measurements.read(file)
    assert [row._replace(place=rows[0].place) for row in found] == list(rows)
    assert [row.place for row in found] == [f"{file}, line 1", f"{file}, line 2"]
