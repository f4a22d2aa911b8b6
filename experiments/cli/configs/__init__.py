"""The configs: one frozen dataclass per command. Its fields are the options of the command."""

from experiments.cli.configs.bench import Bench
from experiments.cli.configs.figures import Figures
from experiments.cli.configs.launch import Launch
from experiments.cli.configs.predict import Predict
from experiments.cli.configs.profile import Profile
from experiments.cli.configs.records import Records
from experiments.cli.configs.report import Report
from experiments.cli.configs.timeline import Timeline
from experiments.cli.configs.train import Train

__all__ = [
    "Bench",
    "Figures",
    "Launch",
    "Predict",
    "Profile",
    "Records",
    "Report",
    "Timeline",
    "Train",
]
