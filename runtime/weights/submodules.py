"""The modules below a parallel model, which hold a rank's slices where the user's modules have the whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from weakref import WeakMethod

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from autoptd.runtime.user_warnings import warn_caller

# What holds other modules' parameters, or any.
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

UNCOPIED = (
    "a parallel model is bound to its process, and is neither copied nor pickled: save_checkpoint and full_state_dict "
    "save it; for an average of its weights keep {name: p.detach().clone() for name, p in parallel.named_parameters()}"
)
UNHOOKED = (
    "a module of a parallel model computes nothing, and a hook on it never runs: hook the parallel model, or a "
    "parameter's gradient (parameter.register_hook)"
)
UNREAD = (
    "{name} was set on a parallel model, or on a module of one, whose program has the values that it was compiled with "
    "and does not read it: set it on the model, and compile that again"
)


class SlicedModule(nn.Module):
    """A place for slices and further parts."""

    sparse = False  # DDP asks embeddings, before a call in it is refused
    arrive: WeakMethod[Callable[[], None]] | None = None  # waits for new weights on their way

    def __init__(self) -> None:
        nn.Module.__init__(self)  # of a layer's own there is nothing but its name

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: there is no part of a step that a module runs."""
        raise ValueError(
            "a module of a parallel model holds this rank's slices and computes nothing: call the parallel model"
        )

    def apply(self, fn: Callable[[nn.Module], None]) -> NoReturn:
        """Refused: what initialises a module would give slices the values of whole tensors."""
        raise ValueError(
            "apply of a parallel model, whose modules hold this rank's slices only: initialise the model before it is "
            "compiled, or give bind the weights"
        )

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(UNHOOKED)

    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refuse_hook

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """As of every module, with a warning: summaries and profilers hook all of them, and may do without."""
        warn_caller(UNHOOKED)
        return super().register_forward_hook(*args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """As of every module, with a warning."""
        warn_caller(UNHOOKED)
        return super().register_forward_pre_hook(*args, **kwargs)

    def __getitem__(self, index: Any) -> NoReturn:
        """Refused, and so is iteration: the second layer of this rank may be the model's tenth."""
        raise TypeError(
            "layers of a parallel model are not taken by number, since a rank may have only some of them: go by the "
            "names of parallel.named_parameters()"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused, for copies as for pickles: what runs the step is of this process."""
        raise TypeError(UNCOPIED)

    def __getattr__(self, name: str) -> Any:
        """As of every module; a parameter once all replicas' steps have arrived."""
        if name in self.__dict__.get("_parameters", ()):
            self._await()
        return super().__getattr__(name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of every module, once all replicas' steps have arrived."""
        self._await()
        return super().named_parameters(*args, **kwargs)

    def _await(self) -> None:
        wait = self.arrive() if self.arrive is not None else None
        if wait is not None:
            wait()

    # A layer's own would look at what is not here.
    _apply = nn.Module._apply
    _load_from_state_dict = nn.Module._load_from_state_dict
    __repr__ = nn.Module.__repr__

    def __setattr__(self, name: str, value: Any) -> None:
        """As of every module, with a warning for what is no tensor or module: a layer's eps or p, say."""
        nn.Module.__setattr__(self, name, value)
        if (
            name[0] != "_"
            and name not in ("training", "arrive")
            and not isinstance(value, Tensor | nn.Module)
        ):
            warn_caller(UNREAD.format(name=name))

    def extra_repr(self) -> str:
        """Nothing."""
        return ""


def make_sliced_module(layer: str) -> nn.Module:
    """A part that is an instance of torch.nn's class `layer` too, where there is one: optimizers' groups go by that."""
    kind = getattr(nn, layer, None) if layer else None
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        return SlicedModule()
    part: nn.Module = type(layer, (SlicedModule, kind), {})()
    return part


def name_layers(model: nn.Module) -> dict[str, str]:
    """The classes in torch.nn of the modules of `model` that have parameters themselves, by path."""
    modules = model.named_modules(remove_duplicate=False)
    named = ((path, name_layer(module)) for path, module in modules if module._parameters)
    return {path: layer for path, layer in named if layer}


def name_layer(module: nn.Module) -> str:
    """The class in torch.nn that `module` is of; "" for one of the user's own, and for what holds others."""
    if isinstance(module, CONTAINERS):
        return ""
    kinds = (kind for kind in type(module).__mro__ if getattr(nn, kind.__name__, None) is kind)
    return next((kind.__name__ for kind in kinds if kind is not nn.Module), "")
