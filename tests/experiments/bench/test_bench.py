"""The measurements of the bench, at small sizes."""

from pathlib import Path

import numpy as np
import pytest

from experiments.__main__ import main
from experiments.bench import kernels, programs, timeline
from jaxcomm.scheduling import AlphaBeta, LayerTimes


@pytest.mark.slow
def test_kernels_and_codecs_are_compared_with_plain_code() -> None:
    leaf = np.asarray(kernels.sparse_leaf(6400))
    assert leaf.shape == (100, 64) and (leaf != 0).any(axis=1).sum() == 2
    for table, lines in zip(kernels.TABLES, (8, 5, 5, 11), strict=True):
        assert len(table(6400, 1).splitlines()) == lines


@pytest.mark.slow
def test_a_program_is_of_one_worker_and_its_peak_excludes_arguments() -> None:
    params = programs.transformer(width=4, layers=1)
    size = sum(x.size for x in params.values())
    program = programs.compile_step("global_qsgd_8_bits", params, 2)
    alone = programs.compile_step("global_qsgd_8_bits", params, 1)
    # Two of the step, and one of the reported loss.
    assert program["collectives"] == 3 and program["lines"] > 100 and program["compile_seconds"] > 0
    # Parameters and gradients, and less than a hundred bytes of state.
    assert 8 * size <= program["arguments"] <= 8 * size + 100 and 8 * size <= alone["arguments"]
    assert program["accessed"] > 8 * size and program["peak"] >= program["temporaries"] > 0


def test_lines_of_stack_frames_are_not_counted() -> None:
    frames = 'FileNames\n1 "step.py"\n\nStackFrames\n1 {file_location_id=1 parent_frame_id=1}\n'
    text = f"HloModule jit_step\n\n{frames}\nENTRY %main (x: f32[2]) -> f32[2] {{\n"
    text += "  %x = f32[2]{0} parameter(0)\n  ROOT %y = f32[2]{0} negate(%x)\n}\n"
    assert programs.operations(text) == 2


def test_the_picture_of_a_timeline_has_a_panel_per_plan_and_a_bar_per_event() -> None:
    times = LayerTimes([4e6, 2e6, 1e6], [1e-2] * 3, forward=[5e-3] * 3)
    found = timeline.timelines(times, AlphaBeta(1e-3, 1e9), 1e-9)
    assert (
        timeline.messages(found["wait-free"]) == 3 and timeline.messages(found["at the end"]) == 1
    )
    axes = timeline.picture(found, "three layers").axes
    assert [len(each.patches) for each in axes] == [len(each.events) for each in found.values()]


@pytest.mark.slow
def test_merging_is_the_fastest_timeline(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    figure = str(tmp_path / "steps.png")
    assert main(["timeline", "--network", "resnet50", "--figure", figure]) == 0
    *lines, path = capsys.readouterr().out.splitlines()
    at_end, wait_free, buckets, merged, *_ = (
        float(line.split(": ")[1].split()[0]) for line in lines
    )
    assert merged <= min(at_end, wait_free, buckets) and path == figure and Path(figure).exists()
