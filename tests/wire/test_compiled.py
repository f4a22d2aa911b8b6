"""What is read from compiled programs: loops, lines, combined arrays, messages on the way."""

import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxcomm import wire
from jaxcomm.wire._compiled import Program
from tests.training.places import mesh_of

MESH = mesh_of(AxisType.Auto, 8)
ROWS = jax.ShapeDtypeStruct((16, 8), jnp.float32, sharding=NamedSharding(MESH, P("data")))
WEIGHTS = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(MESH, P()))


def gradient(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)  # summed here


LINES = pathlib.Path(__file__).read_text(encoding="utf-8").splitlines()
LINE = next(number for number, text in enumerate(LINES, 1) if text.endswith("# summed here"))


def descend(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - gradient(w, x)


def nested(w: jax.Array, x: jax.Array) -> jax.Array:
    inner = lambda w, _: (descend(w, x), None)  # noqa: E731
    outer = lambda w, _: (lax.scan(inner, w, None, length=3)[0], None)  # noqa: E731
    return lax.scan(outer, w, None, length=5)[0]


def until(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda w: w[0, 0] < 9, lambda w: descend(w, x), w)


def either(w: jax.Array, x: jax.Array) -> jax.Array:
    branches = [lambda w: w, lambda w: descend(w, x), lambda w: w + jnp.sum(x)]
    return lax.switch(jnp.int32(w[0, 0]), branches, w)


def test_trip_counts() -> None:
    whole = 14 / 8 * 256
    account = wire.account(jax.jit(nested).lower(WEIGHTS, ROWS))
    (found,) = account.collectives
    assert found.path == ("scan x5", "scan x3") and found.times == 15
    assert account.bytes_per_worker == 15 * whole

    account = wire.account(jax.jit(until).lower(WEIGHTS, ROWS))
    assert account.unbounded and account.bytes_per_worker == whole
    assert ">=1" in str(account) and "in rings: at least 448" in str(account)

    account = wire.account(jax.jit(either).lower(WEIGHTS, ROWS))
    assert [c.path for c in account.collectives] == [("cond 2/3",), ("cond 3/3",)]
    assert account.bytes_per_worker == whole
    assert account.amortized_bytes_per_worker(0.25) == whole / 4


LOOP = """HloModule jit_step, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%body (p: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {
  %p = (s32[], f32[4]{0}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %copied = s32[] copy(%i)
  %step = s32[] get-tuple-element(%p), index=2
  %next = s32[] add(%copied, %step)
  %v = f32[4]{0} get-tuple-element(%p), index=1
  %r = f32[4]{0} all-reduce(%v), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, \
use_global_device_ids=true, to_apply=%add, metadata={METADATA}
  ROOT %out = (s32[], f32[4]{0}, s32[]) tuple(%next, %r, %step)
}

%condition (q: (s32[], f32[4], s32[])) -> pred[] {
  %q = (s32[], f32[4]{0}, s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %limit = s32[] constant(LIMIT)
  ROOT %less = pred[] compare(%j, %limit), direction=DIRECTION
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %zero = s32[] constant(FIRST)
  %begin = s32[] copy(%zero)
  %one = s32[] constant(STEP)
  %t = (s32[], f32[4]{0}, s32[]) tuple(%begin, %a, %one)
  %w = (s32[], f32[4]{0}, s32[]) while(%t), condition=%condition, body=%body
  ROOT %result = f32[4]{0} get-tuple-element(%w), index=1
}
"""


def loop(first: Any = 0, limit: Any = 5, step: Any = 1, direction: str = "LT", of: str = "") -> str:
    texts = {"FIRST": first, "LIMIT": limit, "STEP": step, "DIRECTION": direction, "METADATA": of}
    text = LOOP
    for name, value in texts.items():
        text = text.replace(name, str(value))
    return text


@pytest.mark.parametrize(
    ("given", "times"),
    [
        ((0, 5, 1), 5),
        ((2, 5, 1), 3),
        ((0, 5, 2), 3),
        ((0, 6, 2), 3),
        ((0, 5, 1, "LE"), 6),
        ((7, 5, 1), 0),
    ],
)
def test_trips_of_a_loop_that_counts(given: Any, times: int) -> None:
    """As compiled for TPU, where nothing else says how often a loop runs."""
    (found,) = wire.account(loop(*given)).collectives
    assert found.times == times and found.path == (f"scan x{times}",)


@pytest.mark.parametrize("given", [(0, 5, 0), (0, 5, -1), (0, 5, 1, "NE"), (0, 5, 1, "GT")])
def test_loops_that_do_not_count(given: Any) -> None:
    assert wire.account(loop(*given)).unbounded


TABLES = """
FileNames
1 "/home/me/train.py"
2 "/usr/lib/python3/dist-packages/optax/base.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=17 end_line=17 column=4 end_column=4}
2 {file_name_id=2 function_name_id=1 line=99 end_line=99 column=4 end_column=4}

StackFrames
1 {file_location_id=1 parent_frame_id=FIRST}
2 {file_location_id=2 parent_frame_id=SECOND}

"""


def test_lines_in_both_forms() -> None:
    name = 'op_name="jit(step)/jvp(Model)/layers_0/while/body/dot_general"'
    old = loop(of=f'{name} source_file="/home/me/train.py" source_line=12 source_column=8')
    (found,) = wire.account(old).collectives
    assert (found.source, found.scope) == ("/home/me/train.py:12", "Model/layers_0")
    for parents in ("01", "12"):  # Some versions print numbers of callers plus one.
        tables = TABLES.replace("FIRST", parents[0]).replace("SECOND", parents[1])
        new = loop(of=f"{name} stack_frame_id=2").replace("\n\n", tables, 1)
        (found,) = wire.account(new).collectives
        assert found.source == "/home/me/train.py:17"  # Outside of installed packages.
        assert Program(new).lines(Program(new).computations["body"][-2])[0].number == 99
    (found,) = wire.account(jax.jit(descend).lower(WEIGHTS, ROWS)).collectives
    assert found.source == f"tests/wire/test_compiled.py:{LINE}"


def test_a_collective_without_a_source_has_that_of_its_neighbors() -> None:
    text = loop().replace(
        "  ROOT %out",
        '  %used = f32[4]{0} copy(%r), metadata={op_name="jit(f)/a/sin" source_file="/x/y.py" '
        "source_line=3}\n  ROOT %out",
    )
    (found,) = wire.account(text).collectives
    assert (found.source, found.scope) == ("/x/y.py:3", "a")


def test_a_source_is_of_an_operation() -> None:
    """XLA names some collectives as the whole program, with the line that calls it."""
    named = 'op_name="jit(step)" source_file="/x/main.py" source_line=1'
    (found,) = wire.account(loop(of=named)).collectives
    assert found.source == "/x/main.py:1"
    text = loop(of=named).replace(
        "  ROOT %out",
        '  %used = f32[4]{0} copy(%r), metadata={op_name="jit(step)/a/sin" source_file="/x/y.py" '
        "source_line=3}\n  ROOT %out",
    )
    (found,) = wire.account(text).collectives
    assert (found.source, found.scope) == ("/x/y.py:3", "a")


@pytest.mark.parametrize(
    "name",
    [
        "jit(step)/jvp(model)/mlp/dot_general;jit(step)/transpose(jvp(model))/norm/mul",
        "jit(step)/(jvp(model)/mlp/dot_general:transpose(jvp(model))/norm/mul)",
        "jit(step)/model/(mlp/dot_general:norm/mul:dot_general)",
    ],
)
def test_scopes_of_operations_that_xla_has_merged(name: str) -> None:
    (found,) = wire.account(loop(of=f'op_name="{name}"')).collectives
    assert found.scope == "model/mlp"


def test_combined_arrays_are_one_message() -> None:
    def step(tree: dict[str, jax.Array], x: jax.Array) -> Any:
        return jax.grad(lambda tree: jnp.sum(jnp.sin(x @ tree["w"] + tree["b"][None])))(tree)

    tree = {"w": WEIGHTS, "b": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=WEIGHTS.sharding)}
    account = wire.account(jax.jit(step).lower(tree, ROWS))
    assert [c.combined for c in account.collectives] == [2, 2]
    assert "2 arrays" in str(account) and "XLA keeps the source of one" in str(account)
    wire.require(account, collectives=1)
    assert account.bytes_per_worker == 14 / 8 * (256 + 32)


PERMUTED = "collective-permute(%p), channel_id=7, source_target_pairs={{0,1},{1,0}}"
CALLED = {
    "half": f"  ROOT %inner = f32[8,8] {PERMUTED}",
    "begun": f"  %first = f32[8,8] {PERMUTED}\n"
    '  ROOT %s = (f32[8,8], u32[]) custom-call(%first), custom_call_target="AsyncCollectiveStart"',
    "ended": f"  %last = f32[8,8] {PERMUTED}\n"
    '  ROOT %d = f32[8,8] custom-call(%last), custom_call_target="AsyncCollectiveDone"',
}


def on_the_way(middle: str) -> str:
    """A program of these instructions, with the computations that they call."""
    lines = ["HloModule jit_step, is_scheduled=true, num_partitions=8"]
    for name, inside in CALLED.items():
        if f"%{name}" in middle:
            lines += [f"%{name} (p: f32[8,8]) -> f32[8,8] {{", "  %p = f32[8,8]{1,0} parameter(0)"]
            lines += [inside, "}"]
    lines += ["ENTRY %main (a: f32[8,8]) -> f32[8,8] {", "  %a = f32[8,8]{1,0} parameter(0)"]
    return "\n".join([*lines, middle, "}"])


DOT = "  %dot = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
GROUPS = "channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true"
ON_THE_WAY = {
    "start and done": (
        f"  %s = (f32[8,8], f32[64,8]) all-gather-start(%a), {GROUPS}, dimensions={{0}}\n{DOT}"
        "  ROOT %d = f32[64,8]{1,0} all-gather-done(%s)",
        ("all_gather", 7 * 256, 1024),
    ),
    "nothing between": (
        f"{DOT}  %s = (f32[8,8], f32[64,8]) all-gather-start(%a), {GROUPS}, dimensions={{0}}\n"
        "  ROOT %d = f32[64,8]{1,0} all-gather-done(%s)",
        ("all_gather", 7 * 256, 0),
    ),
    "of a computation": (
        "  %s = ((f32[8,8]), f32[8,8], u32[]) async-start(%a), calls=%half\n"
        f"  %u = ((f32[8,8]), f32[8,8], u32[]) async-update(%s)\n{DOT}"
        "  ROOT %d = f32[8,8]{1,0} async-done(%u)",
        ("ppermute", 256, 1024),
    ),
    "in fusions": (
        f"  %s = (f32[8,8], u32[]) fusion(%a), kind=kCustom, calls=%begun\n{DOT}"
        "  %g = f32[8,8] get-tuple-element(%s), index=0\n"
        "  ROOT %d = f32[8,8]{1,0} fusion(%g), kind=kCustom, calls=%ended",
        ("ppermute", 256, 1024),
    ),
    "sent and received": (
        "  %s = (f32[8,8], u32[], token[]) send(%a, %t), channel_id=2, frontend_attributes="
        '{_xla_send_recv_source_target_pairs="{{0,1},{1,0}}"}\n'
        f"{DOT}  ROOT %d = token[] send-done(%s), channel_id=2",
        ("ppermute", 256, 1024),
    ),
}


@pytest.mark.parametrize("name", ON_THE_WAY)
def test_what_is_computed_meanwhile(name: str) -> None:
    middle, (kind, sent, flops) = ON_THE_WAY[name]
    account = wire.account(on_the_way(middle))
    (found,) = account.collectives
    assert (found.kind, found.bytes_per_worker, found.during.flops) == (kind, sent, flops)
    assert found.asynchronous and account.overlapped == (flops > 0)
    assert ("1e+03 FLOP" if flops else "0 FLOP") in str(account)


def test_a_start_that_waits_is_not_asynchronous() -> None:
    middle, _ = ON_THE_WAY["start and done"]
    config = 'dimensions={0}, backend_config={"collective_backend_config":{"is_sync":true}}'
    (found,) = wire.account(on_the_way(middle.replace("dimensions={0}", config, 1))).collectives
    assert not found.asynchronous and found.bytes_per_worker == 7 * 256


def test_messages_of_one_channel_are_several() -> None:
    """XLA gives one number to all messages that it has combined."""
    twice = (
        "  %s = f32[8,8]{1,0} fusion(%a), kind=kCustom, calls=%half\n"
        "  ROOT %d = f32[8,8]{1,0} fusion(%s), kind=kCustom, calls=%half"
    )
    assert wire.account(on_the_way(twice)).bytes_per_worker == 2 * 256


def test_what_a_host_is_sent_does_not_count_and_unknown_kinds_are_an_error() -> None:
    host = "  ROOT %s = (f32[8,8], u32[]) send(%a), channel_id=2, is_host_transfer=true"
    assert wire.account(on_the_way(host)).collectives == ()
    mapped = "  ROOT %s = f32[8,8] map(%a), to_apply=%half"
    with pytest.raises(ValueError, match=r"not known what runs this collective: %\w+ = f32"):
        wire.account(on_the_way(mapped))
    unknown = f"  ROOT %s = f32[8,8] collective-shuffle(%a), {GROUPS}"
    with pytest.raises(ValueError, match=r"unknown kind: %s = .*collective-shuffle"):
        wire.account(on_the_way(unknown))


def test_numbers_of_16_bits_that_xla_for_cpus_widens() -> None:
    """They count as 16 bits, as on other devices; what float32 holds counts as 32."""
    half = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16, sharding=WEIGHTS.sharding)
    rows = jax.ShapeDtypeStruct((16, 8), jnp.bfloat16, sharding=ROWS.sharding)
    account = wire.account(jax.jit(gradient).lower(half, rows))
    assert {str(c.dtype) for c in account.collectives} == {"bfloat16"}
    assert account.bytes_per_worker == account.widened_bytes == 14 / 8 * 128
    assert "bfloat16*" in str(account) and "sends wider numbers: 224 bytes more" in str(account)
    account = wire.account(jax.jit(gradient).lower(WEIGHTS, ROWS))
    assert account.widened_bytes == 0


def halved(w: jax.Array, x: jax.Array) -> jax.Array:
    """Weights of float32, of which the product is one of bfloat16."""
    y = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
    return jnp.mean(y.astype(jnp.float32) ** 2)


def whole(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.mean((x @ w) ** 2)


def widened(w: jax.Array, x: jax.Array) -> jax.Array:
    """A sum of float32, of numbers that were rounded to bfloat16."""
    rows = jax.shard_map(
        lambda x: lax.psum(x.astype(jnp.bfloat16).astype(jnp.float32), "data"),
        mesh=MESH,
        in_specs=P("data"),
        out_specs=P(),
    )
    return jnp.mean(rows(x) @ w)


@pytest.mark.parametrize(
    ("losses", "dtypes"),
    [
        ([halved], ["bfloat16"]),
        ([halved, whole], ["bfloat16", "float32"]),
        ([whole, halved], ["float32", "bfloat16"]),
        ([halved, halved], ["bfloat16", "bfloat16"]),
        ([widened], ["float32"]),
    ],
    ids=["one", "narrow first", "wide first", "both", "in float32"],
)
def test_sums_whose_conversions_xla_leaves_out(losses: list[Any], dtypes: list[str]) -> None:
    """XLA for CPUs combines sums of all dtypes in one of float32; each counts as its own."""

    def descend(params: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        whole = lambda params: sum(f(w, x) for f, w in zip(losses, params, strict=True))  # noqa: E731
        return jax.tree.map(jnp.subtract, params, jax.grad(whole)(params))

    account = wire.account(jax.jit(descend).lower([WEIGHTS] * len(losses), ROWS))
    assert [str(c.dtype) for c in account.collectives if c.shape] == dtypes


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.int16])
def test_narrow_numbers_count_as_traced(dtype: Any) -> None:
    both = lambda x: (lax.psum(x, "data"), lax.ppermute(x, "data", [(0, 1), (1, 0)]))  # noqa: E731
    run = jax.shard_map(both, mesh=MESH, in_specs=P("data"), out_specs=(P(), P("data")))
    x = jax.ShapeDtypeStruct((64,), dtype)
    traced, compiled = wire.account(run, x), wire.account(jax.jit(run).lower(x))
    assert {c.dtype for c in compiled.collectives} == {x.dtype}
    assert traced.bytes_per_worker == compiled.bytes_per_worker


def converted_later(w: jax.Array, x: jax.Array) -> jax.Array:
    """The sum is in bfloat16, and converted where it is used, among other operations."""
    half = lambda w: jnp.mean((x @ w.astype(jnp.bfloat16)).astype(jnp.float32) ** 2)  # noqa: E731
    return w - 0.1 * jax.grad(half)(w)


def mapped(send: Any) -> Any:
    specs: Any = {"in_specs": (P(), P("data")), "out_specs": P("data"), "check_vma": False}
    return jax.shard_map(send, mesh=MESH, **specs)


SHIFTED = [(i, (i + 1) % 8) for i in range(8)]
SENT = {
    "sum": lambda _, x: lax.psum(x, "data"),
    "reduce-scatter": lambda _, x: lax.psum_scatter(x, "data", scatter_dimension=1),
    "gather": lambda _, x: lax.all_gather(x, "data"),
    "gather, then widen": lambda _, x: lax.all_gather(x, "data").astype(jnp.float32),
    "permute": lambda _, x: lax.ppermute(x, "data", SHIFTED),
}
AS_MEANT = {
    "sum converted later": (converted_later, "bfloat16"),
    **{name: (mapped(send), "bfloat16") for name, send in SENT.items()},
    **{
        f"wide {name}": (mapped(lambda _, x, send=send: send(_, x.astype(jnp.float32))), "float32")
        for name, send in SENT.items()
    },
}


@pytest.mark.parametrize("name", AS_MEANT)
def test_numbers_count_as_the_program_sends_them(name: str) -> None:
    """Of bfloat16, whether XLA for CPUs widens it for a message or the program does."""
    step, dtype = AS_MEANT[name]
    rows = jax.ShapeDtypeStruct((16, 8), jnp.bfloat16, sharding=ROWS.sharding)
    (found,) = wire.account(jax.jit(step).lower(WEIGHTS, rows)).collectives
    assert str(found.dtype) == dtype


def large(layers: int, fillers: int) -> str:
    """A program with a collective for each layer, and other instructions around it."""
    lines = ["HloModule jit_step, is_scheduled=true, num_partitions=8", ""]
    lines += [TABLES.replace("FIRST", "0").replace("SECOND", "1")]
    lines += ["ENTRY %main (a: f32[8,8]) -> f32[8,8] {", "  %x.0 = f32[8,8]{1,0} parameter(0)"]
    source = 'metadata={op_name="jit(step)/layer/dot_general" stack_frame_id=2}'
    for layer in range(layers):
        first = last = layer * fillers
        lines.append(
            f"  %s.{layer} = (f32[8,8], f32[8,8]) all-reduce-start(%x.{first}), {GROUPS}, "
            f"to_apply=%add, {source if layer % 2 else 'metadata={}'}"
        )
        for last in range(first, first + fillers):
            lines.append(
                f"  %x.{last + 1} = f32[8,8]{{1,0}} dot(%x.{last}, %x.{first}), "
                f"lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, {source}"
            )
        lines.append(f"  %d.{layer} = f32[8,8]{{1,0}} all-reduce-done(%s.{layer})")
    lines += [f"  ROOT %r = f32[8,8]{{1,0}} copy(%x.{layers * fillers})", "}"]
    return "\n".join(lines)


@pytest.mark.slow
def test_a_large_program_is_read_quickly() -> None:
    """A thousand collectives in 300,000 lines, in under 10 seconds."""
    text = large(1000, 297)
    assert text.count("\n") >= 299_000
    begun = time.process_time()
    account = wire.account(text)
    took = time.process_time() - begun
    assert len(account.collectives) == 1000 and account.overlapped == 1
    assert account.collectives[7].during.flops == 297 * 1024
    assert took < 10
