"""Clusters: what ships, what a user's file may say, and times by the book."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from autoptd.passes.cost.cluster import SHIPPED, Cluster
from autoptd.passes.cost.work import Product, Work

NAMES = sorted(file.stem for file in SHIPPED.glob("*.toml"))
SELENE = Cluster.load("dgx-a100")
DEVICE = SELENE.device


@pytest.mark.parametrize("name", NAMES)
def test_shipped_clusters_load(name: str) -> None:
    cluster = Cluster.load(name)
    assert cluster.device.peak("fp32") > 0
    assert cluster.node.message_rate >= cluster.network.message_rate
    for line in (SHIPPED / f"{name}.toml").read_text().splitlines():
        key = line.split("=")[0].strip()
        sourced = "#" in line or line[:1] in "[" or key in ("name", "figures", *cluster.device.peak_flops)
        assert sourced, f"{line}: a value without its source"


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_says_where_it_is_from_and_so_does_the_answer(name: str) -> None:
    """Shares, latencies and launches are on no data sheet: each is measured, calibrated, taken over or assumed."""
    text = (SHIPPED / f"{name}.toml").read_text()
    figures = re.findall(r"^\w+(?:_efficiency|_seconds) = \S+ +# (.*)$", text, re.M)
    assert len(figures) == len(re.findall(r"_efficiency = |_seconds = ", text)) >= 9
    words = [re.match(r"measured|calibrated|taken over from dgx-[ah]100|assumed", figure) for figure in figures]
    trust = Cluster.load(name).trust
    assert trust is not None
    for figure, word in zip(figures, words, strict=True):
        assert word, f"{figure}: expected where it is from"
        missing = [part for part in word[0].split(" from ") if part not in trust.figures]
        assert not missing, f"{trust.figures}: does not say {missing}"
    assert trust.fastest <= 1 <= trust.slowest
    low, high = trust.fastest * 10, trust.slowest * 10
    assert Cluster.load(name).expect(10.0) == f"expect {low:.3g} to {high:.3g} s a step: {trust.figures}"


def test_a_file_without_trust_is_not_trusted(tmp_path: Path) -> None:
    replace(SELENE, trust=None).save(tmp_path / "mine.toml", "by hand")
    loaded = Cluster.load(tmp_path / "mine.toml")
    assert loaded.trust is None
    assert "not said in the cluster file" in loaded.expect(1.0)


def test_all_the_named_clusters_ship() -> None:
    assert NAMES == [
        "dgx-1-v100", "dgx-a100", "dgx-h100", "dgx-h200", "gb200-nvl72", "laptop-cpu", "p4de",
    ]  # fmt: skip


def test_a_users_file_loads_by_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text((SHIPPED / "dgx-a100.toml").read_text().replace("DGX A100 (Selene)", "mine"))
    assert replace(Cluster.load(file), name=SELENE.name) == SELENE


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nics_per_node = 8 ", "", "mine.toml: missing 'nics_per_node'"),
        ("4.8e9", "80e9", "device.reserved_bytes leaves nothing of memory_bytes: expected less"),
        ("nics_per_node = 8 ", "nics_per_nod = 8", "unknown key 'nics_per_nod'; did you mean 'nics_per_node'?"),
        ("launch_seconds", "launch_second", "device: unknown key 'launch_second'; did you mean 'launch_seconds'?"),
        (
            "launch_seconds",
            "graphed_launch_seconds = -1\nlaunch_seconds",
            "device: graphed_launch_seconds is -1.0, expected a number above 0",
        ),
        ("80e9", "-80e9", "device: memory_bytes is -80000000000.0, expected a number above 0"),
        ("80e9", "inf", "device: memory_bytes is inf, expected a number above 0"),
        ("80e9", "nan", "device: memory_bytes is nan, expected a number above 0"),
        ("80e9", "1e-320", "device: memory_bytes is 1e-320, expected a number above 0, from 1e-30 to 1e+30"),
        ("0.74", "1e-320", "network: message_efficiency is 1e-320, expected a share above 0, from 1e-30 to 1"),
        ("80e9", "true", "device: memory_bytes is True, expected float"),
        ("80e9", '"80 GB"', "device: memory_bytes is '80 GB', expected float"),
        ("0.74", "74", "network: message_efficiency is 74.0, expected a share above 0, from 1e-30 to 1"),
        ("= 108", f"= {10**31}", "expected a number above 0, from 1e-30 to 1e+30"),
        ("= 108", "= 108.5", "device: multiprocessors is 108.5, expected int"),
        ("bf16 =", "bfloat16 =", "device.peak_flops has ['bfloat16']: expected some of ['fp64', 'fp32'"),
        ('"A100-SXM4-80GB"', "100", "device: name is 100, expected str"),
        ("name =", "name", "cannot be read as TOML"),
    ],
)
def test_a_file_that_cannot_be(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = (SHIPPED / "dgx-a100.toml").read_text()
    assert old in text
    file = tmp_path / "mine.toml"
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=r"mine\.toml") as refusal:
        Cluster.load(file)
    assert message in str(refusal.value)


@pytest.mark.parametrize("text", ["x\ny = 3", "a\r\x00\x7f\t", 'größer "😀" \\n \u2028'])
def test_any_text_is_saved_as_toml(text: str, tmp_path: Path) -> None:
    cluster = replace(SELENE, name=text, device=replace(DEVICE, name=text))
    cluster.save(tmp_path / "mine.toml", text, {"network": text})
    assert Cluster.load(tmp_path / "mine.toml") == cluster


def test_only_a_device_with_graphs_says_what_a_launch_in_one_takes(tmp_path: Path) -> None:
    hopper = Cluster.load("dgx-h100")
    assert (DEVICE.graphed_launch_seconds, hopper.device.graphed_launch_seconds) == (0.0, 3.5e-6)
    for cluster in (SELENE, hopper):
        file = tmp_path / "mine.toml"
        cluster.save(file, "")
        assert Cluster.load(file) == cluster
        assert ("graphed" in file.read_text()) == (cluster is hopper)


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'dgx-a10' is not shipped \(did you mean dgx-a100\?\): expected one of"):
        Cluster.load("dgx-a10")
    with pytest.raises(ValueError, match=r"nowhere\.toml cannot be read as TOML: .*No such file"):
        Cluster.load("nowhere.toml")


def test_a_type_the_device_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="V100-SXM2-32GB has no bf16: expected one of fp16, fp32, fp64"):
        Cluster.load("dgx-1-v100").device.peak("bf16")


def gemm(rows: int, columns: int, inner: int) -> float:
    size = 2 * (rows * columns + rows * inner + columns * inner)
    return DEVICE.seconds(Work((Product(1, rows, columns, inner),), read=size, launches=0), "bf16")


def test_a_gemm_of_whole_waves_reaches_its_share_of_the_peak() -> None:
    rows, columns = 256 * 12, 128 * 9 * 4  # four waves of 108 tiles
    flops = 2 * rows * columns * 8192
    expected = flops / (312e12 * DEVICE.gemm_efficiency) + 4 * DEVICE.tile_seconds
    assert gemm(rows, columns, 8192) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("rows", "columns", "inner", "seconds"),
    [
        (2048, 4096, 4096, 109e-6),
        (16384, 4096, 1024, 249e-6),  # short tiles: 551 TFLOP/s, where 4096 inner elements reach 719
        (16384, 4096, 4096, 765e-6),
        (2048, 16384, 4096, 384e-6),
        (2048, 6144, 12288, 406e-6),
        (4096, 1024, 16384, 215e-6),
    ],
)
def test_a_product_takes_what_it_took_on_a_card(rows: int, columns: int, inner: int, seconds: float) -> None:
    """On an H100 in bfloat16, launched by itself."""
    alone = replace(Cluster.load("dgx-h100").device, graphed_launch_seconds=0.0)
    size = 2 * (rows * columns + rows * inner + columns * inner)
    work = Work((Product(1, rows, columns, inner),), read=size, launches=1)
    assert alone.seconds(work, "bf16") == pytest.approx(seconds, rel=0.1)


def test_a_fused_kernel_waits_for_no_wave() -> None:
    product, waits = Product(64, 2048, 2048, 64), replace(DEVICE, tile_seconds=1.0)
    fused, alone = Work((product,), read=10**6), Work((product,), read=10**9)
    assert waits.seconds(fused, "bf16") == DEVICE.seconds(fused, "bf16")
    assert waits.seconds(alone, "bf16") > DEVICE.seconds(alone, "bf16") + 1


def test_one_tile_more_is_one_wave_more() -> None:
    full = gemm(256 * 12, 128 * 9 * 4, 8192)
    assert gemm(256 * 12 + 1, 128 * 9 * 4, 8192) > 1.05 * full


def test_a_thin_gemm_is_bound_by_memory() -> None:
    size = 2 * (2048 * 8 * 2 + 2048 * 2048)
    rate = DEVICE.memory_bandwidth * DEVICE.memory_efficiency
    assert gemm(2048, 2048, 8) == pytest.approx(size / rate)


def test_elementwise_work_is_its_traffic_and_launches() -> None:
    work = Work(elementwise=10, read=2 * 10**9, written=10**9, launches=3)
    rate = DEVICE.memory_bandwidth * DEVICE.memory_efficiency
    assert DEVICE.seconds(work, "bf16") == pytest.approx(3e9 / rate + 3 * DEVICE.launch_seconds)
    assert DEVICE.seconds(work, "bf16", 0.5) == pytest.approx(1.5e9 / rate + 3 * DEVICE.launch_seconds)


@pytest.mark.parametrize(("elements", "seconds"), [(2**22, 14.5e-6), (2**24, 32e-6), (2**26, 99.4e-6), (2**28, 364e-6)])
def test_an_elementwise_kernel_takes_what_it_took_on_a_card(elements: int, seconds: float) -> None:
    """On an H100 in bfloat16: 2.1, 2.7 and 2.95 TB/s for the larger ones."""
    work = Work(read=2 * elements, written=2 * elements, launches=1)
    alone = replace(Cluster.load("dgx-h100").device, graphed_launch_seconds=0.0)
    assert alone.seconds(work, "bf16") == pytest.approx(seconds, rel=0.03)


def test_a_kernel_in_a_graph_is_launched_as_fast_as_graphs_do() -> None:
    graphed, work = replace(DEVICE, graphed_launch_seconds=1e-6), Work(read=10**9, launches=3)
    saved = 3 * (DEVICE.launch_seconds - 1e-6)
    assert DEVICE.seconds(work, "bf16") - graphed.seconds(work, "bf16") == pytest.approx(saved)


def test_elementwise_work_is_what_it_computes_where_that_is_longer() -> None:
    work, slow = Work(elementwise=10**9, read=2 * 10**9, launches=1), replace(DEVICE, vector_flops=1e10)
    computed = 20 * 10**9 / 1e10
    assert slow.seconds(work, "bf16") == pytest.approx(computed + DEVICE.launch_seconds)
    product = Product(1, 4096, 4096, 4096)
    both = replace(work, products=(product,), read=3 * 2 * 4096**2)
    alone = slow.seconds(replace(both, elementwise=0), "bf16")
    assert slow.seconds(both, "bf16") == pytest.approx(alone + computed)


def test_traffic_beside_a_gemms_own_comes_on_top() -> None:
    product = Product(1, 4096, 4096, 4096)
    own = 3 * 2 * 4096**2
    alone = DEVICE.seconds(Work((product,), read=own), "bf16")
    rate = DEVICE.memory_bandwidth * DEVICE.memory_efficiency
    assert DEVICE.seconds(Work((product,), read=own, written=10**9), "bf16") == pytest.approx(alone + 1e9 / rate)


def test_a_fused_kernel_takes_its_products_or_its_traffic() -> None:
    work = Work((Product(64, 2048, 2048, 64), Product(64, 2048, 64, 2048)), read=10**6)
    separate = replace(work, read=10**9)
    assert DEVICE.seconds(work, "bf16") < DEVICE.seconds(separate, "bf16")


def test_rings() -> None:
    inside, across, thin = list(range(8)), list(range(16)), list(range(0, 256, 8))
    card = SELENE.network.collective_rate
    assert SELENE.ring_rate(inside) == SELENE.node.collective_rate
    assert SELENE.ring_rate(across) == pytest.approx(8 * card)  # one ring has all cards
    assert SELENE.ring_rate(thin) == pytest.approx(card)  # eight share them
    assert replace(SELENE, nics_per_node=2).ring_rate(thin) == pytest.approx(card / 4)
    expected = 2 * 31 * (1e9 / 32 / card + SELENE.network.latency_seconds)
    assert SELENE.all_reduce_seconds(1e9, thin) == pytest.approx(expected)
    assert SELENE.all_reduce_seconds(1e9, [3]) == 0
    assert SELENE.all_reduce_seconds(1e9, inside) == 2 * SELENE.all_gather_seconds(1e9, inside)


def test_messages_that_share_a_card_share_its_rate() -> None:
    """Whether their senders, or their receivers, are tensor ranks or replicas; a device has the card next to it."""
    rate, latency = SELENE.network.message_rate, SELENE.network.latency_seconds
    whole_node, neighbours, apart = ([(i, i + 8) for i in ranks] for ranks in (range(8), (6, 7), (0, 2, 4, 6)))
    few = replace(SELENE, nics_per_node=4)
    for cluster, pairs, sharing in (
        *((SELENE, pairs, 1) for pairs in (whole_node, neighbours, apart)),
        *((few, whole_node, 2), (few, neighbours, 2), (few, apart, 1), (few, [(0, 8), (0, 9), (0, 1)], 2)),
        *((few, [(0, 8), (8, 0)], 1), (few, [(0, 8), (16, 9)], 2), (replace(SELENE, nics_per_node=1), whole_node, 8)),
    ):
        link = cluster.slowest_link(pairs)
        assert link.send_seconds(1e9) == pytest.approx(sharing * 1e9 / rate + latency), (cluster.nics_per_node, pairs)
        assert cluster.slowest_link(pairs[::-1]) == link
        assert link.send_seconds(0) == 0
    assert SELENE.slowest_link([(0, 7), (8, 9)]) == SELENE.node
