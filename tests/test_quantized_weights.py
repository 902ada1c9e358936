"""Frozen weights that bitsandbytes has quantized, under adapters: read, divided by blocks, dequantized in a product."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

import autoptd
from autoptd.capture.quantized_modules import QuantizedLinear, read_quantized
from autoptd.compiled import CompiledProgram
from autoptd.passes.cost.work import backward_work, forward_work
from autoptd.passes.ir.program import find_trained
from autoptd.runtime import collectives, kernels
from autoptd.runtime.kernels.quantized_linear import dequantize
from autoptd.runtime.weights.file_tensor import FileTensor
from tests.ranks import run_ranks
from tests.test_peft import batch, compile_adapted, lora

bitsandbytes = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

KINDS = ["nf4", "fp4", "int8"]
SHAPES = {"vocab_size": 96, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 16}


def quantize(linear: nn.Linear, kind: str, **options: Any) -> nn.Module:
    sizes = linear.in_features, linear.out_features, linear.bias is not None
    if kind == "int8":
        layer = bitsandbytes.nn.Linear8bitLt(*sizes, has_fp16_weights=False)
    else:
        layer = bitsandbytes.nn.Linear4bit(*sizes, quant_type=kind, **{"compute_dtype": torch.float32, **options})
    layer.load_state_dict(linear.state_dict())
    quantized: nn.Module = layer.to(linear.weight.dtype).to("cpu")  # which quantizes
    return quantized


def adapt(kind: str | None, **changes: Any) -> nn.Module:
    """A Llama with adapters that do something, on linear layers that are quantized but for the head."""
    torch.manual_seed(0)
    base: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPES | HEADS | changes, use_cache=False))
    for name, part in list(base.model.named_modules()):
        if isinstance(part, nn.Linear) and kind is not None:
            base.model.set_submodule(name, quantize(part, kind))
    model: Any = peft.get_peft_model(base, lora())
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model.train()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return adapt("nf4")


@pytest.fixture(scope="module")
def program(model: nn.Module) -> CompiledProgram:
    return compile_adapted(model, (2, 1, 1))


# One layer


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_has_the_bits_of_bitsandbytes(kind: str, dtype: torch.dtype, nested: bool) -> None:
    """Of its result and of its gradient, for which bitsandbytes rounds weights to the dtype that they had."""
    torch.manual_seed(0)
    layer = quantize(nn.Linear(128, 24).to(dtype), kind, compress_statistics=nested)
    own = read_quantized(layer)
    assert isinstance(own, QuantizedLinear)
    x, y = (torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2))
    expected, found = layer(x), own(y)
    (expected.square().sum() / 2).backward()
    (found.square().sum() / 2).backward()
    assert torch.equal(found, expected)
    torch.testing.assert_close(y.grad, x.grad, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("size", [32, 96])
def test_blocks_that_cross_rows_are_taken_apart(size: int, kind: str) -> None:
    """As on a GPU: each number within half a step of its table, of its block's largest. (On CPUs some are wrong.)"""
    linear = nn.Linear(size, 8, bias=False)
    own: Any = read_quantized(quantize(linear, kind))
    blocks = linear.weight.detach().view(-1, 64)
    steps = own.quant_map[:, 1].unique().diff().max() / 2 * blocks.abs().amax(1, keepdim=True)
    found = dequantize(own.weight, own.absmax, own.quant_map, torch.float32).view(-1, 64)
    assert (found - blocks).abs().le(steps * 1.001).all()


def test_numbers_in_other_storage_are_the_same() -> None:
    linear = nn.Linear(64, 8)
    plain, wide = (
        dict(read_quantized(quantize(linear, "nf4", **more)).state_dict())
        for more in ({}, {"quant_storage": torch.float32})
    )
    assert all(torch.equal(wide[name], own) for name, own in plain.items())


def test_the_backward_keeps_no_weight() -> None:
    own: Any = read_quantized(quantize(nn.Linear(128, 64, bias=False), "nf4"))
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        own(torch.randn(4, 128).requires_grad_())
    held = {tensor.data_ptr() for tensor in (*own.parameters(), *own.buffers())}
    assert {tensor.data_ptr() for tensor in kept} == held
    wide = own.weight, own.absmax.double(), own.quant_map.double()
    x = torch.randn(2, 128, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: kernels.quantized_linear(x, *wide), x)


class Own(bitsandbytes.nn.LinearNF4):  # type: ignore[misc, name-defined]
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x) * 2
        return result


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Own(64, 8).to("cpu"), "weight is a Params4bit"),
        (bitsandbytes.nn.EmbeddingNF4(8, 64).to("cpu"), "weight is a Params4bit"),
        (bitsandbytes.nn.LinearNF4(64, 8), "weight is a Params4bit"),
    ],
    ids=["another forward", "another layer", "not quantized yet"],
)
def test_others_are_refused(layer: nn.Module, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        autoptd.compile(layer, (1, 1, 1), example_inputs=(torch.rand(2, 64),), loss_fn=torch.sum)


def test_bytes_of_two_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight is quantized with 65 inputs.*llm_int8_skip_modules"):
        read_quantized(bitsandbytes.nn.LinearNF4(65, 8).to("cpu"))


# Models


MESHES = [(2, 1, 1), (2, 2, 1), (1, 2, 2)]


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        pytest.param(kind, mesh, marks=() if mesh == (2, 2, 1) and kind != "fp4" else pytest.mark.slow)
        for kind in KINDS
        for mesh in MESHES
    ],
)
def test_adapters_have_the_gradients_of_the_dequantized_model(kind: str, mesh: tuple[int, int, int]) -> None:
    model = adapt(kind)
    program = compile_adapted(model, mesh)
    assert program.check() == ()
    report = program.verify()
    assert report.passed, report
    assert {*report.gradient_errors} == {n for n, p in model.named_parameters() if p.requires_grad}
    assert max(report.gradient_errors.values()) < 1e-12


def test_rows_and_whole_blocks_are_divided(program: CompiledProgram) -> None:
    """One all-reduce in half a layer, as with a base of floats, and half of the bytes."""
    targets = [node.target for stage in program.stages for node in stage.graph.nodes]
    assert targets.count(kernels.quantized_linear) == targets.count(kernels.add_linear) == 14
    assert targets.count(collectives.reduce_from_tensor) == 2 * SHAPES["num_hidden_layers"] + 1
    packed = [p for n, p in program.manifest.parameters.items() if n.endswith(("base_layer.weight", "absmax"))]
    for parameter in packed:
        local = parameter.local_shape(program.mesh.axes)
        assert torch.Size(local).numel() == torch.Size(parameter.shape).numel() / 2


def test_where_blocks_do_not_divide_the_axis_stays_whole() -> None:
    """Of 192 = 3 blocks. The log says why."""
    program = compile_adapted(adapt("nf4", intermediate_size=192, num_hidden_layers=1), (2, 1, 1))
    whole = [n for n, p in program.manifest.parameters.items() if not p.placement.is_divided]
    assert [n.split(".")[-3] for n in whole if n.endswith("base_layer.weight")] == [
        *("gate_proj", "up_proj", "down_proj")
    ]
    assert any("has one scale for a block of it" in line for line in program.log)
    assert program.verify().passed


def test_the_products_of_the_base_are_counted(program: CompiledProgram) -> None:
    """As many FLOPs, forward and backward, as with a base of floats."""
    plain = compile_adapted(adapt(None), (2, 1, 1))
    found = []
    for (stage,) in (program.stages, plain.stages):
        trained = find_trained(stage)
        works = [w for n in stage.graph.nodes for w in (forward_work(n), backward_work(n, trained))]
        found.append(sum(product.flops for work in works for product in work.products))
    assert found[0] == found[1]


def test_the_proof_reads_scales_beside_their_blocks(program: CompiledProgram) -> None:
    name = "base_model.model.model.layers.0.self_attn.o_proj.base_layer.absmax"
    known = program.manifest.parameters
    other = replace(known[name], shape=(256, 2), placement=type(known[name].placement)())
    manifest = replace(program.manifest, parameters={**known, name: other})
    with pytest.raises(autoptd.ProgramError, match=r"the scales .*absmax.* is whole: expected both divided alike"):
        replace(program, manifest=manifest).check()


def test_a_step_has_bitsandbytes_gradients_and_gives_adapters(model: Any, tmp_path: Path) -> None:
    """On two ranks; the state of adapters loads into the plain model."""
    program = compile_adapted(model, (2, 1, 1))
    model.zero_grad()
    model(**batch(2)).loss.backward()

    def step(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        parallel = program.bind()
        parallel(**batch(2)).loss.backward()
        whole = {n: p.grad for n, p in parallel.named_parameters() if p.grad is not None and "o_proj.lora_B" in n}
        return parallel.full_state_dict(), whole

    (state, gradients), _ = run_ranks(step, 2)
    assert len(gradients) == SHAPES["num_hidden_layers"]
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-4, atol=1e-7)
    model.save_pretrained(tmp_path, state_dict=state)
    other: Any = adapt("nf4")
    loaded = peft.PeftModel.from_pretrained(other.unload(), tmp_path)
    own = model.state_dict()
    assert all(torch.equal(own[n], x) for n, x in loaded.state_dict().items() if "lora_" in n)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_weights_are_read_from_what_bitsandbytes_saves(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a module, a state_dict and a file, of whose bytes a rank reads its own."""
    model = adapt(kind, num_hidden_layers=1)
    program = compile_adapted(model, (2, 1, 1))
    save_file({n: x.contiguous() for n, x in model.state_dict().items()}, tmp_path / "model.safetensors")
    read: list[int] = []
    whole = FileTensor.read

    def count(self: FileTensor, *rows: slice) -> Tensor:
        found = whole(self, *rows)
        if self.name.endswith("q_proj.base_layer.weight"):
            read.append(found.numel())
        return found

    monkeypatch.setattr(FileTensor, "read", count)

    def bind(rank: int) -> tuple[list[list[Tensor]], list[int]]:
        sources: Any = (None, model, model.state_dict(), tmp_path)
        return [[*map(torch.detach, program.bind(weights=w).state_dict().values())] for w in sources], read

    size = 256 * 256 // (1 if kind == "int8" else 2)
    for (expected, *others), read in run_ranks(bind, 2):
        assert read == [size // 2]
        for found in others:
            assert all(map(torch.equal, found, expected))
