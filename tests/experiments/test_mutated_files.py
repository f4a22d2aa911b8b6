"""Mutants of small valid files: each reader returns data or raises its error, and soon."""

import contextlib
import dataclasses
import gzip
import json
import random
import resource
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
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
from tests.experiments.test_readers import IMAGES, LABELS, idx
from tests.slow import slow

SEED = 16
ALL = 100_000  # Mutants of all readers in a slow run.
DEADLINE = 5.0  # Seconds for one file.
MOST_MEMORY = 2**29  # Bytes that the process may grow by, over all mutants of a reader.


def one_of(name: str, array: np.ndarray) -> Callable[[Path], object]:
    """Reads MNIST from a folder where one file is the given one."""

    def read(path: Path) -> object:
        for other in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3",
                      "t10k-labels-idx1"):  # fmt: skip
            if other != name:
                content = idx(IMAGES if "images" in other else LABELS)
                (path.parent / f"{other}-ubyte").write_bytes(content)
        return load("mnist", str(path.parent))

    return read


def bench_of(path: Path) -> object:
    """What the bench computes from a record to compare."""
    record = bench_record.read(path.parent)
    return [(bench_record.multiple(row), bench_record.noise(row)) for row in record.rows]


def newest_of_bench(path: Path) -> object:
    """A record of the bench that cannot be read is passed over."""
    (path.parent / "record").mkdir(exist_ok=True)
    path.replace(path.parent / "record" / "metrics.jsonl")
    (path.parent / "record" / "config.json").write_text('{"finished": true}')
    return bench_record.newest_rows(path.parent, HEADER)


def resumed(path: Path) -> object:
    """Every option of a continued record has a value that the command line allows."""
    config = store.resumed_config(Digits(resume=str(path.parent)), path.parent)
    assert isinstance(config.steps, int) and all(isinstance(name, str) for name in config.methods)
    assert config.steps > 0 and isinstance(config.learning_rate_sgd, float | int)
    return config


def lines(*rows: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


POINT = {"schema": 1, "kind": "point", "method": "mean", "seed": 0, "step": 1, "train_loss": 0.5}
RUN = {"schema": 1, "kind": "run", "method": "mean", "seed": 0, "train_loss": None, "x": [1, [2]]}
OLD = {"kind": "step", "method": "mean", "optimizer": "sgd", "seed": 0, "bytes_sent": 1.5,
       "train_loss": None}  # fmt: skip
TUNED = {"kind": "tuning", "method": "mean", "optimizer": "sgd", "seed": 0, "learning_rate": 0.1,
         "validation_loss": 1.0}  # fmt: skip
TEXT = " ".join(f"word{i % 40} is, not .{i} as" for i in range(400)).encode()
RATINGS = b"".join(b"%d\t%d\t%d\t88125%d\n" % (i % 7, i % 5, 1 + i % 5, i) for i in range(60))
TIMES = b"".join(b"%d.5,%d,0.%d\n" % (i, i + 1, i + 2) for i in range(30))
CONFIG = json.dumps({**dataclasses.asdict(Digits()), "study": "digits", "finished": False}).encode()
METRICS = "metrics.jsonl"
CALIBRATION = json.dumps(
    {"format": 1, "device": "é", "jax_version": "0.12", "codecs": {"mean": 1.5e-9},
     "links": {"data": {"all_reduce": {"latency": 1e-5, "bytes_per_second": 1e9}}}}
).encode()  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Reader:
    """A reader, a valid file for it, and the errors that it may raise."""

    read: Callable[[Path], object]
    name: str
    valid: bytes
    error: type[Exception] = ExperimentError
    never_refuses: bool = False


READERS = {
    "idx": Reader(lambda path: read_idx(path, 3), "images", idx(IMAGES)),
    "idx in gzip": Reader(lambda path: read_idx(path, 3), "images.gz", idx(IMAGES)),
    "mnist images": Reader(one_of("t10k-images-idx3", IMAGES), "t10k-images-idx3-ubyte",
                           idx(IMAGES)),
    "mnist labels": Reader(one_of("train-labels-idx1", LABELS), "train-labels-idx1-ubyte",
                           idx(LABELS)),
    "cifar": Reader(read_batch, "batch.bin", 2 * (b"\1" + bytes(3072))),
    "text": Reader(lambda path: load("text", str(path)), "text", TEXT),
    "words": Reader(lambda path: load("words", str(path), vocabulary=20), "words", TEXT),
    "words in gzip": Reader(lambda path: load("words", str(path), vocabulary=20), "words.gz", TEXT),
    "movielens": Reader(lambda path: load("movielens", str(path)), "u.data", RATINGS),
    "calibration": Reader(read_calibration, "links.json", CALIBRATION, ValueError),
    "recorded_times": Reader(recorded_times, "times.csv", TIMES, ValueError),
    "record": Reader(lambda path: store.read(path.parent), METRICS, lines(POINT, RUN, POINT)),
    "older record": Reader(lambda path: store.read(path.parent), METRICS, lines(OLD, TUNED, OLD)),
    "interrupted": Reader(lambda path: store.read_interrupted(path.parent), METRICS,
                          lines(POINT, RUN, POINT)),
    "config": Reader(resumed, "config.json", CONFIG),
    "environment": Reader(lambda path: store.environment(path.parent), "environment.txt",
                          "command: python -m experiments digits\nname: é\n".encode()),
    "claims": Reader(lambda path: store.require_claims(path.parent, "é stated"), "claims.md",
                     "é stated".encode()),
    "bench": Reader(bench_of, METRICS, lines(HEADER, ROW, FAMILY)),
    "newest of bench": Reader(newest_of_bench, METRICS, lines(HEADER, ROW, FAMILY),
                              never_refuses=True),
}  # fmt: skip
PIECES = [b"", b"0", b"9" * 25, b"7" * 5000, b"\t", b"\n", b"\x1f", b"\xff" * 4, b"\0" * 4, b"e39"]
PIECES += [b"-", b"1e-50,", b"nan", b"#", "\N{ARABIC-INDIC DIGIT ONE}".encode(), b"\xc2\x85", b" 1"]
PIECES += [b"[" * 5000 + b"]" * 5000, b'{"a":' * 900, b"null", b'""', b"1e400", b"[]", b"\\ud800"]
PIECES += [b'"%s"', b"true", b"-1", b"{}", b"\xef\xbb\xbf", b"\r"]
EXTREME = [0, 1, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**24, 2**30, 2**31 - 1, 2**31, 2**32 - 1]
ENCODINGS = ["utf-16", "utf-32", "latin-1", "cp500", "utf-7"]


def flipped(raw: bytes, choice: random.Random) -> bytes:
    """One to eight bits are inverted."""
    changed = bytearray(raw)
    for _ in range(choice.randrange(1, 9)) if raw else ():
        changed[choice.randrange(len(raw))] ^= 1 << choice.randrange(8)
    return bytes(changed)


def truncated(raw: bytes, choice: random.Random) -> bytes:
    return raw[: choice.randrange(len(raw) + 1)]


def spliced(raw: bytes, choice: random.Random) -> bytes:
    """A piece replaces a part, or is inserted; parts are repeated."""
    for _ in range(choice.randrange(1, 4)):
        start = choice.choice([choice.randrange(len(raw) + 1), choice.randrange(20)])
        end = start + choice.choice([0, 1, choice.randrange(len(raw) + 1)])
        piece = choice.choice([*PIECES, choice.randbytes(choice.randrange(9)), raw[start:end] * 2])
        raw = raw[:start] + piece + raw[end:]
    return raw


def extreme(raw: bytes, choice: random.Random) -> bytes:
    """A word near the start, where headers are, is an extreme integer of either byte order."""
    start = 4 * choice.randrange(6) + choice.choice([0, 0, 0, 1, 2])
    return raw[:start] + struct.pack(choice.choice("<>") + "I", choice.choice(EXTREME)) + raw[
        start + 4 :
    ]  # fmt: skip


def recoded(raw: bytes, choice: random.Random) -> bytes:
    return raw.decode("utf-8", "replace").encode(choice.choice(ENCODINGS), "replace")


def replaced_value(raw: bytes, choice: random.Random) -> bytes:
    """In a line of JSON, a value of another type."""
    found = raw.splitlines(keepends=True)
    number = choice.randrange(len(found))
    try:
        row = json.loads(found[number])
    except ValueError:
        return spliced(raw, choice)
    if not isinstance(row, dict) or not row:
        return spliced(raw, choice)
    row[choice.choice([*row])] = choice.choice(
        [None, -1, 0, 1e30, 1e300, 10**400, "", "$x^$", "../x", [], [[1]], {}, {"a": 1}, True, "é"]
    )
    found[number] = json.dumps(row).encode() + b"\n"
    return b"".join(found)


MUTATIONS = [flipped, truncated, spliced, spliced, extreme, recoded, replaced_value]


def mutant(reader: Reader, choice: random.Random) -> bytes:
    """A mutated file; of gzip, the contents or the compressed bytes are mutated, or both."""
    raw, compressed = reader.valid, reader.name.endswith(".gz")
    part = choice.randrange(3) if compressed else 0
    if part != 1:
        for _ in range(choice.choice([1, 1, 2])):
            raw = choice.choice(MUTATIONS)(raw, choice) if raw else raw
    if compressed:
        bomb = bytes(2**22) if choice.random() < 0.01 else b""
        raw = gzip.compress(raw + bomb, mtime=0, compresslevel=1)
        if part:
            raw = choice.choice(MUTATIONS)(raw, choice)
    return raw


class Hung(BaseException):
    """No reader handles it by mistake, as it might handle a TimeoutError, which is an OSError."""


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    def expire(*_: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def most_resident() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("count", [300, slow(-(-ALL // len(READERS)))])
def test_a_reader_names_the_error_in_a_mutant(tmp_path: Path, name: str, count: int) -> None:
    """The error is one line with the path of the file; no other error is allowed."""
    reader, choice = READERS[name], random.Random(f"{SEED} {name}")
    path, refused = tmp_path / reader.name, 0
    path.write_bytes(gzip.compress(reader.valid) if path.suffix == ".gz" else reader.valid)
    reader.read(path)
    before = most_resident()
    for number in range(count):
        raw = mutant(reader, choice)
        path.write_bytes(raw)
        try:
            with deadline(DEADLINE):
                reader.read(path)
        except reader.error as error:
            refused += 1
            said = str(error)
            assert str(path.parent) in said and len(said) < 500 and "\n" not in said, said
        except Hung:
            pytest.fail(f"mutant {number} takes more than {DEADLINE} s: {raw[:200]!r}")
        except Exception as error:
            raise AssertionError(f"mutant {number} raises {error!r:.200}: {raw[:200]!r}") from error
    assert most_resident() - before < MOST_MEMORY
    assert (refused == 0) if reader.never_refuses else refused
