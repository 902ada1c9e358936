"""Modules below a parallel model, which hold a rank's slices in place of the whole tensors of the user's modules."""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from weakref import WeakMethod

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from autoptd.runtime.user_warnings import warn_caller

# Modules without parameters of their own.
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)

UNHOOKED = (
    "a module of a parallel model computes nothing, and a hook on it never runs: hook the parallel model, or a "
    "parameter's gradient (parameter.register_hook)"
)
UNREAD = (
    "{name} was set on a parallel model, or on a module of one, but its program has the value it was compiled with and "
    "does not read this one: set it on the model, and compile that again"
)


class BoundModule(nn.Module):
    """A module of a rank, whose parameters are read after all replicas' steps have arrived."""

    arrive: WeakMethod[Callable[[], None]] | None = None  # waits for new weights that are still on their way

    def __getattr__(self, name: str) -> Any:
        """Return an attribute as of any module; a parameter only after all replicas' steps have arrived."""
        if name in self.__dict__.get("_parameters", ()):
            self._await()
        return super().__getattr__(name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters as of any module, after all replicas' steps have arrived."""
        self._await()
        return super().named_parameters(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._await()
        return nn.Module._apply(self, *args, **kwargs)

    def _await(self) -> None:
        if self.arrive is not None and (wait := self.arrive()) is not None:
            wait()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise TypeError, for copies and pickles: the step is bound to this process."""
        raise TypeError(
            "a parallel model is bound to its process, and is neither copied nor pickled: save_checkpoint and "
            "full_state_dict save it; for an average of its weights keep {name: p.detach().clone() for name, p in "
            "parallel.named_parameters()}"
        )


class SlicedModule(BoundModule):
    """A module that holds slices and further such modules."""

    sparse = False  # DDP reads it of embeddings, before its call is refused

    def __init__(self) -> None:
        nn.Module.__init__(self)  # it has nothing of a layer but the class

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ValueError: no part of a step runs in a module."""
        raise ValueError("a module of a parallel model holds slices and computes nothing: call that model")

    def apply(self, fn: Callable[[nn.Module], None]) -> NoReturn:
        """Raise ValueError: an initialisation would take the slices for whole tensors."""
        raise ValueError(
            "apply was called on a parallel model, whose modules hold only this rank's slices: initialise the model "
            "before it is compiled, or give bind the weights"
        )

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise ValueError(UNHOOKED)

    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refuse_hook

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register as on any module, with a warning: summaries and profilers hook all modules, which must not fail."""
        warn_caller(UNHOOKED)
        return super().register_forward_hook(*args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """Register as on any module, with a warning."""
        warn_caller(UNHOOKED)
        return super().register_forward_pre_hook(*args, **kwargs)

    # The layer's own methods would read attributes that are missing here.
    _load_from_state_dict = nn.Module._load_from_state_dict
    __repr__, extra_repr = nn.Module.__repr__, nn.Module.extra_repr

    def __setattr__(self, name: str, value: Any) -> None:
        """Set as on any module, with a warning unless it is a tensor or module: a layer's eps or p, say."""
        nn.Module.__setattr__(self, name, value)
        if not (name[0] == "_" or name in ("training", "arrive") or isinstance(value, Tensor | nn.Module)):
            warn_caller(UNREAD.format(name=name))


def make_sliced_module(layer: str) -> nn.Module:
    """Make a module that is also an instance of torch.nn's class `layer`, if any: users make optimizer groups by it."""
    kind = getattr(nn, layer, None) if layer else None
    if not isinstance(kind, type) or not issubclass(kind, nn.Module):
        return SlicedModule()
    part: nn.Module = type(layer, (SlicedModule, kind), {})()
    return part


def name_layers(model: nn.Module) -> dict[str, str]:
    """Return the names of the torch.nn classes of those modules of `model` that own parameters, by path."""
    modules = model.named_modules(remove_duplicate=False)
    return {path: layer for path, module in modules if module._parameters and (layer := name_layer(module))}


def name_layer(module: nn.Module) -> str:
    """Return the name of the torch.nn class of `module`; "" for a class of the user's, and for containers."""
    if isinstance(module, CONTAINERS):
        return ""
    kinds = (kind for kind in type(module).__mro__ if getattr(nn, kind.__name__, None) is kind)
    return next((kind.__name__ for kind in kinds if kind is not nn.Module), "")
