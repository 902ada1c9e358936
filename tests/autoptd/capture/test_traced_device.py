"""A forward is traced, and verified, as on the device that the user says, without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import autoptd
from autoptd.capture.traced_device import seem_on
from samples.wild.decoder import LENGTH, Attention, make_inputs
from samples.wild.flex import OnCuda, vary


def test_a_forward_for_cuda_is_traced_and_verified(tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = vary(OnCuda)()
    program = autoptd.compile(model, (2, 1, 1), example_inputs=make_inputs(), device="cuda", num_microbatches=2)
    assert program.verify().ok()
    assert "bfloat16" in program.rank(0).code  # of the region of autocast, which a machine without CUDA leaves out
    program.save(tmp_path)
    assert autoptd.load(tmp_path).verify(model=model).ok()


def test_without_the_device_the_way_out_is_named() -> None:
    with pytest.raises(ValueError, match=r'this kernel needs CUDA with these.*with device="cuda"'):
        autoptd.compile(vary(OnCuda)(), (1, 1, 1), example_inputs=make_inputs())
    with pytest.raises(ValueError, match=r"device is 'gpu': Expected one of cpu, cuda"):
        autoptd.compile(vary(OnCuda)(), (1, 1, 1), example_inputs=make_inputs(), device="gpu")


class Branching(Attention):
    """Scores twice as large on CUDA: a wrong branch would be a wrong program."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = 2.0 if q.device == torch.device("cuda", 0) and v.get_device() == 0 and not k.is_cpu else 1.0
        place = torch.arange(LENGTH).to("cuda") + torch.zeros(1, dtype=torch.long, device=q.device)
        return F.scaled_dot_product_attention(q, k, v, place[:, None] >= place.cpu(), scale=scale)


def test_a_meta_model_takes_the_branch_of_the_device() -> None:
    model = vary(Branching)().to("meta")
    program = autoptd.compile(model, (1, 1, 1), example_inputs=make_inputs(), device="cuda")
    assert "is_causal=True, scale=2.0" in program.rank(0).code
    assert program.verify(weights="random").ok()


def test_nothing_is_left_behind() -> None:
    x = torch.zeros(2)
    with seem_on("cuda"):
        assert x.is_cuda
        assert x.cuda() is x
        assert torch.ones(2, device="cuda").device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
        assert not torch.is_autocast_enabled("cpu")
    assert x.is_cpu
    assert not torch.is_autocast_enabled("cuda")
