"""program.cost is the paper's equations, by algebra; and in numbers what the operators' work says."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import autoptd
from autoptd.passes.cost.saved_tensors import Ledger, count_bytes
from autoptd.passes.cost.work import backward_work, forward_work
from autoptd.passes.ir.nodes import info
from autoptd.passes.ir.program import find_trained, recomputed_groups
from autoptd.passes.operators.quantities import Work
from autoptd.passes.tensor_parallel.symbols import symbol
from samples.gpt import GPT, GPTConfig
from tests.generated_models import ModelConfig, make_batch, make_model
from tests.plain_models import HUGGING_FACE, LENGTH

V, a, b, d, f, h, l, m, s, t = map(symbol, "Vabdfhlmst")  # noqa: E741
B = b * d * m


def sample(batch: int = 2, layers: int = 3, dropout: float = 0.0) -> tuple[nn.Module, dict[str, Any]]:
    with torch.device("meta"):
        model = GPT(GPTConfig(64, LENGTH, layers, 4, 32, dropout))
    return model, {name: torch.zeros(batch, LENGTH, dtype=torch.long) for name in ("idx", "targets")}


def gpt2(batch: int = 2, layers: int = 3, **sizes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Hugging Face's, without dropout."""
    sizes = {"vocab_size": 64, "n_positions": LENGTH, "n_embd": 32, "n_head": 4, "n_layer": layers} | sizes
    config = transformers.GPT2Config(**sizes, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    ids = torch.zeros(batch, config.n_positions, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids.clone()}


def hugging_face(name: str, batch: int = 2) -> tuple[nn.Module, dict[str, Any]]:
    ids = torch.zeros(batch, LENGTH, dtype=torch.long)
    return HUGGING_FACE[name](), {"input_ids": ids, "labels": ids.clone()}


def generated(**options: Any) -> tuple[nn.Module, dict[str, Any]]:
    config = ModelConfig(**options)
    return make_model(config), make_batch(config, 2)


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "sample": sample,
    "one sequence": lambda: sample(1),
    "dropout": lambda: sample(dropout=0.1),
    "gpt2": gpt2,
    "llama, grouped queries": lambda: hugging_face("llama"),
    "bloom": lambda: hugging_face("bloom"),
    "gemma2": lambda: hugging_face("gemma2"),
    "falcon, one key": lambda: hugging_face("falcon"),
    "gated": lambda: generated(rotary=True, gated=True, rms_norm=True, kv_heads=2, bias=False),
    "written": lambda: generated(attention="written", vocabulary=67, tied=True),
}


def compile_model(built: tuple[nn.Module, dict[str, Any]], mesh: Any = (2, 1, 1), **options: Any) -> Any:
    model, batch = built
    return autoptd.compile(model, mesh, example_inputs=batch, **options)


def is_zero(expression: sympy.Expr) -> bool:
    return bool(sympy.simplify(expression) == 0)


# The paper's equations


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1), (4, 2, 3)], ids=str)
@pytest.mark.parametrize("build", [sample, gpt2])
def test_parameters_are_equation_2_and_a_final_norm(build: Any, mesh: Any) -> None:
    """12 l h^2 (1 + 13/12h + (V+s)/12lh); both have a LayerNorm behind the last layer, which the paper has not."""
    cost = compile_model(build(), mesh).cost
    equation = 12 * l * h**2 * (1 + sympy.Rational(13, 12) / h + (V + s) / (12 * l * h))
    assert is_zero(cost.parameters.subs(f, 4 * h) - equation - 2 * h)


@pytest.mark.parametrize(
    ("recompute", "mesh"),
    [
        ("none", (2, 1, 1)),
        ("full", (4, 2, 3)),
        *(
            pytest.param(*way, marks=pytest.mark.slow)
            for way in [("full", (2, 1, 1)), ("none", (4, 2, 3)), ("none", (1, 1, 1)), ("full", (1, 1, 1))]
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("build", [sample, gpt2, lambda: sample(dropout=0.1), lambda: sample(1)])
def test_flops_are_equation_3(build: Any, mesh: Any, recompute: str) -> None:
    """Layers in three or four passes, the head in three; causal attention in full."""
    cost = compile_model(build(), mesh, recompute=recompute).cost
    passes, head = (96, 16) if recompute == "full" else (72, 12)
    equation = passes * B * s * l * h**2 * (1 + s / (6 * h) + V / (head * l * h))
    assert is_zero(cost.flops.subs(f, 4 * h) - equation)


@pytest.mark.parametrize("build", [sample, gpt2])
def test_a_layer_sends_8bsh_elements_over_the_tensor_group(build: Any) -> None:
    """Two all-reduces forward and two backward, by rings (SC21 §3.2); full recomputation repeats one of them."""
    sent = [compile_model(build(), recompute=r).cost.layers[l].communicated for r in ("none", "full")]
    elements = 8 * b * s * h * (t - 1) / t
    assert is_zero(sent[0] / 4 - elements)
    assert is_zero(sent[1] / 4 - elements * sympy.Rational(5, 4))


def test_terms_that_the_paper_drops_are_shown() -> None:
    cost = compile_model(sample()).cost
    # A fused attention's backward computes 2 s^2 h per sequence and layer once more.
    assert is_zero(cost.dropped["scores_again"] - 2 * B * s**2 * h * l)
    rest = cost.dropped["elementwise"]
    assert 0 < cost.evaluate(rest) < 0.05 * cost.evaluate(cost.flops)
    assert {h, l, s, B.free_symbols.pop()} <= rest.free_symbols


def test_a_layer_checkpoint_is_its_input() -> None:
    cost = compile_model(sample(), recompute="full").cost
    assert is_zero(cost.layers[l].saved - 4 * b * s * h)


# By role


def test_the_flagship_is_named_by_role() -> None:
    """V = 2h, and as many heads as a head is large: 1008 B parameters, with 2 of its 128 layers here."""
    sizes = {"vocab_size": 51200, "n_positions": 2048, "n_embd": 25600, "n_head": 160}
    cost = compile_model(gpt2(1, 2, **sizes), (8, 1, 1), recompute="full").cost
    equation = 12 * l * h**2 * (1 + sympy.Rational(13, 12) / h + (V + s) / (12 * l * h))
    assert is_zero(cost.parameters.subs(f, 4 * h) - equation - 2 * h)
    assert cost.evaluate(cost.parameters, l=128) == 1_008_038_758_400
    assert cost.evaluate(cost.flops, l=128, m=512, d=6) == pytest.approx(
        96 * 3072 * 2048 * 128 * 25600**2 * (1 + 2048 / (6 * 25600) + 51200 / (16 * 128 * 25600))
    )
    assert cost.values | {m: 1, d: 1} == {
        V: 51200, h: 25600, a: 160, f: 102400, s: 2048, b: 1, l: 2, t: 8, m: 1, d: 1,
    }  # fmt: skip
    saved = compile_model(gpt2(1, 2, **sizes), (8, 1, 1)).cost.layers[l].saved
    assert a in saved.free_symbols  # a statistic per head and token


def test_grouped_queries_and_gated_widths_have_symbols() -> None:
    """q, o: h^2; k, v: h^2 g/a; three matrices of width f; two norms."""
    g = symbol("g")
    cost = compile_model(hugging_face("llama")).cost
    layer = 2 * h**2 + 2 * h**2 * g / a + 3 * f * h + 2 * h
    assert is_zero(cost.parameters - l * layer - 2 * V * h - h) or is_zero(cost.parameters - l * layer - V * h - h)
    assert cost.values[g] < cost.values[a]


def test_replicated_keys_are_computed_on_every_rank() -> None:
    """Two heads of keys and values over four tensor ranks."""
    g = symbol("g")
    cost = compile_model(hugging_face("llama"), (4, 1, 1)).cost
    assert cost.values[g] == 2
    assert cost.values[a] == 4
    projections = 4 * b * s * h**2 / t + 4 * b * s * h**2 * g / a
    rest = 4 * b * s**2 * h / t + 6 * b * s * h * f / t
    assert is_zero(cost.layers[l].forward - projections - rest)


def test_blooms_packed_heads_are_a_number() -> None:
    cost = compile_model(hugging_face("bloom")).cost
    layer = 12 * h**2 + 13 * h
    assert is_zero(cost.parameters.subs(f, 4 * h) - l * layer - V * h - 4 * h)
    attention = 24 * b * s * h**2 + 4 * b * s**2 * h
    assert is_zero(cost.layers[l].forward.subs(f, 4 * h) * t - attention)


# In numbers


def in_numbers(work: Work, cost: Any) -> list[Any]:
    products = [(p.batch, p.rows, p.columns, p.inner, p.repeated) for p in work.products]
    amounts = [work.elementwise, work.read, work.written, work.reduced, work.launches]
    return [sympy.sympify(x).subs(cost.values) for x in (*amounts, *(x for p in products for x in p))]


@pytest.mark.parametrize(
    ("tensor", "fuse"),
    [(2, True), *(pytest.param(*way, marks=pytest.mark.slow) for way in [(1, True), (1, False), (2, False)])],
)
@pytest.mark.parametrize("name", MODELS)
def test_symbols_and_numbers_agree_for_every_operator(name: str, tensor: int, fuse: bool) -> None:
    program = compile_model(MODELS[name](), (tensor, 1, 1), fuse=fuse)
    assert program.symbols is not None
    sizes = program.symbols.shape
    for stage in program.stages:
        trained = find_trained(stage)
        for node in stage.graph.nodes:
            for named, plain in (
                (forward_work(node, sizes), forward_work(node)),
                (backward_work(node, trained, sizes), backward_work(node, trained)),
            ):
                assert in_numbers(named, program.cost) == in_numbers(plain, program.cost), node


@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_saved_activations_are_the_ledgers(name: str, recompute: str) -> None:
    if name == "gemma2" and recompute == "full":
        pytest.skip("a local layer and a global one: no two are alike")
    program = compile_model(MODELS[name](), recompute=recompute)
    (stage,) = program.stages
    kept = count_bytes(Ledger(stage, program.mesh).kept(recomputed_groups(stage.graph)))
    assert program.cost.evaluate(program.cost.model.saved) == kept
    parameters = sum(torch.Size(p.shape).numel() for p in program.manifest.parameters.values())
    assert program.cost.evaluate(program.cost.parameters) <= parameters


@pytest.mark.parametrize("recompute", ["none", "full", "optimal"])
def test_a_boundary_is_kept_as_it_is_received(recompute: str) -> None:
    """Halves of a rotary table have gaps where they are made, and none once they were sent."""
    program = compile_model(MODELS["llama, grouped queries"](), (2, 2, 1), recompute=recompute)
    kept = [count_bytes(Ledger(stage, program.mesh).kept(recomputed_groups(stage.graph))) for stage in program.stages]
    assert [program.cost.evaluate(stage.saved) for stage in program.cost.stages] == kept
    for stage, interface in zip(program.stages, program.manifest.stages, strict=True):
        given = [node for node in stage.graph.nodes if info(node).role == "boundary"]
        sizes = (sum(s.nbytes() for s in Ledger(stage, program.mesh).storages([node])) for node in given)
        assert list(sizes) == [prod(own.shape) * own.dtype.itemsize for own in interface.receives]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_program_tells_the_cost_of_others(recompute: str) -> None:
    """Two sequences and three layers, evaluated for four and five."""
    cost, other = (compile_model(sample(*sizes, dropout=0.1), recompute=recompute).cost for sizes in ((2, 3), (4, 5)))
    for name in ("forward", "backward", "recomputed", "scores_again", "elementwise", "moved", "saved"):
        found = cost.evaluate(getattr(cost.model, name), b=4, l=5)
        assert found == other.evaluate(getattr(other.model, name)), name
    assert cost.evaluate(cost.parameters, l=5) == other.evaluate(other.parameters)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_decoder_layer_has_its_own_linears_of_the_encoders_output(tensor: int) -> None:
    """The tensor ranks compute those of all layers in one call."""

    def compile_t5(layers: int) -> Any:
        sizes: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "num_heads": 4}
        sizes |= {"num_layers": layers, "dropout_rate": 0.0, "decoder_start_token_id": 0}
        config = transformers.T5Config(**sizes)
        with torch.device("meta"):
            model = transformers.T5ForConditionalGeneration(config)
        ids = torch.zeros(2, LENGTH, dtype=torch.long)
        return compile_model((model, {"input_ids": ids, "labels": ids.clone()}), (tensor, 1, 1)).cost

    cost, other = compile_t5(3), compile_t5(5)
    for name in ("forward", "backward", "communicated"):
        found = cost.evaluate(getattr(cost.model, name), l=5, l2=5)
        assert found == other.evaluate(getattr(other.model, name)), name


def test_stages_add_up_to_the_model() -> None:
    whole, cut = (compile_model(sample(), mesh).cost for mesh in ((2, 1, 1), (2, 2, 1)))
    assert is_zero(
        whole.model.forward
        - sum(stage.forward for stage in cut.stages).subs(l, 3)
        - (whole.model.forward - whole.model.forward.subs(l, 3))
    )
    assert is_zero(whole.parameters - cut.parameters)  # tied ones once, though two stages hold them


def test_a_vision_model_costs_what_torch_counts() -> None:
    """The convolution of its patches too, which has no gradient of the picture."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "image_size": 32, "patch_size": 8, "num_labels": 10}
    config = transformers.ViTConfig(**sizes)
    config._attn_implementation = "eager"  # whose products torch counts
    model = transformers.ViTForImageClassification(config)
    batch = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(0, 10, (2,))}
    program = autoptd.compile(model, mesh=(1, 1, 1), num_microbatches=1, example_inputs=batch)
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    assert program.cost.evaluate(program.cost.flops) == counter.get_total_flops()


def test_a_loaded_program_knows_numbers(tmp_path: Path) -> None:
    program = compile_model(sample())
    program.save(tmp_path)
    loaded = autoptd.load(tmp_path)
    for name in ("parameters", "flops"):
        found = loaded.cost.evaluate(getattr(loaded.cost, name))
        assert found == program.cost.evaluate(getattr(program.cost, name))
    flops = loaded.cost.flops  # as many on any number of tensor ranks
    assert loaded.cost.evaluate(flops, t=4) == loaded.cost.evaluate(flops)


def test_a_symbol_that_is_none_is_refused() -> None:
    cost = compile_model(sample()).cost
    with pytest.raises(ValueError, match="'x' is no symbol of this program's cost: expected one of V, a, b"):
        cost.evaluate(cost.flops, x=3)
