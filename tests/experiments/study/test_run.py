"""A study from its settings to its README: what is run, recorded, skipped and continued."""

import dataclasses
import itertools
import math
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from experiments.errors import ExperimentError, Interrupted
from experiments.study import record as recording
from experiments.study.claims import Claim, is_better
from experiments.study.record import CLAIMS, METRICS, Record, Row, of_kind, read, read_settings
from experiments.study.run import Study, main, read_results, readme, run
from experiments.study.table import Column, Table, key, spread
from experiments.study.tuning import Values

ENVIRONMENT = "command: python -m experiments toy\ncommit: abc\npython: 3\njax: 1\nCPU count: 2\n"


@dataclasses.dataclass(frozen=True)
class Config:
    """Is the loss of `half` lower?"""

    seeds: int = 2
    methods: tuple[str, ...] = ("mean", "half")
    record: str = "toy"
    records: str = "."
    resume: str | None = None


class Counting:
    """Trains nothing, notes what it is asked for, and calls `stop` at run `stop_at`."""

    def __init__(self, stop_at: float = math.inf, stop: Callable[[], None] | None = None):
        self.built, self.calls = [], []
        self.stop_at, self.stop = stop_at, stop

    def __call__(self, config: Config, setting: Any) -> Any:
        self.built.append(setting)
        return self.train

    def train(
        self, setting: Any, seed: int, parameters: Any, *, validation: bool
    ) -> Iterator[dict[str, Any]]:
        if len(self.calls) == self.stop_at:
            if self.stop is None:
                raise KeyboardInterrupt
            self.stop()
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


CLAIM = Claim("`half` has the lower loss.", is_better("final"))
LOSS = Column("loss", spread("final"), ".3f"), Column("accuracy", spread("accuracy"), ".2f")
TABLE = Table(("split", "method"), (*map(key, ("split", "method")), *LOSS), {"method": "mean"})
GRID = {"rate": Values((0.01, 0.1, 1.0))}
TUNED: Any = {"grid": lambda config, setting: GRID, "budget": lambda config: 3}
FACTS = {
    "facts": lambda config, known: [
        {"about": "bytes", "method": name} for name in config.methods[len(known) :]
    ]
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tuned": {**TUNED, "shares": ("method",)},
    "interleaved": {"interleaved": True, **FACTS},
    "tuned and interleaved": {**TUNED, "interleaved": True, "shares": ("method",)},
}


def make(trainer: Counting, **options: Any) -> Study:
    given: dict[str, Any] = {"claims": (CLAIM,), **options}
    return Study("toy", Config, settings_of, trainer, TABLE, **given)


def rows_of(study: Study, rows: Any = ()) -> tuple[list[Row], list[str]]:
    """The rows and the lines of progress."""
    lines, record = list[str](), Record(None)
    record.rows = [*rows]
    return run(study, Config(), record, lines.append), lines


@pytest.fixture(autouse=True)
def quick_environment() -> Iterator[None]:
    """Avoids calls of git."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "describe_environment", lambda: ENVIRONMENT)
        yield


def contents(root: Path) -> tuple[Path, dict[str, bytes]]:
    """The only folder, and its files."""
    (folder,) = root.iterdir()
    return folder, {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_setting_is_trained_with_every_seed() -> None:
    rows, lines = rows_of(make(trainer := Counting(), **FACTS))
    assert trainer.calls == [
        (split, method, seed, False)
        for method in ("mean", "half") for split in ("iid", "skewed") for seed in (0, 1)
    ]  # fmt: skip
    assert rows[0] == {"kind": "fact", "about": "bytes", "method": "mean"}
    keys = {"split": "iid", "method": "mean", "seed": 0}
    assert rows[2] == {"kind": "point", **keys, "step": 1, "loss": 2.0}
    assert [row["kind"] for row in rows[:5]] == ["fact", "fact", "point", "point", "run"]
    assert math.isnan(rows[4]["accuracy"])
    assert lines[2].startswith("3/4 iid half, 0 s; about 0 s left")
    again, lines = rows_of(make(trainer := Counting()), rows=rows)
    assert again == rows and not trainer.calls and lines[2].endswith("recorded")
    for shares, built in ((None, 4), (("method",), 2), ((), 1)):
        rows_of(make(trainer := Counting(), shares=shares))
        assert len(trainer.built) == built and len(trainer.calls) == 8
    _, lines = rows_of(make(trainer := Counting(), **KINDS["tuned and interleaved"]))
    runs = [call[2] for call in trainer.calls if not call[-1]]
    assert runs == [0] * 4 + [1] * 4 and len(trainer.built) == 2
    assert lines[4].startswith("5/8 iid mean, seed 1, rate 0.1, 0 s; about ")


def test_parameters_are_tuned_on_validation_data_with_other_seeds() -> None:
    rows, lines = rows_of(make(trainer := Counting(), **TUNED))
    assert trainer.calls[:5] == [
        *(("iid", "mean", 2, rate, True) for rate in (0.01, 0.1, 1.0)),
        *(("iid", "mean", seed, 0.1, False) for seed in (0, 1)),
    ]
    first = of_kind(rows, "run")[0]
    assert (first["rate"], first["trials"], first["at_edge"]) == (0.1, 3, "")
    assert lines[0].startswith("1/4 iid mean, rate 0.1, 0 s")
    edge = {**TUNED, "grid": lambda config, setting: {"rate": Values((1e-12, 1e-11))}}
    runs = of_kind(rows_of(make(Counting(), **edge))[0], "run")
    # 3 points, of which 1 refines, and 6 extensions.
    assert {(row["at_edge"], row["trials"]) for row in runs} == {("rate", 3 + 6)}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(0, 150))
def test_an_interrupted_study_ends_as_if_it_had_not_been(
    tmp_path_factory: pytest.TempPathFactory, kind: str, stops: list[int], torn: int
) -> None:
    """Each stop is the number of runs before Ctrl+C; the record then loses its last bytes."""
    expected, root = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("parts")
    trainer = Counting()
    assert main(make(trainer, **KINDS[kind]), Config(records=str(expected))) == 0
    assume(sum(stops) < len(trainer.calls))
    config = Config(records=str(root))
    for stop in stops:
        with pytest.raises(Interrupted, match=r"partial record. Continue it with --resume .*toy"):
            main(make(Counting(stop), **KINDS[kind]), config)
        folder, files = contents(root)
        config = Config(resume=str(folder))
        assert not read_settings(folder)["finished"]
        (folder / METRICS).write_bytes(files[METRICS][: -torn or None])
    main(make(Counting(), **KINDS[kind]), config)
    (_, whole), (_, parts) = contents(expected), contents(root)
    assert read_settings(folder)["finished"]
    assert parts.pop("environment.txt").count(b"command: ") == 1 + len(stops)
    differ = {name for name in parts if parts[name] != whole[name]}
    assert differ == {"config.json"} and parts.keys() == whole.keys() - {"environment.txt"}


def test_a_study_on_a_full_disk_is_continued(tmp_path: Path) -> None:
    """A row is cut, as at the end of a disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        size = len(contents(tmp_path)[1][METRICS]) + 100
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    try:
        with pytest.raises(ExperimentError, match=r"File too large.* --resume .*toy"):
            main(make(Counting(3, fill)), Config(records=str(tmp_path)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    folder, files = contents(tmp_path)
    assert not files[METRICS].endswith(b"\n")
    main(make(trainer := Counting()), Config(resume=str(folder)))
    assert len(trainer.calls) == 8 - 3
    assert repr(read(folder)) == repr(rows_of(make(Counting()))[0])


def test_a_finished_record_is_regenerated_without_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(make(Counting(), **TUNED), Config(records=str(tmp_path)))
    printed = capsys.readouterr().out
    assert "toy: 4 settings, 2 seeds each" in printed and "0.505 ± 0.007" in printed
    assert "Claim: `half` has the lower loss. Outcome: holds in 2 of 2 settings." in printed
    folder, before = contents(tmp_path)
    text = before["README.md"].decode()
    assert text.startswith("# Is the loss of `half` lower?\n\nCommand: `python -m experiments toy`")
    assert "toy`, at commit abc; python 3, jax 1; unknown devices, 2 CPUs." in text
    assert "The tuning took 3 trials per setting, on validation data and with other seeds" in text
    later = make(Counting(), claims=(CLAIM, Claim("`half` is better.", is_better("accuracy"))))
    assert readme(later, read_results(later, folder)) == text  # The later claim is not judged.
    main(make(trainer := Counting(), **TUNED), Config(resume=str(folder)))
    _, after = contents(tmp_path)
    assert not trainer.calls
    assert {n for n in after if after[n] != before[n]} <= {"environment.txt", "config.json"}
    (folder / CLAIMS).unlink()
    assert "This record has no `claims.md`" in readme(later, read_results(later, folder))


def test_a_continued_record_keeps_its_options_claims_and_study(tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="--methods has the unknown x"):
        main(make(Counting()), Config(methods=("x",), records=str(tmp_path)))
    with pytest.raises(ExperimentError, match="no setting has all requested names"):
        main(make(Counting()), Config(methods=(), records=str(tmp_path)))
    assert not [*tmp_path.iterdir()]  # Wrong options leave no record.
    with pytest.raises(Interrupted):
        main(make(Counting(1)), Config(seeds=3, records=str(tmp_path)))
    folder, before = contents(tmp_path)
    assert f"- {CLAIM.text}" in before[CLAIMS].decode().splitlines()
    claims = {"claims": (CLAIM._replace(text="`half` has the higher loss."),)}
    for study, seeds, message in (
        (make(Counting()), 4, r"--seeds is 3 in .*, got 4. Omit it or begin"),
        (make(Counting(), **claims), 3, "The claims are not those of"),
        (dataclasses.replace(make(Counting()), name="a"), 3, "not a record of the study `a`"),
    ):
        with pytest.raises(ExperimentError, match=message):
            main(study, Config(seeds=seeds, resume=str(folder)))
    assert contents(tmp_path)[1] == before
    main(make(trainer := Counting()), Config(resume=str(folder)))
    assert len(trainer.calls) == 4 * 3 - 1 and len(of_kind(read(folder), "run")) == 4 * 3
