"""Replace attention, however written, by torch's fused attention or by the softmax kernel between two products.

Attention is found by dataflow, from each softmax (`chain`), and the meaning of its masks is proved (`masks`). Without
dropout, and if every query is proved to see a key, the whole chain becomes ``scaled_dot_product_attention``. Otherwise
the part around the softmax becomes ``kernels.scaled_softmax`` (SC21 §4.2) if that means the same: scale, mask,
softmax, keyed dropout. Any other attention is left as it is, but for a mask that is proved to be causal or to show all.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from torch import fx

from autoptd.passes.attention.chain import read_chain
from autoptd.passes.attention.constants import Constants
from autoptd.passes.attention.rewriting import Rewriter
from autoptd.passes.cost.work import describe_saving
from autoptd.passes.ir.names import rename_nodes
from autoptd.passes.ir.nodes import argument, called, shape_of, walk, where
from autoptd.passes.ir.program import Program, copy_graph
from autoptd.passes.operators.table import Trait, has_trait
from autoptd.runtime import kernels


@dataclass(frozen=True)
class Finding:
    """One attention of the model: the rule that applied, its mask, and why no better rule did.

    `rule`: "sdpa", "softmax" (``scaled_softmax`` between products) or "" (left). `place`: module path and source line.
    """

    rule: str
    mask: str
    reason: str
    place: str


def recognize_attention(program: Program) -> Program:
    """Rewrite the one-stage program's attentions, and log each distinct one with the rule or the reason."""
    return find_attentions(program)[0]


def find_attentions(program: Program) -> tuple[Program, tuple[Finding, ...]]:
    """Return the result of `recognize_attention`, and its findings in graph order."""
    (stage,) = program.stages
    graph, constants = copy_graph(stage.graph), Constants(stage, program.buffers)
    rewriter = Rewriter(graph, constants, program)
    weights = [n for name, n in rewriter.loads.items() if constants.parameters[name].kind == "parameter"]
    learned = set(walk(weights, attrgetter("users")))
    findings = [f for node in list(graph.nodes) for f in [_visit(rewriter, node, learned)] if f is not None]
    entry = f"recognize_attention {_describe(findings)}"
    if rewriter.changed:
        graph.eliminate_dead_code()
        before, stage = stage, constants.finish(rename_nodes(graph))
        entry += f"; {describe_saving((before,), (stage,))}"
    return program.replace_stages((stage,), entry, proved=rewriter.proved), tuple(findings)


def _visit(rewriter: Rewriter, node: fx.Node, learned: set[fx.Node]) -> Finding | None:
    """Rewrite the attention of a node that is one, or is its softmax; return None for any other node."""
    if has_trait(node, Trait.FUSED_ATTENTION):
        words = rewriter.drop_mask(node)
        rewriter.group_heads(node)
        return Finding("sdpa", words, "", where(node))
    if node.target is kernels.scaled_softmax:
        return Finding("softmax", rewriter.drop_mask(node), "of dropout", where(node))
    if not has_trait(node, Trait.SOFTMAX):
        return None
    chain = read_chain(node, rewriter.constants.number, learned)
    if isinstance(chain.product, str) and isinstance(chain.result, str):
        return None
    rank, dim = len(shape_of(node)), int(argument(node, "dim"))
    if dim % rank != rank - 1 or rank < 3:
        return Finding("", "", f"{called(node)} runs over dimension {dim} of {rank}", where(node))
    mask = rewriter.fuse_whole(chain)
    if not isinstance(mask, str):
        return Finding("sdpa", mask.words, "", where(node))
    part, reason = rewriter.fuse_softmax(chain, mask)
    return Finding("softmax" if part else "", part.words if part else "", reason, where(node))


def _describe(findings: Sequence[Finding]) -> str:
    if not findings:
        return "no attention"
    known = Counter((f.rule, f.mask, f.reason) for f in findings if f.rule)
    parts = []
    for (rule, mask, reason), count in known.items():
        words = {"causal": " causal", "no mask": ""}.get(mask, f" with mask ({mask})")
        name = f"{rule}{words}" if rule == "sdpa" else f"softmax only{words}"
        parts.append(f"{count} {name}" + (f" because {reason}" if reason else ""))
    for reason, count in Counter(f.reason for f in findings if not f.rule).items():
        first = next(f.place for f in findings if not f.rule and f.reason == reason)
        more = f" and {count - 1} more" if count > 1 else ""
        parts.append(f"{count} not recognised because {reason}: {first}{more}")
    return f"{len(findings)} attentions: {', '.join(parts)}"
