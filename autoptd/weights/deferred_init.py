"""Initial weights of a model on the meta device: the distributions that building it on a real device would draw.

The model's constructor is run again and recorded, or `initializer` on a copy; if neither is possible, each module's
``reset_parameters``. Nothing is guessed: uncertain cases are refused, with the reason.
"""

import ast
import builtins
import contextlib
import copy
import inspect
import io
import itertools
import os
import re
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves  # private, with no public twin

from autoptd.capture.fake_module import copy_structure, make_twin
from autoptd.capture.source_lines import user_line
from autoptd.passes.ir.program import Program
from autoptd.runtime.program.placement import Draw
from autoptd.weights.init_recorder import UnknownError, Writes

R = TypeVar("R")
Initializer = Callable[[nn.Module], object] | None

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
# Methods of modules, containers and tensors that a constructor may call, since they give no parameter its values.
_HARMLESS = re.compile(
    "__init__|add_module|append|eval|extend|get|insert|items|join|keys|print|register_(buffer|module|parameter)|"
    "requires_grad_|train|update|values|"
    "bool|expand|flatten|float|int|long|repeat|reshape|squeeze|t|to|transpose|unsqueeze|view"
)


def read_initial(program: Program, *, model: nn.Module, initializer: Initializer = None) -> Program:
    """Give every parameter on the meta device its initial distributions, and buffers their values if known.

    If that is impossible, the program says why, and weights must be given. `model` is left as it is. Raises
    ValueError for an `initializer` of a model that has weights, TypeError for one that cannot be called.
    """
    if initializer is not None and not callable(initializer):
        raise TypeError(f"initializer is {initializer!r}; expected a function of the model, or None")
    (stage,) = program.stages
    tensors = dict(model.named_parameters(remove_duplicate=False))
    missing = [n for n, p in stage.parameters.items() if p.kind == "parameter" and tensors[n].is_meta]
    if not missing:
        if initializer is not None:
            raise ValueError("initializer= is for a model on the meta device, and this one has its weights")
        return program
    try:
        # Without prints, and without drawing from the user's random numbers.
        with contextlib.redirect_stdout(io.StringIO()), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            made, writes, how = _initialize(model, initializer)
        draws = _read_draws(made, missing, writes)
    except UnknownError as error:
        entry = f"initialise: bind needs weights=: {error}"
        return replace(program, log=(*program.log, entry), uninitialized=str(error))
    parameters = {n: replace(p, initial=draws.get(n, ())) for n, p in stage.parameters.items()}
    known = {n: b for n, b in made.named_buffers() if n in parameters and tuple(b.shape) == parameters[n].shape}
    buffers = {n: b.detach().to(parameters[n].dtype) for n, b in known.items() if not b.is_meta}
    log = (*program.log, f"initialise: {len(draws)} parameters as {how}")
    stages = (replace(stage, parameters=parameters),)
    return replace(program, stages=stages, buffers={**buffers, **program.buffers}, log=log)


def _initialize(model: nn.Module, initializer: Initializer) -> tuple[nn.Module, Writes, str]:
    """Return a twin of `model`, the writes of its initialisation, and the code that made them. Raises UnknownError.

    An `initializer` starts from the writes of building the model; if these are unknown, it must write everything.
    """
    if initializer is None:
        return _build(model)
    try:
        twin, writes, how = _build(model)
        for own, other in zip(model.modules(), twin.modules(), strict=True):
            given = {k: v for k, v in vars(own).items() if not k.startswith("_") and not _holds_tensors(v)}
            vars(other).update(given)  # attributes that were set after building
    except UnknownError:
        writes = Writes()
        twin, how = _copy_on_meta(model, writes), ""
    with writes:
        _call(partial(initializer, twin), "initializer= fails")
    return twin, writes, "initializer= does" + f", after {how.removesuffix(' does')}" * bool(how)


def _build(model: nn.Module) -> tuple[nn.Module, Writes, str]:
    writes = Writes()
    arguments = _find_arguments(model)
    if isinstance(arguments, dict):
        with writes:
            twin = _call(lambda: type(model)(**arguments), f"{type(model).__name__} cannot be built again")
        _compare(model, twin, arguments)
        return twin, writes, f"{type(model).__name__}({', '.join(f'self.{name}' for name in arguments)}) does"
    _check_constructors(model, arguments)
    twin = _copy_on_meta(model, writes)
    with writes:
        _reset(twin)
    _compare_versions(model, twin)
    return twin, writes, "each module's reset_parameters does"


def _read_draws(made: nn.Module, names: list[str], writes: Writes) -> dict[str, tuple[Draw, ...]]:
    draws: dict[str, tuple[Draw, ...]] = {}
    drawn: dict[int, str] = {}
    for name in names:
        try:
            written = writes.read(made.get_parameter(name))
        except UnknownError as error:
            raise UnknownError(f"{name}: {error}") from error
        for draw, call in written:
            if draw.kind != "constant" and drawn.setdefault(call, name) != name:
                raise UnknownError(f"{name} is a copy of the random numbers of {drawn[call]}")
        draws[name] = tuple(draw for draw, _ in written)
    return draws


def _copy_on_meta(model: nn.Module, writes: Writes) -> nn.Module:
    twin = copy_structure(model, make_twin)
    for tensor in twin.parameters():
        writes.watch(tensor)
    return twin


def _call(function: Callable[[], R], message: str) -> R:
    """Return the result of the user's `function`; UnknownError, beginning with `message`, if it fails."""
    try:
        return function()
    except Exception as error:
        place = user_line(traceback.extract_tb(error.__traceback__))
        found = f"{type(error).__name__}: {error}" + f" at {place}" * bool(place)
        raise UnknownError(f"{message} ({found})") from error


# By the model's own constructor


def _find_arguments(model: nn.Module) -> dict[str, Any] | str:
    """Return copies of the constructor's arguments, from the attributes that keep them; or why they are unknown."""
    kind = type(model)
    if _is_torchs(kind):
        return f"{kind.__name__} keeps no arguments of its constructor"
    arguments = {}
    for name, parameter in list(inspect.signature(kind.__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name not in vars(model):
            return f"{kind.__name__}.__init__ cannot be called again: it keeps no self.{name}"
        value = vars(model)[name]
        if _holds_tensors(value):
            return f"{kind.__name__}.__init__ cannot be called again: self.{name} holds modules or tensors"
        arguments[name] = copy.deepcopy(value)
    return arguments


def _holds_tensors(value: object) -> bool:
    return any(isinstance(leaf, (nn.Module, Tensor)) for leaf in tree_leaves(value))


def _compare(model: nn.Module, twin: nn.Module, arguments: Mapping[str, object]) -> None:
    """Raise UnknownError unless `twin`, made from `arguments`, has the modules and number of writes of `model`."""
    kind = type(model).__name__
    for name, value in arguments.items():
        kept = vars(twin).get(name)
        if kept is not value and (not isinstance(value, _PLAIN) or kept != value):
            raise UnknownError(f"{kind}.__init__ does not keep its argument {name} in self.{name} as it is")
    for own, other in itertools.zip_longest(_list_structure(model), _list_structure(twin)):
        if own != other:
            raise UnknownError(f"{kind}({', '.join(arguments)}) builds another model: {other}, not {own}")
    _compare_versions(model, twin)


def _list_structure(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules(remove_duplicate=False):
        yield f"{path or 'the model'} is a {type(module).__qualname__}"
    homes: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        home = homes.setdefault(id(parameter), name)
        yield f"{name} is {home if home != name else list(parameter.shape)}"


def _compare_versions(model: nn.Module, twin: nn.Module) -> None:
    """Raise UnknownError if a parameter of `model` was written more often than its initialisation writes it."""
    for name, parameter in twin.named_parameters():
        if (extra := model.get_parameter(name)._version - parameter._version) > 0:
            raise UnknownError(f"{name} was written {extra} times more, after the model was built")


# By each module's reset_parameters


def _reset(twin: nn.Module) -> None:
    """Initialise every module with parameters of its own, inner ones first, as constructors do."""
    for path, module in reversed(list(twin.named_modules())):
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if own and not callable(getattr(module, "reset_parameters", None)):
            name = ".".join(filter(None, (path, own[0])))
            raise UnknownError(f"{name}: {type(module).__name__} has no reset_parameters")
        if own:
            _call(module.reset_parameters, f"{path}: {type(module).__name__}.reset_parameters fails")


def _check_constructors(model: nn.Module, why: str) -> None:
    """Raise UnknownError if a constructor of the model's own classes may do more than build modules."""
    for kind in dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__):
        builds = issubclass(kind, nn.Module) and not _is_torchs(kind) and "__init__" in vars(kind)
        if builds and (line := _find_more(kind)):
            raise UnknownError(f"{why}, and {kind.__qualname__}.__init__ may write parameters: {line}")


def _find_more(kind: type) -> str:
    """Return the first line of a constructor that calls more than classes and torch's functions, or ""."""
    function = inspect.unwrap(vars(kind)["__init__"])
    try:
        lines, first = inspect.getsourcelines(function)
        (tree,) = ast.parse(textwrap.dedent("".join(lines))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return "its source is not available"
    scope = {**vars(builtins), **function.__globals__, **inspect.getclosurevars(function).nonlocals}
    for node in ast.walk(tree):
        called = isinstance(node, ast.Call) and not _only_builds(node.func, scope)
        if isinstance(node, (ast.Call, ast.Assign, ast.AugAssign)) and (called or _changes_elements(node)):
            line = lines[node.lineno - 1].strip()
            return f"{os.path.basename(inspect.getfile(kind))}:{first + node.lineno - 1}: {line}"
    return ""


def _changes_elements(node: ast.AST) -> bool:
    """Return whether an assignment writes into a tensor: ``x[...] = ...`` or ``x.data = ...``."""
    targets = [node.target] if isinstance(node, ast.AugAssign) else getattr(node, "targets", [])
    return any(isinstance(t, ast.Subscript) or getattr(t, "attr", "") == "data" for t in targets)


def _only_builds(called: ast.expr, scope: Mapping[str, object]) -> bool:
    """Return whether the callee makes a new object, judged by its name."""
    path = ast.unparse(called)
    if _HARMLESS.fullmatch(path.rpartition(".")[2]):
        return True
    if not re.fullmatch(r"[\w.]+", path) or path.endswith("_"):
        return False
    first, *rest = path.split(".")
    value: Any = scope.get(first)
    for name in rest:
        value = getattr(value, name, None)
    module = str(getattr(value, "__module__", None))
    return isinstance(value, type) or module.split(".")[0] in ("builtins", "torch", "math", "copy")


def _is_torchs(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "torch" or kind is object
