"""The configs: one frozen dataclass per command. Its fields are the options of the command."""

from experiments.configs.bench import Bench
from experiments.configs.compare import Compare
from experiments.configs.estimate import Estimate
from experiments.configs.figures import Figures
from experiments.configs.gossip import Gossip
from experiments.configs.launch import Launch
from experiments.configs.pace import Pace
from experiments.configs.sparse import Sparse
from experiments.configs.stragglers import Stragglers
from experiments.configs.survey import Survey
from experiments.configs.train import Train

__all__ = [
    "Bench",
    "Compare",
    "Estimate",
    "Figures",
    "Gossip",
    "Launch",
    "Pace",
    "Sparse",
    "Stragglers",
    "Survey",
    "Train",
]
