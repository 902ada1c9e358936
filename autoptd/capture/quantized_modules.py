"""Linear layers that bitsandbytes has quantized, as modules of plain tensors."""

import json
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.capture.fake_module import copy_structure
from autoptd.runtime import kernels
from autoptd.runtime.weights.file_tensor import FileTensor, PackedFile, Weights, read_whole

_FORWARDS = ("Linear4bit.forward", "Linear8bitLt.forward")
_FORMAT = "weight.quant_state.bitsandbytes__"  # under which a state_dict of nf4 or fp4 has what is no tensor
_BLOCK = 64  # the most numbers that are not divided, of a row or a larger block of one scale


class QuantizedLinear(nn.Module):
    """A ``Linear4bit`` or ``Linear8bitLt`` as it computes in training on a CPU; of its tensors only the bias trains."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        hooks = {name: own for name, own in vars(layer).items() if name.startswith(("_forward", "_backward"))}
        vars(self).update(hooks, training=layer.training)
        tensors = unpack_state(layer.state_dict())
        self.weight = nn.Parameter(tensors["weight"], requires_grad=False)
        self.absmax, self.quant_map = nn.Buffer(tensors["absmax"]), nn.Buffer(tensors["quant_map"])
        self.bias = layer.bias
        self.compute_dtype = getattr(layer, "compute_dtype", None)
        stored = getattr(getattr(layer.weight, "quant_state", None), "dtype", None)
        self.stored = None if stored in (torch.float32, self.compute_dtype) else stored

    def forward(self, x: Tensor) -> Tensor:
        given = x.to(self.compute_dtype or x.dtype)
        if torch.is_autocast_enabled(x.device.type):
            given = given.to(torch.get_autocast_dtype(x.device.type))
        made = kernels.quantized_linear(given, self.weight, self.absmax, self.quant_map, self.stored)
        made = made if self.bias is None else made + self.bias.to(made.dtype)
        return made if self.quant_map.shape[1] == 1 else made.to(x.dtype)


def read_quantized(model: nn.Module) -> nn.Module:
    """Return `model`, or its copy with the same tensors but for the layers that bitsandbytes has quantized."""
    parts = model.modules() if isinstance(model, nn.Module) else ()
    layers = {id(part): QuantizedLinear(part) for part in parts if _is_quantized(part)}
    if not layers:
        return model
    plain = copy_structure(model, lambda x: x, layers)
    return plain if model.training else plain.eval()


def _is_quantized(layer: Any) -> bool:
    own = type(layer).forward
    known = getattr(own, "__module__", "") == "bitsandbytes.nn.modules" and own.__qualname__ in _FORWARDS
    if not known or "forward" in vars(layer):
        return False
    return layer.weight.dtype is torch.int8 or getattr(layer.weight, "quant_state", None) is not None


def unpack_state(state: Weights) -> dict[str, Any]:
    """Return `state` with the tensors of `QuantizedLinear` in place of what bitsandbytes saves of quantized layers.

    Scales that are quantized too are put together, and those of blocks that cross rows or are large are repeated.
    """
    found: dict[str, Any] = dict(state)

    def take(name: str) -> Tensor:
        return read_whole(found.pop(name))

    for name in state:
        prefix, packed, _ = name.partition(_FORMAT)
        if packed:
            known = json.loads(bytes(take(name).tolist()))
            (out, size), blocksize = known["shape"], known["blocksize"]
            code, absmax = take(f"{prefix}weight.quant_map"), take(f"{prefix}weight.absmax")
            if "nested_offset" in known:
                scales = take(f"{prefix}weight.nested_absmax").repeat_interleave(known["nested_blocksize"])
                absmax = take(f"{prefix}weight.nested_quant_map")[absmax.int()]
                absmax = absmax * scales[: len(absmax)] + known["nested_offset"]
            table = torch.cartesian_prod(code, code)
        elif name.rpartition(".")[2] == "SCB":
            prefix = name.removesuffix("SCB")
            out, size = state[f"{prefix}weight"].shape
            found.pop(f"{prefix}weight_format", None)
            blocksize, absmax = size, take(name) * (1 / 127)
            table = torch.arange(256, dtype=torch.uint8, device=absmax.device).view(torch.int8).float()[:, None]
        else:
            continue
        block = gcd(size, blocksize, _BLOCK)
        if block % table.shape[1]:
            raise ValueError(
                f"{prefix}weight is quantized with {size} inputs, so that bytes hold numbers of two rows: leave it "
                "as it is (llm_int8_skip_modules)"
            )
        absmax = absmax.float().repeat_interleave(blocksize // block)[: out * size // block].view(out, -1)
        shape, weight = (out, size // block, block // table.shape[1]), state[f"{prefix}weight"]
        if isinstance(weight, FileTensor):  # of which a rank reads its rows
            found[f"{prefix}weight"] = PackedFile(weight.path, weight.name, shape, torch.uint8, weight.shape[0] // out)
        else:
            found[f"{prefix}weight"] = weight.detach().view(torch.uint8).view(shape)
        found |= {f"{prefix}absmax": absmax, f"{prefix}quant_map": table}
    return found
