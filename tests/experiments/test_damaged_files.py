"""Files as people damage them: each reader returns data, or names the file in one line."""

import dataclasses
import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.bench import record as bench_record
from experiments.cli.errors import ExperimentError
from experiments.studies.digits import Digits
from experiments.study import store
from experiments.tasks.data import load
from experiments.tasks.data.cifar import read_batch
from experiments.tasks.data.idx import read_idx
from jaxcomm.perf import read_calibration
from jaxcomm.synchronization import recorded_times
from tests.experiments.bench.test_table import FAMILY, HEADER, ROW
from tests.experiments.test_readers import IMAGES, MNIST, idx

METRICS = "metrics.jsonl"
POINT = {"schema": 1, "kind": "point", "method": "mean", "seed": 0, "step": 1, "train_loss": 0.5}
RUN = {**POINT, "kind": "run", "train_loss": None, "x": [1, [2]]}
OLD = {"kind": "step", "method": "mean", "optimizer": "sgd", "seed": 0, "bytes_sent": 1.5,
       "train_loss": None}  # fmt: skip
TEXT = " ".join(f"word{i % 40} is, not .{i} as" for i in range(400)).encode()
RATINGS = b"".join(b"%d\t%d\t%d\t88125%d\n" % (i % 7, i % 5, 1 + i % 5, i) for i in range(60))
CONFIG = {**dataclasses.asdict(Digits()), "study": "digits", "finished": False}
LINKS = {"data": {"all_reduce": {"latency": 1e-5, "bytes_per_second": 1e9}}}
CALIBRATION = {"format": 1, "device": "é", "jax_version": "0.12", "codecs": {}, "links": LINKS}


def lines(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def mnist(path: Path) -> object:
    """Reads MNIST from a folder where one file is the given one."""
    for name, array in MNIST.items():
        if name != path.name:
            (path.parent / name).write_bytes(idx(array))
    return load("mnist", str(path.parent))


def words(path: Path) -> object:
    return load("words", str(path), vocabulary=20)


READERS: dict[str, tuple[Callable[[Path], object], str, bytes]] = {
    "idx": (lambda path: read_idx(path, 3), "images", idx(IMAGES)),
    "idx in gzip": (lambda path: read_idx(path, 3), "images.gz", gzip.compress(idx(IMAGES))),
    "mnist": (mnist, "train-images-idx3-ubyte", idx(IMAGES)),
    "cifar": (read_batch, "batch.bin", 2 * (b"\1" + bytes(3072))),
    "words": (words, "text", TEXT),
    "words in gzip": (words, "words.gz", gzip.compress(TEXT)),
    "movielens": (lambda path: load("movielens", str(path)), "u.data", RATINGS),
    "calibration": (read_calibration, "links.json", lines(CALIBRATION)),
    "times": (recorded_times, "times.csv", b"".join(b"%d.5,%d\n" % (i, i + 1) for i in range(30))),
    "record": (lambda path: store.read(path.parent), METRICS, lines(POINT, RUN, POINT)),
    "older record": (lambda path: store.read(path.parent), METRICS, lines(OLD, OLD)),
    "interrupted": (
        lambda path: store.read_interrupted(path.parent), METRICS, lines(POINT, RUN, POINT)),
    "config": (
        lambda path: store.resumed_config(Digits(), path.parent), "config.json", lines(CONFIG)),
    "environment": (
        lambda path: store.environment(path.parent), "environment.txt", "name: é\n".encode()),
    "claims": (
        lambda path: store.require_claims(path.parent, "é\n"), "claims.md", "é\n".encode()),
    "bench": (lambda path: bench_record.read(path.parent), METRICS, lines(HEADER, ROW, FAMILY)),
}  # fmt: skip
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "cut": lambda raw: raw[: len(raw) // 2],
    "without its last byte": lambda raw: raw[:-1],
    "twice": lambda raw: 2 * raw,
    "with Windows line ends": lambda raw: raw.replace(b"\n", b"\r\n"),
    "in UTF-16": lambda raw: raw.decode("latin-1").encode("utf-16"),
    "a page of an error": lambda raw: b"<!doctype html>\n<title>Not found</title>\n",
    "a number replaced": lambda raw: raw.replace(b"1", b"one"),
    "a name replaced": lambda raw: raw.replace(b"mean", b"../$x^$").replace(b"schema", b"scheme"),
    "deep": lambda raw: b"[" * 100_000,
    "deep inside": lambda raw: raw.replace(b"[2]", b"[" * 900 + b"]" * 900),
}


@pytest.mark.parametrize("name", READERS)
def test_a_reader_returns_data_or_names_the_file(tmp_path: Path, name: str) -> None:
    read, file, valid = READERS[name]
    path, refused = tmp_path / file, set()
    path.write_bytes(valid)
    read(path)
    for damage, change in DAMAGES.items():
        path.write_bytes(change(valid))
        try:
            read(path)
        except (ExperimentError, ValueError) as error:
            refused.add(damage)
            said = str(error)
            assert isinstance(error, ExperimentError) == (name not in ("calibration", "times"))
            assert str(tmp_path) in said and len(said) < 500 and "\n" not in said, damage
    assert ("a page of an error" in refused) == (name != "environment")  # Which is any text.
    assert ("deep inside" in refused) == (b"[2]" in valid)
