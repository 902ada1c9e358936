"""Compare a parallel module with the parameters, modes and precision that its program was compiled for."""

import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.nn.parallel import DistributedDataParallel

from autoptd.runtime.comm.agreement import ABSENT, find_unlike, gather_given, with_complements
from autoptd.runtime.comm.connection import Connection
from autoptd.runtime.program.manifest import Manifest

WARY = 100  # steps in which ranks compare their trained parameters before the step, after one was made again


class ParameterWatch:
    """The parameters of a module as they were bound, under their names; `check` refuses a module with others.

    Asked in every step: it goes through all tensors in C, since Python, or what torch has, takes milliseconds.
    `trained` are the names of the parameters that are not frozen, `buffers` the buffers by name, and `tensors` both,
    the same mapping as long as all are in the same memory.
    """

    def __init__(self, manifest: Manifest, module: nn.Module, sharded: Iterable[str]) -> None:
        """Watch `module`; the parameters of a sharded optimizer, `sharded`, must stay trained."""
        self.hooks: frozenset[int] = frozenset()  # the runtime's own, on these
        self.parameters = dict(nn.Module.named_parameters(module))
        self._sharded = {name: self.parameters[name] for name in sharded}
        self._bound = {name: (p, (p.dtype, p.shape, p.device)) for name, p in self.parameters.items()}
        self._look_through(module)
        # The boundaries of a program carry no gradients to parameters that were frozen when it was compiled.
        self._frozen = {name for name in self._bound if not manifest.parameters[name].requires_grad}
        self._names = tuple(manifest.parameters)
        self.agreed: frozenset[str] | None = None  # trained here when the ranks compared last
        self.stale = True  # whether any rank's has changed since
        self._wary = 0  # steps before which they compare, from now on

    def agree(self, connection: Connection) -> frozenset[str]:
        """Return the parameters that get gradients: those trained when the ranks last compared, until it is `stale`.

        Every rank must call it. They compare before the first step and, where some rank's changed after it, before the
        next `WARY`. ValueError on every rank where one has frozen what another trains: they would wait for each other.
        """
        trained = self.trained
        if connection.world.size == 1:
            self.agreed, self.stale = trained, False
        if self.agreed is not None and not (self.stale or self._wary):
            return self.agreed
        states = [int(name in trained) if name in self.parameters else ABSENT for name in self._names]
        own = torch.tensor(states, device=connection.rank.device)
        for place in find_unlike(connection.world.all_reduce(with_complements(own), "max").tolist()):
            given = gather_given(connection.world, own[place])
            frozen, training = ([rank for rank, state in given.items() if state == kind] for kind in (0, 1))
            raise ValueError(
                f"the parameter {self._names[place]} is frozen on rank {frozen[0]} and trained on rank {training[0]}; "
                f"ranks {min(frozen, training, key=len)} differ from the others that have it. All train one model: "
                "call requires_grad_ for the same names on every rank, and draw such names with the same seed"
            )
        changed = self.stale and self.agreed is not None
        self.agreed, self.stale, self._wary = trained, False, WARY if changed else max(self._wary - 1, 0)
        return trained

    def check(self, module: nn.Module) -> None:
        """Raise ValueError where a parameter was replaced, unfrozen or hooked, or has another shape, dtype or device.

        Also where a module below is in another mode than `module`, inside DDP, which gives all ranks the first one's
        tensors, and inside torch's checkpoint, which would call the model anew in each backward.
        """
        hooks = _top_saved_tensors_default_hooks(False)
        if hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint":
            raise ValueError(
                "the parallel model is called inside torch.utils.checkpoint, and a call is a whole step, with its "
                "backwards: call it without, and let compile(recompute='full') or 'selective' do that"
            )
        if DistributedDataParallel._get_active_ddp_module() is not None:
            raise ValueError(
                "the parallel model is called inside DistributedDataParallel, which gave every rank the first one's "
                "share of the weights; it sums gradients over the replicas itself: bind again, and use it as it is "
                "(Lightning: strategy=SingleDeviceStrategy(device=...))"
            )
        if [part.training for part in self._parts].count(module.training) < len(self._parts):
            name = next(name for name, part in module.named_modules() if part.training != module.training)
            raise ValueError(
                f"the module {name} is in {'evaluation' if module.training else 'training'} mode, and the parallel "
                "model is not: modules below it do not run, so call parallel.train() or parallel.eval(), and put "
                "modules that are to stay in evaluation mode there before the model is compiled"
            )
        if _list_contents(self._held) == self._contents and self._read_states() == self._states:
            return
        # A parallel model's own waits for weights on their way.
        now = dict(nn.Module.named_parameters(module))
        self.check_bound(now)
        if added := sorted(set(now) - set(self._bound)):
            raise ValueError(
                f"the parameter {added[0]} was added after bind, or was tied to another and replaced, and the program "
                "does not read it: change the model and compile it again"
            )
        self._look_through(module)

    def check_bound(self, now: Mapping[str, nn.Parameter]) -> None:
        """Raise ValueError where a parameter of `now` is not the one bound under its name, or not as it was bound."""
        for name, (parameter, form) in self._bound.items():
            found = now.get(name)
            if found is not parameter:
                raise ValueError(
                    f"the parameter {name} was {'removed' if found is None else 'replaced'} after bind, and an "
                    "optimizer may have the old one: write its values instead, with torch.no_grad(): "
                    "parameter.copy_(...), or change the model and compile it again"
                )
            if (own := (found.dtype, found.shape, found.device)) != form:
                here, there = (f"{dtype}{list(shape)} on {device}" for dtype, shape, device in (own, form))
                raise ValueError(
                    f"the parameter {name} is {here}, but was {there} when it was bound: move the parallel model back, "
                    "bind it there, or change the model and compile it again"
                )
            if found.requires_grad and name in self._frozen:
                raise ValueError(
                    f"the parameter {name} was frozen when the program was compiled, which has no gradient for it: "
                    "compile the model with it unfrozen (and freeze it on the parallel model for as long as you like)"
                )
            if name in self._sharded:
                refuse_hooks(name, parameter, self.hooks)
                if not found.requires_grad:
                    raise ValueError(
                        f"the parameter {name} was frozen after its optimizer was sharded, which steps it with "
                        "others: freeze before shard_optimizer, or give its group a learning rate of 0"
                    )

    def _look_through(self, module: nn.Module) -> None:
        modules = list(module.modules())
        self._parts = modules[1:]  # not itself, which would live as long as its own watch
        self._held = [held for part in modules for held in (part._parameters, part._modules, part._buffers)]
        self._contents = _list_contents(self._held)
        self.trained = frozenset(name for name, p in self.parameters.items() if p.requires_grad)
        self.buffers = dict(module.named_buffers(remove_duplicate=False))
        self.tensors: dict[str, Tensor] = {**self.parameters, **self.buffers}
        self._states = self._read_states()

    def _read_states(self) -> list[object]:
        """Return what may change of tensors that stay: their memory, how they lie in it, who is frozen, and hooks."""
        own, sharded = self.tensors.values(), self._sharded.values()
        return [
            *(list(map(read, own)) for read in (Tensor.data_ptr, Tensor.size, Tensor.stride)),
            [x.dtype for x in own],
            [x.requires_grad for x in own],
            [[*(p._backward_hooks or ()), *(p._post_accumulate_grad_hooks or ())] for p in sharded],
        ]


def _list_contents(held: Sequence[dict[str, Any]]) -> list[object]:
    """Return names and identities of what modules have in their own mappings of parameters, modules and buffers."""
    filled = list(filter(None, held))
    identities = map(id, chain.from_iterable(map(dict.values, filled)))
    return [*map(len, held), *chain.from_iterable(filled), *identities]


def refuse_hooks(name: str, parameter: nn.Parameter, own: Container[int] = ()) -> None:
    """Raise ValueError where a `parameter` that a sharded optimizer steps has a hook other than the ids `own`."""
    hooks = {**(parameter._backward_hooks or {}), **(parameter._post_accumulate_grad_hooks or {})}
    if any(number not in own for number in hooks):
        raise ValueError(
            f"the parameter {name} has a hook on its gradient, which would not run: with a sharded optimizer no rank "
            "has the whole gradient of a parameter. Remove the hook, or train without shard_optimizer"
        )


def describe_unheeded(manifest: Manifest, device: torch.device) -> str:
    """Return a warning where autocast, or the precision given to Accelerate, is not the program's, else ""."""
    if torch.is_autocast_enabled(device.type):
        if torch.get_autocast_dtype(device.type) == manifest.autocast:
            return ""
        asked, dtype = "autocast", torch.get_autocast_dtype(device.type)
    else:
        # It leaves a parallel model without autocast, as it is prepared already; so does the Trainer, which has it.
        state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
        name = str(getattr(state, "_shared_state", {}).get("_mixed_precision"))
        found = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
        if found in (None, manifest.autocast) or found in {p.dtype for p in manifest.parameters.values()}:
            return ""
        asked, dtype = f"Accelerate's mixed_precision={name!r} (the Trainer's {name}=True)", found
    return (
        f"{asked} has no effect inside a compiled program, which keeps the precision it was captured with: call "
        f"autoptd.compile under torch.autocast({device.type!r}, {dtype}), or convert the model first"
    )
