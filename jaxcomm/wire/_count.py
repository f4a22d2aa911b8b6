"""Counts the bytes that a program sends: traced, or compiled where XLA inserts collectives."""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxcomm.wire._account import Account
from jaxcomm.wire._compiled import Instruction, Program
from jaxcomm.wire._messages import messages_in, nodes_of
from jaxcomm.wire._partitioned import is_partitioned
from jaxcomm.wire._program import named_axes
from jaxcomm.wire._walk import collectives_of


def account(
    fn: Callable[..., Any] | jax.stages.Lowered | jax.stages.Compiled | str,
    *args: Any,
    **kwargs: Any,
) -> Account:
    r"""Counts the bytes that `fn(*args, **kwargs)` sends, from its traced JAX program.

    Bytes are those that one worker sends in ring schedules, with :math:`n` workers and an operand
    of :math:`B` bytes:

    ==================  ======================
    all-reduce          :math:`2 (n-1)/n\, B`
    reduce-scatter      :math:`(n-1)/n\, B`
    all-to-all          :math:`(n-1)/n\, B`
    all-gather          :math:`(n-1)\, B`
    ppermute            :math:`B`
    ==================  ======================

    Collectives that a program asks for, in `jax.shard_map` or `jax.pmap`, are read from the traced
    program. The account includes those that autodiff inserts. It excludes collectives with unused
    results and counts duplicates once. If XLA inserts collectives, because `fn` computes with
    sharded arrays outside of `jax.shard_map`, the program is compiled and the account is read from
    the compiled program; so it is for a program that is compiled already. Nothing runs.

    The bytes of a loop of known length are multiplied by the length. Conditionals are reported
    branch by branch and counted as the heaviest branch. Loops of unknown length count once, and are
    flagged.

    In a traced program, a device sends its own shard of an operand that is sharded over an Explicit
    axis, or in a `jax.shard_map` over that axis. For an automatic axis, the trace does not specify
    the sharding: the whole operand is counted, and the account prints "at most". The compiled
    program says what is sent: `account(jax.jit(fn).lower(*args))`.

    Args:
      fn: A function that communicates, such as the step of `jaxcomm.make_step` or
        `jaxcomm.simulate`, or any other, also of `flax.nnx.jit` or `equinox.filter_jit`; or a
        compiled program: `jax.jit(fn).lower(...)`, its `compile()`, for devices that need not
        exist, or the text of one, as `XLA_FLAGS=--xla_dump_to=FOLDER` writes.
      *args: The arguments of a function: arrays, `jax.ShapeDtypeStruct`, or what is static.
      **kwargs: Its keyword arguments, likewise; for a compiled program `mesh`, a mesh or a dict of
        the sizes of axes, if the program does not say it.

    Returns:
      The account; print it for a table, the largest first. Bytes of one worker: `bytes_per_worker`;
      `bytes_by_axis`, a dict; `bytes_of_branches`, as if all branches ran;
      `amortized_bytes_per_worker(share)`, if only this share of the runs takes the heaviest branch;
      `bytes_sent(worker)` and `bytes_received(worker)`, which differ if only some workers take part
      in messages. `messages` counts sequential messages, and `seconds(bytes_per_second, latency)`
      is their time without overlap. `unbounded`: a loop of unknown length sends, and counts once;
      `at_most`: XLA may shard an operand that is counted whole; `axes`: those of the program's
      meshes. `table()` has a dict per collective for a data frame, and `json()` is a text for
      `jaxcomm.wire.require(same_as=...)`.
      `collectives` has one entry per array of each collective of every branch, and `heaviest(cost)`
      those of the branches with the largest `cost(collectives)`. An entry has `kind`, such as
      `"all_reduce"`; `axes`; `workers`; `dtype` and `shape` of the operand; `times`, how often it
      runs; `path`, the control flow around it; `source`, the line of the user's code, and `scope`,
      the `jax.named_scope` around it; `bytes_per_worker`; and `messages`. Of a compiled program
      also `combined`, the number of arrays that XLA sends in its message, of which it keeps the
      source of one; `asynchronous`, whether it has a start and a done; and `during`, the operations
      and bytes of what is computed between the two. `overlapped` is the share of bytes that are on
      the way while products are computed.

    Raises:
      ValueError: If `fn` contains a step of `jaxcomm.simulate`, which sends nothing; if a compiled
        program has a collective in a form that is not known; or if `mesh` has not its devices.

    Warns:
      UserWarning: If an argument is sharded over an axis that is automatic where the program sends.

    An account of a trace does not include what XLA inserts within a `jax.shard_map`, over the axes
    that it leaves to XLA, such as the `shard_axes` of a step. XLA for CPUs sends bfloat16 as
    float32 and floats of 8 bits as float16: they count as other devices send them, and a compiled
    program shows an asterisk. What a program itself widens before it sends it counts as wide. XLA
    for GPUs sends int16 as int32 in an all-reduce; no codec of this library uses it there. Messages
    that kernels send are not seen.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jaxcomm
      >>> tx = optax.chain(jaxcomm.global_qsgd(), optax.sgd(0.5))
      >>> params = jnp.zeros(1000)
      >>> step = jaxcomm.simulate(lambda w, x: jnp.mean((w - x[0]) ** 2), tx, workers=8)
      >>> sent = jaxcomm.wire.account(
      ...     step, params, jaxcomm.init(tx, params, 8), jnp.ones((8, 1000))
      ... )
      >>> print(sent)
      collective  axis  workers  dtype    shape   times  bytes  within  where
      all_reduce  data  8        int8     1000    1      1,750  -       global_qsgd/codes
      all_reduce  data  8        float32  2       1      14     -       global_qsgd/max_abs
      all_reduce  data  8        float32  scalar  1      7      -       make_step/metrics
      bytes sent per worker, in rings: 1,771
      >>> sent.seconds(bytes_per_second=1e6, latency=1e-3)
      0.043771
    """
    stage = _stage_of(fn)
    if stage is not None:
        return _of_compiled(stage, *args, **kwargs)
    run: Any = getattr(fn, "on_mesh", fn)
    of_arrays, leaves = _of_arrays(run, args, kwargs)
    jaxpr = jax.make_jaxpr(of_arrays)(*leaves)
    found = Account(*collectives_of(jaxpr.jaxpr))
    # A step that places its arguments before it starts moves them once, not in its program.
    inputs = [None] * len(leaves) if getattr(run, "places_arguments", False) else leaves
    if is_partitioned(jaxpr, inputs):
        own = hasattr(run, "lower")
        lowered = run.lower(*args, **kwargs) if own else jax.jit(of_arrays).lower(*leaves)
        compiled = _stage_of(lowered.compile())
        program = Program(compiled.as_text() or "")
        if _has_inserted(program):
            return _read(program, _shardings(compiled))
    _warn_of_sharded(found, (args, kwargs))
    return found


def _stage_of(given: Any) -> Any:
    """The compiled program, or that which a wrapper of Equinox or Flax has; None for a function."""
    stages = str | jax.stages.Compiled | jax.stages.Lowered
    inside = (given, getattr(given, "lowered", None), getattr(given, "compiled", None))
    return next((x for x in inside if isinstance(x, stages)), None)


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _of_arrays(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Callable[..., Any], Any]:
    """The function of the arrays among its arguments, and these; it keeps what is no array.

    Numbers are arrays for `jax.jit`, unless a function is jitted already, by whichever library, or
    has arguments which `jax.jit` would not take.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    plain = [_is_array(x) or isinstance(x, int | float | complex) for x in leaves]
    traced = [*map(_is_array, leaves)] if hasattr(fn, "lower") or not all(plain) else plain

    def of_arrays(*arrays: Any) -> Any:
        given = iter(arrays)
        whole = [next(given) if known else x for x, known in zip(leaves, traced, strict=True)]
        args, kwargs = jax.tree.unflatten(tree, whole)
        return [x for x in jax.tree.leaves(fn(*args, **kwargs)) if _is_array(x)]

    return of_arrays, [x for x, known in zip(leaves, traced, strict=True) if known]


def _has_inserted(program: Program) -> bool:
    """Whether a compiled program has collectives that are not from within a `jax.shard_map`.

    XLA may have combined an array with others, and has kept the source of one.
    """

    def is_inserted(each: Instruction) -> bool:
        arrays = program.operands(each) if len(each.operands) > 1 else []
        others = [x.op_name for x in arrays if "/" in x.op_name]
        return not all("shard_map/" in name for name in (each.op_name, *others))

    return any(
        is_inserted(message.each)
        for name, _ in program.computations_that_run()
        for message in messages_in(program, name)
    )


def _of_compiled(
    given: Any, mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None
) -> Account:
    compiled = given.compile() if isinstance(given, jax.stages.Lowered) else given
    if isinstance(compiled, str):
        return _read(Program(compiled), [], mesh)
    return _read(Program(compiled.as_text() or ""), _shardings(compiled), mesh)


def _shardings(compiled: jax.stages.Compiled) -> list[Any]:
    """Those of its arguments and results."""
    return jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))


def _read(
    program: Program,
    shardings: list[Any],
    mesh: Mesh | AbstractMesh | Mapping[str, int] | None = None,
) -> Account:
    """The account of a compiled program; its mesh is that of most devices and axes."""
    meshes = [s.mesh.shape for s in shardings if isinstance(s, NamedSharding)]
    if mesh is not None:
        meshes = [mesh if isinstance(mesh, Mapping) else mesh.shape]
    elif not meshes:
        meshes = [program.mesh]
    sizes = max(meshes, key=lambda shape: (_size(shape), len(shape)))
    kinds = {device.platform for sharding in shardings for device in sharding.device_set}
    nodes, count = nodes_of(program, sizes, widens=kinds == {"cpu"}), _size(program.counts)
    if mesh is not None and nodes and _size(sizes) != count:
        raise ValueError(f"`mesh` is {dict(sizes)}; the program is for {count} devices.")
    return Account(nodes, sizes)


def _size(shape: Mapping[str, int]) -> int:
    return math.prod(shape.values())


def _warn_of_sharded(found: Account, given: Any) -> None:
    """Warns of arguments that are counted whole, since XLA chooses how they are sharded."""
    automatic = {name for collective in found.collectives for name in collective.automatic}
    sharded = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(given):
        spec = getattr(getattr(leaf, "sharding", None), "spec", ())
        if over := sorted(automatic.intersection(sum(named_axes(spec), ()))):
            sharded.append(f"at {jax.tree_util.keystr(path[1:])} is sharded over {over}")
    if sharded:
        others = f" (and {len(sharded) - 1} other arguments)" if len(sharded) > 1 else ""
        warnings.warn(
            f"The argument {sharded[0]}{others}: the account counts the whole array, an upper "
            "bound. `jaxcomm.shard_local(tx, specs)` sends each shard separately, and an account "
            "of the compiled program, `jax.jit(step).lower(...).compile()`, counts what XLA sends.",
            stacklevel=3,
        )
