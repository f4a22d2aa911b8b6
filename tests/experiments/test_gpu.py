"""The kit for ten minutes with a GPU: rehearsed, continued, and what its record fills."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxcomm
from experiments.gpu import __main__ as kit
from experiments.gpu import measure, pages
from jaxcomm import perf
from pallas_kernels import _measurements
from pallas_kernels.benchmark.record import Record

ROOT = kit.ROOT
MEASURED = [part.name for part in kit.PARTS]
H100 = "NVIDIA H100 80GB HBM3"
pytestmark = pytest.mark.xdist_group("gpu")  # One process rehearses, for all tests.


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Two measurements of each part, by the command that runs on a GPU."""
    folder = tmp_path_factory.mktemp("gpu") / "record"
    command = ["tools/gpu", "--rehearse", "--most", "2", *MEASURED, "--record", str(folder)]
    environment = {**os.environ, "JAXCOMM_PYTHON": sys.executable}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0 and "0 failures" in ran.stdout, ran.stdout + ran.stderr
    return Record(folder)


@pytest.mark.slow
def test_all_parts_are_rehearsed_and_advise_reads_the_calibration(record: Record) -> None:
    for part in MEASURED:
        ended, _ = record.ends(part)
        assert len(ended) == 2 and {line["kind"] for line in ended.values()} == {"done"}
    kinds = {one["kind"] for one in record.results(MEASURED)}
    assert kinds >= {"check", "time", "clocks", "codec", "batch", "step", "power_sgd"}
    measured = perf.read_calibration(record.folder / measure.CALIBRATION)
    assert measured == measure.calibration(record) and len(measured.codecs) == 2
    params = {"w": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}
    found = jaxcomm.advise(params, 8, link=measured.with_link("10Gbit"), step_seconds=0.1)
    assert any("2 of 9 methods were timed" in each for each in found.assumptions)


def test_the_larger_gradients_are_calibrated(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"device": "cpu"}')
    results = [
        {"kind": "codec", "method": "m", "coordinates": size, "per_coordinate": size / 10}
        for size in (10, 30, 20)
    ]
    Record(tmp_path).add({"kind": "done", "part": "codecs", "key": "a", "results": results})
    assert measure.calibration(Record(tmp_path)).codecs == {"m": 3.0}


def test_the_models_have_the_published_sizes() -> None:
    with jax.numpy_dtype_promotion("standard"):  # For Flax.
        found = measure.gradients(rehearse=False)
    leaves, resnet = (jax.tree.leaves(found[name]) for name in ("transformer", "resnet50"))
    assert len(resnet) == 161 and sum(x.size for x in resnet) == 25_557_032
    # GPT-2's 124,439,808, and 47 words more.
    assert sum(x.size for x in leaves) == 124_475_904 and {x.dtype.name for x in leaves} == {
        "float32"
    }
    rows = [measure.most_rows(kept=2 * 10**9, per_row=each, memory=70e9) for each in (1e9, 1e12)]
    assert rows == [64, 1]


@pytest.mark.slow
def test_the_initial_transformer_loss_is_that_of_a_uniform_guess() -> None:
    model = measure.SMALL
    batch = jax.random.randint(jax.random.key(0), (4, model.length + 1), 0, model.words)
    with jax.numpy_dtype_promotion("standard"):  # For Flax.
        loss, gradient = jax.value_and_grad(model.loss)(model.weights(), batch)
    assert loss == pytest.approx(np.log(model.words), rel=0.05)
    assert all(x.dtype == jnp.float32 and jnp.any(x != 0) for x in jax.tree.leaves(gradient))


def _times_of_ops(made: Record) -> None:
    """What a session on a GPU adds to the record: times of packing, and one op that fails."""
    seconds = {"copy": 1.0, "reference": 3.0, "mosaic_gpu": 2.0, "torch": 4.0}
    for bits, size in ((4, 2**28), (4, 2**24), (4, 2**18), (8, 2**24)):
        about = {"kind": "time", "label": f"pack, {bits} bits", "size": size, "config": {}}
        results = [
            {**about, "implementation": name, "seconds": [1e-3 * each], "share_of_copy": 1 / each,
             "published_bytes_per_second": None if name == "torch" else 3.35e12}
            for name, each in seconds.items()
        ]  # fmt: skip
        made.add({"kind": "done", "part": "times", "key": f"{about}", "results": results})
    failed = {"part": "right", "key": "k", "label": "pack, 1 bits", "implementation": "mosaic_gpu"}
    reason = "RuntimeError: illegal address"
    made.add({"kind": "failed", **failed, "size": 2**20, "reason": reason})


@pytest.mark.slow
def test_a_record_fills_the_table_the_tables_and_the_sentence(
    tmp_path: Path, record: Record
) -> None:
    """A record as an H100 would leave it: that of the rehearsal, and times of ops."""
    for path in pages.PAGES:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    dispatch = tmp_path / pages.DISPATCH
    dispatch.parent.mkdir()
    folder = tmp_path / "experiments" / "records" / "gpu"
    shutil.copytree(record.folder, folder)
    assert pages.records(tmp_path) == {}  # A rehearsal measures nothing.
    pages.write(tmp_path)
    assert not dispatch.exists()
    for name in ("metrics.jsonl", "config.json"):
        text = (folder / name).read_text().replace('"device": "cpu"', f'"device": "{H100}"')
        (folder / name).write_text(text.replace('"rehearse": true', '"rehearse": false'))
    _times_of_ops(Record(folder))
    pages.write(tmp_path)
    date = pages.records(tmp_path)[H100].lines()[0]["date"][:10]
    sentence = f"{H100}: measured on {date}; no TPU has been measured."
    for text in ((tmp_path / page).read_text() for page in pages.PAGES):
        assert sentence in text and pages.NONE not in text
    # The rehearsal's own sizes are below those that count; 8 bits were not timed at the smallest.
    packed = [row for row in _measurements.read(dispatch) if row.op == "pack.pack"]
    assert [(row.size, row.implementation, row.bits, row.kind, row.record) for row in packed] == [
        (2**18, "mosaic_gpu", 4, H100, "gpu")
    ]
    text = (tmp_path / pages.TABLES).read_text()
    assert f"| {H100} | pack, 4 bits | 2^28 | 2,000.0 | 33% | 50% | 25% |" in text
    assert "**Not right**: pack, 1 bits, mosaic_gpu, 2^20: RuntimeError: illegal address" in text
    for words in ("| `mean` |", "rank | library", '| `jaxcomm.mean("data")` | transformer |'):
        assert words in text
    later = folder.with_name("gpu_again")
    shutil.copytree(folder, later)
    Record(later).add({"kind": "session", "date": "2099-01-01 00:00:00"})
    assert "measured on 2099-01-01" in pages.sentence(pages.records(tmp_path))


def test_the_pages_are_those_of_the_committed_records() -> None:
    """If it fails: `python -m experiments.gpu.pages`."""
    found = pages.records(ROOT)
    for page, text in pages.texts(ROOT, found).items():
        assert (ROOT / page).read_text(encoding="utf-8") == text, page
    rows = [row._replace(place="") for row in _measurements.OF_PACKAGE]
    assert rows == [row._replace(place="") for row in pages.dispatch(found)]
    assert bool(found) == (pages.sentence(found) != pages.NONE)


def test_pages_mention_measured_devices_only_with_records() -> None:
    claim = re.compile(
        r"no gpu|no (gpu or )?tpu (has|is|was)|(is|are) \**not (timed|measured)\s", re.I
    )
    said = {}
    for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), ROOT / "docs/answer/page.html"]:
        text = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", path.read_text(), flags=re.DOTALL)
        said[path.name] = claim.findall(text)
    assert {name: found for name, found in said.items() if found} == {}


def test_the_bucket_of_torch_has_the_shapes_of_pytorch() -> None:
    torch: Any = pytest.importorskip("torch", reason="no PyTorch")
    shapes = [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((3, 3, 8, 16), (16, 10), (10,))]
    drawn = measure.drawn(shapes)
    kernel, dense, bias = measure.Bucket(torch, shapes).gradients()
    np.testing.assert_array_equal(kernel.cpu(), drawn[0].transpose(3, 2, 0, 1))
    np.testing.assert_array_equal(dense.cpu(), drawn[1])
    np.testing.assert_array_equal(bias.cpu(), drawn[2])
