"""Tuning: configs are checked and timed like implementations, and the fastest is written."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import _dispatch, _measurements, bench, measured
from pallas_kernels._measurements import Measured
from pallas_kernels.arg_specs import ROWS, Row
from pallas_kernels.benchmark import candidates, ops, parts
from pallas_kernels.benchmark.candidates import Session, Variant, variants
from pallas_kernels.benchmark.goals import Measurement, measured_rows, read
from pallas_kernels.benchmark.record import Record
from pallas_kernels.benchmark.timing import Profile
from pallas_kernels.pack import mosaic_gpu, pack

FEW, MANY = (("numbers", 4),), (("numbers", 16),)


def row_of(label: str) -> Row:
    return next(row for row in ROWS if row.label == label)


def session(kind: str = "cuda", tune: bool = True) -> Session:
    device = _dispatch.Device(kind, "NVIDIA H200" if kind == "cuda" else kind)
    return Session(device, 1, tune=tune)


def test_variants_are_the_candidates_of_kernels() -> None:
    found = variants(row_of("pack, 4 bits"), session())
    assert found[0] == Variant("reference")
    assert found[1:] == [
        Variant("mosaic_gpu", config.fields) for config in mosaic_gpu.Config.candidates("uint8")
    ]
    plain = [Variant("reference"), Variant("mosaic_gpu")]
    assert variants(row_of("pack, 4 bits"), session(tune=False)) == plain
    assert variants(row_of("sketch tiles, decode mean"), session()) == plain  # It has no config.
    assert variants(row_of("pack, 4 bits"), session("cpu")) == plain[:1]


def test_a_config_that_fails_is_a_row(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that raises, of one that is wrong; the others are still timed, in their config."""
    row, kernel, seen = row_of("pack, 8 bits"), mosaic_gpu.pack, set()

    def broken(numbers: jax.Array, *, config: Any = None, **options: Any) -> jax.Array:
        seen.add(config)
        if config.fields == MANY:
            raise RuntimeError("too many registers\nand more")
        result = kernel(numbers, config=config, **options)
        return result + 1 if config.fields == FEW else result

    monkeypatch.setattr(mosaic_gpu, "pack", broken)
    monkeypatch.setattr(ops, "profile", lambda *_: Profile(1e-6, None))
    record = Record(tmp_path)
    options = {"ops": ["pack"], "check_sizes": [64], "sizes": [64]}
    with _dispatch.rehearsal():
        given = Session(_dispatch.target(), 1, rehearse=True, tune=True)

        def of_row(tasks: Any) -> list[Any]:
            return [
                task for task in tasks(given, options, record) if task.about["label"] == row.label
            ]

        assert parts.measure(record, "tune_right", of_row(ops.checks), 60) == parts.NOTHING_LEFT
        results = list(of_row(ops.times)[0].run())
        timed = ops.time_row(row, 64, candidates.builders(row, 64, given), given)
    failed = [line["config"] for line in timed if line["kind"] == "failed"]
    assert failed == [dict(MANY)] and len(timed) == 5  # Also where none was checked.
    assert seen == {*mosaic_gpu.Config.candidates("uint8")}
    reasons = {
        tuple(line["config"].items()): line.get("reason") or line["wrong"]
        for line in parts.bad_lines(record, ops.TUNED_PARTS)
    }
    assert reasons == {
        MANY: "RuntimeError: too many registers",
        FEW: "result 0 differs at 16 places, first at 0",
    }
    timed = [(m.implementation, m.config) for m in read(results)]
    assert timed == [("copy", ()), ("reference", ()), ("mosaic_gpu", (("numbers", 8),))]


def times(label: str, exponent: int, fast: dict[Any, float]) -> list[Measurement]:
    return [
        Measurement(row_of(label), 2**exponent, name, seconds, 0.5, config)
        for (name, config), seconds in fast.items()
    ]


def test_rows_name_the_fastest_config_from_each_size_on() -> None:
    few, many, plain = ("mosaic_gpu", FEW), ("mosaic_gpu", MANY), ("reference", ())
    label = "pack, 4 bits"
    measurements = [
        *times(label, 26, {plain: 3.0, few: 2.0, many: 1.0}),
        *times(label, 22, {plain: 3.0, few: 1.0, many: 2.0}),
        *times(label, 24, {plain: 3.0, few: 1.0, many: 2.0}),
        *times(label, 18, {plain: 1.0, few: 2.0, many: 2.0, ("copy", ()): 0.1}),
    ]
    common = {"dtype": "uint8", "bits": 4, "residual": False}
    assert measured_rows(measurements, "H", "r") == [
        Measured("pack.pack", "H", 2**18, "reference", "r", **common),
        Measured("pack.pack", "H", 2**22, "mosaic_gpu", "r", **common, config=FEW),
        Measured("pack.pack", "H", 2**26, "mosaic_gpu", "r", **common, config=MANY),
    ]


def test_calls_of_one_workload_share_a_row() -> None:
    """The sum decides, over what ran for all of them."""
    two = Variant("mosaic_gpu", (("stages", 2),)), Variant("mosaic_gpu", (("stages", 4),))
    measurements = [
        *times("sketch tiles, decode mean", 20, {two[0]: 1.0, two[1]: 2.0, ("reference", ()): 0.1}),
        *times("sketch tiles, decode median", 20, {two[0]: 4.0, two[1]: 2.0}),
    ]
    (row,) = measured_rows(measurements, "H", "r")
    assert (row.op, row.rows, row.config) == ("count_sketch.decode", 3, two[1].config)


@pytest.mark.slow
def test_a_rehearsal_writes_a_file_that_ops_use(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "record"
    arguments = ["--rehearse", "--tune", "--ops", "pack", "--sizes", "9", "--output", str(folder)]
    assert bench.main(arguments) == 0
    assert json.loads((folder / "config.json").read_text())["tune"]
    lines = Record(folder).results(["tune_right", "tune_times"])
    for kind in ("check", "time"):
        found = {str(line["config"]) for line in lines if line["kind"] == kind}
        assert found == {"{}", "{'numbers': 4}", "{'numbers': 8}", "{'numbers': 16}"}
    file = folder / bench.MEASURED
    rows = _measurements.read(file)
    assert {row.op for row in rows} == {"pack.pack", "pack.unpack"} and len(rows) == 8
    assert {(row.kind, row.size, row.record) for row in rows} == {("cpu", 512, "record")}
    x = jnp.arange(512, dtype=jnp.uint8) % 16
    _measurements.write(
        file, [row._replace(implementation="mosaic_gpu", config=MANY) for row in rows]
    )
    with _dispatch.rehearsal(), measured(file):
        tuned = pack(x, bits=4)
        assert "2048" in str(jax.make_jaxpr(lambda x: pack(x, bits=4))(x))  # Padded to a row.
    assert (tuned == pack(x, bits=4)).all()
