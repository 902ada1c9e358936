"""Initial weights of a model on the meta device: the distributions that building it on a real device would draw.

The model's constructor, and `initializer` if there is one, is run again and recorded. Uncertain cases are refused.
"""

import contextlib
import copy
import inspect
import io
import itertools
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


def read_initial(program: Program, *, model: nn.Module, initializer: Initializer = None) -> Program:
    """Give every parameter on the meta device its initial distributions, and buffers their values if known.

    If that is impossible, the program says why, and weights must be given. `model` is left as it is. Raises
    ValueError for an `initializer` of a model that has weights.
    """
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
        twin, writes, how = copy_structure(model, make_twin), Writes(), ""
        for tensor in twin.parameters():
            writes.watch(tensor)
    with writes:
        _call(partial(initializer, twin), "initializer= fails")
    return twin, writes, "initializer= does" + f", after {how.removesuffix(' does')}" * bool(how)


def _build(model: nn.Module) -> tuple[nn.Module, Writes, str]:
    """Return a twin that the constructor of `model` makes again, its writes, and the call. Raises UnknownError."""
    arguments, writes = _find_arguments(model), Writes()
    with writes:
        twin = _call(lambda: type(model)(**arguments), f"{type(model).__name__} cannot be built again")
    _compare(model, twin, arguments)
    return twin, writes, f"{type(model).__name__}({', '.join(f'self.{name}' for name in arguments)}) does"


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


def _call(function: Callable[[], R], message: str) -> R:
    """Return the result of the user's `function`; UnknownError, beginning with `message`, if it fails."""
    try:
        return function()
    except Exception as error:
        place = user_line(traceback.extract_tb(error.__traceback__))
        found = f"{type(error).__name__}: {error}" + f" at {place}" * bool(place)
        raise UnknownError(f"{message} ({found})") from error


def _find_arguments(model: nn.Module) -> dict[str, Any]:
    """Return copies of the constructor's arguments, from the attributes that keep them. Raises UnknownError."""
    kind, arguments = type(model), {}
    for name, parameter in list(inspect.signature(kind.__init__).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name not in vars(model):
            raise UnknownError(f"{kind.__name__}.__init__ cannot be called again: it keeps no self.{name}")
        value = vars(model)[name]
        if _holds_tensors(value):
            raise UnknownError(f"{kind.__name__}.__init__ cannot be called again: self.{name} holds modules or tensors")
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
    for name, parameter in twin.named_parameters():
        if (extra := model.get_parameter(name)._version - parameter._version) > 0:
            raise UnknownError(f"{name} was written {extra} times more, after the model was built")


def _list_structure(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules(remove_duplicate=False):
        yield f"{path or 'the model'} is a {type(module).__qualname__}"
    homes: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        home = homes.setdefault(id(parameter), name)
        yield f"{name} is {home if home != name else list(parameter.shape)}"
