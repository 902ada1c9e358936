"""One rank's tensors are never written as if they were the model."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

from autoptd.runtime.comm.connection import Connection, run_threads
from autoptd.runtime.guards.pickle_guard import OwnSlice
from tests.runtime.chain import Chain

WRITERS: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "torch.save": lambda state: torch.save(state, io.BytesIO()),
    "on the CPU": lambda state: torch.save({n: x.cpu().clone() for n, x in state.items()}, io.BytesIO()),
    "nested": lambda state: torch.save({"model": state, "step": 3}, io.BytesIO()),
    "safetensors": save,
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1)])
def test_a_slice_is_not_written(writer: str, mesh: tuple[int, int, int]) -> None:
    chain = Chain(mesh, "gpipe", 1, 1)

    def body(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        wrapped = nn.ModuleDict({"inner": parallel})  # as Lightning does
        below = [module.state_dict() for module in parallel.modules() if list(module.parameters())]
        assert len(below) > 3
        kept = parallel.state_dict(keep_vars=True)
        parameters: dict[str, Tensor] = dict(parallel.named_parameters())
        pickled = writer in ("torch.save", "nested")  # copies of parameters are plain tensors
        for state in (wrapped.state_dict(), *below, *(kept, parameters) * pickled):
            with pytest.raises(ValueError, match=r"one rank's slice .* Call parallel.full_state_dict\(\)"):
                WRITERS[writer](state)

    run_threads(chain.manifest, body)


def test_slices_load_and_copy() -> None:
    chain = Chain((2, 1, 1), "gpipe", 1, 1)

    def body(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        state = copy.deepcopy(parallel.state_dict())
        assert all(type(x) is OwnSlice for x in state.values())
        for tensor in (*state.values(), *parallel.parameters()):
            with pytest.raises(
                ValueError, match=r"not pickled, which copy.copy does too \(take a \.clone\(\)"
            ):
                copy.copy(tensor)
            assert torch.equal(copy.deepcopy(tensor), tensor.clone())
        kept = parallel.state_dict(keep_vars=True)
        assert all(kept[name] is p for name, p in parallel.named_parameters())
        with torch.no_grad():
            for p in parallel.parameters():
                p.zero_()
        parallel.load_state_dict(state)
        for name, tensor in parallel.state_dict().items():
            assert torch.equal(tensor, state[name])
        assert not any(isinstance(p, OwnSlice) for p in parallel.parameters())
        own = {name: x.as_subclass(Tensor) for name, x in state.items()}
        file = io.BytesIO()
        torch.save(own, file)
        file.seek(0)
        parallel.load_state_dict(torch.load(file))

    run_threads(chain.manifest, body)


def test_modules_below_name_their_slices() -> None:
    chain = Chain((2, 1, 1), "gpipe", 2, 1)

    def body(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        whole = parallel.state_dict()
        for path, module in parallel.named_modules():
            prefix = f"{path}." * bool(path)
            state = module.state_dict(prefix=prefix)
            assert list(state) == [name for name in whole if name.startswith(prefix)]
            assert all(type(x) is OwnSlice for x in state.values())
        other = nn.Linear(2, 2).state_dict(prefix="other.")
        below = next(parallel.children()).state_dict(destination=dict(other), prefix="layer.")
        assert all((type(below[name]) is OwnSlice) == (name not in other) for name in below)

    run_threads(chain.manifest, body)


def test_unwritten_parameters_are_parameters_like_any() -> None:
    chain = Chain((2, 1, 1), "gpipe", 1, 1)

    def body(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1, foreach=True)
        for each in (optimizer, copy.deepcopy(optimizer)):
            parallel(**chain.batch())["loss"].backward()
            each.step()
            each.zero_grad()
        torch.save(optimizer.state_dict(), io.BytesIO())
        with pytest.raises(ValueError, match="one rank's slice"):
            torch.save(optimizer, io.BytesIO())
        for p in parallel.parameters():
            assert type(p) is nn.Parameter  # foreach is not the default of others
            copied = copy.deepcopy(p)
            assert type(copied) is nn.Parameter
            assert torch.equal(copied, p)
            for plain in (p.detach(), p.as_subclass(Tensor), copied):
                torch.save(plain, io.BytesIO())
                save({"plain": plain.detach()})

    run_threads(chain.manifest, body)


def test_a_whole_model_is_written() -> None:
    chain = Chain((1, 1, 2), "gpipe", 1, 1)

    def body(connection: Connection) -> Any:
        parallel = chain.parallel(connection)
        torch.save(list(parallel.parameters()), io.BytesIO())
        return save(parallel.state_dict())

    first, second = run_threads(chain.manifest, body)
    assert first == second
