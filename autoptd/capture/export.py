"""Trace an nn.Module or fx.GraphModule into a Program of one stage, with module paths and source lines."""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.nn import functional
from torch.nn.modules import transformer
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_map_only  # private, with no public twin

from autoptd.capture.assertions import assuming
from autoptd.capture.autocast_state import read_autocast
from autoptd.capture.custom_autograd import Functions, write_functions
from autoptd.capture.eval_mode import compare_evaluation
from autoptd.capture.example_inputs import ExampleInputs, read_examples
from autoptd.capture.expert_loops import bound_rows, depends_on_data
from autoptd.capture.experts import write_experts
from autoptd.capture.fake_module import copy_structure, make_mode, make_twin, run_without_data
from autoptd.capture.objective import Objective
from autoptd.capture.results import LossFunction, Outputs
from autoptd.capture.side_effects import NUMBERS, keeping_attributes, refuse_conversions, refuse_hooks
from autoptd.capture.source_lines import CaptureError, short_line
from autoptd.capture.trace_errors import describe_error, explain, find_way
from autoptd.capture.traced_device import find_device
from autoptd.passes.ir.nodes import NodeInfo, aten_name, copy_node, describe, where
from autoptd.passes.ir.program import Program, Stage
from autoptd.runtime.module.parallel import Parallel
from autoptd.runtime.program.manifest import Result
from autoptd.runtime.program.mesh import Mesh
from autoptd.runtime.program.placement import Parameter
from autoptd.runtime.program.tagged_json import encode_value
from autoptd.runtime.user_warnings import warn_caller

CHECKS = ("_assert_", "sym_constrain_range")  # what the names of operators begin with that only check


def capture(
    model: nn.Module,
    *,
    mesh: Mesh,
    example_inputs: ExampleInputs = None,
    loss_fn: LossFunction = None,
    microbatch_size: int | None = None,
    outputs: Outputs = (),
    device: str | torch.device | None = None,
) -> Program:
    """Trace `model` and its loss into a Program of one stage, for one microbatch; `model` is left unchanged.

    The graph is that of torch.export in training mode: aten's training operators, and parameters as ``get_attr`` nodes
    under their first ``state_dict`` name; its results are the loss and the `outputs`, which the `NodeInfo` of the
    output node names. `normalize` writes autocast out. Raises TypeError for anything but a plain
    module, and ValueError for what cannot be traced, with the user's file and line.
    """
    check_model(model)
    buffers: dict[str, Tensor] = {}
    for name, part in (("captured", model), ("loss_fn", loss_fn)):
        if isinstance(part, nn.Module):
            refuse_hooks(part)
            buffers |= part.named_buffers(name)
    examples = read_examples(model, example_inputs, loss_fn, microbatch_size)
    fixed = {n: encode_value(value, f"example input {n!r}") for n, value in examples.constants.items()}
    mode = make_mode()
    twin_of = partial(make_twin, mode=mode)
    with mode:
        values = tuple(torch.empty(i.shape, dtype=i.dtype) for i in examples.inputs)
    loss_twin = copy_structure(loss_fn, twin_of) if isinstance(loss_fn, nn.Module) else loss_fn
    seen = find_device(model, device)
    objective = Objective(copy_structure(model, twin_of), examples, loss_twin, outputs, seen)
    objective.known.buffers |= buffers
    autocast = read_autocast(model)
    functions = Functions(autocast)

    def run() -> Tensor:
        """Call the model without data, and without a trace."""
        with run_without_data(mode), refuse_conversions(), Functions(autocast).watch():
            return objective.find_loss(*values)

    # Forwards read ``x.dtype``, and the traced tensors are on the CPU.
    dtypes = torch.autocast("cpu", autocast.dtype) if autocast else nullcontext()
    # What ``nn.TransformerEncoder`` finds by reading a mask's values, the passes prove.
    said_causal = patch.object(transformer, "_detect_is_causal_mask", lambda _, is_causal, *__: is_causal is True)
    counting = patch.object(torch, "bincount", partial(_count, torch.bincount))
    with dtypes, said_causal, counting, write_experts(), assuming() as assumed:
        try:
            with keeping_attributes(objective):
                exported = _export(objective, values, functions)
        except CaptureError:
            raise
        except Exception as error:
            raise ValueError(explain(error, objective, run)) from error
        differences = tuple(_compare_modes(objective, run))
    unchecked = "is an assertion on data, and not in the program: a step checks row numbers and labels"
    notes = (*functions.notes.values(), *differences, *(f"{line} {unchecked}" for line in assumed))
    tensors = _name_tensors(model, loss_fn, exported, objective.result.assigned)
    if objective.result.varying:
        warn_caller(
            f"forward leaves {', '.join(objective.result.varying)}, different for each batch: a step sets none of "
            "them, neither for you nor for the next call. Return what you want to see, and name it in outputs="
        )
    graph = _build_graph(exported, tensors, objective)
    stage = Stage(graph, tensors.parameters, fx.Graph())
    log = (f"capture {type(model).__name__}: {len(graph.nodes)} nodes", *notes, *objective.known.notes)
    known = examples.inputs, objective.result.output, tensors.aliases, log, tensors.buffers
    read = (name.removeprefix("captured.") for name in objective.known.read)
    proved = frozenset(tensors.aliases.get(name, name) for name in read)
    return Program(mesh, (stage,), *known, proved, autocast=autocast, fixed=fixed, device=seen)


def _count(bincount: Callable[..., Tensor], input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Replace ``torch.bincount``, the length of which depends on data: of a `minlength`, all numbers are below it."""
    if weights is not None or not minlength:
        return bincount(input, weights, minlength)
    return functional.one_hot(input, minlength).sum(0)


def check_model(model: object) -> None:
    """Raise TypeError if `model` is not a plain module."""
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {name}; expected an nn.Module or an fx.GraphModule")
    made = isinstance(model, (DataParallel, DistributedDataParallel, Parallel)) or hasattr(model, "_orig_mod")
    if made or "FSDP" in name:
        way = "pass the plain module (model.module, or that before torch.compile), and data in the mesh"
        raise TypeError(f"model is wrapped in {name}, or compiled already; {way}")
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
            raise TypeError(
                f"{path} is a {type(tensor).__name__}; expected plain parameters and buffers: undo what divides or "
                "quantizes the model, or run a lazy module once"
            )


def _export(objective: Objective, values: tuple[Tensor, ...], functions: Functions) -> ExportedProgram:
    # Only the graph is wanted: torch.export would write Python code for it after each of its passes, and at the end.
    unwritten = patch.object(fx.GraphModule, "recompile", lambda _: None)
    with functions.watch(), _use_lazy_graph_module(True), unwritten, warnings.catch_warnings():
        # Torch warns of our wrapper, and of harmless writes; `_name_tensors` refuses the others.
        warnings.filterwarnings("ignore", "The tensor attribute.* assigned during export")
        exported = torch.export.export(objective, values, strict=False)
        _drop_checks(exported.graph)
        bound_rows(exported.graph)
        write_functions(exported.graph_module)
        return exported


def _compare_modes(objective: Objective, run: Callable[[], Tensor]) -> Iterator[str]:
    """Warn, and yield log lines, where evaluation differs from training without dropout."""
    try:
        with objective.known:
            found = compare_evaluation(objective, objective.result.calls.made, run)
    except Exception as error:  # the trace supports operators that do not run otherwise without data
        yield f"evaluation was not compared with training: {describe_error(error, objective.captured)[1]}"
        return
    if found:
        line = f"in evaluation the model computes something else, from {found}"
        warn_caller(
            f"{line}: a program computes the forward of training in evaluation too, with its noise, only without "
            "dropout. Evaluate with the model itself, which loads full_state_dict(), or make both forwards alike"
        )
        yield line


class _Tensors(NamedTuple):
    """The user's tensors under their first names, and the exported graph's placeholder of each."""

    parameters: Mapping[str, Parameter]
    aliases: Mapping[str, str]
    buffers: Mapping[str, Tensor]
    placeholders: Mapping[fx.Node, str]


def _name_tensors(
    model: nn.Module, loss_fn: object, exported: ExportedProgram, written: Mapping[str, Tensor]
) -> _Tensors:
    """Give every tensor its first name in the user's modules; further names of a tied one are aliases.

    Raises ValueError, with the place, for a constant where forward has `written` another tensor by the end.
    """
    homes: dict[int, str] = {}
    aliases: dict[str, str] = {}
    parameters: dict[str, Parameter] = {}
    buffers: dict[str, Tensor] = {}
    for name, tensor in _named_tensors(model, loss_fn):
        home = homes.setdefault(id(tensor), name)
        if home != name:
            aliases[name] = home
            continue
        shape, trained = tuple(tensor.shape), isinstance(tensor, nn.Parameter)
        wants = trained and tensor.requires_grad
        parameters[name] = Parameter(name, shape, tensor.dtype, "parameter" if trained else "buffer", wants)
        if not trained and not tensor.is_meta:
            buffers[name] = tensor.detach()
    places = {t.data_ptr(): name for name, t in model.named_parameters() if not t.is_meta and t.numel()}
    assigned = {tensor.data_ptr(): place for place, tensor in written.items() if type(tensor) is Tensor}
    placeholders: dict[fx.Node, str] = {}
    for node, spec in _placeholders(exported):
        if spec.kind is InputKind.USER_INPUT:
            continue
        name = str(spec.target).removeprefix("captured.")
        placeholders[node] = aliases.get(name, name)
        if spec.kind not in (InputKind.CUSTOM_OBJ, InputKind.CONSTANT_TENSOR):
            continue
        value, place = exported.constants[str(spec.target)], _first_use(node)
        if spec.kind is InputKind.CUSTOM_OBJ:
            raise ValueError(
                f"{place} gets {value!r}, which is not a tensor. Random numbers of a generator would differ between "
                "meshes: draw without a generator, or pass them in as an input"
            )
        if type(value) is not Tensor:
            raise ValueError(
                f"{place} reads {name}, a tensor without values: it was made on the meta device, or is the .data of a "
                "parameter. Register it as a buffer, or build the model on the CPU; for a parameter, read .detach()"
            )
        if (held := assigned.get(value.data_ptr())) is not None:
            raise ValueError(
                f"{place} reads {held}, which forward assigns for the next call: a program would keep its value from "
                "the capture in every step. Pass it as an input, or compute it from the batch"
            )
        if (held := places.get(value.data_ptr())) is not None:
            raise ValueError(f"{place} reads {held} from outside the module, as a constant; read it through self")
        parameters[name] = Parameter(name, tuple(value.shape), value.dtype, "buffer", False)
        buffers[name] = value.detach()
    return _Tensors(parameters, aliases, buffers, placeholders)


def _placeholders(exported: ExportedProgram) -> Iterator[tuple[fx.Node, InputSpec]]:
    return zip(exported.graph.find_nodes(op="placeholder"), exported.graph_signature.input_specs, strict=True)


def _first_use(node: fx.Node) -> str:
    """Describe the operator that reads an input of the exported graph first: "aten.add.Tensor (gpt.py:52)"."""
    user = next(iter(node.users), node)
    line = short_line(user.meta.get("stack_trace") or "")
    return f"{user.target} ({line})" if line else str(user.target)


def _named_tensors(model: nn.Module, loss_fn: object) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    if isinstance(loss_fn, nn.Module):
        for name, _ in loss_fn.named_parameters():
            raise ValueError(f"loss_fn has the parameter {name!r}; only the model may have parameters")
        yield from loss_fn.named_buffers("loss_fn", remove_duplicate=False)


def _build_graph(exported: ExportedProgram, tensors: _Tensors, objective: Objective) -> fx.Graph:
    """Rewrite the exported graph: inputs under their own names, tensors as get_attr at first use."""
    inputs = [node for node, spec in _placeholders(exported) if spec.kind is InputKind.USER_INPUT]
    graph, values = fx.Graph(), dict[fx.Node, fx.Node]()
    attributes: dict[str, fx.Node] = {}
    for placeholder, value in zip(inputs, objective.inputs, strict=True):
        values[placeholder] = new = graph.placeholder(value.name)
        _describe_node(new, placeholder, role="input")

    def value_of(node: fx.Node) -> fx.Node:
        if node not in values:
            target = tensors.placeholders[node]
            if target not in attributes:
                attributes[target] = graph.create_node("get_attr", target)
                _describe_node(attributes[target], node)
            values[node] = attributes[target]
        return values[node]

    for node in exported.graph.nodes:
        if node.op == "output":
            loss, *others = map(value_of, node.args[0])
            asked = zip(objective.result.outputs, (other.meta["val"] for other in others), strict=True)
            outputs = tuple(Result(path, tuple(val.shape), val.dtype) for path, val in asked)
            describe(graph.output((loss, *others) if others else loss), loss.meta["val"], NodeInfo(outputs=outputs))
        elif node.op != "placeholder":
            values[node] = copy_node(graph, node, value_of)
            region = _region(exported.graph_module, node) if node.op == "get_attr" else None
            _describe_node(values[node], node, region=region)
            _check_value(values[node], objective.captured)
    return graph


def _drop_checks(graph: fx.Graph) -> None:
    """Drop what only checks numbers that depend on data, and the numbers that nothing else reads."""
    for node in reversed(graph.nodes):
        checks = aten_name(node.target).startswith(CHECKS)
        if not node.users and (checks or isinstance(node.meta.get("val"), NUMBERS)):
            graph.erase_node(node)


def _check_value(node: fx.Node, model: nn.Module) -> None:
    """Raise ValueError for a number or size that depends on data, such as the length of a list made from a tensor."""
    if depends_on_data(node):
        raise ValueError(
            f"{where(node)}: {node.target} makes a number or size from a tensor's values, but sizes may not change "
            f"with the batch; keep the number in a tensor, or take it from shapes or the config{find_way(model)}"
        )


def _region(owner: fx.GraphModule, node: fx.Node) -> fx.Graph:
    """Return the graph of a ``torch.no_grad`` or autocast region, which the exported graph calls as a submodule."""
    region = getattr(owner, str(node.target))
    _drop_checks(region.graph)
    for inner in region.graph.nodes:
        _describe_node(inner, inner, region=_region(region, inner) if inner.op == "get_attr" else None)
    return region.graph  # type: ignore[no-any-return]


def _describe_node(new: fx.Node, node: fx.Node, **facts: Any) -> None:
    """Describe `new` by what torch.export says of `node`, and `facts`."""
    stack, line = node.meta.get("nn_module_stack"), short_line(node.meta.get("stack_trace") or "")
    path = re.sub(r"@\d+|^captured\.?", "", list(stack.values())[-1][0]) if stack else ""
    val = tree_map_only(Tensor, lambda x: make_twin(x).detach(), node.meta.get("val"))
    describe(new, val, NodeInfo(path, line, **facts))
