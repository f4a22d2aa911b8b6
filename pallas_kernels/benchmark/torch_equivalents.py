"""The equivalents of the ops in PyTorch, which the benchmark times for comparison.

Ops are compiled by `torch.compile` for static shapes, once for each size, with noise from PyTorch's
generator: Inductor writes Triton for them. Without a GPU, they run as they are. Sketches use
`torch.index_add_` and `torch.gather`. Their columns and signs are computed beforehand and are not
timed, since a user would keep them from step to step.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from pallas_kernels.arg_specs import SKETCH_ROWS, columns_for
from pallas_kernels.block_float.reference import FORMATS

Build = Callable[[Any, int], Callable[[], Any]]


def device_of(torch: Any) -> str:
    """The device on which PyTorch computes."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def wait(torch: Any) -> None:
    """Returns when all calls have ended."""
    if device_of(torch) == "cuda":
        torch.cuda.synchronize()


def _compile(torch: Any, f: Callable[..., Any]) -> Callable[..., Any]:
    """For static shapes, as they are in JAX."""
    backend = "inductor" if device_of(torch) == "cuda" else "eager"
    compiled: Callable[..., Any] = torch.compile(f, dynamic=False, fullgraph=True, backend=backend)
    return compiled


def _shifts(torch: Any, bits: int) -> Any:
    return torch.arange(0, 32, bits, device=device_of(torch), dtype=torch.int32)[:, None]


def _quantize(torch: Any, size: int, bits: int) -> Callable[[], Any]:
    levels = 2 ** (bits - 1) - 1
    x = torch.randn(size, device=device_of(torch))
    factor = levels / x.abs().max()

    def codes(x: Any, factor: Any) -> Any:
        return torch.floor(x * factor + torch.rand_like(x)).clamp(-levels, levels)

    def packed(x: Any, factor: Any, shifts: Any) -> Any:
        fields = (codes(x, factor) + levels).to(torch.int32).view(32 // bits, -1)
        return (fields << shifts).sum(0, dtype=torch.int32)

    if bits == 8:
        compiled = _compile(torch, lambda x, factor: codes(x, factor).to(torch.int8))
        return functools.partial(compiled, x, factor)
    return functools.partial(_compile(torch, packed), x, factor, _shifts(torch, bits))


def _dequantize(torch: Any, size: int) -> Callable[[], Any]:
    codes = torch.randint(-127, 128, (size,), device=device_of(torch), dtype=torch.int8)
    step = torch.tensor(0.01, device=device_of(torch))
    compiled = _compile(torch, lambda codes, step: codes.float() * step)
    return functools.partial(compiled, codes, step)


def _pack(torch: Any, size: int, bits: int) -> Callable[[], Any]:
    numbers = torch.randint(0, 2**bits, (size,), device=device_of(torch), dtype=torch.uint8)

    def pack(numbers: Any, shifts: Any) -> Any:
        planes = numbers.view(32 // bits, -1).to(torch.int32)
        return (planes << shifts).sum(0, dtype=torch.int32)

    return functools.partial(_compile(torch, pack), numbers, _shifts(torch, bits))


def _unpack(torch: Any, size: int, bits: int) -> Callable[[], Any]:
    words = torch.randint(
        0, 2**31 - 1, (size * bits // 32,), device=device_of(torch), dtype=torch.int32
    )

    def unpack(words: Any, shifts: Any) -> Any:
        return (words[None] >> shifts) & (2**bits - 1)

    return functools.partial(_compile(torch, unpack), words, _shifts(torch, bits))


def _block_float(torch: Any, size: int, dtype: str, block_size: int) -> Callable[[], Any]:
    """Rounds to nearest."""
    form = FORMATS[dtype]
    x = torch.randn(size, device=device_of(torch))

    def encode(x: Any) -> Any:
        blocks = x.view(-1, block_size)
        ratio = blocks.abs().amax(1, keepdim=True) / form.largest
        exponents = torch.ceil(torch.log2(ratio)).clamp(-126, 127)
        scaled = blocks * torch.exp2(-exponents)
        rounded = scaled.round() if form.is_integer else scaled
        return rounded.to(getattr(torch, dtype)), (exponents + 127).to(torch.uint8)

    return functools.partial(_compile(torch, encode), x)


def _columns_and_signs(torch: Any, size: int) -> tuple[Any, Any]:
    shape = (SKETCH_ROWS, size)
    columns = torch.randint(0, columns_for(size), shape, device=device_of(torch))
    return columns, torch.randint(
        0, 2, shape, device=device_of(torch), dtype=torch.int8
    ) * 2.0 - 1.0


def _encode(torch: Any, size: int) -> Callable[[], Any]:
    columns, signs = _columns_and_signs(torch, size)
    x = torch.randn(size, device=device_of(torch))

    def encode(x: Any, columns: Any, signs: Any) -> Any:
        rows = []
        for row in range(SKETCH_ROWS):
            empty = torch.zeros(columns_for(size), device=device_of(torch))
            rows.append(empty.index_add_(0, columns[row], signs[row] * x))
        return torch.stack(rows)

    return functools.partial(_compile(torch, encode), x, columns, signs)


def _decode(torch: Any, size: int, estimate: str) -> Callable[[], Any]:
    columns, signs = _columns_and_signs(torch, size)
    table = torch.randn(SKETCH_ROWS, columns_for(size), device=device_of(torch))

    def decode(table: Any, columns: Any, signs: Any) -> Any:
        values = torch.gather(table, 1, columns) * signs
        return values.mean(0) if estimate == "mean" else values.median(0).values

    return functools.partial(_compile(torch, decode), table, columns, signs)


EQUIVALENTS: dict[str, Build] = {
    "quantize float32, 8 bits": functools.partial(_quantize, bits=8),
    "quantize float32, 4 bits": functools.partial(_quantize, bits=4),
    "dequantize, 8 bits": _dequantize,
    "pack, 4 bits": functools.partial(_pack, bits=4),
    "unpack, 4 bits": functools.partial(_unpack, bits=4),
    "block float float8_e4m3fn, blocks of 32, nearest": functools.partial(
        _block_float, dtype="float8_e4m3fn", block_size=32
    ),
    "sketch tiles, encode float32": _encode,
    "sketch tiles, decode mean": functools.partial(_decode, estimate="mean"),
    "sketch tiles, decode median": functools.partial(_decode, estimate="median"),
}
"""The equivalents, by the label of the row in the table of workloads."""


def build(torch: Any, label: str, size: int) -> Callable[[], Any]:
    """The equivalent of a row, compiled for one size, as if it were the first one."""
    torch.compiler.reset()
    return EQUIVALENTS[label](torch, size)


def load(on_cpu: bool = False) -> Any:
    """PyTorch, if it is installed and sees a GPU, or need not; else None."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    return torch if on_cpu or torch.cuda.is_available() else None
