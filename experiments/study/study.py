"""A study: settings and seeds, trained one by one, skipping what the record has."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from experiments.study.claims import Claim, Results
from experiments.study.columns import Table
from experiments.study.search import Budget, Choice, Grid, search
from experiments.study.tidy import Kind, Row, identity, make_row
from experiments.training.cluster import from_main_process

Setting = Mapping[str, Any]
"""The keys of the rows of a setting, such as `{"graph": "ring_8", "method": "dpsgd"}`."""

Part = tuple[Setting, Sequence[int]]
"""A setting and seeds, which are trained before the next line of progress."""


class Trainer(Protocol):
    """Trains runs of the settings that share a compiled program."""

    def __call__(
        self, setting: Setting, seed: int, parameters: Mapping[str, Any], *, validation: bool
    ) -> Iterable[Mapping[str, Any]]:
        """Trains once; yields the values of logged points, and at last those of the run.

        Args:
          setting: The setting.
          seed: The seed of weights, data and noise.
          parameters: The tuned parameters, and those of `Study.inputs`.
          validation: Whether to train without the validation set. The last values then include
            `validation_loss`.
        """


class Output(Protocol):
    """Appends rows, as a record does."""

    def add(self, row: Row) -> None:
        """Appends a row."""


class Reporter(Protocol):
    """Reports progress, as on a terminal."""

    def advance(self, done: int, line: str) -> None:
        """Sets the number of finished parts, and prints a line."""


def no_prose(results: Results) -> Sequence[str]:
    """No paragraphs."""
    return ()


@dataclasses.dataclass(frozen=True)
class Study:
    """Everything that defines a study.

    By default, the config has the number `seeds`, and runs have the seeds 0, 1, ... Trials have the
    seeds that follow.

    Attributes:
      name: The name, which is that of its module and of its command.
      config: The dataclass of its options.
      settings: `config -> settings`, in the order of the runs. User errors are raised here.
      train: `(config, setting) -> trainer`. It compiles; its trainer is shared by successive
        settings with the same values of `shares`.
      table: The table.
      prose: `results -> paragraphs` of the README; see `experiments.study.readme`.
      figures: The figures.
      claims: The claims, which are written to the record before the first run.
      seeds: `config -> seeds` of every setting.
      shares: The keys that `train` depends on; all by default.
      grid: `(config, setting) -> grid` of parameters that are tuned, or None for a setting without
        tuning; none by default.
      budget: `config -> budget`, the same for all settings; with a grid only.
      inputs: `(config, rows, setting, seed) -> parameters` of a run that depend on earlier rows,
        such as measured times.
      interleaved: Whether every setting is trained with a seed before the next seed, so that
        settings whose times are compared are measured at about the same time.
      facts: `config -> facts`, with the keys that they are about; recorded before the runs.
      derive: Adds columns that depend on other rows; for table, figures and claims.
      headline: The columns of the table in the lines of progress.
      files: `results -> content by file name` of more files in the record.
      exit_code: `results -> exit code` of the command.
      processes: The number of processes that train, as `make records` starts them.
    """

    name: str
    config: type
    settings: Callable[[Any], Sequence[Setting]]
    train: Callable[[Any, Setting], Trainer]
    table: Table
    prose: Callable[[Results], Sequence[str]] = no_prose
    figures: Sequence[Any] = ()
    claims: Sequence[Claim] = ()
    seeds: Callable[[Any], Sequence[int]] = lambda config: range(config.seeds)
    shares: tuple[str, ...] | None = None
    grid: Callable[[Any, Setting], Grid | None] = lambda config, setting: None
    budget: Callable[[Any], Budget] = lambda config: Budget(1)
    inputs: Callable[[Any, Sequence[Row], Setting, int], Mapping[str, Any]] = lambda *_: {}
    interleaved: bool = False
    facts: Callable[[Any], Iterable[Mapping[str, Any]]] = lambda config: ()
    derive: Callable[[Sequence[Row]], Sequence[Row]] = list
    headline: tuple[str, ...] = ()
    files: Callable[[Results], Mapping[str, str | bytes]] = lambda results: {}
    exit_code: Callable[[Results], int] = lambda results: 0
    processes: int = 1


def show_duration(seconds: float) -> str:
    """A duration to one or two digits.

    Example:
      >>> show_duration(42.3), show_duration(700), show_duration(9000)
      ('42 s', '12 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class _Runs:
    """The rows of a study, and the runs that they lack."""

    def __init__(self, study: Study, config: Any, output: Output, rows: Sequence[Row]):
        self.study, self.config, self._output, self.rows = study, config, output, [*rows]
        self._ended = [row for row in rows if row["kind"] in ("run", "trial")]
        self.seeds = study.seeds(config)
        self._trainers: dict[tuple, Trainer] = {}
        self.trained = 0

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._output.add(row)
            self.rows.append(row)

    def add_facts(self) -> None:
        """Records the facts. All are recorded if there is a row of another kind."""
        if all(row["kind"] == "fact" for row in self.rows):
            facts = [make_row("fact", {}, values) for values in self.study.facts(self.config)]
            self.add(facts[len(self.rows) :])

    def _train(
        self, kind: Kind, setting: Setting, seed: int, parameters: Mapping[str, Any], **last: Any
    ) -> Row:
        """Trains and records a run unless the record has it; returns its last row."""
        keys = {**setting, "seed": seed}
        names = (*setting, *(parameters if kind == "trial" else ()))
        wanted = identity({"kind": kind, **keys, **parameters}, names)
        for row in self._ended:
            if identity(row, names) == wanted:
                return row
        trainer, validation = self._trainer(setting), kind == "trial"
        inputs = self.study.inputs(self.config, self.rows, setting, seed)
        parameters = {**parameters, **inputs}
        *points, end = from_main_process(
            [*trainer(setting, seed, parameters, validation=validation)]
        )
        rows = [] if validation else [make_row("point", keys, values) for values in points]
        rows.append(make_row(kind, {**keys, **parameters, **last}, end))
        self.add(rows)
        self._ended.append(rows[-1])
        self.trained += 1
        return rows[-1]

    def _trainer(self, setting: Setting) -> Trainer:
        shares = self.study.shares
        key = tuple(setting[name] for name in (setting if shares is None else shares))
        if key not in self._trainers:
            if not self.study.interleaved:
                self._trainers.clear()  # Frees the memory of the program.
            self._trainers[key] = self.study.train(self.config, setting)
        return self._trainers[key]

    def parts(self, settings: Sequence[Setting]) -> list[Part]:
        """The settings and the seeds of each part of the study, in the order of the runs."""
        if self.study.interleaved:
            return [(setting, [seed]) for seed in self.seeds for setting in settings]
        return [(setting, self.seeds) for setting in settings]

    def tune(self, setting: Setting) -> Choice | None:
        """The parameters of a setting; None if there is nothing to tune."""
        grid = self.study.grid(self.config, setting)
        if grid is None:
            return None
        return search(
            grid,
            self.study.budget(self.config),
            lambda parameters, number: self._train(
                "trial", setting, max(self.seeds) + 1 + number, parameters
            )["validation_loss"],
        )

    def run(self, setting: Setting, seeds: Sequence[int]) -> Choice | None:
        """Tunes and trains a setting."""
        choice = self.tune(setting)
        parameters = choice.parameters if choice else {}
        last = {"at_edge": ", ".join(choice.at_edge), "trials": choice.trials} if choice else {}
        for seed in seeds:
            self._train("run", setting, seed, parameters, **last)
        return choice

    def missing(self, parts: Sequence[Part]) -> int:
        """The number of runs and trials before extensions that parts lack."""
        budget, names = self.study.budget(self.config), [*parts[0][0]]
        runs = {(*setting.values(), seed) for setting, seeds in parts for seed in seeds}
        settings = {
            tuple(setting.values()): self.study.grid(self.config, setting) for setting, _ in parts
        }
        tuned = sum(grid is not None for grid in settings.values())
        had = 0
        for row in self._ended:
            keys = tuple(row.get(name) for name in names)
            had += keys in settings if row["kind"] == "trial" else (*keys, row["seed"]) in runs
        return max(0, len(runs) + tuned * budget.points * budget.seeds - had)

    def headline(self, setting: Setting) -> list[str]:
        """The columns of the last line of a setting, such as `loss 0.52 ± 0.01`."""
        if not self.study.headline:
            return []
        lines = self.study.table.lines(self.study.derive(self.rows))
        own = [line for line in lines if line.group.keys.items() <= setting.items()]
        columns = {column.name: column for column in self.study.table.columns}
        return [
            f"{columns[name].heading} {columns[name].cell(line.values[name])}"
            for line in own[-1:]
            for name in self.study.headline
        ]


def run(
    study: Study, config: Any, record: Output, progress: Reporter, rows: Sequence[Row] = ()
) -> list[Row]:
    """Runs all settings and seeds that `rows` lacks; returns all rows.

    The rows of a run are recorded when it ends, so that a record has whole runs only. In a cluster,
    all processes train, and all have the rows of the first one.

    Args:
      study: The study.
      config: Its config.
      record: Takes new rows.
      progress: Takes a line per part, with the time that is left.
      rows: The rows of an interrupted record.
    """
    runs = _Runs(study, config, record, rows)
    runs.add_facts()
    start, parts = time.perf_counter(), runs.parts(study.settings(config))
    for done, (setting, seeds) in enumerate(parts, 1):
        began, trained = time.perf_counter(), runs.trained
        choice = runs.run(setting, seeds)
        now, rest = time.perf_counter(), parts[done:]
        line = ", ".join(
            [" ".join(map(str, setting.values()))]
            + ([f"seed {seeds[0]}"] if study.interleaved else [])
            + ([choice.text] if choice else [])
            + runs.headline(setting)
            + ([show_duration(now - began)] if runs.trained > trained else ["recorded"])
        )
        if rest and runs.trained:
            left = (now - start) / runs.trained * runs.missing(rest)
            line += f"; about {show_duration(left)} left"
        progress.advance(done, line)
    return runs.rows
