"""The passes that every program walks through, in their order."""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

from autoptd.options import Options
from autoptd.passes.attention.recognition import recognize_attention
from autoptd.passes.fusion.rules import fuse_operators
from autoptd.passes.ir.nodes import require_info
from autoptd.passes.ir.program import Passes, Program
from autoptd.passes.layout.sequence_first import rewrite_layout
from autoptd.passes.normal_form.constants import fold_constants
from autoptd.passes.normal_form.normalize import normalize
from autoptd.passes.recompute import recompute_activations
from autoptd.passes.structure.layers import label_layers
from autoptd.passes.tensor_parallel.overlap import overlap_reductions
from autoptd.passes.tensor_parallel.sharding import shard_tensors
from autoptd.progress import Say

Phase = Literal["arrange", "divide", "finish"]
Keep = Callable[[Program, str], None]


class Pass(NamedTuple):
    """One row of `PASSES`.

    `phase`: "arrange" is the same for any number of tensor ranks, "divide" divides over them, "finish" rewrites the
    stages after the cut. `choose` returns the pass under the options of `compile`, or None where they leave it out.
    """

    name: str
    phase: Phase
    choose: Callable[[Options], Callable[[Program], Program] | None]


PASSES = (
    Pass("normalize", "arrange", lambda _: normalize),
    Pass("fold constants", "arrange", lambda _: fold_constants),
    Pass("recognize attention", "arrange", lambda _: recognize_attention),
    Pass("rewrite layout", "arrange", lambda o: rewrite_layout if o.layout == "sbh" else None),
    Pass("label layers", "arrange", lambda _: label_layers),
    Pass("shard tensors", "divide", lambda o: lambda p: shard_tensors(p, o.rules, o.sequence_parallel, o.cluster)),
    # Here `passes.stages` cuts the program. It times operators as the kernels that the passes below make of them.
    Pass("recompute activations", "finish", lambda o: partial(recompute_activations, recompute=o.recompute)),
    Pass("fuse operators", "finish", lambda o: fuse_operators if o.fuse else None),
    Pass("overlap reductions", "finish", lambda o: partial(overlap_reductions, cluster=o.cluster, overlap=o.overlap)),
)


def select_passes(options: Options, *phases: Phase) -> Passes:
    """Return the names and functions of the passes of some `phases`, in their order, each with its result checked."""
    chosen = ((row.name, row.choose(options)) for row in PASSES if row.phase in phases)
    return tuple((name, partial(_run, name, step)) for name, step in chosen if step is not None)


def _run(name: str, step: Callable[[Program], Program], program: Program) -> Program:
    result = step(program)
    for stage in result.stages:
        stage.graph.lint()
        require_info(stage.graph, f'after the pass "{name}"')
    return result


def run_passes(passes: Passes, program: Program, say: Say, keep: Keep = lambda *_: None) -> Program:
    """Run the `passes` on a program, and hand each result to `keep` with the name of its pass."""
    for name, step in passes:
        say(name)
        program = step(program)
        keep(program, name)
    return program
