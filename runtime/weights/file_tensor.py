"""A tensor in a safetensors file, of which a rank reads only the rows that it keeps."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from safetensors import safe_open
from torch import Tensor

# The dtypes of safetensors files that are written here, by their names there.
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32},
    **{"I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64},
}
BLOCK = 1 << 22  # elements of a file that are in memory at once when columns are read


@dataclass(frozen=True)
class FileTensor:
    """The whole tensor `name` of the file at `path`, which is read when it is asked for."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_meta: ClassVar[bool] = False

    def read(self, *rows: slice) -> Tensor:
        """Return these `rows` of the first dimensions, all without any."""
        with safe_open(self.path, framework="pt") as reader:
            found: Any = reader.get_slice(self.name)[rows] if rows else reader.get_tensor(self.name)
            return cast(Tensor, found)


@dataclass(frozen=True)
class PackedFile(FileTensor):
    """Bytes of a file in another shape than it has: `per_row` of its rows are one of these."""

    per_row: int = 1

    def read(self, *rows: slice) -> Tensor:
        first, *others = rows or (slice(0, self.shape[0]),)
        taken = super().read(slice(first.start * self.per_row, first.stop * self.per_row))
        return taken.view(torch.uint8).view(-1, *self.shape[1:])[(slice(None), *others)]


Weights = Mapping[str, Tensor | FileTensor]


def read_whole(tensor: Tensor | FileTensor) -> Tensor:
    """Return the whole `tensor`, detached."""
    return tensor.read() if isinstance(tensor, FileTensor) else tensor.detach()


def copy_rows(tensor: Tensor | FileTensor, dim: int, first: int, end: int, into: Tensor) -> None:
    """Copy rows `first` to `end` of dimension `dim` to `into`, converted to its dtype and device.

    Of a file's inner dimension block by block, each of which opens the file anew: its pages stay while it is open.
    """
    if isinstance(tensor, Tensor):
        into.copy_(tensor.detach().narrow(dim, first, end - first))
    elif dim == 0:
        into.copy_(tensor.read(slice(first, end)))
    else:
        count, *inner = tensor.shape
        columns = (*[slice(None)] * (dim - 1), slice(first, end))
        size = max(1, BLOCK // max(1, torch.Size(inner).numel()))
        for start in range(0, count, size):
            rows = slice(start, min(start + size, count))
            into[rows].copy_(tensor.read(rows, *columns))
