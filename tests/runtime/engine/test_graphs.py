"""Stages replayed from graphs give the bits of stages that run one operator at a time; on a CPU a replay is a call."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import autoptd
from autoptd.compiled import CompiledProgram
from autoptd.runtime.comm.groups import Group, Posted, running
from autoptd.runtime.engine import graphs
from autoptd.runtime.engine.graphs import GraphSlot, Replay
from autoptd.runtime.module.parallel import Parallel
from samples.gpt import GPT, GPTConfig
from tests.marks import slow_but, slow_rows_but
from tests.ranks import run_ranks
from tests.steps import train_step

VOCABULARY, LENGTH, MICROBATCHES = 64, 16, 4
RECOMPUTE, DTYPES = ("none", "selective", "full"), (torch.float64, torch.bfloat16)


@pytest.fixture(autouse=True)
def replays_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "graph_devices", graphs.graph_devices | {"cpu"})
    monkeypatch.setattr("autoptd.compiled.graph_devices", graphs.graph_devices)


@cache
def compile_gpt(mesh: Any = (1, 1, 1), dtype: torch.dtype = torch.float64, **options: Any) -> CompiledProgram:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "block_size": LENGTH, "n_layer": 4, "n_embd": 32, "n_head": 4}
    model = GPT(GPTConfig(**sizes, dropout=0.1)).to(dtype)
    given = {"microbatch_size": 1, "num_microbatches": MICROBATCHES, **options}
    return autoptd.compile(model, mesh=mesh, **given)


def make_batch(seed: int, length: int = LENGTH) -> dict[str, Tensor]:
    idx, targets = torch.randint(
        0, VOCABULARY, (2, MICROBATCHES, length), generator=torch.Generator().manual_seed(seed)
    ).unbind()
    return {"idx": idx, "targets": targets}


def train(parallel: Parallel, steps: int = 4, device: str = "cpu", between: Callable[..., Any] | None = None) -> Any:
    """Losses, evaluations and the last gradients of a few steps; ``between(parallel, step)`` runs before each."""
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    found: list[Tensor] = []
    for step in range(steps):
        if between is not None:
            between(parallel, step)
        batch = {name: x.to(device) for name, x in make_batch(step).items()}
        loss = parallel(**batch)[1]
        loss.backward()
        found.append(loss.detach().cpu())
        found += [p.grad.detach().cpu().clone() for p in parallel.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            parallel.eval()
            with torch.no_grad():
                found.append(parallel(**batch)[1].cpu())
            parallel.train()
    return found


class Tape(TorchDispatchMode):
    """The operators that were called, with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        self.calls.append((operator, args, kwargs or {}, result))
        return result


class TapeReplay(Replay):
    """A replay of operators alone, in the memory and with the numbers of the capture: what a CUDA graph repeats."""

    def __init__(self, work: Any, *_: Any) -> None:
        """Run the `work`, which a graph's capture does not: a backward with gradients of zero, to no effect."""
        self._tape: Tape = Tape()
        if isinstance(work.args[0], Replay):
            torch._foreach_zero_(work.func.__self__.gradients)
        with self._tape:
            self.result = work()

    def run(self) -> None:
        with torch.no_grad():
            for operator, args, kwargs, result in self._tape.calls:
                again = operator(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


def slots_of(parallel: Parallel) -> list[GraphSlot]:
    return [slot for stage in parallel._runner.shape.stages.values() for slot in stage.graphed]


def captured_in(parallel: Parallel) -> set[Any]:
    """The modes that are replayed."""
    states = parallel._runner.shape.captures._states
    return {mode for mode, state in states.items() if state == "captured"}


def assert_same(one: list[Tensor], two: list[Tensor]) -> None:
    assert len(one) == len(two)
    assert all(map(torch.equal, one, two))


@pytest.mark.parametrize(
    ("recompute", "dtype"),
    slow_rows_but([("none", torch.bfloat16), ("selective", torch.float64)], product(RECOMPUTE, DTYPES)),
)
def test_replays_have_the_bits_of_plain_calls(recompute: str, dtype: torch.dtype) -> None:
    program = compile_gpt(recompute=recompute, dtype=dtype)
    replayed, plain = program.bind(), program.bind(graphs=False)
    assert_same(train(replayed), train(plain))
    assert captured_in(replayed) == {(True, True), (False, False)}
    assert not slots_of(plain)


@pytest.mark.parametrize(
    ("recompute", "dtype"),
    slow_rows_but([("none", torch.float64), ("full", torch.bfloat16)], product(RECOMPUTE, DTYPES)),
)
def test_no_number_of_a_step_is_kept_in_a_graph(
    monkeypatch: pytest.MonkeyPatch, recompute: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(graphs, "Replay", TapeReplay)
    program = compile_gpt(recompute=recompute, dtype=dtype)
    replayed, plain = program.bind(), program.bind(graphs=False)
    assert_same(train(replayed, 6), train(plain, 6))
    assert all(replay._tape.calls for slot in slots_of(replayed) for replay, _ in slot._graphs.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("mesh", slow_but([(2, 2, 1)], [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)]))
def test_so_do_those_of_a_mesh(mesh: tuple[int, int, int]) -> None:
    program = compile_gpt(mesh)
    size = mesh[0] * mesh[1] * mesh[2]

    def work(_: int) -> int:
        replayed, plain = program.bind(), program.bind(graphs=False)
        assert_same(train(replayed), train(plain))
        return len(captured_in(replayed))

    assert run_ranks(work, size, timeout=60) == [2] * size


def test_a_pipeline_has_a_slot_for_each_microbatch_in_flight() -> None:
    program = compile_gpt((1, 2, 1), schedule="1f1b")

    def work(rank: int) -> int:
        replayed = program.bind()
        train(replayed, 3)
        return len(slots_of(replayed))

    assert run_ranks(work, 2) == [2, 1]


def freeze_and_unfreeze(parallel: Parallel, step: int) -> None:
    for name, parameter in parallel.named_parameters():
        parameter.requires_grad_("h.0" not in name or step != 2)


def load_weights(parallel: Parallel, step: int) -> None:
    if step == 2:
        parallel.load_state_dict({n: x * 0.9 for n, x in parallel.state_dict().items()}, assign=False)


def move_the_memory(parallel: Parallel, step: int) -> None:
    if step == 2:
        for parameter in parallel.parameters():
            parameter.data = parameter.data.clone()


@pytest.mark.parametrize("change", [freeze_and_unfreeze, load_weights, move_the_memory])
def test_what_changes_between_steps_is_noticed(change: Callable[[Parallel, int], None]) -> None:
    program = compile_gpt()
    replayed, plain = program.bind(), program.bind(graphs=False)
    assert_same(train(replayed, 6, between=change), train(plain, 6, between=change))
    assert captured_in(replayed)


def test_several_calls_add_their_gradients_up() -> None:
    program = compile_gpt()
    found = []
    for parallel in (program.bind(), program.bind(graphs=False)):
        for step in range(5):
            parallel(**make_batch(step))[1].backward()
        found.append([p.grad.clone() for p in parallel.parameters() if p.grad is not None])
    assert_same(*found)


def test_a_gradient_that_is_kept_keeps_its_values() -> None:
    parallel = compile_gpt().bind()
    kept: list[tuple[Tensor, Tensor]] = []
    for step in range(5):
        parallel(**make_batch(step))[1].backward()
        for parameter in parallel.parameters():
            assert parameter.grad is not None
            kept.append((parameter.grad[:1], parameter.grad[:1].clone()))
        parallel.zero_grad()
    assert all(torch.equal(view, value) for view, value in kept)
    assert captured_in(parallel)


def test_sums_stay_in_place_while_nobody_keeps_a_gradient() -> None:
    parallel = compile_gpt().bind()
    places = []
    for step in range(5):
        parallel(**make_batch(step))[1].backward()
        places.append([p.grad.data_ptr() for p in parallel.parameters() if p.grad is not None])
        parallel.zero_grad()
    assert places[1] == places[2] == places[3] == places[4]


def test_a_gradient_that_is_kept_moves_its_sum_once() -> None:
    parallel = compile_gpt().bind()
    kept: list[Any] = []
    moves = []
    for step in range(6):
        parallel(**make_batch(step))[1].backward()
        kept.append([p.grad for p in parallel.parameters()])
        moves.append(parallel._weights.sums.memory[1])
        parallel.zero_grad()
    assert moves[1] > 0
    assert moves[1:] == moves[1:2] * 5
    assert captured_in(parallel)


def test_shards_of_an_optimizer_between_steps_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "Replay", TapeReplay)
    program = compile_gpt()
    found = []
    for parallel in (program.bind(), program.bind(graphs=False)):
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
        losses = []
        for step in range(8):
            if step == 3:
                optimizer = parallel.shard_optimizer(optimizer)
            losses.append(train_step(parallel, make_batch(step), optimizer))
        found.append(losses)
    assert_same(*found)


def count(found: Counter[str], x: Tensor) -> Tensor:
    found["saved"] += 1
    return x


class Recorder(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return operator(*args, **(kwargs or {}))


def test_what_looks_at_a_step_sees_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """With graphs of earlier steps at hand, and although one is asked for in this step."""
    monkeypatch.setattr(graphs, "Replay", TapeReplay)
    for earlier in (1, 4):
        parallel = compile_gpt().bind()
        train(parallel, earlier)
        packed = Counter[str]()
        with torch.autograd.graph.saved_tensors_hooks(partial(count, packed), lambda x: x):
            parallel(**make_batch(7))[1].backward()
        assert packed["saved"] > 100
        with Recorder() as recorder:
            parallel(**make_batch(7))[1].backward()
        assert recorder.count > 1000
        train(parallel, 2)
        assert (True, True) in captured_in(parallel)


def test_ranks_capture_before_the_schedule_and_replay_together_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    program = compile_gpt((1, 2, 1))
    begun: list[int] = []
    refusing: list[bool] = [False]

    class Watched(Replay):
        def __init__(self, *arguments: Any) -> None:
            begun.append(len(executors[-1].measured.spans))
            if refusing[0]:
                raise RuntimeError("out of memory")
            super().__init__(*arguments)

    monkeypatch.setattr(graphs, "Replay", Watched)
    executors: list[Any] = []

    def work(rank: int) -> Any:
        found = []
        for refuses in (False, True):
            parallel = program.bind()
            executors.append(parallel._shapes[0])
            refusing[0] = refuses and rank == 1
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert_same(train(parallel), train(program.bind(graphs=False)))
            warned = any("program_01.py runs without CUDA graphs" in str(w.message) for w in caught)
            found.append((len(captured_in(parallel)), warned))
        return found, set(begun)

    either = [((2, False), (0, False)), ((2, False), (0, True))]
    assert run_ranks(work, 2, timeout=60) == [(list(found), {0}) for found in either]


def test_what_moves_on_one_rank_is_captured_anew_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    program = compile_gpt((1, 1, 2))

    class Counted(Replay):
        def __init__(self, *arguments: Any) -> None:
            made.append(1)
            super().__init__(*arguments)

    monkeypatch.setattr(graphs, "Replay", Counted)
    made: list[int] = []

    def work(rank: int) -> Any:
        kept: list[Any] = []

        def keep(parallel: Parallel, step: int) -> None:
            if rank == 0 and step == 4:
                kept.append([p.grad for p in parallel.parameters()])

        replayed, plain = program.bind(), program.bind(graphs=False)
        found = []
        for parallel in (replayed, plain):
            losses = []
            for step in range(9):
                loss = parallel(**make_batch(step + 10 * rank))[1]
                loss.backward()
                keep(parallel, step)
                losses += [loss.detach(), *(p.grad.clone() for p in parallel.parameters() if p.grad is not None)]
                parallel.zero_grad()
            found.append(losses)
        assert_same(*found)
        slots = len(slots_of(replayed))
        return len(made) // (2 * slots), len(captured_in(replayed))

    assert run_ranks(work, 2, timeout=60) == [(2, 1), (2, 1)]


def test_a_nan_is_explained_by_a_plain_run() -> None:
    parallel = compile_gpt().bind()
    train(parallel, 3)
    with torch.no_grad():
        next(p for n, p in parallel.named_parameters() if "h.2" in n).fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="h2_ln1"):
        parallel(**make_batch(0))


def test_several_shapes_have_graphs_of_their_own() -> None:
    examples = [{n: torch.zeros(1, length, dtype=torch.long) for n in ("idx", "targets")} for length in (LENGTH, 8)]
    program = compile_gpt.__wrapped__(example_inputs=examples, microbatch_size=None)
    found = []
    for parallel in (program.bind(), program.bind(graphs=False)):
        losses = []
        for step in range(8):
            loss = parallel(**make_batch(step, (LENGTH, 8)[step // 2 % 2]))[1]
            loss.backward()
            losses += [loss.detach(), *(p.grad.clone() for p in parallel.parameters() if p.grad is not None)]
            parallel.zero_grad()
        found.append(losses)
    assert_same(*found)


@pytest.mark.parametrize("of", ["forward", "backward"])
def test_what_cannot_be_captured_runs_plainly_and_says_so(monkeypatch: pytest.MonkeyPatch, of: str) -> None:
    made: list[str] = []

    class Refusing(Replay):
        def __init__(self, *arguments: Any) -> None:
            made.append("forward" if not made or of == "forward" else "backward")
            if made[-1] == of:
                raise RuntimeError("operation not permitted when stream is capturing")
            super().__init__(*arguments)

    monkeypatch.setattr(graphs, "Replay", Refusing)
    program = compile_gpt()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(program.bind(), 3)
    assert_same(found, train(program.bind(graphs=False), 3))
    said = [str(w.message) for w in caught if "without CUDA graphs" in str(w.message)]
    assert said
    assert all("program_00.py runs" in text and "not permitted" in text for text in said)


def test_graphs_of_a_pipeline_have_queues_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(ValueError, match=r"is 1: with fewer than 32 queues, .* may wait for each other .*graphs=False"):
        compile_gpt((1, 2, 1)).bind()
    compile_gpt().bind()


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_have_the_bits_of_plain_calls_on_a_card(card: str, recompute: str, dtype: torch.dtype) -> None:
    program = compile_gpt(recompute=recompute, dtype=dtype)
    replayed, plain = program.bind(card), program.bind(card, graphs=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without CUDA graphs")
        found = train(replayed, 20, card)
    assert_same(found, train(plain, 20, card))
    assert all(isinstance(replay.result[0][0], Tensor) for s in slots_of(replayed) for replay, _ in s._graphs.values())


@pytest.mark.gpu
def test_graphs_take_the_memory_of_a_step_once(card: str) -> None:
    """And what the step before the captures took is given back."""
    model = GPT(GPTConfig(vocab_size=64, block_size=512, n_layer=4, n_embd=256, n_head=4))
    batch = {name: torch.randint(64, (16, 512), device=card) for name in ("idx", "targets")}
    program = autoptd.compile(model, (1, 1, 1), microbatch_size=16, num_microbatches=1)
    reserved = []
    for choice in (False, "auto"):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        parallel = program.bind(card, graphs=choice)
        for _ in range(4):
            parallel(**batch)[1].backward()
            parallel.zero_grad()
        reserved.append(torch.cuda.memory_reserved() - before)
        del parallel
    assert reserved[1] < 1.3 * reserved[0]


@pytest.mark.gpu
@pytest.mark.parametrize("change", [freeze_and_unfreeze, load_weights, move_the_memory])
def test_what_changes_is_noticed_on_a_card(card: str, change: Callable[[Parallel, int], None]) -> None:
    program = compile_gpt(dtype=torch.float32)
    found = train(program.bind(card), 8, card, change)
    assert_same(found, train(program.bind(card, graphs=False), 8, card, change))


@pytest.mark.gpu
def test_a_capture_that_fails_on_a_card_leaves_the_allocator_as_it_was(card: str) -> None:
    program = compile_gpt(dtype=torch.float32)
    parallel = program.bind(card)
    train(parallel, 1, card)
    (slot,) = slots_of(parallel)
    function = slot.call.function

    def ask(*values: Any) -> Any:
        result = function(*values)
        result.item()
        return result

    ask.__code__ = ask.__code__.replace(co_filename=function.func.__code__.co_filename)
    slot.call = replace(slot.call, function=partial(ask))
    with pytest.warns(UserWarning, match="program_00.py runs without CUDA graphs"):
        found = train(parallel, 3, card)
    plain = program.bind(card, graphs=False)
    train(plain, 1, card)
    assert_same(found, train(plain, 3, card))
    before = torch.cuda.memory_reserved()
    for _ in range(20):  # memory that another stream used is given back, as it is not while a capture is under way
        other = torch.cuda.Stream()
        x = torch.empty(64 * 2**20, dtype=torch.uint8, device=card)
        x.record_stream(other)
        del x
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() <= before + 3 * 64 * 2**20


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_buckets_of_a_replay_are_complete_when_they_are_posted(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, device: str
) -> None:
    """What a sum over replicas reads, on the stream that it waits on, is what the whole backward leaves."""
    if device == "cuda":
        request.getfixturevalue("card")
    monkeypatch.setattr("autoptd.runtime.optimizer.gradient_buckets.BUCKET_BYTES", 2**14)
    parallel = compile_gpt(dtype=torch.float32).bind(device)
    sums = parallel._weights.sums
    copies: list[Tensor] = []

    class Replicas(Group):
        """Another one adds nothing."""

        def post_all_reduce(self, tensors: Sequence[Tensor]) -> Posted[list[Tensor]]:
            copies.append(tensors[0].clone())
            return running(list(tensors))

    monkeypatch.setattr(sums, "_data", replicas := Replicas(2))
    monkeypatch.setattr(sums, "_replicas", dict.fromkeys(sums._replicas, replicas))
    for step in range(6):
        copies.clear()
        parallel(**{name: x.to(device) for name, x in make_batch(step).items()})[1].backward()
        assert len(copies) > 3
        for early, bucket in zip(copies, sums._memory, strict=True):
            assert torch.equal(early, bucket.flat * 2)  # divided by the number of replicas since
        parallel.zero_grad()
    assert (True, True) in captured_in(parallel)
