"""The file of a calibration: what is written is read, and what is damaged is refused."""

import json
import pathlib
from typing import Any

import pytest

from jaxcomm import perf
from jaxcomm.perf._link import FORMAT, PRIMITIVES

WHOLE = perf.Calibration(
    {"data": {name: perf.Link(1e9 + i, 1e-5 * i) for i, name in enumerate(PRIMITIVES)}, "one": {}},
    {'jaxcomm.mean("data")': 1.5e-9, "free": 0.0},
    "a device",
    "0.12",
)


def damaged(path: pathlib.Path, change: Any) -> pathlib.Path:
    WHOLE.save(path)
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
    return path


def test_saved_calibrations_are_read(tmp_path: pathlib.Path) -> None:
    WHOLE.save(tmp_path / "a.json")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    read = perf.read_calibration(tmp_path / "a.json")
    assert (read.codecs, read.device, read.jax_version) == (WHOLE.codecs, "a device", "0.12")
    assert read.links.keys() == WHOLE.links.keys()
    for name in PRIMITIVES:
        one, other = read.link("data", name), WHOLE.link("data", name)
        assert (one.bytes_per_second, one.latency) == (other.bytes_per_second, other.latency)
    assert "us per message" in str(read) and 'jaxcomm.mean("data")' in str(read)


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.update(format=FORMAT + 1),
        lambda v: v.update(links={"data": 3}),
        lambda v: v["links"]["data"]["all_gather"].update(bytes_per_second=0),
        lambda v: v.update(codecs={"mean": -1.0}),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: pathlib.Path, change: Any) -> None:
    with pytest.raises(ValueError, match=r"a\.json is no calibration, or .*|its format is not 1,"):
        perf.read_calibration(damaged(tmp_path / "a.json", change))
