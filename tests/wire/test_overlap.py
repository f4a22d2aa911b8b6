"""The report of overlap, on programs written by hand and compiled ones."""

import jax
import jax.numpy as jnp
import pytest

from jaxcomm import wire
from jaxcomm.wire._overlap import Overlap

# Two products of 2 * 8^3 operations after the start of the first message, one of them before its
# end; nothing after the start of the second one. The third one is synchronous, in a loop.
BACKWARD = 'metadata={op_name="jit(step)/transpose(jvp())/dot_general"}'
DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
TRIPS = 'backend_config={"known_trip_count":{"n":"5"}}'
PROGRAM = f"""HloModule jit_step, is_scheduled=true

%body (p: (f32[8,8])) -> (f32[8,8]) {{
  %p = (f32[8,8]{{1,0}}) parameter(0)
  %x = f32[8,8]{{1,0}} get-tuple-element(%p), index=0
  %dot.9 = f32[8,8]{{1,0}} dot(%x, %x), {DOT}, {BACKWARD}
  %all-reduce.9 = f32[8,8]{{1,0}} all-reduce(%dot.9), to_apply=%add
  ROOT %t = (f32[8,8]{{1,0}}) tuple(%all-reduce.9)
}}

%async_all-gather (q: s8[16]) -> s8[32] {{
  %q = s8[16]{{0}} parameter(0)
  ROOT %all-gather.3 = s8[32]{{0}} all-gather(%q), dimensions={{0}}
}}

ENTRY %main (a: f32[8,8], b: s8[16]) -> f32[8,8] {{
  %a = f32[8,8]{{1,0}} parameter(0)
  %b = s8[16]{{0}} parameter(1)
  %forward = f32[8,8]{{1,0}} dot(%a, %a), {DOT}, metadata={{op_name="jit(step)/jvp()/dot_general"}}
  %all-reduce-start = ((s8[16]{{0}}), s8[16]{{0}}) all-reduce-start(%b), to_apply=%add
  %dot.1 = f32[8,8]{{1,0}} dot(%a, %a), {DOT}, {BACKWARD}
  %all-reduce-done = s8[16]{{0}} all-reduce-done(%all-reduce-start)
  %dot.2 = f32[8,8]{{1,0}} dot(%dot.1, %a), {DOT}, {BACKWARD}
  %all-gather-start = ((s8[4]{{0}}), s8[32]{{0}}) async-start(%b), calls=%async_all-gather
  %all-gather-done = s8[32]{{0}} async-done(%all-gather-start)
  %init = (f32[8,8]{{1,0}}) tuple(%dot.2)
  %loop = (f32[8,8]{{1,0}}) while(%init), body=%body, {TRIPS}
  ROOT %out = f32[8,8]{{1,0}} get-tuple-element(%loop), index=0
}}
"""


def test_a_program_by_hand() -> None:
    report = wire.overlap_report(PROGRAM, flops_per_second=1024.0, bytes_per_second=1e30)
    first, second, third = report.overlaps
    # Each product takes a second; the loop has five of them.
    assert first == Overlap("all_reduce", 16, True, 1.0, 2.0, 1)
    assert first.share == 0.5
    assert second == Overlap("all_gather", 32, True, 0.0, 0.0, 1)
    assert third == Overlap("all_reduce", 256, False, 0.0, 0.0, 5)
    # The second one is the last outside loops.
    assert report.share == 16 * 0.5 / (16 + 5 * 256)
    lines = str(report).splitlines()
    assert lines[1].split()[:4] == ["all_reduce", "16", "1", "start/done"]
    assert lines[-1] == "share of the remaining backward pass, by bytes: 1%"


def test_bytes_bound_small_products() -> None:
    report = wire.overlap_report(PROGRAM, flops_per_second=1e30, bytes_per_second=768.0)
    assert report.overlaps[0].during == 1.0


SLICED = """HloModule jit_step, is_scheduled=true

%fused (q: f32[64,8,8], r: f32[8,8], i: s32[]) -> f32[64,8,8] {
  %q = f32[64,8,8]{2,1,0} parameter(0)
  %r = f32[8,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %u = f32[1,8,8]{2,1,0} bitcast(%r)
  ROOT %d = f32[64,8,8]{2,1,0} dynamic-update-slice(%q, %u, %i, %i, %i)
}

ENTRY %main (q: f32[64,8,8], r: f32[8,8], i: s32[]) -> f32[64,8,8] {
  %q = f32[64,8,8]{2,1,0} parameter(0)
  %r = f32[8,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %all-reduce-start = (f32[8,8]{1,0}, f32[8,8]{1,0}) all-reduce-start(%r), to_apply=%add
  ROOT %f = f32[64,8,8]{2,1,0} fusion(%q, %r, %i), kind=kLoop, calls=%fused, BACKWARD
  %all-reduce-done = f32[8,8]{1,0} all-reduce-done(%all-reduce-start)
}
"""


def test_a_slice_counts_as_its_own_bytes() -> None:
    """A layer is written into its stack: the layer, the slice twice, and an index."""
    text = SLICED.replace("BACKWARD", BACKWARD)
    report = wire.overlap_report(text, flops_per_second=1e30, bytes_per_second=772.0)
    assert report.overlaps[0].during == 1.0


def test_a_compiled_program() -> None:
    compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4))).compile()
    assert wire.overlap_report(compiled).overlaps == ()


def test_branches_are_listed() -> None:
    branch = """%{0} (q: f32[8]) -> f32[8] {{
  %q.{0} = f32[8]{{0}} parameter(0)
  ROOT %r.{0} = f32[8]{{0}} all-reduce(%q.{0}), to_apply=%add
}}
"""
    entry = """ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %p = pred[] constant(true)
  %i = s32[] constant(0)
  %c = f32[8]{0} conditional(%p, %a, %a), true_computation=%one, false_computation=%two
  ROOT %d = f32[8]{0} conditional(%i, %c, %c), branch_computations={%one, %two}
}
"""
    report = wire.overlap_report(branch.format("one") + branch.format("two") + entry)
    assert [(each.kind, each.bytes, each.times) for each in report.overlaps] == [
        ("all_reduce", 32, 1)
    ] * 4


@pytest.mark.parametrize("program", [None, ""])
def test_invalid_programs_are_refused(program: str | None) -> None:
    with pytest.raises(ValueError, match="Pass the compiled program"):
        wire.overlap_report(program)
