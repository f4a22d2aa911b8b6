"""The benchmark times every codec there is."""

import inspect
import time

import chex
import jax
import numpy as np
import pytest

import jaxcomm
from experiments import bench_ops, bench_programs, bench_sparse, bench_updates, bench_windows
from experiments.bench_codecs import CODECS, Timing, time_codecs, to_table
from experiments.bench_ops import core_seconds
from experiments.timing import medians
from experiments.train import make_mesh
from jaxcomm.compression import quantizers, sketches, sparsifiers

FACTORIES = [
    name
    for module in (quantizers, sketches, sparsifiers)
    for name in module.__all__
    if inspect.isfunction(factory := getattr(module, name))
    and inspect.signature(factory).return_annotation is jaxcomm.Codec
]


def test_factories_are_found() -> None:
    assert {"dither", "top_k", "random_k"} < set(FACTORIES)


@pytest.mark.parametrize("factory", FACTORIES)
def test_every_codec_is_timed(factory: str) -> None:
    assert any(factory in name.replace(",", "").split() for name in CODECS)


def test_a_table_has_the_codecs_beside_a_copy_and_top_k() -> None:
    chosen = {name: CODECS[name] for name in ("signs", "diana of dither, 8 bits")}
    timings = time_codecs(1000, 1, chosen)
    assert [*timings] == [*chosen]
    assert all(seconds > 0 for timing in timings.values() for seconds in timing)
    assert to_table(timings, 1000).row_count == 4


def test_a_codec_is_compared_with_what_was_timed_in_the_same_moments() -> None:
    table = to_table({"fast": Timing(1e-6, 1e-6, 2e-6), "slow": Timing(8e-6, 4e-6, 4e-6)}, 1000)
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["a copy", "jax.lax.top_k of 1 %", "fast", "slow"]
    assert cells[1][2:] == ["1.00", "8.00"]
    assert cells[2][2:] == ["1.0", "2.0"] and cells[3][2:] == ["0.50", "2.00"]


def test_functions_are_timed_in_turn() -> None:
    calls = []
    times = medians({name: lambda name=name: calls.append(name) for name in "ab"}, 3)
    assert "".join(calls) == "ab" * 4 and set(times) == {"a", "b"}


def test_sketches_are_timed_beside_scatters() -> None:
    times = bench_ops.time_sketch(2000, 1)
    assert len(times) == 4 and min(times.values()) > 0
    assert {"numpy.add.at, columns given", "jnp .at[].add, columns given"} < set(times)
    cells = [list(column.cells) for column in bench_ops.to_table(times, 2000).columns]
    assert cells[0] == [*times] and cells[2][0] == "1.00"


def test_codecs_of_sparse_updates_are_timed_beside_top_k() -> None:
    leaf = np.asarray(bench_sparse.sparse_leaf(6400))
    assert leaf.shape == (100, 64) and (leaf != 0).any(axis=1).sum() == 2
    chosen = {"nonzero": bench_sparse.CODECS["nonzero"]}
    timings, top_k = bench_sparse.time_sparse(6400, 1, chosen)
    assert top_k > 0 and all(seconds > 0 for timing in timings.values() for seconds in timing)
    assert bench_sparse.to_table(timings, top_k, 6400).row_count == len(timings)


def test_sparse_updates_are_judged_by_thirty_milliseconds_and_by_top_k() -> None:
    def judge(mean: float, peel: float) -> list[str]:
        times = {"s2_sketch, mean": mean, "s2_sketch, peel, 3 rows": peel}
        return bench_sparse.verdicts(
            {name: bench_sparse.Timing(0.0, 0.0, each) for name, each in times.items()}, 0.1
        )

    assert [line.split()[-2] for line in judge(0.029, 0.09)[:1]] == ["within"]
    assert "within the 100 of" in judge(0.029, 0.09)[1]
    assert "BEYOND 30" in judge(0.031, 0.11)[0] and "BEYOND the 100 of" in judge(0.031, 0.11)[1]


def test_time_of_cores_does_not_count_waiting() -> None:
    assert core_seconds(lambda: time.sleep(0.2), 1) < 0.1
    assert core_seconds(lambda: sum(range(1_000_000)), 1) > 1e-4


def test_quantizing_is_judged_by_nanoseconds_a_coordinate() -> None:
    assert bench_ops.verdict(1e-6, 1000, 256).endswith(
        "1.00 ns of one core a coordinate, within 1.5"
    )
    assert bench_ops.verdict(2e-6, 1000, 512).endswith("BEYOND 1.5")
    assert all(seconds > 0 for seconds in bench_ops.time_quantize(2000, 1).values())


@pytest.mark.slow
def test_windows_are_timed_and_train() -> None:
    few = bench_windows.time_windows(4, 60)
    assert few.parameters >= 5000 and few.seconds > 0
    assert few.loss < np.log(10) - 0.05  # Of ten classes that are all as likely.
    table = bench_windows.to_table({4: few, 8: few._replace(seconds=1.0)}, 2)
    assert [*table.columns[1].cells][1] == "500.0"
    assert "BEYOND" in bench_windows.verdict({8: few._replace(seconds=1.0)}, 2)
    assert "within" in bench_windows.verdict({8: few._replace(seconds=0.5)}, 2)


def test_a_transformer_has_288_leaves_of_which_two_thirds_are_vectors() -> None:
    leaves = bench_programs.transformer().values()
    assert len(leaves) == 288 and sum(x.ndim == 1 for x in leaves) == 192
    assert sum(x.size for x in leaves) == 24 * (12 * 64**2 + 13 * 64)


def test_whole_updates_are_timed_as_multiples_of_the_plainest() -> None:
    chosen = {"qsgd": bench_updates.CONTENDERS["qsgd"]}
    seconds, size = bench_updates.measure(chosen, side=16)
    assert size == 10 * 17 * 16 and [*seconds] == ["baseline", "qsgd"] and seconds["qsgd"] > 0
    table = bench_updates.to_table({"baseline": 2e-6, "qsgd": 5e-6}, 1000)
    assert [[*column.cells][1] for column in table.columns] == ["qsgd", "5.00", "2.5", "3"]


def test_what_is_written_by_hand_is_the_mean_but_for_rounding() -> None:
    """Of four workers with levels of 1 / 31, which noise moves by one at most."""
    tx = bench_programs.by_hand()
    grads = np.random.default_rng(0).uniform(-1, 1, (4, 50)).astype(np.float32)
    grads[0, 0] = 1

    def average(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return tx.update(tree, tx.init(tree))[0]

    tree = {"a": grads[:, :20].reshape(4, 4, 5), "b": grads[:, 20:]}
    found = jax.jit(jax.vmap(average, axis_name="data"))(tree)
    mean = jax.tree.map(lambda x: np.broadcast_to(x.mean(0), x.shape), tree)
    chex.assert_trees_all_close(found, mean, atol=1 / 31)


def test_programs_are_told() -> None:
    params = bench_programs.transformer(width=4, layers=1)
    program = bench_programs.compile_step(
        bench_programs.METHODS["global_qsgd, 8 bits"], params, make_mesh(2)
    )
    # Two of the step, and one of the loss that is told.
    assert program.collectives == 3 and program.lines > 100 and program.seconds > 0
    assert all(ns > 0 for ns in bench_programs.time_updates(1, leaves=1, side=8).values())
    table = bench_programs.to_table({"mean": program}, {"mean": 1.234})
    assert [*table.columns[-1].cells] == ["1.23"]
