"""A study from its settings to its README: what is run, recorded, skipped and continued."""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from experiments.cli.errors import ExperimentError, Interrupted
from experiments.studies.digits import Digits
from experiments.study import command, readme
from experiments.study import record as recording
from experiments.study.claims import Claim
from experiments.study.columns import Column, Table, key
from experiments.study.groups import spread
from experiments.study.judges import is_better
from experiments.study.search import Axis, Budget
from experiments.study.store import CLAIMS, read, resumed_config
from experiments.study.study import Study, run
from experiments.study.tidy import make_row


@dataclasses.dataclass(frozen=True)
class Config:
    """Is the loss of `half` lower?

    More text.
    """

    seeds: int = 2
    methods: tuple[str, ...] = ("mean", "half")
    record: str = "toy"
    records: str = "."
    resume: str | None = None


class Counting:
    """Trains nothing, and counts what it is asked for."""

    def __init__(self, stop_after: float = math.inf):
        self.built: list[dict[str, Any]] = []
        self.calls: list[tuple] = []
        self.stop_after = stop_after

    def __call__(self, config: Config, setting: Mapping[str, Any]) -> Any:
        self.built.append(dict(setting))
        return self.train

    def train(
        self, setting: Mapping[str, Any], seed: int, parameters: Any, *, validation: bool
    ) -> Iterator[dict[str, Any]]:
        if len(self.calls) >= self.stop_after:
            raise KeyboardInterrupt
        self.calls.append((*setting.values(), seed, *parameters.values(), validation))
        factor = 0.5 if setting["method"] == "half" else 1.0
        if validation:
            yield {"validation_loss": abs(math.log(parameters["rate"] / 0.1)) + seed}
            return
        for step in (1, 2):
            yield {"step": step, "loss": factor * (3 - step) + seed / 100}
        yield {"final": factor + seed / 100, "accuracy": math.inf if factor == 1 else 0.5}


def settings_of(config: Config) -> list[dict[str, str]]:
    if unknown := {*config.methods} - {"mean", "half"}:
        raise ExperimentError(f"--methods has the unknown {min(unknown)}.")
    pairs = itertools.product(config.methods, ("iid", "skewed"))
    return [{"split": split, "method": method} for method, split in pairs]


def make(trainer: Counting, **options: Any) -> Study:
    table = Table(
        by=("split", "method"),
        columns=(
            key("split"),
            key("method"),
            Column("loss", spread("final"), ".3f"),
            Column("accuracy", spread("accuracy"), ".2f"),
        ),
        reference={"method": "mean"},
    )
    claim = Claim("`half` has the lower loss.", is_better("final"))
    return Study(
        **{"name": "toy", "config": Config, "settings": settings_of, "train": trainer,
           "table": table,
           "claims": (claim,), "headline": ("loss",), **options}
    )  # fmt: skip


TUNED = {
    "grid": lambda config, setting: {"rate": Axis((0.01, 0.1, 1.0))},
    "budget": lambda config: Budget(3, seeds=2),
}


class Lines(list):
    """The rows or the lines that a study reports."""

    def add(self, row: dict[str, Any]) -> None:
        self.append(row)

    def advance(self, done: int, line: str) -> None:
        self.append((done, line))


@pytest.fixture(autouse=True)
def quick_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Avoids calls of git."""
    text = "command: python -m experiments toy\ncommit: abc\npython: 3\ndevices: 8 x cpu\n"
    for module in (recording, command):
        monkeypatch.setattr(module, "describe_environment", lambda: text)


def test_every_setting_is_trained_with_every_seed() -> None:
    trainer, rows, lines = Counting(), Lines(), Lines()
    returned = run(make(trainer), Config(), rows, lines)
    assert returned == rows
    assert trainer.calls == [
        (split, method, seed, False)
        for method in ("mean", "half") for split in ("iid", "skewed") for seed in (0, 1)
    ]  # fmt: skip
    assert rows[0] == {
        "schema": 1, "kind": "point", "split": "iid", "method": "mean", "seed": 0,
        "step": 1, "loss": 2.0}  # fmt: skip
    assert [row["kind"] for row in rows[:3]] == ["point", "point", "run"]
    assert math.isnan(rows[2]["accuracy"])
    assert [done for done, _ in lines] == [1, 2, 3, 4]
    assert lines[2][1].startswith("iid half, loss 0.505 ± 0.007, 0 s; about ")


def test_settings_share_compiled_programs() -> None:
    for shares, built in ((None, 4), (("method",), 2), ((), 1)):
        trainer = Counting()
        run(make(trainer, shares=shares), Config(), Lines(), Lines())
        assert len(trainer.built) == built and len(trainer.calls) == 8


def test_parameters_are_tuned_on_validation_data_with_other_seeds() -> None:
    trainer, rows, lines = Counting(), Lines(), Lines()
    run(make(trainer, **TUNED), Config(methods=("half",)), rows, lines)
    trials = [call for call in trainer.calls if call[-1]]
    assert trials[:6] == [
        ("iid", "half", seed, rate, True) for rate in (0.01, 0.1, 1.0) for seed in (2, 3)
    ]
    assert [call for call in trainer.calls if not call[-1]] == [
        (split, "half", seed, 0.1, False) for split in ("iid", "skewed") for seed in (0, 1)
    ]
    first = next(row for row in rows if row["kind"] == "run")
    assert (first["rate"], first["trials"], first["at_edge"]) == (0.1, 6, "")
    assert "iid half, rate 0.1, loss" in lines[0][1]
    edge = {"grid": lambda config, setting: {"rate": Axis((1e-9, 1e-8))}}
    run(make(Counting(), **{**TUNED, **edge}), Config(), found := Lines(), Lines())
    runs = [row for row in found if row["kind"] == "run"]
    # 3 points (1 refines), and 2 extensions, of 2 seeds each.
    assert {(row["at_edge"], row["trials"]) for row in runs} == {("rate", 10)}


def test_facts_are_recorded_once_and_first() -> None:
    facts = [{"about": "bytes", "method": name, "bytes": 4} for name in ("mean", "half")]
    study, rows = make(Counting(), facts=lambda config: facts), Lines()
    run(study, Config(), rows, Lines())
    assert [row["kind"] for row in rows[:3]] == ["fact", "fact", "point"]
    for had, added in ((1, 1), (len(rows) - 3, 0)):
        run(study, Config(), again := Lines(), Lines(), rows[:had])
        assert sum(row["kind"] == "fact" for row in again) == added


def test_interleaved_settings_alternate() -> None:
    """Trainers are kept; a continued study trains what is missing, and parts are counted."""
    study = make(trainer := Counting(), interleaved=True, shares=("method",), **TUNED)
    rows, lines = Lines(), Lines()
    run(study, Config(), rows, lines)
    final = [call[:3] for call in trainer.calls if not call[-1]]
    assert final == [(*each, seed) for seed in (0, 1) for each in dict.fromkeys(
        (split, method) for split, method, _ in final)] and len(final) == 8  # fmt: skip
    assert len(trainer.built) == 2
    assert [done for done, _ in lines] == [*range(1, 9)]
    assert lines[4][1].startswith("iid mean, seed 1, rate 0.1, loss 1.005 ± 0.007, 0 s; about ")
    missing = [row for row in rows if row["kind"] == "trial" or row["seed"] == 0]
    again, added = Counting(), Lines()
    run(make(again, interleaved=True, **TUNED), Config(), added, Lines(), missing)
    assert [call[:3] for call in again.calls] == [each for each in final if each[2] == 1]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def only(root: Path) -> Path:
    (folder,) = root.iterdir()
    return folder


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15, deadline=None
)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=3), st.integers(0, 60))
def test_an_interrupted_study_ends_as_if_it_had_not_been(
    tmp_path_factory: pytest.TempPathFactory, stops: list[int], torn: int
) -> None:
    """Each stop is the number of trainings before Ctrl+C; the record then loses its last bytes."""
    expected, root = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("parts")
    trainer = Counting()
    assert command.main(make(trainer, **TUNED), Config(records=str(expected))) == 0
    assume(sum(stops) < len(trainer.calls))
    config = Config(records=str(root))
    for stop in stops:
        with pytest.raises(Interrupted, match=r"partial record. Continue it with --resume .*toy"):
            command.main(make(Counting(stop), **TUNED), config)
        config = Config(resume=str(only(root)))
        assert not json.loads((only(root) / "config.json").read_text())["finished"]
        metrics = only(root) / recording.METRICS
        metrics.write_bytes(metrics.read_bytes()[: -torn or None])
    command.main(make(Counting(), **TUNED), config)
    whole, parts = contents(only(expected)), contents(only(root))
    for name in (recording.METRICS, "table.csv", CLAIMS, "README.md"):
        assert parts[name] == whole[name], name
    assert json.loads(parts["config.json"])["finished"]
    assert parts["environment.txt"].count(b"command: ") == 1 + len(stops)


def test_a_finished_record_is_regenerated_without_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"files": lambda results: {"a.txt": "ä", "b.npz": b"\xff"}}
    command.main(make(Counting(), **TUNED, **files), Config(records=str(tmp_path)))
    printed = capsys.readouterr().out
    assert "toy: 4 settings, 2 seeds each" in printed and "0.505 ± 0.007" in printed
    assert "Claim: `half` has the lower loss. Outcome: holds in 2 of 2 settings." in printed
    before = contents(only(tmp_path))
    assert (before["a.txt"].decode(), before["b.npz"]) == ("ä", b"\xff")
    results = command.read_results(make(Counting()), only(tmp_path))
    assert readme.write(make(Counting()), results).encode() == before["README.md"]
    # A claim that the study has gained since then is not judged.
    later = (*make(Counting()).claims, Claim("`half` is more accurate.", is_better("accuracy")))
    results = command.read_results(make(Counting(), claims=later), only(tmp_path))
    assert [each.claim for each in results.judgements] == [later[0]]
    trainer = Counting()
    command.main(make(trainer, **TUNED), Config(resume=str(only(tmp_path))))
    after = contents(only(tmp_path))
    changed = {name for name in after if after[name] != before[name]}
    assert not trainer.calls and changed <= {"environment.txt", "config.json"}


def test_the_claims_are_stated_before_the_first_run(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="--methods has the unknown x"):
        command.main(make(Counting()), Config(methods=("x",), records=str(tmp_path)))
    assert not [*tmp_path.iterdir()]  # Wrong options leave no record.
    with pytest.raises(Interrupted):
        command.main(make(Counting(0)), Config(records=str(tmp_path)))
    assert "- `half` has the lower loss." in (only(tmp_path) / CLAIMS).read_text().splitlines()
    other = make(Counting(), claims=(Claim("`half` has the higher loss.", is_better("final")),))
    with pytest.raises(ExperimentError, match="The claims of the study are not those of"):
        command.main(other, Config(resume=str(only(tmp_path))))


def test_a_continued_record_keeps_its_options(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        command.main(make(Counting(1)), Config(seeds=3, records=str(tmp_path)))
    folder = str(only(tmp_path))
    with pytest.raises(ExperimentError, match=r"--seeds is 3 in .*, got 4. Omit the option"):
        command.main(make(Counting()), Config(seeds=4, resume=folder))
    trainer = Counting()
    command.main(make(trainer), Config(resume=folder))
    assert len(trainer.calls) == 4 * 3 - 1
    assert len([row for row in read(Path(folder)) if row["kind"] == "run"]) == 4 * 3


def config_of_digits(**changes: Any) -> str:
    return json.dumps({**dataclasses.asdict(Digits()), **changes})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"steps": 3}', r"is not a record of this study"),
        (config_of_digits(steps="many"), r"--steps is .*, which is not allowed"),
    ],
)
def test_a_config_that_was_edited_is_not_continued(
    tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ExperimentError, match=message):
        resumed_config(Digits(), tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not a valid row of metrics"),
        ('{"schema": 1, "kind": "step"}', "not a row of schema 1"),
        ('{"schema": 1, "kind": "run", "loss": NaN}', "NaN is not valid JSON"),
        ('{"schema": 1, "kind": "run", "loss": 1e31}', "'1e\\+31' is not a short name"),
    ],
)
def test_a_damaged_record_is_not_continued(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(Interrupted):
        command.main(make(Counting(1)), Config(records=str(tmp_path)))
    metrics = only(tmp_path) / recording.METRICS
    first = metrics.read_text().splitlines()[0]
    metrics.write_text(f"{first}\n{line}\n{first}\n")
    with pytest.raises(ExperimentError, match=message):
        command.main(make(Counting()), Config(resume=str(only(tmp_path))))


def test_every_row_that_is_written_is_read(tmp_path: Path) -> None:
    losses = (1e30, math.inf, math.nan, 7e35, -7e35)
    with recording.Record(Config(records=str(tmp_path))) as record:
        for seed, loss in enumerate(losses):
            record.add(make_row("run", {"seed": seed}, {"loss": loss}))
    first, *others = (row["loss"] for row in read(record.folder))
    assert first == 1e30 and len(others) == 4 and all(map(math.isnan, others))
