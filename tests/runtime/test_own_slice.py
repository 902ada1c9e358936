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

from autoptd.runtime.connection import Connection, run_threads
from autoptd.runtime.own_slice import OwnSlice
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
        wrapped = nn.ModuleDict({"inner": chain.parallel(connection)})  # as Lightning does
        for state in (wrapped["inner"].state_dict(), wrapped.state_dict()):
            with pytest.raises(ValueError, match=r"one rank's slice .* Call parallel.full_state_dict\(\)"):
                WRITERS[writer](state)

    run_threads(chain.manifest, body)


def test_slices_load_and_copy() -> None:
    chain = Chain((2, 1, 1), "gpipe", 1, 1)

    def body(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        state = copy.deepcopy(parallel.state_dict())
        assert all(type(x) is OwnSlice for x in state.values())
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


def test_a_whole_model_is_written() -> None:
    chain = Chain((1, 1, 2), "gpipe", 1, 1)

    def body(connection: Connection) -> Any:
        return save(chain.parallel(connection).state_dict())

    first, second = run_threads(chain.manifest, body)
    assert first == second
