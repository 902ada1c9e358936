"""Capture: any plain model, unchanged, becomes a one-stage Program with the same loss and gradients."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from autoptd.capture.export import capture
from autoptd.passes.ir.nodes import info
from autoptd.passes.ir.program import Program
from autoptd.passes.normal_form.constants import fold_constants
from autoptd.passes.normal_form.normalize import normalize
from autoptd.runtime.program.mesh import Mesh
from tests.interpret import run_graph
from tests.plain_models import HUGGING_FACE, LENGTH, PLAIN, VOCABULARY, PlainGPT

MESH = Mesh(1, 1, 1)


def batch(*names: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: torch.randint(0, VOCABULARY, (2, LENGTH)) for name in names}


def compiled(model: nn.Module, **options: Any) -> Program:
    return fold_constants(normalize(capture(model, mesh=MESH, **options)))


def assert_same(model: nn.Module, program: Program, inputs: dict[str, Tensor], loss: Tensor, rtol: float = 0) -> None:
    """Loss and every gradient of the program equal the model's own, bit for bit if no `rtol` is given."""
    model.zero_grad()
    loss.backward()
    weights = {
        name: tensor.detach().clone().requires_grad_(tensor.requires_grad) for name, tensor in model.named_parameters()
    }
    found = run_graph(program, weights, inputs)
    found.backward()
    torch.testing.assert_close(found, loss, rtol=rtol, atol=rtol)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            assert weights[name].grad is None, name
        else:
            torch.testing.assert_close(weights[name].grad, parameter.grad, rtol=rtol, atol=rtol, msg=name)


@pytest.mark.parametrize("name", [*PLAIN, *HUGGING_FACE])
def test_same_loss_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    model = {**PLAIN, **HUGGING_FACE}[name]().train()
    inputs = batch("idx", "targets") if name in PLAIN else batch("input_ids", "labels")
    program = compiled(model, example_inputs=inputs)
    result = model(**inputs)
    assert_same(model, program, inputs, result[1] if name in PLAIN else result.loss)
    for node in program.stages[0].graph.nodes:
        assert node.op in ("placeholder", "get_attr", "call_function", "output")
        assert node.op != "call_function" or "arange" not in str(node.target)
        for value in node.meta["val"] if isinstance(node.meta["val"], (list, tuple)) else [node.meta["val"]]:
            assert value is None or (value.device.type == "meta" and type(value) is Tensor)


def test_model_is_left_unchanged() -> None:
    model = PlainGPT(flash=False, dropout=0.1).eval()
    model.transformer["ln_f"].train()
    calls: list[int] = []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    before = {name: (id(t), t._version, t.data_ptr()) for name, t in model.state_dict(keep_vars=True).items()}
    modes = [module.training for module in model.modules()]
    attributes = {name: {k: id(v) for k, v in vars(module).items()} for name, module in model.named_modules()}
    values = copy.deepcopy(model.state_dict())
    capture(model, mesh=MESH, example_inputs=batch("idx", "targets"))
    assert modes == [module.training for module in model.modules()]
    assert before == {name: (id(t), t._version, t.data_ptr()) for name, t in model.state_dict(keep_vars=True).items()}
    assert all(torch.equal(values[name], tensor) for name, tensor in model.state_dict().items())
    for name, module in model.named_modules():
        assert attributes[name] == {k: id(v) for k, v in vars(module).items()}, name


def test_meta_weights_give_the_same_graph() -> None:
    inputs = batch("idx", "targets")
    with torch.device("meta"):
        empty = PlainGPT()
    texts = [str(compiled(model, example_inputs=inputs).stages[0].graph) for model in (PlainGPT(), empty)]
    assert texts[0] == texts[1]


def test_names_paths_and_lines() -> None:
    program = compiled(PlainGPT(dropout=0.1), example_inputs=batch("idx", "targets"))
    nodes = {node.name: node for node in program.stages[0].graph.nodes}
    assert list(nodes)[:3] == ["rank", "idx", "targets"]
    assert [info(nodes[name]).role for name in ("rank", "idx", "targets")] == ["rank", "input", "input"]
    assert nodes["h1_attn_c_attn"].target is torch.ops.aten.linear.default
    assert info(nodes["h1_attn_c_attn"]).path == "transformer.h.1.attn.c_attn"
    assert info(nodes["h1_attn_c_attn"]).line.startswith("plain_models.py:")
    assert nodes["h0_attn_split_2"].args == (nodes["h0_attn_split"], 2)
    assert nodes["h1_attn_c_attn_weight"].target == "transformer.h.1.attn.c_attn.weight"


def test_tied_frozen_and_buffers() -> None:
    model = PlainGPT(flash=False)
    model.transformer["wpe"].weight.requires_grad_(False)
    program = compiled(model, example_inputs=batch("idx", "targets"))
    parameters = program.stages[0].parameters
    assert program.aliases == {"lm_head.weight": "transformer.wte.weight"}
    assert "lm_head.weight" not in parameters
    assert not parameters["transformer.wpe.weight"].requires_grad
    assert parameters["transformer.wte.weight"].requires_grad
    assert parameters["transformer.h.0.attn.bias"].kind == "buffer"
    assert torch.equal(program.buffers["transformer.h.0.attn.bias"], model.get_buffer("transformer.h.0.attn.bias"))
    inputs = batch("idx", "targets")
    assert_same(model, program, inputs, model(**inputs)[1])


class Head(nn.Module):
    """A one-layer model whose output takes any form."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)
        self.form = form

    def forward(self, idx: Tensor, targets: Tensor) -> Any:
        logits = self.head(self.embedding(idx))
        return self.form(logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


@dataclasses.dataclass
class Result:
    logits: Tensor
    loss: Tensor


@pytest.mark.parametrize(
    ("form", "kind", "loss", "fields"),
    [
        (lambda logits, loss: loss, "tensor", "", ()),
        (lambda logits, loss: (logits, loss), "tuple", "1", ("0", "1")),
        (lambda logits, loss: {"loss": loss, "logits": logits}, "dict", "loss", ("loss", "logits")),
        (lambda logits, loss: Result(logits, loss), "dataclass", "loss", ("logits", "loss")),
    ],
)
def test_forms_of_loss(form: Callable[..., Any], kind: str, loss: str, fields: tuple[str, ...]) -> None:
    program = compiled(Head(form), example_inputs=batch("idx", "targets"))
    assert (program.output.kind, program.output.loss, program.output.fields) == (kind, loss, fields)
    if kind == "dataclass":
        assert program.output.type == f"{__name__}:Result"


def local_result(logits: Tensor, loss: Tensor) -> object:
    return dataclasses.make_dataclass("Own", ("logits", "loss"), namespace={"__qualname__": "f.<locals>.Own"})(
        logits, loss
    )


class LogitsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.positions = nn.Embedding(LENGTH, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])  # no device: works wherever the weights are
        logits: Tensor = self.head(self.embedding(tokens) + self.positions(places))
        return logits


class TokenLoss(nn.Module):
    def forward(self, logits: Tensor, answers: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), answers.flatten())


def token_loss(logits: Tensor, answers: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), answers.flatten())


@pytest.mark.parametrize("loss_fn", [token_loss, TokenLoss()])
@pytest.mark.parametrize("given", ["dict", "tuple", "none"])
def test_loss_fn(loss_fn: Callable[..., Tensor], given: str) -> None:
    model, inputs = LogitsOnly(), batch("tokens", "answers")
    examples = {"dict": inputs, "tuple": tuple(inputs.values()), "none": None}[given]
    program = compiled(model, example_inputs=examples, loss_fn=loss_fn, microbatch_size=2)
    assert [(i.name, i.shape, i.batch_dim) for i in program.inputs] == [
        ("tokens", (2, LENGTH), 0),
        ("answers", (2, LENGTH), 0),
    ]
    assert_same(model, program, inputs, loss_fn(model(inputs["tokens"]), inputs["answers"]))


@pytest.mark.parametrize("make", ["symbolic_trace", "export"])
def test_graph_modules(make: str) -> None:
    inputs = batch("idx", "targets")
    model: nn.Module = Head(lambda logits, loss: loss) if make == "symbolic_trace" else PlainGPT()
    if make == "symbolic_trace":
        graph_module = fx.symbolic_trace(model)
    else:
        graph_module = torch.export.export(model, tuple(inputs.values())).module()
    program = compiled(graph_module, example_inputs=inputs)
    result = graph_module(*inputs.values())
    assert_same(graph_module, program, inputs, result if make == "symbolic_trace" else result[1])
    if make == "export":
        names = {node.name for node in program.stages[0].graph.nodes}
        assert {"h0_attn_c_attn", "h1_ln2", "lm_head"} <= names


def test_inputs_from_config_and_tables() -> None:
    program = capture(HUGGING_FACE["llama"](), mesh=MESH, microbatch_size=3)
    assert [(i.name, i.shape) for i in program.inputs] == [("input_ids", (3, LENGTH)), ("labels", (3, LENGTH))]
    assert program.output.type == "transformers.modeling_outputs:CausalLMOutputWithPast"
    program = capture(PlainGPT(), mesh=MESH)
    assert [(i.name, i.shape) for i in program.inputs] == [("idx", (1, LENGTH)), ("targets", (1, LENGTH))]


def test_loss_module_with_a_buffer() -> None:
    weight = torch.rand(VOCABULARY, dtype=torch.float64)
    loss_fn = nn.CrossEntropyLoss(weight=weight)

    class Flat(LogitsOnly):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens).transpose(1, 2)

    model, inputs = Flat().double(), batch("tokens", "target")
    program = compiled(model, example_inputs=inputs, loss_fn=loss_fn)
    assert torch.equal(program.buffers["loss_fn.weight"], weight)
    # Classes in the middle are written as the last dimension, whose sums are in another order.
    assert_same(model, program, inputs, loss_fn(model(inputs["tokens"]), inputs["target"]), rtol=1e-14)


def test_vocabulary_smaller_than_length() -> None:
    class Characters(LogitsOnly):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Embedding(2 * VOCABULARY, 8)

    program = capture(Characters(), mesh=MESH, loss_fn=token_loss)
    assert [i.shape for i in program.inputs] == [(1, 2 * VOCABULARY)] * 2


class Awkward(Head):
    """Attributes that cannot be copied, tensors that are neither parameter nor buffer, bound methods."""

    def __init__(self) -> None:
        super().__init__(loss_only)
        self.lock = threading.Lock()
        self.scale = torch.rand(8)
        self.lists = [torch.rand(8)]
        self.read = self.embed

    def embed(self, idx: Tensor) -> Tensor:
        x: Tensor = self.embedding(idx) * self.scale + self.lists[0]
        return x

    def forward(self, idx: Tensor, targets: Tensor) -> Any:
        with self.lock:
            logits = self.head(self.read(idx))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_awkward_attributes() -> None:
    model, inputs = Awkward(), batch("idx", "targets")
    program = compiled(model, example_inputs=inputs)
    assert_same(model, program, inputs, model(**inputs))
    assert torch.equal(program.buffers["scale"], model.scale)


class Enclosing(Head):
    """Functions as attributes that lead to the model by what they close over: a tied head, a forward wrapped."""

    def __init__(self) -> None:
        super().__init__(loss_only)
        plain = self.embedding.forward

        def scale(x: Tensor, times: int) -> Tensor:
            return scale(x * self.head.bias.mean(), times - 1) if times else x

        def embed(idx: Tensor, *, times: int = 1) -> Tensor:
            return scale(plain(idx), times)

        self.embedding.forward = embed  # type: ignore[assignment]
        self.tied: Callable[[Tensor], Tensor] = lambda x: functional.linear(x, self.embedding.weight, self.head.bias)

    def forward(self, idx: Tensor, targets: Tensor) -> Any:
        return functional.cross_entropy(self.tied(self.embedding(idx)).flatten(0, 1), targets.flatten())


def test_functions_that_close_over_the_model() -> None:
    model, inputs = Enclosing(), batch("idx", "targets")
    program = compiled(model, example_inputs=inputs)
    assert_same(model, program, inputs, model(**inputs))


def test_functions_that_share_a_variable() -> None:
    """What one assigns another reads, in the program as in the model."""

    class Keeping(Head):
        def __init__(self) -> None:
            super().__init__(loss_only)
            kept = None

            def keep(x: Tensor) -> Tensor:
                nonlocal kept
                kept = x
                return x

            def add(x: Tensor) -> Tensor:
                return x if kept is None else x + kept

            self.keep, self.add = keep, add

        def forward(self, idx: Tensor, targets: Tensor) -> Any:
            x = self.keep(self.embedding(idx))
            return functional.cross_entropy(self.head(self.add(x.tanh())).flatten(0, 1), targets.flatten())

    model, inputs = Keeping(), batch("idx", "targets")
    program = compiled(model, example_inputs=inputs)
    assert_same(model, program, inputs, model(**inputs))


def test_lower_precision() -> None:
    model, inputs = PlainGPT().to(torch.bfloat16), batch("idx", "targets")
    program = compiled(model, example_inputs=inputs)
    assert_same(model, program, inputs, model(**inputs)[1])


def test_sequence_first_batch_dim() -> None:
    class SequenceFirst(Head):
        def forward(self, idx: Tensor, targets: Tensor) -> Any:
            return super().forward(idx, targets)

    model = SequenceFirst(lambda logits, loss: loss)
    inputs = {name: tensor.t().contiguous() for name, tensor in batch("idx", "targets").items()}
    program = capture(model, mesh=MESH, example_inputs=inputs, microbatch_size=2)
    assert [i.batch_dim for i in program.inputs] == [1, 1]


def test_nested_inputs_are_refused() -> None:
    class Nested(nn.Module):
        def forward(self, x: Tensor, batch: dict[str, Tensor]) -> Tensor:
            return x.sum() + batch["idx"].sum()

    with pytest.raises(TypeError, match=r"example input 'batch'\['idx'\] is a torch.Tensor of shape"):
        capture(Nested(), mesh=MESH, example_inputs={"x": torch.zeros(2), "batch": batch("idx")})


class Branching(Head):
    def forward(self, idx: Tensor, targets: Tensor) -> Any:
        if idx.sum() > 3:  # a branch on data
            targets = targets + 1
        return super().forward(idx, targets)


class Item(Head):
    def forward(self, idx: Tensor, targets: Tensor) -> Any:
        return super().forward(idx, targets) * idx.max().item()


class Routing(Head):
    """Numbers of tokens as a list, as experts are given their rows."""

    def forward(self, idx: Tensor, targets: Tensor) -> Any:
        first, _ = idx.flatten().split([int(n) for n in torch.bincount(idx.flatten() % 2, minlength=2).tolist()])
        return super().forward(idx, targets + 0 * first.sum())


class Counting(Head):
    count: Tensor

    def __init__(self) -> None:
        super().__init__(lambda logits, loss: loss)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, idx: Tensor, targets: Tensor) -> Any:
        self.count += 1
        return super().forward(idx, targets)


def outside() -> nn.Module:
    model = Head(loss_only)
    weight = model.head.weight
    model.form = lambda logits, loss: loss + weight.sum()
    return model


def meta_attribute() -> nn.Module:
    with torch.device("meta"):
        return Awkward()


def loss_only(logits: Tensor, loss: Tensor) -> Tensor:
    return loss


@pytest.mark.parametrize(
    ("model", "options", "error", "words"),
    [
        ("gpt", {}, TypeError, ["str", "nn.Module"]),
        (nn.DataParallel(PlainGPT()), {}, TypeError, ["DataParallel", "model.module", "mesh"]),
        (torch.compile(PlainGPT()), {}, TypeError, ["torch.compile", "plain module"]),
        (nn.Sequential(nn.LazyLinear(3)), {}, TypeError, ["0.weight", "UninitializedParameter", "lazy"]),
        (outside(), {}, ValueError, ["test_export.py:", "head.weight", "constant", "self"]),
        (meta_attribute(), {}, ValueError, ["scale", "meta device", "buffer"]),
        (Branching(loss_only), {}, ValueError, ["test_export.py:", "if idx.sum() > 3", "torch.where"]),
        (Routing(loss_only), {}, ValueError, ["test_export.py:", "depends on a tensor's values"]),
        (
            Item(loss_only),
            {},
            ValueError,
            ["test_export.py:", "makes a number or size from a tensor's values", "config"],
        ),
        (Counting(), {}, ValueError, ["test_export.py:", "'count'", "buffer", "outside forward"]),
        (Head(lambda logits, loss: logits), {}, ValueError, ["no scalar loss", "[2, 16, 61]", "loss_fn="]),
        (Head(lambda logits, loss: (logits, None)), {}, ValueError, ["tuple of", "NoneType None", "loss_fn="]),
        (Head(lambda logits, loss: loss.item()), {}, ValueError, ["no scalar loss"]),
        (Head(local_result), {}, ValueError, ["output class f.<locals>.Own", "top level"]),
        (Head(loss_only), {"names": ("idx", "target")}, ValueError, ["idx, target, and", "missing", "'targets'"]),
        (Head(loss_only), {"names": ("idx",)}, ValueError, ["missing a required argument: 'targets'", "idx"]),
        (Head(loss_only), {"microbatch_size": 3}, ValueError, ["microbatch_size=3", "'idx'", "[2, 16]"]),
        (Head(loss_only), {"microbatch_size": 0}, ValueError, ["microbatch_size=0"]),
        (Head(loss_only), {"names": None}, ValueError, ["sequence length", "example_inputs="]),
    ],
)
def test_bad_input(
    model: Any, options: dict[str, Any], error: type[Exception], words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    names = options.pop("names", ("idx", "targets"))
    with pytest.raises(error) as found:
        compiled(model, example_inputs=None if names is None else batch(*names), **options)
    for word in words:
        assert word in str(found.value)
    assert "def forward" not in capfd.readouterr().err, "the graph so far, as torch prints it"


class Mixture(nn.Module):
    """Experts that are given their own tokens, in ways that people write."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.table, self.head, self.router = (nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY), nn.Linear(8, 3))
        self.experts, self.way = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), way
        self.double()

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.table(idx).flatten(0, 1)
        probabilities = self.router(x).softmax(-1)
        gates, chosen = probabilities.topk(2, -1)
        logits = self.head(getattr(self, self.way)(x, probabilities, gates, chosen))
        return functional.cross_entropy(logits, targets.flatten())

    def where(self, x: Tensor, probabilities: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == e)
            out.index_add_(0, rows, gates[rows, slots, None] * expert(x[rows]))
        return out

    def mask(self, x: Tensor, probabilities: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = (chosen == e).any(-1)
            out[mask] = out[mask] + probabilities[mask][:, e, None] * expert(x[mask])
        return out

    def skip(self, x: Tensor, probabilities: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            if (mask := (chosen == e).any(-1)).any():
                out[mask] += probabilities[mask][:, e, None] * expert(x[mask])
        return out


@pytest.mark.parametrize("way", ["where", "mask"])
def test_a_loop_over_experts_gives_each_its_own_rows(way: str) -> None:
    torch.manual_seed(0)
    model, inputs = Mixture(way), batch("idx", "targets")
    graph = compiled(model, example_inputs=inputs)
    assert_same(model, graph, inputs, model(**inputs))


def test_a_loop_over_experts_with_a_condition_is_refused_with_the_line_that_works() -> None:
    torch.manual_seed(0)
    model, inputs = Mixture("skip"), batch("idx", "targets")
    with pytest.raises(ValueError, match=r"test_export\.py.* tensor's values") as found:
        compiled(model, example_inputs=inputs)
    text = inspect.getsource(Mixture.where)
    for line in ("rows, slots = torch.where(chosen == e)", "out.index_add_(0, rows, gates[rows, slots, None] * expert"):
        assert line in text
        assert line in str(found.value)
    loss = model(**inputs)
    model.way = "where"
    torch.testing.assert_close(model(**inputs), loss, rtol=1e-12, atol=0)


def test_only_a_model_of_transformers_with_experts_is_told_its_option() -> None:
    model = HUGGING_FACE["llama"]()
    model.model.norm.register_forward_hook(lambda own, args, x: x if x.sum() > 0 else 2 * x)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="depends on a tensor's values") as found:
        compiled(model, example_inputs=batch("input_ids", "labels"))
    assert "experts" not in str(found.value)


def misshapen(own: Refused, x: Tensor) -> Tensor:
    return x @ torch.ones(7, 8)


def missing(own: Refused, x: Tensor) -> Tensor:
    return cast(Any, own).absent(x)  # type: ignore[no-any-return]


def checked(own: Refused, x: Tensor) -> Tensor:
    assert x.shape[1] > LENGTH, "too short"
    return x


@pytest.mark.parametrize("between", [misshapen, missing, checked])
def test_what_the_model_itself_raises_is_said_first(between: Callable[[Refused, Tensor], Tensor]) -> None:
    """As the plain model does, with the same inputs; what only a trace cannot do is not said of the model."""
    model, inputs = Refused(between), {name: x % 40 for name, x in batch("idx", "targets").items()}
    with pytest.raises((RuntimeError, AttributeError, AssertionError)) as plain:
        model(**inputs)
    given = rf"with these inputs: idx \[2, {LENGTH}\] of torch.int64, targets"
    found = rf"test_export\.py:\d+: .*: the model itself raises {plain.type.__name__}: .* {given}"
    with pytest.raises(ValueError, match=found):
        compiled(model, example_inputs=inputs)
    readable = Refused(lambda own, x: x + torch.from_numpy(x.detach().numpy()))
    readable(**inputs)
    with pytest.raises(ValueError, match="the model cannot be traced"):
        compiled(readable, example_inputs=inputs)


def test_a_loss_that_forward_keeps_must_be_returned() -> None:
    class Keeping(Head):
        returns = False

        def forward(self, idx: Tensor, targets: Tensor) -> Any:
            self.last_loss = super().forward(idx, targets)
            return self.last_loss if self.returns else self.head(self.embedding(idx))

    model, inputs = Keeping(loss_only), batch("idx", "targets")
    with pytest.raises(ValueError, match="no scalar loss; return the loss"):
        compiled(model, example_inputs=inputs)
    model.returns = True
    assert_same(model, compiled(model, example_inputs=inputs), inputs, model(**inputs))


def test_arguments_of_the_loss_that_are_missing_are_said() -> None:
    def loss(logits: Tensor, answers: Tensor, scale: float) -> Tensor:
        return scale * token_loss(logits, answers)

    model, inputs = LogitsOnly(), batch("tokens", "answers")
    with pytest.raises(ValueError, match=r"loss_fn takes scale too: .*functools\.partial\(loss_fn, scale=\.\.\.\)"):
        compiled(model, example_inputs=inputs, loss_fn=loss)
    program = compiled(model, example_inputs=inputs, loss_fn=functools.partial(loss, scale=2.0))
    assert_same(model, program, inputs, loss(model(inputs["tokens"]), inputs["answers"], 2.0))


def test_a_cache_of_earlier_tokens_is_left_out() -> None:
    class Caching(Head):
        def __init__(self) -> None:
            super().__init__(loss_only)
            self.register_buffer("cache", torch.zeros(2, LENGTH, 8))

        def forward(self, idx: Tensor, targets: Tensor, start: int | None = None) -> Any:
            x = self.embedding(idx)
            if start is not None:
                self.get_buffer("cache")[:, start : start + x.shape[1]] = x
                x = self.get_buffer("cache")[:, : start + x.shape[1]]
            return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    model, inputs = Caching(), batch("idx", "targets")
    with pytest.raises(ValueError, match=r"'cache'.*if it is a cache of earlier tokens, call forward without it"):
        compiled(model, example_inputs={**inputs, "start": 0})
    assert_same(model, compiled(model, example_inputs=inputs), inputs, model(**inputs))


class Refused(nn.Module):
    """An embedding and a projection, with something between that a program cannot hold."""

    def __init__(self, between: Callable[[Refused, Tensor], Tensor], **options: Any) -> None:
        super().__init__()
        self.wte = nn.Embedding(40, 8, **options)
        self.head = nn.Linear(8, 40)
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.bag = nn.EmbeddingBag(8, 8)
        self.generator = torch.Generator()
        self.between = between

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.between(self, self.wte(idx)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Refused(lambda _, x: x, sparse=True), r"wte \(.*: ranks cannot sum the sparse gradient .* leave these"),
        (
            Refused(lambda _, x: x, scale_grad_by_freq=True),
            r"wte \(.*: .*scale_grad_by_freq=True.* one microbatch at a time: leave these options out",
        ),
        (Refused(lambda _, x: x, max_norm=1.0), r"wte \(.*: forward writes to 'wte\.weight', a parameter or buffer"),
        (
            Refused(lambda own, x: x + torch.randn(x.shape, generator=own.generator)),
            # The latter up to torch 2.12, which does not trace it.
            r"aten\.randn\.generator \(test_export\.py:\d+\) gets <torch\._C\.Generator .* not a tensor"
            r"|test_export\.py:\d+: .* cannot be traced \(NotImplementedError: .*torch\._C\.Generator",
        ),
        (
            Refused(lambda own, x: x + own.head.weight.data.mul_(0.5).sum()),
            r"aten\.mul_\.Tensor \(test_export\.py:\d+\) reads lifted_tensor_0, a tensor .* \.detach\(\)",
        ),
        (Refused(lambda own, x: own.rnn(x)[0]), r"rnn \(.* aten\.gru\.input is a whole recurrent layer"),
        (
            Refused(lambda own, x: x + own.bag(x.argmax(-1))[:, None]),
            r"bag \(test_export\.py:\d+\): an embedding bag .* an embedding and the mean",
        ),
        (
            Refused(lambda _, x: x + torch.randn_like(x, dtype=torch.complex64).real),
            r"test_export\.py:\d+\): aten\.randn_like\.default draws random numbers",
        ),
        (
            Refused(lambda _, x: x[:, torch.randperm(x.shape[1])]),
            r"test_export\.py:\d+\): aten\.randperm\.default draws random numbers .* draw with dropout, rand",
        ),
        (
            Refused(lambda _, x: nn.functional.dropout1d(nn.functional.alpha_dropout(x, 0.5, False), 0.5)),
            r"test_export\.py:\d+\): aten\.feature_dropout\.default draws random numbers",
        ),
        (
            Refused(lambda _, x: torch.vmap(torch.tanh)(x)),
            r"test_export\.py:\d+\): a transform of torch\.func, such as vmap, .* the whole batch",
        ),
    ],
    ids=[
        "sparse gradient",
        "scaled gradient",
        "written weight",
        "generator",
        "data",
        "recurrent layer",
        "embedding bag",
        "complex numbers",
        "a permutation",
        "dropped channels",
        "vmap",
    ],
)
def test_values_that_a_program_cannot_hold_are_refused_with_their_place(model: nn.Module, message: str) -> None:
    example = {name: torch.zeros(1, 8, dtype=torch.long) for name in ("idx", "targets")}
    with pytest.raises(ValueError, match=message):
        compiled(model, example_inputs=example)
