"""The README of a comparison of gossip."""

import inspect
from collections.abc import Sequence

from experiments.cli.configs import Gossip
from experiments.methods.gossip import BUDGET, METHODS
from experiments.studies.gossip import figure
from experiments.studies.gossip.table import Claim, Row, to_markdown
from experiments.study.record import describe_command


def verdict(claims: Sequence[Claim]) -> str:
    """The result of the claim, in one sentence."""
    if not claims:
        return "The claim was not put to the test, which takes both methods and two seeds."
    holding = [claim for claim in claims if claim.holds]
    failed = [f"{claim.graph} ({claim.split})" for claim in claims if not claim.holds]
    better = [c for c in claims if not c.holds and not c.above]
    text = f"The claim holds on {len(holding)} of {len(claims)} graphs and splits"
    if failed:
        text += f"; not on {', '.join(failed)}"
    if better:
        text += f", where it is the better of the two in {len(better)}"
    return text + "."


def write_readme(config: Gossip, rows: Sequence[Row], claims: Sequence[Claim]) -> str:
    """The text of the README; all its numbers are in the record."""
    question = (inspect.getdoc(Gossip) or "").splitlines()[0]
    used = {row.method for row in rows}
    legend = "".join(
        f"- `{name}`: {method.sends}\n" for name, method in METHODS.items() if name in used
    )
    return (
        f"# {question}\n\n"
        f"digits, {config.steps} steps of {config.batch} examples over all workers, plain SGD with "
        f"the rate {config.learning_rate:g} for all methods, {config.seeds} seeds. All methods "
        "have the same weights, splits and batches per seed. MATCHA and its periodic baseline "
        f"have the budget {BUDGET:g}.\n\n"
        f"Command: `{describe_command()}`. Versions and machine are in `environment.txt`, every "
        "setting in `config.json`, every raw metric in `metrics.jsonl`.\n\n"
        f"{verdict(claims)}\n\n"
        + "".join(f"- {claim.sentence}\n" for claim in claims)
        + f"\nEach worker sends in a step:\n\n{legend}\n"
        f"{to_markdown(rows)}\n"
        "Losses are over the whole training set and accuracies over the test set, both of the mean "
        "of the parameters of all workers. ± is the standard deviation over seeds. The distance is "
        "the sum of the squared distances of the workers from that mean at the end. In a round, "
        "each participating worker sends one message and receives one; it is the unit of time of "
        "the paper's model. Bytes are those of a worker that participates in every round. One "
        "device simulates all workers, so no time is measured.\n\n"
        f"![Training loss against steps and rounds]({figure.NAME})\n"
    )
