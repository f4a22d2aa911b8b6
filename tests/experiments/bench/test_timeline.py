"""The command `timeline`: a table and a picture of simulated steps."""

from pathlib import Path

import pytest
from matplotlib.image import imread

from experiments.__main__ import main
from experiments.bench.timeline import messages, picture, timelines
from jaxcomm.scheduling import AlphaBeta, LayerTimes


def test_the_picture_has_a_panel_per_plan() -> None:
    times = LayerTimes([4e6, 2e6, 1e6], [1e-2] * 3, forward=[5e-3] * 3)
    found = timelines(times, AlphaBeta(1e-3, 1e9), 1e-9)
    figure = picture(found, "three layers")
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert [title.split(":")[0] for title in titles] == [*found]
    assert "1 message" in titles[0] and titles[0].endswith("1 message")
    for axes, each in zip(figure.axes, found.values(), strict=True):
        assert len(axes.collections) == len(each.events)
    assert messages(found["wait-free"]) == 3


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "steps.png"
    assert main(["timeline", "--network", "resnet50", "--figure", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == str(path) and imread(path).shape[2] == 4
    steps = {line.split(" | ")[0]: float(line.split(" | ")[1]) for line in lines[2:-1]}
    assert steps["| merged (MG-WFBP)"] == min(
        steps[f"| {name}"]
        for name in ("at the end", "wait-free", "buckets of 25 MiB", "merged (MG-WFBP)")
    )


@pytest.mark.slow
def test_a_folder_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", "--network", "resnet50", "--figure", "nowhere/steps.png"]) == 2
    error = capsys.readouterr().err
    assert "nowhere/steps.png cannot be written" in error and error.count("\n") == 1
