"""Masks, first weights and training curves do not depend on the mesh: 6 meshes against one device, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.compiled import CompiledProgram
from autoptd.runtime import kernels
from autoptd.runtime.comm.connection import Connection, run_threads
from autoptd.runtime.comm.groups import Group
from autoptd.runtime.comm.rank import Rank
from autoptd.runtime.engine.executor import ShapeFunctions
from autoptd.runtime.module.parallel import Parallel
from autoptd.runtime.program.mesh import Coordinates, Mesh
from autoptd.runtime.program.program_text import read_program
from autoptd.runtime.randomness import Randomness
from autoptd.verification.float64 import Promotion
from samples.gpt import GPT, GPTConfig
from samples.huggingface import make_gpt2, make_llama
from tests.parity import Batch, Training, loss_of, train_compiled
from tests.ranks import run_ranks

# tensor, pipeline, data; the first is one device
MESHES = [(1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 2, 2), (4, 1, 2), (4, 2, 1), (2, 1, 4)]  # one device and six others
SEQUENCES = 8  # of all replicas and microbatches


# Masks of the kernel, as ranks draw them


@dataclass(frozen=True)
class Case:
    """A dropout: one sample's whole shape, where the batch dimension is put in, which one is divided."""

    shape: tuple[int, ...]
    sample: int
    divided: int | None  # of the shape with the batch dimension
    p: float
    seed: int
    call: int
    operator: int
    microbatch: dict[int, int]  # sequences, by the number of replicas

    def whole_shape(self, batch: int) -> list[int]:
        return [*self.shape[: self.sample], batch, *self.shape[self.sample :]]


def draw_case(number: int) -> Case:
    choose = random.Random(number)
    shape = [choose.choice([1, 2, 3, 5, 8, 13]) for _ in range(choose.randint(1, 3))]
    sample = choose.randint(0, len(shape))
    divided = choose.choice([None, *range(len(shape))]) if number % 4 else 0
    if divided is not None:
        shape[divided] = 4 * choose.randint(1, 5)
        divided += divided >= sample
    return Case(
        tuple(shape),
        sample,
        divided,
        choose.choice([0.1, 0.25, 0.5, choose.random()]),
        choose.randrange(1 << 63),
        choose.randrange(1 << 20),
        choose.randrange(1 << 24),
        {data: choose.choice([b for b in (1, 2, 4, 8) if b * data <= SEQUENCES]) for data in (1, 2, 4)},
    )


def draw_mask(case: Case, mesh: Mesh, coordinates: Coordinates, microbatch: int) -> Tensor:
    """What one rank keeps in one microbatch."""
    rank = Rank.local(mesh, coordinates)
    rank.groups["tensor"] = Group(mesh.tensor, coordinates.tensor)
    b = case.microbatch[mesh.data]
    first = coordinates.data * (SEQUENCES // mesh.data) + microbatch * b
    rank.randomness = Randomness(case.seed, case.call, first)
    shape = case.whole_shape(b)
    if case.divided is not None:
        shape[case.divided] //= mesh.tensor
    kept: Tensor = kernels.dropout(rank, torch.ones(shape), case.p, case.operator, case.sample, case.divided).bool()
    return kept


def gather_mask(case: Case, mesh: Mesh) -> Tensor:
    """The whole mask of all sequences, from all ranks; those that hold the same are held to it."""
    count = SEQUENCES // mesh.data // case.microbatch[mesh.data]
    rows = []
    for data in range(mesh.data):
        for microbatch in range(count):
            parts = [
                draw_mask(case, mesh, Coordinates(data, pipeline, tensor), microbatch)
                for pipeline in range(mesh.pipeline)
                for tensor in range(mesh.tensor)
            ]
            first = parts[: mesh.tensor]
            for start in range(0, len(parts), mesh.tensor):
                assert all(map(torch.equal, parts[start : start + mesh.tensor], first))
            if case.divided is None:
                assert all(torch.equal(part, first[0]) for part in first)
            rows.append(first[0] if case.divided is None else torch.cat(first, case.divided))
    return torch.cat(rows, case.sample)


@pytest.mark.parametrize("number", range(100))
def test_a_mask_gathered_from_any_mesh_is_that_of_one_device(number: int) -> None:
    case = draw_case(number)
    one, *others = (gather_mask(case, Mesh(*mesh)) for mesh in MESHES)
    assert list(one.shape) == case.whole_shape(SEQUENCES)
    for mesh, mask in zip(MESHES[1:], others, strict=True):
        assert torch.equal(mask, one), mesh
    if prod(one.shape) > 100 and 0.1 <= case.p <= 0.9:
        assert 0 < int(one.sum()) < one.numel()


# Masks of compiled programs, read off their gradients


class Revealing(nn.Module):
    """A model whose gradients say which elements its dropouts keep, in every sample.

    Sample i counts 2**i in the loss. A dropout's element [token, place] has a weight of its own; the weight's gradient
    is the sum of 2**i over the samples that keep the element, times a known factor. Tokens x are one-hot, so that
    attention with queries and keys of zero gives the dropped attention weights themselves.
    """

    def __init__(self, heads: int, length: int, p: float, sequence_first: bool) -> None:
        super().__init__()
        self.heads, self.p, self.sequence_first = heads, p, sequence_first
        self.replicated = nn.Parameter(torch.zeros(length, length))
        self.divided = nn.Parameter(torch.zeros(length, heads * length))
        self.attention = nn.Parameter(torch.zeros(length, heads * length))
        self.query, self.key, self.value, self.up = (nn.Linear(length, heads * length, bias=False) for _ in range(4))
        self.down, self.last = (nn.Linear(heads * length, 1, bias=False) for _ in range(2))
        with torch.no_grad():
            for layer in (self.query, self.key, self.up):
                layer.weight.zero_()
            self.value.weight.copy_(torch.eye(length).repeat(heads, 1))
            self.down.weight.fill_(1)
            self.last.weight.fill_(1)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """`x` [b, s, s], or [s, b, s] where the model is sequence-first; `counts` [b]."""
        dim = 1 if self.sequence_first else 0
        y = F.dropout(x + self._spread(self.replicated), self.p)
        u = F.dropout(self.up(x) + self._spread(self.divided), self.p)
        q, k, v = (self._split(layer(x)) for layer in (self.query, self.key, self.value))
        weights = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p)  # [b, heads, s, s]
        z = weights.permute(2, 0, 1, 3) if self.sequence_first else weights.transpose(1, 2)
        z = z.flatten(2, 3) * self._spread(self.attention)
        total = y.sum(2, keepdim=True) + self.down(u) + self.last(z)  # [b, s, 1]
        loss: Tensor = (total.squeeze(2).sum(1 - dim) * counts).sum()
        return loss

    def _spread(self, weight: Tensor) -> Tensor:
        return weight.unsqueeze(1) if self.sequence_first else weight

    def _split(self, y: Tensor) -> Tensor:
        y = y.unflatten(2, (self.heads, -1))
        return y.permute(1, 2, 0, 3) if self.sequence_first else y.transpose(1, 2)


def run_step(program: CompiledProgram, batch: Batch, dims: dict[str, int]) -> dict[str, Tensor]:
    """The gradients of one training step of all ranks, whole, by name."""
    manifest, mesh = program.manifest, program.mesh
    texts = [read_program(text, "program.py") for text in program.texts]

    def step(connection: Connection) -> dict[str, Tensor]:
        at = connection.rank.coordinates
        text = texts[at.pipeline]
        weights = dict(program.model.state_dict()) if program.model is not None else {}
        parallel = Parallel(connection, ShapeFunctions(manifest, text, weights))
        own = {n: x.chunk(mesh.data, dims[n])[at.data].contiguous() for n, x in batch.items()}
        loss_of(parallel(**own)).backward()
        return {name: p.grad for name, p in parallel.named_parameters() if p.grad is not None}

    ranks = run_threads(manifest, step)
    whole: dict[str, Tensor] = {}
    for name, parameter in manifest.parameters.items():
        for data in range(mesh.data):
            members = [mesh.rank_of(data, manifest.homes(name)[0], tensor) for tensor in range(mesh.tensor)]
            if name in ranks[members[0]]:
                joined = parameter.placement["tensor"].join([ranks[rank][name] for rank in members])
                assert torch.equal(whole.setdefault(name, joined), joined)
    return whole


def reveal(gradient: Tensor, factor: float) -> Tensor:
    """Which elements each sample keeps, [samples, ...], from the gradient of their weights."""
    sums = (gradient / factor).round()
    assert float((gradient / factor - sums).abs().max()) < 1e-9
    return torch.stack([sums.long() >> sample & 1 for sample in range(SEQUENCES)]).bool()


def reveal_masks(case: tuple[int, int, float, bool, int], mesh: tuple[int, int, int], b: int) -> dict[str, Tensor]:
    heads, length, p, sequence_first, seed = case
    model = Revealing(heads, length, p, sequence_first).double()
    dims = {"x": 1 if sequence_first else 0, "counts": 0}
    x = torch.eye(length, dtype=torch.float64).expand(SEQUENCES, length, length)
    counts = torch.arange(SEQUENCES, dtype=torch.float64).exp2()
    batch = {"x": x.transpose(0, 1).contiguous() if sequence_first else x, "counts": counts}
    microbatches = SEQUENCES // b // mesh[2]
    example = {n: t.narrow(dims[n], 0, b).contiguous() for n, t in batch.items()}
    program = autoptd.compile(
        model,
        mesh,
        example_inputs=example,
        microbatch_size=b,
        num_microbatches=microbatches,
        schedule="1f1b",
        seed=seed,
    )
    divided = {n for n, p in program.manifest.parameters.items() if p.placement["tensor"].dim is not None}
    assert mesh[0] == 1 or {"divided", "attention"} <= divided
    assert "replicated" not in divided
    gradients = run_step(program, batch, dims)
    factor = 1 / (1 - p) / microbatches / mesh[2]
    return {
        "replicated": reveal(gradients["replicated"], factor),
        "divided": reveal(gradients["divided"], factor),
        "attention": reveal(gradients["attention"], factor / length),
    }


@pytest.mark.parametrize(
    "case",
    [  # heads, length, p, sequence-first, seed
        (4, 5, 0.1, False, 0),
        (4, 6, 0.5, True, 1 << 40),
        pytest.param((8, 4, 0.25, False, 1), marks=pytest.mark.slow),
        pytest.param((4, 7, 0.9, True, 7), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiled_programs_keep_the_same_elements_on_every_mesh(case: tuple[int, int, float, bool, int]) -> None:
    heads, length, p, *_ = case
    one = reveal_masks(case, MESHES[0], b=1)
    assert [tuple(mask.shape) for mask in one.values()] == [
        (SEQUENCES, length, length),
        *[(SEQUENCES, length, heads * length)] * 2,
    ]
    for mask in one.values():
        spread = (p * (1 - p) / mask.numel()) ** 0.5
        assert abs(float(mask.double().mean()) - (1 - p)) < 5 * spread
        assert len({tuple(sample.flatten().tolist()) for sample in mask}) == SEQUENCES
    assert not torch.equal(one["divided"], one["attention"])
    for number, mesh in enumerate(MESHES):
        masks = reveal_masks(case, mesh, b=[2, 4, 1, 2, 1, 8, 2][number])
        for name, mask in masks.items():
            assert torch.equal(mask, one[name]), (mesh, name)


# First weights, gathered


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(GPTConfig(67, 8, 2, 4, 16)),  # packed projections, a padded vocabulary, a tied head
    "gpt2": lambda: make_gpt2(GPTConfig(64, 8, 2, 4, 16)),  # weights stored in x out
    "llama": lambda: make_llama(GPTConfig(67, 8, 1, 8, 64)),  # 4 key and value heads
}


def compile_meta(name: str, mesh: Sequence[int]) -> CompiledProgram:
    with torch.device("meta"):
        model = MODELS[name]()
    return autoptd.compile(model, mesh, num_microbatches=2, num_model_chunks=1, seed=11)


def gather_weights(program: CompiledProgram) -> dict[str, Tensor]:
    texts = [read_program(text, "program.py") for text in program.texts]

    def gather(connection: Connection) -> dict[str, Tensor]:
        text = texts[connection.rank.coordinates.pipeline]
        functions = ShapeFunctions(program.manifest, text, program.buffers)
        parallel = Parallel(connection, functions, drawn=True)
        for name, parameter in program.manifest.parameters.items():
            if (
                parameter.placement["tensor"].padding
                and parameter.kind == "parameter"
                and name in dict(parallel.named_parameters())
            ):
                check_padding(program, connection.rank, name, parallel.get_parameter(name))
        return parallel.full_state_dict()

    return run_threads(program.manifest, gather)[0]


def check_padding(program: CompiledProgram, rank: Rank, name: str, own: Tensor) -> None:
    parameter = program.manifest.parameters[name]
    assert parameter.placement["tensor"].dim == 0
    (segment,) = parameter.placement["tensor"].segments
    first = rank.group("tensor").index * (segment.size // rank.group("tensor").size)
    padded = max(0, first + len(own) - parameter.shape[0])
    assert not own[len(own) - padded :].any()


@pytest.mark.parametrize("name", ["gpt", "llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_first_weights_are_the_same_on_every_mesh(name: str) -> None:
    one = gather_weights(compile_meta(name, MESHES[0]))
    model = MODELS[name]()
    model.load_state_dict(one, strict=True)
    assert all(len(w.unique()) > 0.9 * w.numel() for w in one.values() if w.dim() > 1)
    packed = False
    for mesh in MESHES[1:]:
        program = compile_meta(name, mesh)
        packed |= any(
            p.placement["tensor"].padding
            or len(p.placement["tensor"].segments) > 1
            or any(s.outer > 1 for s in p.placement["tensor"].segments)
            for p in program.manifest.parameters.values()
        )
        found = gather_weights(program)
        assert found.keys() == one.keys()
        for key, whole in one.items():
            assert torch.equal(found[key], whole), (mesh, key)
    assert packed, "nothing is packed or padded here"


def test_processes_draw_the_same_weights_as_one() -> None:
    program = compile_meta("gpt", (2, 2, 2))
    found = run_ranks(lambda rank: program.bind().full_state_dict(), 8)
    one = compile_meta("gpt", (1, 1, 1)).bind(device="cpu").full_state_dict()
    assert found[1:] == [{}] * 7
    assert found[0].keys() == one.keys()
    assert all(torch.equal(found[0][key], one[key]) for key in one)


# Training with dropout


def train(name: str, mesh: tuple[int, int, int], dropout: float = 0.1, steps: int = 20) -> list[float]:
    """The losses of SGD in float64, each step on 8 sequences."""
    torch.manual_seed(3)
    sizes = GPTConfig(67, 8, 2, 4, 16, dropout=dropout)
    model = (GPT(sizes) if name == "gpt" else make_gpt2(sizes)).double()
    ids = torch.randint(0, 67, (steps, SEQUENCES, 8))
    names = ("idx", "targets") if name == "gpt" else ("input_ids", "labels")
    batches = [dict(zip(names, (x, x.roll(-1, 1) if name == "gpt" else x.clone()), strict=True)) for x in ids]
    b = 2 if mesh[2] == 1 else 1
    program = autoptd.compile(
        model,
        mesh,
        example_inputs={n: x[:b] for n, x in batches[0].items()},
        num_microbatches=SEQUENCES // b // mesh[2],
        seed=4,
    )
    run = train_compiled(program, batches, Training(lr=0.5), prepare=promote_casts, timeout=120)
    return [float(step.loss) for step in run.steps]


def promote_casts() -> None:
    """Compute in float64 throughout a rank: transformers casts the logits to float32."""
    Promotion().__enter__()  # type: ignore[no-untyped-call]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["gpt", "gpt2"])
def test_twenty_steps_with_dropout_are_the_same_on_every_mesh(name: str) -> None:
    one = train(name, (1, 1, 1))
    without = train(name, (1, 1, 1), dropout=0.0)
    assert max(abs(a - b) for a, b in zip(one, without, strict=True)) > 1e-3
    for mesh in [(2, 1, 1), (1, 2, 2), (2, 2, 2)]:
        found = train(name, mesh)
        errors = [abs(own - loss) / loss for own, loss in zip(found, one, strict=True)]
        assert max(errors) <= 1e-12, (mesh, errors)
