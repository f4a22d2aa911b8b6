"""The claims of the race to a loss, about the method that `jaxcomm.advise` named before it."""

from collections.abc import Callable

from experiments.lab.network import UNSHAPED, bits_per_second
from experiments.lab.peers import KEPT, PEERS
from experiments.study import targets
from experiments.study.claims import (
    Claim,
    Finding,
    Judge,
    Results,
    is_equivalent,
    is_no_worse,
    is_within,
)

LIMIT, ADVISED = "limit", "advised"
TIME = "seconds_to_target"
DENSE = ("ddp", "ddp_fp16", "ddp_bf16")
EQUAL = ("mean_bfloat16", *DENSE)  # They have the arithmetic of `mean`.
SLOW = 200e6  # Bits per second.


def takes(
    limit: float, theirs: Callable[[str], bool], links: Callable[[float], bool] = lambda bits: True
) -> Judge:
    """The claim that the advised method takes at most `limit` of the time of the fastest of others.

    Args:
      limit: The ratio.
      theirs: Whether a method is one of the others.
      links: Whether links of a bandwidth, in bits per second, are tested.
    """

    def findings(results: Results) -> list[Finding]:
        found = []
        for link in dict.fromkeys(line["link"] for line in results.lines):
            if not links(bits_per_second(link)):
                continue
            here = {line["method"]: line.group for line in results.lines if line["link"] == link}
            fast = targets.fastest([here[name] for name in here if theirs(name)], "seconds")
            if fast is None or ADVISED not in here:
                why = "nothing is advised, or none of the others reaches the target"
                found.append(Finding(link, "not tested", why))
                continue
            keys = {"link": link, "method": ADVISED}
            judge = is_no_worse(TIME, limit, methods=keys, reference=fast.keys, log=True)
            where = f"{link}, {here[ADVISED].runs[0]['named']} against {fast.keys['method']}"
            found += [each._replace(where=where) for each in judge(results)]
        return found

    return findings


def _is_slow(bits: float) -> bool:
    return bits <= SLOW


def _is_raced(name: str) -> bool:
    return name not in (LIMIT, ADVISED)


CLAIMS = (
    Claim(
        "On every link, the advised method reaches the target in at most 1.02 of the time of the "
        "fastest of PyTorch's, with any hook and either setting of memory.",
        takes(1.02, lambda name: name in PEERS),
    ),
    Claim(
        "At 200 Mbit/s and less, it takes at most 0.85 of the time of the fastest of PyTorch's.",
        takes(0.85, lambda name: name in PEERS, _is_slow),
    ),
    Claim(
        "At 200 Mbit/s and less, it takes at most 0.5 of the time of PyTorch's fastest that sends "
        "all gradients, in 16 or 32 bits.",
        takes(0.5, lambda name: name.removesuffix(KEPT) in DENSE, _is_slow),
    ),
    Claim(
        "On every link, it takes at most 1.1 of the time of the fastest of all methods.",
        takes(1.1, _is_raced),
    ),
    Claim(
        "At 200 Mbit/s and more, it takes at most 1.25 of the time of the computation alone.",
        takes(1.25, lambda name: name == LIMIT, lambda bits: bits >= SLOW),
    ),
    Claim(
        "At 50 Mbit/s and more, it takes at most 1.6 of the time of the computation alone.",
        takes(1.6, lambda name: name == LIMIT, lambda bits: bits >= SLOW / 4),
    ),
    Claim(
        "Methods with the arithmetic of `mean`, up to rounding to 16 bits, need as many steps as "
        "`mean`, within 5 %.",
        is_equivalent(
            "step_to_target", 1.05, methods={"link": UNSHAPED, "method": EQUAL},
            reference={"method": "mean"}, log=True,
        ),
    ),
    Claim(
        "A training over the slowest link takes its steps times the measured step time, within "
        "10 %.",
        is_within("confirmed", 0.9, 1.1),
    ),
)  # fmt: skip
