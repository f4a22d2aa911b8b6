"""Budgets: what breaks each, what keeps it, and what the error says; the command line."""

import json
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxcomm import wire
from jaxcomm.wire.__main__ import main
from tests.training.places import mesh_of

MESH = mesh_of(AxisType.Auto, 2, 4, names=("dcn", "ici"))
X = jnp.ones((16, 16))
RING = [(i, (i + 1) % 4) for i in range(4)]


def on(fn: Any) -> Any:
    return jax.shard_map(fn, mesh=MESH, in_specs=P(), out_specs=P(), check_vma=False)


def step(x: jax.Array) -> jax.Array:
    """1,536 bytes of float32 within, 512 of bfloat16 across in three turns, and a scalar."""
    inside = lax.psum(x, "ici")
    body = lambda x, _: (lax.psum(x.astype(jnp.bfloat16), "dcn").astype(jnp.float32), None)  # noqa: E731
    outside = lax.scan(body, inside, None, length=3)[0]
    return outside * lax.psum(jnp.sum(x), ("dcn", "ici"))


KEPT: dict[str, dict[str, Any]] = {
    "bytes": {"bytes": 1536 + 3 * 512 + 7},
    "units": {"bytes": "3.1 kB"},
    "binary units": {"bytes": "3.1KiB"},
    "bytes over an axis": {"bytes": {"dcn": 3 * 512 + 7, "ici": 1543}},
    "messages": {"collectives": 5},
    "messages of a kind": {"collectives": {"all_reduce": 5}},
    "dtypes": {"dtypes": {"float32", jnp.bfloat16}},
    "dtypes over an axis": {"dtypes": {"dcn": "bfloat16"}, "above": 7},
    "bits": {"bits": 32},
    "axes": {"only_axes": ("dcn", "ici")},
    "loops of little": {"outside_loops": True, "above": "2 kB"},
}
BROKEN: dict[str, tuple[dict[str, Any], str, int]] = {
    "bytes": ({"bytes": 3078}, r"bytes: 3,079, at most 3,078", 3),
    "bytes over an axis": (
        {"bytes": {"dcn": "1 kB"}},
        r"bytes over 'dcn': 1,543, at most 1,000",
        2,
    ),
    "messages": ({"collectives": 4}, r"collectives: 5, at most 4", 3),
    "other kinds": ({"collectives": {"ppermute": 9}}, r"all_reduce: 5, at most 0", 3),
    "dtypes": ({"dtypes": ["int8", "bfloat16"]}, r"dtypes other than bfloat16, int8:", 2),
    "dtypes over an axis": ({"dtypes": {"ici": "bfloat16"}, "above": 7}, "over 'ici'", 1),
    "bits": ({"bits": 16, "above": "1 kB"}, r"wider than 16 bits:", 1),
    "loops": ({"outside_loops": True}, r"in a loop:\n +all_reduce  dcn  bfloat16\[16,16\]  x3", 1),
    "axes": ({"only_axes": "ici"}, r"over other axes than 'ici':", 2),
    "overlap": ({"overlapped": 0.5}, r"0% of the bytes, at least 50% are asked for", 3),
    "two": ({"bits": 8, "collectives": 1}, r"collectives: 5[\s\S]*wider than 8 bits", 3),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_budget_that_is_kept(name: str) -> None:
    report = wire.require(on(step), X, **KEPT[name])
    assert wire.require(report, **KEPT[name]) is report


@pytest.mark.parametrize("name", BROKEN)
def test_a_budget_that_is_broken(name: str) -> None:
    budget, message, count = BROKEN[name]
    with pytest.raises(wire.WireError, match=message) as caught:
        wire.require(on(step), X, **budget)
    assert len(caught.value.collectives) == count
    assert "test_require.py:" in str(caught.value)
    assert caught.value.report.bytes_per_worker == 3079


def test_equal_collectives_are_several() -> None:
    both = on(lambda x: sum(lax.psum([x, 2 * x], "ici")))
    with pytest.raises(wire.WireError) as caught:
        wire.require(both, X, collectives=0, bits=16)
    assert [c.shape for c in caught.value.collectives] == [X.shape] * 2
    assert "float32[16,16]  x1  2 equal, 3,072 bytes" in str(caught.value)


def test_a_loop_of_unknown_length_keeps_no_total() -> None:
    fn = on(lambda x: lax.while_loop(lambda x: x[0, 0] < 9, lambda x: lax.psum(x, "ici"), x))
    for budget in ({"bytes": "1 GB"}, {"collectives": 10**6}):
        with pytest.raises(wire.WireError, match="at least"):
            wire.require(fn, X, **budget)  # type: ignore[arg-type]


def test_the_branch_that_sends_most_counts() -> None:
    fn = on(lambda x: lax.cond(x[0, 0] > 0, lambda x: lax.psum(x, "ici"), lambda x: x, x))
    wire.require(fn, X, bytes=1536, collectives=1)
    with pytest.raises(wire.WireError):
        wire.require(fn, X, bytes=1535)


@pytest.mark.parametrize("size", ["2.5", "2 megabytes", "MB", "1 Mb"])
def test_sizes_that_are_none(size: str) -> None:
    with pytest.raises(ValueError, match=r"A size is a number of bytes"):
        wire.require(on(step), X, bytes=size)


def test_an_axis_that_the_program_does_not_have() -> None:
    """A limit of it would hold of any program."""
    for budget in ({"bytes": {"dnc": 1}}, {"dtypes": {"dnc": "int8"}}):
        with pytest.raises(ValueError, match=r"no axis 'dnc': its axes are \['dcn', 'ici'\]"):
            wire.require(on(step), X, **budget)  # type: ignore[arg-type]
    inside = on(lambda x: lax.psum(x, "ici"))
    wire.require(inside, X, bytes={"dcn": 0})
    compiled = jax.jit(inside).lower(X).compile()
    wire.require(compiled, bytes={"dcn": 0}, mesh=MESH)
    text = (compiled.as_text() or "").replace("'dcn'", "'a'")
    groups = "replica_groups={{0,1,2,3},{4,5,6,7}}"
    text = re.sub(
        r"replica_groups=(mesh\[.*?\] \{.*?\}|\[\S*?\]<=\[\S*?\]|\{\{.*?\}\})", groups, text
    )
    with pytest.raises(ValueError, match=r"no axis 'dcn'.*pass `mesh`"):
        wire.require(text, bytes={"dcn": 0})
    wire.require(text, bytes={"dcn": 0}, mesh={"dcn": 2, "ici": 4})


def more(x: jax.Array) -> jax.Array:
    return lax.ppermute(step(x), "ici", RING)


def wider(x: jax.Array) -> jax.Array:
    body = lambda x, _: (lax.psum(x, "dcn"), None)  # noqa: E731
    outside = lax.scan(body, lax.psum(x, "ici"), None, length=3)[0]
    return outside * lax.psum(jnp.sum(x), ("dcn", "ici"))


def test_the_same_as_an_earlier_report(tmp_path: pathlib.Path) -> None:
    """A file that a repository keeps: only what is sent counts, not the lines."""
    lock, other = tmp_path / "wire.json", tmp_path / "other.json"
    lock.write_text(wire.account(on(step), X).json())
    other.write_text(lock.read_text().replace("test_require.py:", "moved.py:1"))
    assert lock.read_text() != other.read_text()
    for earlier in (lock, str(lock), other, wire.account(on(step), X)):
        wire.require(on(step), X, same_as=earlier)
    for fn, message in (
        (more, r"added:\n +ppermute  ici  float32\[16,16\]"),
        (wider, r"grew, 1,536 bytes to 3,072:\n +all_reduce  dcn  float32"),
    ):
        with pytest.raises(wire.WireError, match=message):
            wire.require(on(fn), X, same_as=lock)
    lock.write_text(wire.account(on(more), X).json())
    with pytest.raises(wire.WireError, match=r"removed:\n +ppermute"):
        wire.require(on(step), X, same_as=lock)
    lock.write_text(wire.account(on(wider), X).json())
    with pytest.raises(wire.WireError, match=r"changed, and not grown, 3,072 bytes to 1,536"):
        wire.require(on(step), X, same_as=lock)
    for text in ("{", "[]", '{"collectives": [{"kind": "all_reduce"}]}'):
        lock.write_text(text)
        with pytest.raises(ValueError, match="not a report"):
            wire.require(on(step), X, same_as=lock)


def test_a_report_is_written_and_read_and_listed() -> None:
    branches = lambda x: lax.cond(x[0, 0] > 0, step, lambda x: lax.psum(x, "dcn"), x)  # noqa: E731
    from jaxcomm.wire._account import read

    report = wire.account(on(branches), X)
    again = read(report.json())
    assert str(again) == str(report) and again.json() == report.json()
    assert again.amortized_bytes_per_worker(0.5) == report.amortized_bytes_per_worker(0.5)
    assert len(report.json().splitlines()) == 2 + 1  # One conditional.
    rows = report.table()
    assert len(rows) == len(report.collectives) == 4
    assert sum(row["bytes"] for row in rows) == report.bytes_of_branches
    assert {row["within"] for row in rows} == {"cond 1/2", "cond 2/2 / scan x3", "cond 2/2"}
    json.dumps(rows)


def test_a_long_report_fits_a_terminal() -> None:
    """Collectives of one line are one row; beyond thirty rows, the smallest are one."""

    def many(x: jax.Array) -> jax.Array:
        for i in range(50):
            with jax.named_scope(f"turn_{i}"):
                body = lambda x, _: (jnp.sin(lax.psum(x, "ici")), None)  # noqa: E731
            x = lax.scan(body, lax.psum(x, "dcn"), None, length=i + 2)[0]
        return x

    lines = str(wire.account(on(many), X)).splitlines()
    assert len(lines) == 33 and all(len(line) <= 120 for line in lines)
    assert lines[-2].startswith("and 21 others: ")
    sent = [int(line.split()[6].replace(",", "")) for line in lines[1:31]]
    assert sent == sorted(sent, reverse=True)
    (row,) = [line for line in lines if "dcn" in line and "ici" not in line]
    assert row.split()[4:7] == ["16x16", "50", "51,200"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    main(arguments)
    return capsys.readouterr().out


def test_the_command_line(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = jax.jit(on(step)).lower(X).compile()
    name = "module_0001.jit_step.cpu_after_optimizations.txt"
    text = compiled.as_text() or ""
    (tmp_path / name).write_text(text)
    (tmp_path / "module_0002.jit_f.cpu_after_optimizations.txt").write_text(
        jax.jit(jnp.sin).lower(X).compile().as_text() or ""
    )
    (tmp_path / f"{name}.other").write_text("nothing")
    out = printed(capsys, str(tmp_path), "--mesh", "dcn=2,ici=4")
    assert out.count("bytes sent per worker") == 1 and name in out and "dcn,ici" in out
    assert "scan x3" in out and "test_require.py:" in out
    assert str(wire.account(text, mesh=MESH)) in out
    with pytest.raises(ValueError, match="the program is for 8 devices"):
        main([str(tmp_path), "--mesh", "ici=4"])
    one = printed(capsys, str(tmp_path / name), "--json")
    assert len(json.loads(one)["collectives"]) == 3
    assert "nothing is sent" in printed(
        capsys, str(tmp_path / "module_0002.jit_f.cpu_after_optimizations.txt")
    )

    (tmp_path / "program.py").write_text(
        "from tests.wire.test_require import X, on, step\n\ndef given():\n    return on(step), X\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert "3,079" in printed(capsys, "program:given")
    for target in ("no/such/file", str(tmp_path / "empty")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(SystemExit, match=r"is no file or folder|no file \*after"):
            main([target])
