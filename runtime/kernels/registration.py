"""Register kernels as operators of torch, ``torch.ops.autoptd.<name>``, and choose Triton's form or plain torch."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from autoptd.runtime.kernels.operands import KERNEL_DTYPES

LIBRARY = torch.library.Library("autoptd", "FRAGMENT")
# Tests add "cpu", where Triton's interpreter runs the kernels.
kernel_devices = {"cuda"}

Result = TypeVar("Result")

# The types of arguments that are as they look: a subclass of Tensor wants to be asked.
_PLAIN = frozenset((Tensor, Parameter, type(None), bool, int, float, str, list, torch.dtype))


class Operator(Generic[Result]):
    """One operator, with registrations named as those of ``torch.library.custom_op``."""

    def __init__(self, name: str, function: Callable[..., Result]) -> None:
        self.name = name
        self._function = function
        self._apply: Callable[..., Result] | None = None

    def __call__(self, *arguments: Any) -> Result:
        """Call the operator, past torch's dispatcher where nobody listens there.

        Its way through Python costs 25 microseconds more, backward included, in a step hundreds of times. It is for
        those who look at operators: tracers, dispatch modes, profilers, torch.func.
        """
        alone = (
            _PLAIN.issuperset(map(type, arguments))
            and not torch._C._len_torch_dispatch_stack()  # of this thread
            and not torch._C._autograd._profiler_enabled()
            and not torch._C._are_functorch_transforms_active()
            and arguments[0].device.type in ("cpu", "cuda")
        )
        if alone and torch.is_grad_enabled():
            if self._apply is not None:
                return self._apply(*arguments)
            alone = not any(isinstance(each, Tensor) and each.requires_grad for each in arguments)
        function: Callable[..., Result] = self._function if alone else getattr(torch.ops.autoptd, self.name)
        return function(*arguments)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        def forward(ctx: Any, *arguments: Any) -> Any:
            output = self._function(*arguments)
            setup_context(ctx, arguments, output)
            return output

        torch.library.register_autograd(f"autoptd::{self.name}", backward, setup_context=setup_context, lib=LIBRARY)
        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        node = type(self.name, (torch.autograd.Function,), methods)
        # Function's own looks at each argument once more, for functorch.
        self._apply = super(torch.autograd.Function, node).apply  # type: ignore[misc]


def define_operator(
    name: str, fake: Callable[..., Result], triton: str | None = None
) -> Callable[[Callable[..., Result]], Operator[Result]]:
    """Make the decorated function, which changes none of its arguments, the operator autoptd::`name`.

    As ``torch.library.custom_op`` does, but that imports torch._dynamo at the first call: 2 s in every process.
    ``fake(*arguments)`` allocates the results and fills nothing. Where the module triton/<triton>.py can run, its
    function of this `name` is called with the arguments and these results, and fills them.
    """

    def define(function: Callable[..., Result]) -> Operator[Result]:
        def call_on_device(*arguments: Any) -> Result:
            kernels = find_kernels(triton, *arguments) if triton else None
            if kernels is None:
                return function(*arguments)
            results = fake(*arguments)
            getattr(kernels, name)(*arguments, results)
            return results

        LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
        LIBRARY.impl(name, call_on_device, "CompositeExplicitAutograd")
        torch.library.register_fake(f"autoptd::{name}", fake, lib=LIBRARY)
        return Operator(name, call_on_device)

    return define


def find_kernels(name: str, x: Tensor, *others: Any) -> Any:
    """Return the module triton/<name>.py where it takes these tensors, else None.

    It takes non-empty float32, float16 and bfloat16 tensors (integer and bool ones beside them) on the current
    GPU, where Triton launches; Triton is an extra and may not be installed.
    """
    if x.device.type not in kernel_devices or (x.is_cuda and x.get_device() != torch.cuda.current_device()):
        return None
    for each in (x, *others):
        if isinstance(each, Tensor) and (
            each.numel() == 0 or (each.dtype not in KERNEL_DTYPES and each.is_floating_point())
        ):
            return None
    return _load(name)


@cache
def _load(name: str) -> Any:
    return import_module(f"autoptd.runtime.kernels.triton.{name}") if find_spec("triton") else None


def runs_plainly(x: Tensor) -> bool:
    """Return whether a chain of torch's own operators, differentiated by torch, may stand for an operator here.

    So it does where no kernel runs and no mask is drawn, without the 50 microseconds that a call of ours takes.
    """
    return x.device.type not in kernel_devices
