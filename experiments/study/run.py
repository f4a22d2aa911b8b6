"""A study: settings and seeds, trained one by one, skipping what the record has, and its README."""

import dataclasses
import inspect
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from experiments.cluster import from_main_process, reraise_lost_process
from experiments.errors import ExperimentError, Interrupted
from experiments.study import record as recording
from experiments.study.claims import Claim, Judgement, Results, state
from experiments.study.record import Kind, Record, Row, make_row, of_kind
from experiments.study.table import Table
from experiments.study.tuning import Grid, search

Setting = Mapping[str, Any]
"""The keys of the rows of a setting, such as `{"graph": "ring_8", "method": "dpsgd"}`."""

Trainer = Callable[..., Iterable[Mapping[str, Any]]]
"""Trains a run of any setting that shares its compiled program.

`trainer(setting, seed, parameters, validation=...)` yields the values of logged points, and at last
those of the run. The seed is that of weights, data and noise; the parameters are the tuned ones and
those of `Study.inputs`. With `validation`, it trains without the validation set, and the last
values include `validation_loss`.
"""

PARTS = ("{provenance}", "{tuning}", "{claims}", "{table}", "{figures}")
PROVENANCE, TUNING, CLAIMS, TABLE, FIGURES = PARTS
"""Paragraphs that the prose of a study places among its own. Those that it omits follow at the end,
so that no study omits a claim."""

CORRECTED = (
    "P-values are those of the outcome, corrected by Holm's method for the number of settings of "
    "the claim; intervals are not corrected."
)
UNSTATED = "This record has no `claims.md`: it is older than the statement of claims before a run."


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of every study."""

    record: str = ""
    """the record folder is <date>_NAME, by default of the study; none writes no record"""
    records: str = "runs"
    """folder in which the record folder is created"""
    resume: str | None = None
    """the folder of an interrupted record, which is continued"""


@dataclasses.dataclass(frozen=True)
class Study:
    """Everything that defines a study.

    Attributes:
      name: The name of its command.
      config: Its `Options`, a dataclass. Its docstring begins with the question.
      settings: `config -> settings`, in the order of the runs. User errors are raised here.
      train: `(config, setting) -> trainer`. It compiles; its trainer is shared by successive
        settings with the same values of `shares`.
      prose: `results -> paragraphs` of the README.
      claims: The claims, which are written to the record before the first run.
      seeds: `config -> seeds` of every setting; by default 0, 1, ... Trials have the next ones.
      shares: The keys that `train` depends on; all by default.
      grid: `(config, setting) -> grid` of parameters that are tuned; None without tuning.
      budget: `config -> points` that the tuning of every setting tries; with a grid only.
      tuned_by: The column of a trial that is least for the best parameters.
      inputs: `(config, rows, setting, seed) -> parameters` of a run that depend on earlier rows,
        such as measured times.
      interleaved: Whether every setting is trained with a seed before the next seed, so that
        settings whose times are compared are measured at about the same time.
      facts: `(config, known) -> facts` that a record lacks, with the keys that they are about;
        recorded before the runs.
      derive: Adds columns that depend on other rows; for table, figures and claims.
      exit_code: `results -> exit code` of the command.
    """

    name: str
    config: type
    settings: Callable[[Any], Sequence[Setting]]
    train: Callable[[Any, Setting], Trainer]
    table: Table
    prose: Callable[[Results], Sequence[str]] = lambda results: ()
    figures: Sequence[Any] = ()
    claims: Sequence[Claim] = ()
    seeds: Callable[[Any], Sequence[int]] = lambda config: range(config.seeds)
    shares: tuple[str, ...] | None = None
    grid: Callable[[Any, Setting], Grid | None] = lambda config, setting: None
    budget: Callable[[Any], int] = lambda config: 1
    tuned_by: str = "validation_loss"
    inputs: Callable[[Any, Sequence[Row], Setting, int], Mapping[str, Any]] = lambda *_: {}
    interleaved: bool = False
    facts: Callable[[Any, Sequence[Row]], Iterable[Mapping[str, Any]]] = lambda config, known: ()
    derive: Callable[[Sequence[Row]], Sequence[Row]] = list
    exit_code: Callable[[Results], int] = lambda results: 0


class Command(NamedTuple):
    """A command that is no study: the dataclass of its options, and what it does."""

    config: type
    main: Callable[[Any], int]


def show_duration(seconds: float) -> str:
    """A duration to one or two digits, such as `42 s`, `12 min` or `2.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def run(study: Study, config: Any, record: Record, say: Callable[[str], None] = print) -> list[Row]:
    """Runs all settings and seeds that the record lacks; returns its rows.

    The rows of a run are recorded when it ends, so that a record has whole runs only. In a cluster,
    all processes train, and all have the rows of the first one.
    """
    record.rows = rows = from_main_process(record.rows)
    seeds, trainers = study.seeds(config), {}

    def trainer_of(setting: Setting) -> Trainer:
        key = tuple(setting[name] for name in (setting if study.shares is None else study.shares))
        if key not in trainers:
            if not study.interleaved:
                trainers.clear()  # Frees the memory of the program.
            trainers[key] = study.train(config, setting)
        return trainers[key]

    def train(kind: Kind, setting: Setting, seed: int, parameters: Mapping, **last: Any) -> Row:
        """Trains and records a run unless the record has it; returns its last row."""
        keys, is_trial = {**setting, "seed": seed}, kind == "trial"
        wanted = {"kind": kind, **keys, **(parameters if is_trial else {})}.items()
        if found := next((row for row in rows if wanted <= row.items()), None):
            return found
        parameters = {**parameters, **study.inputs(config, rows, setting, seed)}
        trained = trainer_of(setting)(setting, seed, parameters, validation=is_trial)
        *points, end = from_main_process([*trained])
        new = [] if is_trial else [make_row("point", keys, values) for values in points]
        record.add([*new, make_row(kind, {**keys, **parameters, **last}, end)])
        return rows[-1]

    def trial_of(setting: Setting) -> Callable[[Mapping], float]:
        return lambda point: train("trial", setting, max(seeds) + 1, point)[study.tuned_by]

    facts = study.facts(config, of_kind(rows, "fact"))
    record.add([make_row("fact", {}, values) for values in facts])
    settings = study.settings(config)
    parts = [(setting, [seed]) for seed in seeds for setting in settings]
    if not study.interleaved:
        parts = [(setting, seeds) for setting in settings]
    begun, done_before, recorded = time.perf_counter(), 0, len(rows)
    for done, (setting, of_part) in enumerate(parts, 1):
        start, before = time.perf_counter(), len(rows)
        said = [f"{done}/{len(parts)} " + " ".join(map(str, setting.values()))]
        said += [f"seed {of_part[0]}"] if study.interleaved else []
        parameters, tuned = {}, {}
        if grid := study.grid(config, setting):
            choice = search(grid, study.budget(config), trial_of(setting))
            parameters, at_edge, trials = choice
            tuned = {"at_edge": ", ".join(at_edge), "trials": trials}
            said.append(choice.text)
        for seed in of_part:
            train("run", setting, seed, parameters, **tuned)
        now, is_recorded = time.perf_counter(), len(rows) == before
        done_before += is_recorded  # Parts of an earlier session cost no time.
        line = ", ".join([*said, "recorded" if is_recorded else show_duration(now - start)])
        if len(rows) > recorded and done < len(parts):
            left = (now - begun) / (done - done_before) * (len(parts) - done)
            line += f"; about {show_duration(left)} left"
        say(line)
    return rows


def analyze(study: Study, config: Any, rows: Sequence[Row], environment: str) -> Results:
    """The table and the judged claims of rows."""
    derived = study.derive(rows)
    results = Results(config, derived, study.table.lines(derived), environment)
    judged = [Judgement(claim, claim.judge(results)) for claim in study.claims]
    return dataclasses.replace(results, judgements=judged)


def read_results(study: Study, folder: Path) -> Results:
    """The results of a record. Claims that the study has gained since then are not judged."""
    config = recording.read_config(study.config, folder)
    environment = recording.read_environment(folder)
    results = analyze(study, config, recording.read(folder), environment)
    path = folder / recording.CLAIMS
    if not path.exists():
        return dataclasses.replace(results, are_stated=False)
    stated = path.read_text(encoding="utf-8").splitlines()
    judged = [each for each in results.judgements if f"- {each.claim.text}" in stated]
    return dataclasses.replace(results, judgements=judged)


def _provenance(environment: str) -> str:
    """The command, commit, versions and machine of a record."""
    first, *resumed = [
        dict(line.split(": ", 1) for line in part.splitlines() if ": " in line)
        for part in environment.strip().split("\n\n")
    ]
    packages = ", ".join(f"{name} {first[name]}" for name in ("python", "jax") if name in first)
    commits = [*dict.fromkeys(each.get("commit", "unknown") for each in (first, *resumed))]
    again = f", resumed at {' and '.join(commits[1:])}" if len(commits) > 1 else ""
    return (
        f"Command: `{first.get('command', 'unknown')}`, at commit {commits[0]}{again}; {packages}; "
        f"{first.get('devices', 'unknown devices')}, {first.get('CPU count', '?')} CPUs. All "
        "versions are in `environment.txt`, every setting in `config.json`, every raw metric in "
        "`metrics.jsonl.gz`."
    )


def _describe_tuning(rows: Sequence[Row], keys: Sequence[str]) -> str:
    """The number of seeds, the number of trials, and choices at the edge of their grid."""

    def extent(rows: Sequence[Row], word: str) -> str:
        counts = Counter(tuple(row[name] for name in keys) for row in rows).values()
        least, most = min(counts), max(counts)
        shown = f"{least}" if least == most else f"{least} to {most}"
        return f"{shown} {word}{'' if most == 1 else 's'}"

    runs, trials = of_kind(rows, "run"), of_kind(rows, "trial")
    text = f"Every line of the table is over {extent(runs, 'seed')}."
    if not trials:
        return text
    edges = {", ".join(str(run[name]) for name in keys): run.get("at_edge") for run in runs}
    listed = "; ".join(f"{where} ({names})" for where, names in edges.items() if names)
    edge = (
        f"At the edge of the grid: {listed}" if listed else "No choice is at the edge of its grid"
    )
    return (
        f"{text} The tuning took {extent(trials, 'trial')} per setting, on validation data and "
        f"with other seeds: {len(trials):,} in total. {edge}."
    )


def readme(study: Study, results: Results) -> str:
    """The text of the README, which is a function of the record."""
    claims = [judgement.markdown for judgement in results.judgements]
    if any(", p " in claim for claim in claims):
        claims.append(CORRECTED)
    if claims and not results.are_stated:
        claims.insert(0, UNSTATED)
    parts = {
        TABLE: study.table.to_markdown(results.lines),
        CLAIMS: "\n\n".join(claims),
        FIGURES: "\n\n".join(f"![{figure.caption}]({figure.file})" for figure in study.figures),
        PROVENANCE: _provenance(results.environment),
        TUNING: _describe_tuning(results.rows, study.table.by),
    }
    paragraphs = [*study.prose(results)]
    paragraphs += [part for part in PARTS if part not in paragraphs]
    shown = [parts.get(paragraph, paragraph) for paragraph in paragraphs]
    question = (inspect.getdoc(study.config) or study.name).splitlines()[0]
    return "\n\n".join([f"# {question}", *filter(None, shown)]) + "\n"


def write(study: Study, results: Results, folder: Path) -> None:
    """Writes the table, the README and the figures of a study to a folder."""
    recording.write_atomically(folder / "table.csv", study.table.to_csv(results.lines))
    recording.write_atomically(folder / "README.md", readme(study, results))
    for figure in study.figures:
        figure.draw(folder, results)


def main(study: Study, config: Any) -> int:
    """Runs a study, or continues the record `config.resume`; returns the exit code."""
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 150)
    record, claims = Record(None), state(study.name, study.claims)
    try:
        if config.resume:
            config, record = recording.resumed_record(config, study.name, claims)
        settings, seeds = len(study.settings(config)), len(study.seeds(config))
        if not settings:
            raise ExperimentError("no setting has all requested names, such as --methods.")
        if not config.resume:
            record = recording.new_record(config, study.name)
            record.write(recording.CLAIMS, claims)
        with record, reraise_lost_process():
            print(f"{study.name}: {settings} settings, {seeds} seeds each", flush=True)
            rows = run(study, config, record, lambda line: print(line, flush=True))
            results = analyze(study, config, rows, record.environment)
            console.print(study.table.to_rich(results.lines))
            print(*[judgement.markdown for judgement in results.judgements], sep="\n\n")
            if record.folder:
                write(study, results, record.folder)
                print(f"Record: {record.folder}")
            record.finish()
    except (Interrupted, ExperimentError, OSError) as error:
        if not record.folder:
            raise
        kind = ExperimentError if isinstance(error, OSError) else type(error)
        raise kind(f"{error} Continue it with --resume {record.folder}.") from error
    return study.exit_code(results)
