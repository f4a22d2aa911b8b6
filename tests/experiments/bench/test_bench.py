"""The measurements of the bench, at small sizes."""

import chex
import jax
import numpy as np
import pytest

from experiments.bench import dither, memory, ops, programs, sparse, windows
from experiments.bench.methods import TIMED
from experiments.training.train import make_mesh


def test_passes_and_sketches_are_compared_with_plain_code() -> None:
    passes, sketches = dither.time_passes(1000, 1), ops.time_sketch(2000, 1)
    assert min(*passes.values(), *sketches.values()) > 0
    assert dither.to_table(passes, 1000).row_count == 6
    plain = {"encode, floor with hashed noise": 1.0, "decode, multiply": 1.0}
    lines = [*dither.verdicts({"encode": 2.0, "decode": 2.1, **plain})]
    assert "2.00 times the plain code, within 2" in lines[0] and "ABOVE" in lines[1]
    cells = [list(column.cells) for column in ops.to_table(sketches, 2000).columns]
    assert cells[0] == [*sketches] and len(sketches) == 4 and cells[2][0] == "1.00"


def test_codecs_of_sparse_updates_are_compared_with_top_k() -> None:
    leaf = np.asarray(sparse.sparse_leaf(6400))
    assert leaf.shape == (100, 64) and (leaf != 0).any(axis=1).sum() == 2
    chosen = {"nonzero": sparse.CODECS["nonzero"]}
    timings, top_k = sparse.time_sparse(6400, 1, chosen)
    assert top_k > 0 and all(seconds > 0 for timing in timings.values() for seconds in timing)
    assert sparse.to_table(timings, top_k, 6400).row_count == len(timings)


def test_quantization_has_a_limit_per_coordinate() -> None:
    assert ops.verdict(1e-6, 1000, 256).endswith("1.00 ns of one core per coordinate, within 1.5")
    assert ops.verdict(2e-6, 1000, 512).endswith("ABOVE 1.5")
    assert all(seconds > 0 for seconds in ops.time_quantize(2000, 1).values())


@pytest.mark.slow
def test_windows_are_timed_and_train() -> None:
    few = windows.time_windows(4, 60)
    assert few.parameters >= 5000 and few.seconds > 0
    assert few.loss < np.log(10) - 0.05  # Ten classes of equal probability.
    table = windows.to_table({4: few, 8: few._replace(seconds=1.0)}, 2)
    assert [*table.columns[1].cells][1] == "500.0"
    assert "ABOVE" in windows.verdict({8: few._replace(seconds=1.0)}, 2)
    assert "within" in windows.verdict({8: few._replace(seconds=0.5)}, 2)


def test_the_handwritten_update_is_the_mean_up_to_rounding() -> None:
    """Four workers with levels of 1 / 31; noise changes a code by at most one level."""
    tx = programs.by_hand()
    grads = np.random.default_rng(0).uniform(-1, 1, (4, 50)).astype(np.float32)
    grads[0, 0] = 1

    def average(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return tx.update(tree, tx.init(tree))[0]

    tree = {"a": grads[:, :20].reshape(4, 4, 5), "b": grads[:, 20:]}
    found = jax.jit(jax.vmap(average, axis_name="data"))(tree)
    mean = jax.tree.map(lambda x: np.broadcast_to(x.mean(0), x.shape), tree)
    chex.assert_trees_all_close(found, mean, atol=1 / 31)


@pytest.mark.slow
def test_a_program_is_of_one_worker_and_its_peak_excludes_arguments() -> None:
    params = programs.transformer(width=4, layers=1)
    size = sum(x.size for x in params.values())
    program, alone = (
        programs.compile_step(TIMED["global_qsgd_8_bits"].build(), params, make_mesh(workers))
        for workers in (2, 1)
    )
    # Two of the step, and one of the reported loss.
    assert program.collectives == 3 and program.lines > 100 and program.compile_seconds > 0
    # Parameters and gradients, and less than a hundred bytes of state.
    assert 8 * size <= program.arguments <= 8 * size + 100 and 8 * size <= alone.arguments
    assert program.accessed > 8 * size and program.peak >= program.temporaries > 0


def test_lines_of_stack_frames_are_not_counted() -> None:
    text = """HloModule jit_step

FileNames
1 "step.py"

StackFrames
1 {file_location_id=1 parent_frame_id=1}

ENTRY %main (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  ROOT %y = f32[2]{0} negate(%x)
}
"""
    assert programs.operations(text) == 2


@pytest.mark.slow
@pytest.mark.skipif(not memory.STATUS.exists(), reason="not Linux: reads resident memory")
def test_resident_memory_is_that_of_the_compiled_program() -> None:
    resident = memory.resident_in_subprocess("mean", 1024)
    assert resident == pytest.approx(4 * 50_384_896, rel=0.1)
