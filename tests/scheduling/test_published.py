"""The gains that the authors of MG-WFBP measured, beside those of the model on our networks.

Sixteen workers with a GPU each. The numbers are those of the scripts that plot the figures of the
extended paper, arXiv 1912.09268: seconds of a step, and the latency and the seconds a byte that a
regression gave for the all-reduce. Seconds per layer are not public; those of the networks follow
their multiplications. So gains are compared, and not seconds.
"""

import math

import pytest

from experiments.bench.timeline import network_times
from experiments.networks import NETWORKS
from jaxcomm.scheduling import AlphaBeta, at_end_plan, merge_plan, timeline, wait_free_plan

ETHERNET = AlphaBeta(9.080981007148093e-4, 1 / 7.395651186836712e-10)  # 10 Gbit/s
INFINIBAND = AlphaBeta(2.3583677659915685e-4, 1 / 4.0594787739537565e-10)  # 56 Gbit/s
# Seconds of the computation, and of steps: wait-free, one message at the end, and merged.
MEASURED = {
    ("resnet152", ETHERNET): (0.883118, (1.233439, 1.360146, 1.126113)),
    ("resnet152", INFINIBAND): (0.883118, (1.082075, 1.143499, 1.089261)),
    ("densenet161", ETHERNET): (0.477655, (0.832388, 0.682585, 0.628013)),
    ("densenet161", INFINIBAND): (0.477655, (0.601903, 0.596815, 0.527390)),
    ("densenet201", ETHERNET): (0.360877, (0.763600, 0.512830, 0.456600)),
    ("densenet201", INFINIBAND): (0.360877, (0.512376, 0.437789, 0.405943)),
}


@pytest.mark.parametrize(
    ("name", "leaves", "coordinates", "products"),
    [
        ("resnet50", 161, 25_557_032, 4.09e9),
        ("resnet152", 467, 60_192_808, 11.5e9),
        ("densenet161", 484, 28_681_000, 7.73e9),
        ("densenet201", 604, 20_013_928, 4.29e9),
    ],
)
def test_the_networks_have_the_published_sizes(
    name: str, leaves: int, coordinates: int, products: float
) -> None:
    found = NETWORKS[name]
    assert (len(found), sum(math.prod(shape) for shape, _ in found)) == (leaves, coordinates)
    multiplied = sum(times * math.prod(shape) for shape, times in found)
    assert multiplied == pytest.approx(products, rel=0.01)


@pytest.mark.parametrize(("name", "link"), MEASURED)
def test_the_gains_of_merging(name: str, link: AlphaBeta) -> None:
    compute, (wait_free, at_end, merged) = MEASURED[name, link]
    times = network_times(NETWORKS[name], compute)
    model = [
        timeline(times, link, plan).step_seconds
        for plan in (
            wait_free_plan(times),
            at_end_plan(times),
            merge_plan(times, link, method="greedy"),
            merge_plan(times, link),
        )
    ]
    # The rule of the paper is within a hundredth of the optimum on these networks.
    assert model[3] <= model[2] <= 1.01 * model[3]
    assert model[1] / model[2] == pytest.approx(at_end / merged, rel=0.1)
    # Per leaf, the model is 20 % over the measured gain on DenseNet-201 with Ethernet; over
    # InfiniBand it hides all latencies, which the measured steps did not.
    assert model[0] / model[2] == pytest.approx(wait_free / merged, rel=0.21)
