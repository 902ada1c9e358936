"""A model on the meta device begins as its own constructor would have it; what is not certain is refused."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import autoptd
from autoptd.compiled import CompiledProgram
from autoptd.runtime.program.placement import Draw
from samples.gpt import GPT, GPTConfig
from samples.huggingface import make_gpt2, make_llama

SIZES = GPTConfig(vocab_size=256, block_size=16, n_layer=4, n_head=4, n_embd=32)
ONE, ZERO = (Draw("constant", value=1.0),), (Draw("constant"),)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def compile_model(model: nn.Module, **options: Any) -> CompiledProgram:
    return autoptd.compile(model, (1, 1, 1), num_microbatches=1, **options)


def compile_tiny(model: nn.Module, **options: Any) -> CompiledProgram:
    example = {"ids": torch.zeros(1, 4, dtype=torch.long)}
    return compile_model(model, example_inputs=example, **options)


def initial(program: CompiledProgram) -> dict[str, tuple[Draw, ...]]:
    return {n: p.initial for n, p in program.manifest.parameters.items() if p.kind == "parameter"}


def refusal(program: CompiledProgram) -> str:
    """Why bind wants weights."""
    assert not any(initial(program).values())
    (entry,) = [entry for entry in program.log if entry.startswith("initialise: ")]
    assert entry == f"initialise: bind needs weights=: {program.manifest.uninitialized}"
    with pytest.raises(ValueError, match="Give weights= to bind, or initializer= to compile") as caught:
        program.bind(device="cpu")
    assert program.manifest.uninitialized in str(caught.value)
    return program.manifest.uninitialized


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(SIZES),
    "gpt2": lambda: make_gpt2(SIZES),
    "llama": lambda: make_llama(SIZES),
    "gpt-neox": lambda: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=16,
            use_cache=False,
        )
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_distributed_as_on_a_real_device(name: str) -> None:
    """Every parameter's mean and deviation against a real model's: within 4 sigma, 1 in 16,000 for each."""
    model = on_meta(MODELS[name])
    before = copy.deepcopy(model.state_dict())
    program = compile_model(model)
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    assert model.state_dict().keys() == before.keys()
    found = program.bind(device="cpu").full_state_dict()
    torch.manual_seed(1)
    real = MODELS[name]()
    real.load_state_dict(found, strict=True)
    torch.manual_seed(2)
    expected = MODELS[name]().state_dict()
    assert found.keys() == expected.keys()
    scaled = 0
    for key, whole in expected.items():
        own, count = found[key].double(), whole.numel()
        if not float(whole.double().var()):
            assert torch.equal(found[key], whole), key
            continue
        std = float(whole.double().std())
        assert abs(float(own.mean() - whole.double().mean())) < 4 * std * math.sqrt(2 / count), key
        # The error of a normal sample's deviation is std / sqrt(2 n); there are two samples.
        assert abs(float(own.std()) - std) < 4 * std / math.sqrt(count), key
        assert len(own.unique()) > 0.9 * count or own.dtype is not torch.float64
        scaled += key.endswith("c_proj.weight") and abs(float(own.std()) - 0.02 / math.sqrt(8)) < 0.0005
    assert scaled == (8 if name in ("gpt", "gpt2") else 0), "the scaled projections onto the residual path"


def test_recipes_of_gpt2() -> None:
    found = initial(compile_model(on_meta(MODELS["gpt2"])))
    table = (Draw("normal", std=0.02),)
    assert found["transformer.wte.weight"] == found["transformer.h.3.attn.c_attn.weight"] == table
    assert found["transformer.h.0.mlp.c_proj.weight"] == (Draw("normal", std=0.02 / math.sqrt(8)),)
    assert found["transformer.h.0.ln_1.weight"] == ONE
    assert found["transformer.h.0.attn.c_attn.bias"] == ZERO
    assert "lm_head.weight" not in found, "tied: drawn once"


def test_a_padding_row_and_a_tie_as_transformers_leaves_them() -> None:
    """The head is initialised too and then tied: the table's row of zeros stays."""
    config = transformers.OPTConfig(
        vocab_size=256,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        word_embed_proj_dim=32,
        pad_token_id=1,
        use_cache=False,
    )
    found = initial(compile_model(on_meta(lambda: transformers.OPTForCausalLM(config))))
    assert found["model.decoder.embed_tokens.weight"] == (Draw("normal", std=0.02), Draw("constant", run=(32, 64)))


def test_buffers_have_their_values() -> None:
    program = compile_model(on_meta(MODELS["llama"]))
    expected = dict(MODELS["llama"]().named_buffers())
    assert program.buffers.keys() == expected.keys()
    assert all(torch.equal(program.buffers[name], expected[name]) for name in expected)


@dataclass
class TinyConfig:
    std: float = 0.5
    width: int = 8


class Tiny(nn.Module):
    """What the tests below begin from; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.table(ids))
        loss: Tensor = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
        return loss


class Configured(Tiny):
    """nanoGPT's manner: applied functions, then names."""

    def __init__(self, config: TinyConfig, scale: float = 2.0) -> None:
        super().__init__()
        print("this model has parameters")
        self.config = config
        self.scale = scale
        self.apply(self._write)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.constant_(parameter, scale)

    def _write(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=self.config.std)


class Unkept(Tiny):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(size, 8)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).view(1, 4, 4), persistent=False)


BOUND = 1 / math.sqrt(8)


def test_the_constructor_is_run_again_on_the_arguments_that_it_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    config = TinyConfig(std=0.125)
    state = torch.get_rng_state()
    program = compile_tiny(on_meta(lambda: Configured(config, 3.0)))
    found = initial(program)
    assert found["table.weight"] == (Draw("normal", std=0.125),)
    assert found["head.bias"] == (Draw("constant", value=3.0),)
    assert [round(x, 7) for x in (found["head.weight"][0].low, found["head.weight"][0].high)] == [
        round(-BOUND, 7),
        round(BOUND, 7),
    ]
    assert "initialise: 3 parameters as Configured(self.config, self.scale) does" in program.log
    assert capsys.readouterr().out.count("this model has parameters") == 1
    assert torch.equal(torch.get_rng_state(), state), "the user's random numbers are left alone"
    weights = program.bind(device="cpu").state_dict()
    assert torch.equal(weights["head.bias"], torch.full((16,), 3.0))
    assert float(weights["head.weight"].abs().max()) <= BOUND


def test_an_initializer_goes_on_from_what_the_constructor_writes() -> None:
    def halve(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("table.weight").mul_(0.5)

    program = compile_tiny(on_meta(lambda: Configured(TinyConfig(std=0.125), 3.0)), initializer=halve)
    found = initial(program)
    assert found["table.weight"] == (Draw("normal", std=0.0625),)
    assert found["head.bias"] == (Draw("constant", value=3.0),)
    said = "initialise: 3 parameters as initializer= does, after Configured(self.config, self.scale)"
    assert said in program.log
    unknown = compile_tiny(on_meta(lambda: Unkept(16)), initializer=halve)
    assert refusal(unknown) == "table.weight: nothing writes it"


def test_an_initializer_sees_what_was_set_after_building() -> None:
    def build() -> nn.Module:
        model = Configured(TinyConfig(std=0.125), 3.0)
        model.later = 0.75  # type: ignore[assignment]
        return model

    def write(model: nn.Module) -> None:
        nn.init.normal_(model.get_parameter("table.weight"), std=float(model.later))  # type: ignore[arg-type]

    found = initial(compile_tiny(on_meta(build), initializer=write))
    assert found["table.weight"][-1] == Draw("normal", std=0.75)


def test_an_initializer_writes_all_where_the_constructor_is_not_known() -> None:
    def write_table(model: nn.Module) -> None:
        assert isinstance(model, Unkept)
        nn.init.trunc_normal_(model.table.weight, std=0.1, a=-0.2, b=0.2)

    def write(model: nn.Module) -> None:
        assert isinstance(model, Unkept)
        write_table(model)
        model.head.reset_parameters()

    model = on_meta(lambda: Unkept(16))
    assert refusal(compile_tiny(model, initializer=write_table)) == "head.weight: nothing writes it"
    program = compile_tiny(model, initializer=write)
    found = initial(program)
    assert found["table.weight"] == (Draw("truncated_normal", std=0.1, low=-0.2, high=0.2),)
    assert found["head.bias"][0].kind == "uniform"
    assert "initialise: 3 parameters as initializer= does" in program.log
    table = program.bind(device="cpu").state_dict()["table.weight"]
    assert 0.1 < float(table.abs().max()) <= 0.2
    with pytest.raises(ValueError, match="initializer= is for a model on the meta device, and this one has"):
        compile_tiny(Unkept(16), initializer=write)


def test_a_saved_program_draws_the_same_weights(tmp_path: Path) -> None:
    program = compile_model(on_meta(MODELS["gpt"]), seed=5)
    program.save(tmp_path)
    text = (tmp_path / "manifest.json").read_text()
    assert '"initial": [{"kind": "normal", "std": 0.02}]' in text
    first = program.bind(device="cpu").state_dict()
    again = autoptd.load(tmp_path).bind(device="cpu").state_dict()
    other = compile_model(on_meta(MODELS["gpt"]), seed=6).bind(device="cpu").state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["wte.weight"], other["wte.weight"])
    assert not torch.equal(first["h.0.attn.c_attn.weight"], first["h.1.attn.c_attn.weight"])


def test_a_saved_program_says_why_it_needs_weights(tmp_path: Path) -> None:
    program = compile_tiny(on_meta(lambda: Unkept(16)))
    program.save(tmp_path)
    loaded = autoptd.load(tmp_path)
    with pytest.raises(ValueError, match=r"Unkept\.__init__ cannot be called again"):
        loaded.bind(device="cpu")
    assert loaded.bind(device="cpu", weights=Unkept(16)) is not None


def test_weights_that_are_given_are_never_drawn() -> None:
    model = on_meta(MODELS["gpt"])
    program = compile_model(model)
    state = GPT(SIZES).state_dict()
    bound = program.bind(device="cpu", weights=state).state_dict()
    assert all(torch.equal(bound[name], state[name]) for name in bound)
    del state["h.1.ln_1.bias"]
    with pytest.raises(ValueError, match=r"1 of the model's 52 tensors are not .*: h\.1\.ln_1\.bias\[32\]; give"):
        program.bind(device="cpu", weights=state)
    with pytest.raises(ValueError, match="is on the meta device and has no values"):
        program.bind(device="cpu", weights=model)


def test_a_real_tensor_of_a_meta_model_stays() -> None:
    model = on_meta(MODELS["gpt"])
    bias = torch.linspace(0, 1, 32)
    model.get_submodule("h.2.ln_1").register_parameter("bias", nn.Parameter(bias))
    bound = compile_model(model).bind(device="cpu").state_dict()
    assert torch.equal(bound["h.2.ln_1.bias"], bias)
    assert torch.equal(bound["h.1.ln_1.bias"], torch.zeros(32))


class Orthogonal(Tiny):
    def __init__(self) -> None:
        super().__init__()
        nn.init.orthogonal_(self.head.weight)


class Listed(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.head.bias = nn.Parameter(torch.arange(16.0))


class Doubled(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.second = copy.deepcopy(self.head)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = super().forward(ids) + self.second(self.table(ids)).sum()
        return loss


class Looking(Tiny):
    def __init__(self) -> None:
        super().__init__()
        if not self.head.weight.is_meta and self.head.weight.std() > 1:
            nn.init.zeros_(self.head.weight)


class Shadowed(Tiny):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = 2 * width


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = F.rms_norm(x, (8,)) * self.weight
        return normed


class OwnNorm(Unkept):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.norm = Norm(8)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = super().forward(ids) + self.norm(self.table(ids)).sum()
        return loss


class Wrapping(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        vars(self)["inner"] = self.add = inner

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.add(ids)
        return loss


class Chain(nn.Sequential):
    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self[0](ids)
        return loss


HERE = r"test_deferred_init\.py:\d+: "


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            Orthogonal,
            rf"^head\.weight: .*{HERE}nn\.init\.orthogonal_\(self\.head\.weight\) \(aten\.copy_\) cannot be "
            "described element by element$",
        ),
        (Listed, r"^head\.bias: it holds values that are neither constant nor random numbers$"),
        (Doubled, r"^second\.weight is a copy of the random numbers of head\.weight$"),
        (Looking, rf"^Looking cannot be built again \(RuntimeError: .* at .*{HERE}if not self\.head\.weight"),
        (lambda: Shadowed(3), r"^Shadowed\.__init__ does not keep its argument width in self\.width as it is"),
        (lambda: Unkept(16), r"^Unkept\.__init__ cannot be called again: it keeps no self\.size$"),
        (lambda: Chain(Tiny()), r"^Chain\.__init__ cannot be called again: it keeps no self\.args$"),
        (lambda: Wrapping(Tiny()), r"^Wrapping\.__init__ .* again: self\.inner holds modules or tensors$"),
    ],
)
def test_uncertain_initialisation_is_refused(make: Callable[[], nn.Module], why: str) -> None:
    reason = refusal(compile_tiny(on_meta(make)))
    assert re.search(why, reason), reason


def test_changes_after_construction_are_refused() -> None:
    def changed(make: Callable[[], nn.Module], change: Callable[[Any], object]) -> str:
        model = on_meta(make)
        change(model)
        return refusal(compile_tiny(model))

    def build() -> nn.Module:
        return Configured(TinyConfig())

    written = changed(build, lambda model: nn.init.normal_(model.table.weight, std=3.0))
    assert written == "table.weight was written 1 times more, after the model was built"
    again = changed(Tiny, lambda model: model.head.reset_parameters())
    assert again == "head.weight was written 1 times more, after the model was built"
    replaced = changed(build, lambda model: setattr(model, "head", nn.Linear(8, 16, bias=False, device="meta")))
    assert replaced.startswith("Configured(config, scale) builds another model: head.bias is [16], not ")
    kind = changed(build, lambda model: setattr(model, "table", type("Table", (nn.Embedding,), {})(16, 8)))
    assert "table is a Embedding, not table is a Table" in kind


def reset_torchs(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.reset_parameters()


def test_an_initializer_that_does_not_do_is_refused() -> None:
    nothing_for_the_norm = reset_torchs

    def fail(model: nn.Module) -> None:
        raise KeyError("layer 3")

    model = on_meta(lambda: OwnNorm(16))
    assert refusal(compile_tiny(model, initializer=nothing_for_the_norm)) == "norm.weight: nothing writes it"
    assert "initializer= fails (KeyError: 'layer 3' at " in refusal(compile_tiny(model, initializer=fail))


def test_a_buffer_without_values_is_named() -> None:
    class Masked(OwnNorm):
        mask: Tensor

        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) + self.mask.sum()

    def write(model: nn.Module) -> None:
        reset_torchs(model)
        nn.init.ones_(model.get_parameter("norm.weight"))

    program = compile_tiny(on_meta(lambda: Masked(16)), initializer=write)
    with pytest.raises(ValueError, match=r"1 tensors are on the meta device and have no values \(mask\)"):
        program.bind(device="cpu")
