"""Published networks for images of 224 x 224: the shapes of their leaves, in backward order."""

Leaf = tuple[tuple[int, ...], int]  # The shape, and how often a forward pass multiplies with it.


def _convolution(kernel: int, inputs: int, outputs: int, side: int) -> list[Leaf]:
    """A kernel without bias, whose result has `side` x `side` positions."""
    return [((kernel, kernel, inputs, outputs), side * side)]


def _norm(channels: int) -> list[Leaf]:
    return 2 * [((channels,), 0)]


def resnet(*blocks: int) -> list[Leaf]:
    """The leaves of a ResNet of bottleneck blocks."""
    convolutions, inputs = [(7, 3, 64, 112)], 64
    for stage, count in enumerate(blocks):
        width, side = 64 * 2**stage, 56 // 2**stage
        for block in range(count):
            before = 2 * side if stage and not block else side
            convolutions += [(1, inputs, width, before), (3, width, width, side)]
            convolutions += [(1, width, 4 * width, side)]
            if not block:
                convolutions += [(1, inputs, 4 * width, side)]
            inputs = 4 * width
    leaves = [leaf for each in convolutions for leaf in _convolution(*each) + _norm(each[2])]
    return [((1000,), 0), ((inputs, 1000), 1), *reversed(leaves)]


def densenet(growth: int, channels: int, *blocks: int) -> list[Leaf]:
    """The leaves of a DenseNet."""
    leaves, side = _convolution(7, 3, channels, 112) + _norm(channels), 56
    for stage, count in enumerate(blocks):
        if stage:
            leaves += _convolution(1, channels, channels // 2, side)
            channels, side = channels // 2, side // 2
        for _ in range(count):
            leaves += _norm(channels) + _convolution(1, channels, 4 * growth, side)
            leaves += _norm(4 * growth) + _convolution(3, 4 * growth, growth, side)
            channels += growth
        leaves += _norm(channels)
    return [((1000,), 0), ((channels, 1000), 1), *reversed(leaves)]


NETWORKS = {
    "resnet50": resnet(3, 4, 6, 3),
    "resnet152": resnet(3, 8, 36, 3),
    "densenet161": densenet(48, 96, 6, 12, 36, 24),
    "densenet201": densenet(32, 64, 6, 12, 48, 32),
}
