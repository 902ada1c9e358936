"""A cluster as numbers read from a TOML file (devices, nodes, network), and the time of work and messages on it.

Impossible values are refused by name, and each is written with its source.
"""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from math import ceil, prod
from os import PathLike
from pathlib import Path
from typing import Any

from autoptd.passes.cost.work import Product, Work
from autoptd.runtime.program.manifest_json import decode

SHIPPED = Path(__file__).parent / "clusters"
ITEM_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp4": 0.5}
ELEMENT_FLOPS = 20  # of an element of an elementwise kernel: an exponential and some arithmetic
SMALLEST, LARGEST = 1e-30, 1e30  # bounds of a value, so that no time vanishes or overflows
SMALLEST_TILE = 2**12  # elements of a GEMM's result: smaller tiles are not worth their loads


@dataclass(frozen=True)
class Link:
    """One direction of a link of one device (in a node), or of one network card.

    `bandwidth` is the vendor's, in bytes/s. Large messages reach the share `message_efficiency` of it; collectives,
    which all devices run at once, reach `collective_efficiency`. The smallest message takes `latency_seconds`.
    """

    bandwidth: float
    message_efficiency: float
    collective_efficiency: float
    latency_seconds: float

    @property
    def message_rate(self) -> float:
        """The bytes/s of a large message."""
        return self.bandwidth * self.message_efficiency

    @property
    def collective_rate(self) -> float:
        """The bytes/s of a large ring collective over one link."""
        return self.bandwidth * self.collective_efficiency

    def send_seconds(self, count: float) -> float:
        """Return the seconds of a message of `count` bytes."""
        return count / self.message_rate + self.latency_seconds if count else 0.0


@dataclass(frozen=True)
class Device:
    """One accelerator.

    `peak_flops` is by dtype; `memory_bandwidth` in bytes/s; both as the maker gives them. Of the `memory_bytes` plans
    leave `reserved_bytes` free, for what a process holds besides the program's tensors. `gemm_efficiency` and
    `memory_efficiency` are the shares that a large GEMM without remainders and a large elementwise kernel reach.
    `vector_flops` is FLOP/s outside GEMMs, which bounds elementwise kernels on CPUs, where memory bounds them on GPUs.
    A GEMM's result is computed in tiles of `tile_rows` x `tile_columns` or their halves, one on each of
    `multiprocessors` at a time; such a wave takes `tile_seconds` besides, to load its first factors and write its last
    results. A kernel takes `launch_seconds` besides its work, or one in a CUDA graph `graphed_launch_seconds`: then a
    stage's forward or backward on a microbatch is one graph. 0: the device has none.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    gemm_efficiency: float
    memory_efficiency: float
    vector_flops: float
    multiprocessors: int
    tile_rows: int
    tile_columns: int
    launch_seconds: float
    graphed_launch_seconds: float = 0.0
    tile_seconds: float = 0.0
    reserved_bytes: float = 0.0

    @property
    def usable_bytes(self) -> float:
        return self.memory_bytes - self.reserved_bytes

    def peak(self, dtype: str) -> float:
        """Return FLOP/s in `dtype`; raise ValueError if the device does not compute in it."""
        if dtype not in self.peak_flops:
            raise ValueError(f"{self.name} has no {dtype}: expected one of {', '.join(self.peak_flops)}")
        return self.peak_flops[dtype]

    def seconds(self, work: Work, dtype: str, scale: float = 1.0) -> float:
        """Return the seconds of `work` on this device, without its all-reduces.

        A GEMM takes the time of its tiles or of its memory traffic, whichever is longer; the other traffic, or the
        elementwise FLOPs if they take longer, come on top. Products that move less than their factors are one fused
        kernel: attention, whose exponentials and traffic both do. `scale` converts the bytes of `work` to `dtype`.
        Graphs are launched besides.
        """
        moved, rate = work.moved * scale, self.memory_bandwidth * self.memory_efficiency
        time = work.launches * (self.graphed_launch_seconds or self.launch_seconds)
        elementwise = work.elementwise * ELEMENT_FLOPS / self.vector_flops
        products = [self._measure(product, dtype, scale, self.tile_seconds) for product in work.products]
        traffic = sum(size for _, size in products)
        if traffic > moved * 1.01:
            fused = sum(self._measure(product, dtype, scale, 0.0)[0] for product in work.products)
            return float(time + fused + elementwise + moved / rate)
        own = sum(max(seconds, size / rate) for seconds, size in products)
        return float(time + own + max((moved - traffic) / rate, elementwise))

    def _measure(self, product: Product, dtype: str, scale: float, wave: float) -> tuple[float, float]:
        """Return a product's seconds, `wave` more for each, and bytes, in `dtype` or a narrower one of its own."""
        if product.dtype and ITEM_BYTES[product.dtype] * scale < ITEM_BYTES[dtype]:
            dtype = product.dtype
        rate = self.peak(dtype) * self.gemm_efficiency
        rounded = round_flops(product, self.tile_rows, self.tile_columns, self.multiprocessors, wave * rate)
        m, n, k = product.rows, product.columns, product.inner
        size = float(product.batch * (m * n + m * k + n * k) * ITEM_BYTES[dtype])
        return product.share * rounded / rate, size


@dataclass(frozen=True)
class Trust:
    """The trust that a cluster's file deserves: where the `figures` are from that are on no data sheet, in words.

    Steps took from `fastest` to `slowest` times what was predicted, as far as that was compared.
    """

    figures: str
    fastest: float
    slowest: float


@dataclass(frozen=True)
class Cluster:
    """Nodes of `devices_per_node` devices and `nics_per_node` network cards; rank r is in node r // devices_per_node.

    `node` is each device's link to the others of its node, `network` one card's link to other nodes. A CPU's is a core.
    """

    name: str
    device: Device
    devices_per_node: int
    nics_per_node: int
    node: Link
    network: Link
    trust: Trust | None = None

    @classmethod
    def load(cls, name: Cluster | str | Path) -> Cluster:
        """Load a shipped cluster by name ("dgx-a100") or your own TOML file by path; return a `Cluster` as it is.

        TypeError for another type; ValueError for an unknown name, or missing, unknown or impossible values in a file.
        """
        if isinstance(name, Cluster):
            return name
        if not isinstance(name, (str, PathLike)):
            raise TypeError(
                f'cluster is {name!r}; expected a shipped name such as "dgx-a100", the path of a .toml file, '
                "or a Cluster"
            )
        path = Path(name)
        if path.suffix != ".toml":
            known = sorted(file.stem for file in SHIPPED.glob("*.toml"))
            if str(name) not in known:
                raise ValueError(
                    f"cluster {str(name)!r} is not shipped{suggest(str(name), known)}: expected one of "
                    f"{', '.join(known)}, or the path of a .toml file"
                )
            path = SHIPPED / f"{name}.toml"
        try:
            table = tomllib.loads(path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"cluster file {path} cannot be read as TOML: {error}") from None
        cluster: Cluster = decode(cls, table, str(path))
        check_values(cluster, str(path))
        unknown = [key for key in cluster.device.peak_flops if key not in ITEM_BYTES]
        if unknown or not cluster.device.peak_flops:
            raise ValueError(f"{path}: device.peak_flops has {unknown or 'none'}: expected some of {[*ITEM_BYTES]}")
        if cluster.device.usable_bytes <= 0:
            raise ValueError(f"{path}: device.reserved_bytes leaves nothing of memory_bytes: expected less")
        return cluster

    def save(self, path: str | Path, source: str, others: Mapping[str, str] | None = None) -> None:
        """Write a TOML file that `load` reads, each value with its source: `source`, or its entry in `others`.

        `others` has values or tables by name ("nics_per_node", "network"). ValueError if `path` cannot be a .toml file.
        """
        file = Path(path)
        if file.suffix != ".toml":
            raise ValueError(f"cluster file {file}: expected a path that ends in .toml")
        text = "".join(f"{line}\n" for line in write_tables(self, source, others or {}))
        file.write_text(text, "utf-8")

    def expect(self, seconds: float) -> str:
        """Say how long a step may take that is predicted to take some `seconds`, and what that relies on."""
        if self.trust is None:
            return "how far to trust these times is not said in the cluster file"
        low, high = self.trust.fastest * seconds, self.trust.slowest * seconds
        return f"expect {low:.3g} to {high:.3g} s a step: {self.trust.figures}"

    def nodes(self, ranks: Sequence[int]) -> Counter[int]:
        """Count the `ranks` in each node."""
        return Counter(rank // self.devices_per_node for rank in ranks)

    def slowest(self, groups: Iterable[Sequence[int]]) -> Sequence[int]:
        """Return the first of the slowest `groups`: groups of one size may span different numbers of nodes."""
        return max(groups, key=lambda ranks: (-self.ring_rate(ranks), self.ring_latency(ranks)))

    def ring_rate(self, ranks: Sequence[int]) -> float:
        """Return bytes/s over the slowest link of a ring through `ranks`, while all other devices are in equal rings.

        A node's cards are shared evenly: a ring with k of its devices has k shares.
        """
        nodes = self.nodes(ranks)
        if len(nodes) < 2:
            return self.node.collective_rate
        cards = min(nodes.values()) * self.nics_per_node / self.devices_per_node
        return min(self.node.collective_rate, cards * self.network.collective_rate)

    def all_reduce_seconds(self, count: float, ranks: Sequence[int]) -> float:
        """Return the seconds of a ring all-reduce of `count` bytes: 2 (n - 1) steps of 1/n each (SC21 §3.3.1)."""
        return 2 * self.all_gather_seconds(count, ranks)

    def all_gather_seconds(self, count: float, ranks: Sequence[int]) -> float:
        """Return the seconds to all-gather or reduce-scatter `count` bytes by a ring: n - 1 steps of 1/n each."""
        number = len(ranks)
        if number < 2 or not count:
            return 0.0
        return (number - 1) * count / number / self.ring_rate(ranks) + self.ring_latency(ranks)

    def ring_latency(self, ranks: Sequence[int]) -> float:
        """Return the seconds of an all-gather of almost no bytes."""
        return (len(ranks) - 1) * (self.node if len(self.nodes(ranks)) < 2 else self.network).latency_seconds

    def slowest_link(self, pairs: Iterable[tuple[int, int]]) -> Link:
        """Return the slowest link between `pairs` of ranks that send equal messages at once, a rank one at a time.

        Devices have the card next to them: where a node has fewer cards than devices, the ranks that send over one card
        at once, or receive, share it evenly, be they tensor ranks or replicas.
        """
        size, cards = self.devices_per_node, self.nics_per_node
        crossing = [(one, other) for one, other in pairs if one // size != other // size]
        if not crossing:
            return self.node
        sides = ([(r // size, r % size * cards // size) for r in {*ranks}] for ranks in zip(*crossing, strict=True))
        sharing = max(max(Counter(side).values()) for side in sides)
        return replace(self.network, bandwidth=self.network.bandwidth / sharing)


@lru_cache(maxsize=4096)
def round_flops(product: Product, tile_rows: int, tile_columns: int, multiprocessors: int, each: float = 0.0) -> float:
    """Return a product's FLOPs, with those that its best tiling wastes, and `each` that a wave of tiles costs besides.

    Tiles run in waves over all multiprocessors, and a wave takes its time whether it is full or not. A tile of
    r x c loads r + c elements for every r c products: smaller tiles are slower in proportion.
    """
    side = 2 * tile_rows * tile_columns * product.inner * multiprocessors / (tile_rows + tile_columns)
    tilings = ((ceil(product.rows / r) * ceil(product.columns / c), r + c) for r, c in _tiles(tile_rows, tile_columns))
    return float(min(ceil(product.batch * n / multiprocessors) * (side * edges + each) for n, edges in tilings))


@lru_cache
def _tiles(rows: int, columns: int) -> tuple[tuple[int, int], ...]:
    """Return the largest tile, its halves and theirs, in both orientations."""
    one, other = ([side >> halvings for halvings in range(side.bit_length())] for side in (rows, columns))
    tiles = {*itertools.product(one, other), *itertools.product(other, one)}
    return tuple(sorted(tile for tile in tiles if prod(tile) >= min(SMALLEST_TILE, rows * columns)))


# The file


def check_values(record: Any, place: str) -> None:
    """Raise ValueError for the first number in a dataclass or mapping that is out of bounds and not its default."""
    for name, value in (record if isinstance(record, Mapping) else vars(record)).items():
        if isinstance(value, Mapping) or is_dataclass(value):
            check_values(value, f"{place}: {name}")
        elif not isinstance(value, str) and value != getattr(type(record), name, None):
            noun, most = ("share", 1.0) if name.endswith("efficiency") else ("number", LARGEST)
            if not SMALLEST <= value <= most:
                bounds = f"from {SMALLEST:g} to {most:g}"
                raise ValueError(f"{place}: {name} is {value!r}, expected a {noun} above 0, {bounds}")


def suggest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean x?)" if one of `known` resembles `name`, else ""."""
    near = get_close_matches(name, list(known), 1)
    return f" (did you mean {near[0]}?)" if near else ""


def write_tables(record: Any, source: str, others: Mapping[str, str], place: str = "") -> Iterator[str]:
    """Yield the lines of a dataclass as TOML: its own values first, then a table for each dataclass or mapping in it.

    A value's source is in `others` by its name, or by its table's, or it is `source`. 0 and None are left out.
    """
    values = {k: v for k, v in (record if isinstance(record, Mapping) else vars(record)).items() if v not in (0, None)}
    tables = {k: value for k, value in values.items() if isinstance(value, Mapping) or is_dataclass(value)}
    if place:
        yield f"\n[{place}]"
    for key, value in values.items():
        if key not in tables:
            quoted = isinstance(value, str)
            text = _escape(json.dumps(value, ensure_ascii=False)) if quoted else f"{value:.6g}"
            yield f"{f'{key} = {text}':<35} # {_escape(others.get(key, source))}"
    for key, table in tables.items():
        yield from write_tables(table, others.get(key, source), others, f"{place}.{key}" if place else key)


def _escape(text: str) -> str:
    """Escape control characters, which neither TOML strings nor comments may have."""
    return re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\u{ord(found[0]):04x}", text)
