"""Trace a call of the user's own autograd function as one operator, whose backward is the function's own."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import Function

# Private, with no public twins.
from torch.overrides import _get_current_function_mode_stack
from torch.utils import checkpoint
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from autoptd.capture.eval_mode import Call, Calls
from autoptd.capture.fake_module import make_twin
from autoptd.capture.source_lines import CaptureError, user_line
from autoptd.passes.ir.autocast import Autocast
from autoptd.passes.ir.autograd_functions import find_cast, run_backward, run_forward, tensors_in
from autoptd.passes.normal_form.autocast import is_eligible
from autoptd.runtime import kernels
from autoptd.runtime.kernels.autograd_function import AutogradFunction
from autoptd.runtime.program.class_path import find_class

_ROUND = "_checkpoint_without_reentrant_generator"
_ROUND += "_impl" if hasattr(checkpoint, f"{_ROUND}_impl") else ""  # since torch 2.14
# Private: where Function.apply, under whatever name a program has kept it, looks up the call of C++ each time.
_BASE: Any = Function.__mro__[1]
_WRITTEN = {bool, int, float, str, type(None), torch.dtype}  # what a program's text can hold, besides tensors


class Traced(NamedTuple):
    """A traced call: the operator, the arguments with ... for tensors, and what it returns on the meta device."""

    function: AutogradFunction
    leaves: list[Any]
    spec: TreeSpec
    results: Any


# In a trace a call is this operator of its key in the table and its tensors, until `write_functions`.
_LIB = torch.library.Library("autoptd_capture", "FRAGMENT")
_LIB.define("autograd_function(str call, Tensor[] tensors) -> Tensor[]")
_TRACED = torch.ops.autoptd_capture.autograd_function.default
_CALLS: dict[str, Traced] = {}


def _make_results(call: str, _: list[Tensor]) -> list[Tensor]:
    return [torch.empty_strided(x.size(), x.stride(), dtype=x.dtype) for x in tensors_in(_CALLS[call].results)]


torch.library.register_fake("autoptd_capture::autograd_function", _make_results, lib=_LIB)


class Functions:
    """The autograd functions called during a trace with this state of `autocast`, each with a line for the log."""

    def __init__(self, autocast: Autocast | None) -> None:
        self.notes: dict[object, str] = {}  # also one of each place of activation checkpointing
        self._device = "cpu" if autocast is None else autocast.device

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Trace every call of an autograd function in this block as an operator, and a checkpoint as what it wraps."""

        def look_through(*_: Any, **__: Any) -> Iterator[None]:
            self._note_checkpoint(user_line())
            yield

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if cls is checkpoint.CheckpointFunction:
                return self._inline(args)
            traced = any(isinstance(x, FakeTensor) for x in tree_leaves(args))
            # Torch's own, such as that of a torch.library operator, which stays whole in a trace with its gradient.
            if not traced or kwargs or cls.__module__.startswith("torch._"):
                return super(_BASE, cls).apply(*args, **kwargs)  # type: ignore[misc]
            return self._trace(cls, args)

        # Private: the context of a call that is not reentrant. A torch without it traces such calls itself.
        inner = patch.object(checkpoint, _ROUND, look_through, create=True)
        with patch.object(_BASE, "apply", classmethod(apply), create=True), inner:
            yield

    def _note_checkpoint(self, place: str) -> None:
        inlined = "activation checkpointing is inlined; recompute= says what the backward computes again"
        self.notes[place] = f"{place}: {inlined}"

    def _inline(self, args: tuple[Any, ...]) -> Any:
        place = user_line()
        self._note_checkpoint(place)
        result = args[0](*args[2:])
        if _need_gradient(tree_leaves(result)) and not _need_gradient(args[2:]):
            raise ValueError(
                f"{place}: no argument of this reentrant checkpoint needs a gradient, so torch gives none to the "
                "parameters inside; set use_reentrant=False, or pass an argument that needs one"
            )
        return result

    def _trace(self, cls: type, args: tuple[Any, ...]) -> Any:
        """Return the results of a call without data, as results of the one operator in the trace."""
        place = user_line()
        function = _find_function(cls, place)
        leaves, spec = tree_flatten(args)
        for other in leaves:
            if not isinstance(other, Tensor) and type(other) not in _WRITTEN:
                raise CaptureError(
                    f"{place}: {cls.__name__} takes a {type(other).__name__}, which the text of a program cannot hold; "
                    "pass it tensors, numbers, strings and lists of these"
                )
        if torch.is_autocast_enabled("cpu") and (dtype := find_cast(function, self._device)) is not None:
            leaves = [x.to(dtype) if is_eligible(x) else x for x in leaves]
            args = tree_unflatten(leaves, spec)
        with ThreadPoolExecutor(1) as thread:  # in which no mode of the trace is active
            results, calls, note = thread.submit(_run, function, args, place, torch.is_grad_enabled()).result()
        for mode in _get_current_function_mode_stack():
            if isinstance(mode, Calls):
                mode.note(calls)
        self.notes.setdefault(cls, f"{place}: {cls.__name__} is one operator, with its own backward{note}")
        held = [... if isinstance(x, Tensor) else x for x in leaves]
        shapes = [(x.shape, x.dtype) for x in tensors_in((args, results))]
        key = f"{function.path} {held} {spec} {shapes}"
        _CALLS[key] = Traced(function, held, spec, results)
        made = iter(_TRACED(key, [x for x in leaves if isinstance(x, Tensor)]))

        def place_result(result: Any) -> Any:
            if not isinstance(result, Tensor):
                return result
            return value if (value := next(made)).requires_grad == result.requires_grad else value.detach()

        return tree_map(place_result, results)


def write_functions(root: fx.GraphModule) -> None:
    """Write the calls that were traced, and kernels, into the graph of `root` and those of its regions, in place."""
    for part in root.modules():
        graph = part.graph if isinstance(part, fx.GraphModule) else fx.Graph()
        for node in [node for node in graph.nodes if getattr(node.target, "namespace", "") == "autoptd"]:
            node.target = getattr(kernels, node.target._opname)
        for node in [node for node in graph.nodes if node.target is _TRACED]:
            key, tensors = node.args
            call, given = _CALLS[key], iter(tensors)
            leaves = [next(given) if leaf is ... else leaf for leaf in call.leaves]
            node.target, node.args = call.function, tuple(tree_unflatten(leaves, call.spec))
            node.meta["val"] = tuple(node.meta["val"])
            if len(node.meta["val"]) == 1:
                (node.meta["val"],) = node.meta["val"]
                for item in list(node.users):
                    item.replace_all_uses_with(node)
                    graph.erase_node(item)


def _find_function(cls: type, place: str) -> AutogradFunction:
    """Return the operator of a class; CaptureError where no import finds the class."""
    function = AutogradFunction.of(cls)
    with contextlib.suppress(ValueError, ImportError):
        if find_class(function.path, "autograd function") is cls:
            return function
    raise CaptureError(
        f"{place}: {cls.__qualname__} is an autograd function that no import finds: define it at the top level of a "
        "module, under its own name, where every rank can import it"
    )


def _run(function: AutogradFunction, args: Any, place: str, grad: bool) -> tuple[Any, Sequence[Call], str]:
    """Return the results of a call on the meta device, the calls that its forward makes, and a note for the log.

    Raises CaptureError for a forward that needs data, and for a function that would not be the same on all meshes.
    """
    # Clones: a leaf may not be written in place.
    twins = tree_map(lambda x: make_twin(x).clone() if isinstance(x, Tensor) else x, args)
    name, note = function.path.partition(":")[2], ""
    with torch.set_grad_enabled(grad):
        try:
            with Calls() as calls:
                results, operations = run_forward(function, twins)
        except Exception as error:
            found = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            raise CaptureError(
                f"{place}: the forward of {name} does not run without data ({found}), as the shapes of its results "
                "need: write it with torch operators; make your kernel one by torch.library.custom_op and register_fake"
            ) from error
        further, unknown = run_backward(results, twins)
    if unknown:
        note = f", which does not run without data ({type(unknown).__name__}) and was not looked into"
    given = {x.untyped_storage() for x in tensors_in(twins)}
    for own in (*operations, *further):
        func = own.operator
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CaptureError(
                f"{place}: {name} draws random numbers with {func}, which would differ between meshes: draw them in "
                "the module's forward, and pass them in"
            )
        if any(x.untyped_storage() in given for x in own.written):
            raise CaptureError(
                f"{place}: {name} writes to its argument with {func}, but a program's values stay: write to a clone"
            )
    foreign = dict.fromkeys(x.operator.name() for x in operations if x.operator.namespace != "aten")
    return results, calls.made, note + f"; the FLOPs of {', '.join(foreign)} are unknown" * bool(foreign)


def _need_gradient(values: Iterable[object]) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in values)
