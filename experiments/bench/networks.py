"""The leaves of published networks for images of 224 x 224, in backward order, with their work."""

import math
from collections.abc import Callable
from typing import NamedTuple

from jaxcomm.scheduling import LayerTimes


class Leaf(NamedTuple):
    """A leaf of parameters.

    Attributes:
      name: Its name, such as `block3.2.conv1`.
      coordinates: Its size.
      products: The multiplications of its forward pass for one image.
    """

    name: str
    coordinates: int
    products: int


class _Builder:
    """Leaves in forward order."""

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []

    def convolution(self, name: str, kernel: int, inputs: int, outputs: int, side: int) -> None:
        """A kernel without bias, whose result has `side` x `side` positions, and the batch norm."""
        size = kernel * kernel * inputs * outputs
        self.leaves.append(Leaf(name, size, size * side * side))

    def norm(self, name: str, channels: int) -> None:
        self.leaves += [Leaf(f"{name}.scale", channels, 0), Leaf(f"{name}.bias", channels, 0)]

    def dense(self, inputs: int, outputs: int) -> None:
        self.leaves += [Leaf("head", inputs * outputs, inputs * outputs)]
        self.leaves += [Leaf("head.bias", outputs, 0)]

    def backward(self) -> list[Leaf]:
        return self.leaves[::-1]


def resnet(*blocks: int) -> list[Leaf]:
    """A ResNet of bottleneck blocks: 3, 4, 6, 3 for ResNet-50, and 3, 8, 36, 3 for ResNet-152."""
    build = _Builder()
    build.convolution("stem", 7, 3, 64, 112)
    build.norm("stem.norm", 64)
    inputs = 64
    for stage, count in enumerate(blocks):
        width, side = 64 * 2**stage, 56 // 2**stage
        for block in range(count):
            name = f"block{stage + 1}.{block}"
            before = 2 * side if stage and not block else side
            convolutions = [(1, inputs, width, before), (3, width, width, side)]
            convolutions += [(1, width, 4 * width, side)]
            if not block:
                convolutions += [(1, inputs, 4 * width, side)]
            for number, (kernel, ins, outs, at) in enumerate(convolutions):
                build.convolution(f"{name}.conv{number}", kernel, ins, outs, at)
                build.norm(f"{name}.norm{number}", outs)
            inputs = 4 * width
    build.dense(inputs, 1000)
    return build.backward()


def densenet(growth: int, first: int, *blocks: int) -> list[Leaf]:
    """A DenseNet: 32, 64, 6, 12, 48, 32 for DenseNet-201; 48, 96, 6, 12, 36, 24 for -161."""
    build = _Builder()
    build.convolution("stem", 7, 3, first, 112)
    build.norm("stem.norm", first)
    channels = first
    for stage, count in enumerate(blocks):
        side = 56 // 2**stage
        for layer in range(count):
            name = f"block{stage + 1}.{layer}"
            build.norm(f"{name}.norm0", channels)
            build.convolution(f"{name}.conv0", 1, channels, 4 * growth, side)
            build.norm(f"{name}.norm1", 4 * growth)
            build.convolution(f"{name}.conv1", 3, 4 * growth, growth, side)
            channels += growth
        build.norm(f"block{stage + 1}.norm", channels)
        if stage + 1 < len(blocks):
            build.convolution(f"block{stage + 1}.conv", 1, channels, channels // 2, side)
            channels //= 2
    build.dense(channels, 1000)
    return build.backward()


NETWORKS: dict[str, Callable[[], list[Leaf]]] = {
    "resnet50": lambda: resnet(3, 4, 6, 3),
    "resnet152": lambda: resnet(3, 8, 36, 3),
    "densenet161": lambda: densenet(48, 96, 6, 12, 36, 24),
    "densenet201": lambda: densenet(32, 64, 6, 12, 48, 32),
}


def network_times(leaves: list[Leaf], compute_seconds: float) -> LayerTimes:
    """Times of float32 leaves: a third of the computation is the forward pass.

    Seconds are proportional to multiplications, an assumption: batch norm is free in it.
    """
    share = compute_seconds / math.fsum(leaf.products for leaf in leaves)
    return LayerTimes(
        sizes=[4 * leaf.coordinates for leaf in leaves],
        backward=[2 / 3 * share * leaf.products for leaf in leaves],
        forward=[1 / 3 * share * leaf.products for leaf in leaves],
        names=[leaf.name for leaf in leaves],
    )
