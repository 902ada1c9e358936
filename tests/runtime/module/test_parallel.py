"""The parallel module in the loops people write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoptd.runtime.comm.connection import Connection, connect, run_threads
from autoptd.runtime.engine.batch import output_builder, unequal_counts
from autoptd.runtime.module.parallel import Parallel
from autoptd.runtime.program.manifest import Output
from tests.ranks import run_ranks
from tests.runtime.chain import Chain

CPU = torch.device("cpu")


class Plain(nn.Module):
    """The chain as an ordinary module: parameters by name, a call that runs all microbatches."""

    def __init__(self, chain: Chain) -> None:
        super().__init__()
        self.chain = chain
        for name, tensor in chain.weights().items():
            path, _, leaf = name.rpartition(".")
            module: nn.Module = self
            for part in path.split(".") if path else ():
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            if chain.manifest.parameters[name].kind == "buffer":
                module.register_buffer(leaf, tensor)
            else:
                module.register_parameter(leaf, nn.Parameter(tensor))
        if chain.tied:
            self.head = nn.Module()
            self.head.scale = self.scale

    def gradients(self, batch: dict[str, Tensor], scale: float = 1.0) -> Tensor:
        """Add one batch's gradients to ``.grad``; give the loss."""
        weights = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        loss, gradients = self.chain.plain({n: w.detach() for n, w in weights.items()}, batch, scale)
        for name, gradient in gradients.items():
            p = self.get_parameter(name)
            p.grad = gradient if p.grad is None else p.grad + gradient
        return loss


def alone(**options: Any) -> tuple[Chain, Parallel]:
    chain = Chain((1, 1, 1), "gpipe", 2, 3, **options)
    return chain, chain.parallel(connect(chain.manifest, CPU, "text"))


@pytest.mark.parametrize("tied", [False, True])
def test_twenty_sgd_steps_stay_bitwise(tied: bool) -> None:
    chain = Chain((1, 2, 1), "interleaved_1f1b", 2, 4, tied)

    def train(model: nn.Module, step: Callable[[int], Tensor]) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for number in range(20):
            losses.append(step(number))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    def body(connection: Connection) -> tuple[list[Tensor], dict[str, Tensor]]:
        parallel = chain.parallel(connection)

        def step(number: int) -> Tensor:
            loss: Tensor = parallel(**chain.batch(number % 3))["loss"]
            loss.backward()
            return loss.detach()

        return train(parallel, step), parallel.state_dict()

    plain = Plain(chain)
    losses = train(plain, lambda number: plain.gradients(chain.batch(number % 3)))
    for own_losses, own in run_threads(chain.manifest, body):
        assert all(map(torch.equal, own_losses, losses))
        for name, tensor in own.items():
            assert torch.equal(tensor, plain.state_dict()[name]), name


@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_backward_scales_and_accumulates(scale: float) -> None:
    chain, parallel = alone()
    plain = Plain(chain)

    def step(replica: int) -> None:
        loss = parallel(**chain.batch(replica))["loss"]
        (loss if scale == 1 else loss * scale).backward()
        plain.gradients(chain.batch(replica), scale)

    def compare() -> None:
        for name, p in parallel.named_parameters():
            torch.testing.assert_close(p.grad, plain.get_parameter(name).grad, rtol=1e-13, atol=1e-15)

    for replica in range(3):
        step(replica)
    compare()
    for model in (parallel, plain):
        model.zero_grad(set_to_none=False)  # the next step adds into what .grad was
    step(3)
    compare()
    assert not parallel._runner.steps._scales  # alone nobody asks for them, and they would pile up


def test_second_backward_is_refused() -> None:
    chain, parallel = alone()
    loss = parallel(**chain.batch())["loss"]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"handed to \.grad by an earlier backward"):
        loss.backward()


def test_losses_of_several_calls_are_differentiated_together() -> None:
    chain, parallel = alone(tied=True)
    one, two = (parallel(**chain.batch(replica))["loss"] for replica in (1, 2))
    (2 * one - 3 * two).backward()
    found = {name: p.grad for name, p in parallel.named_parameters()}
    expected = [Plain(chain), Plain(chain)]
    for replica, plain in enumerate(expected, 1):
        plain.gradients(chain.batch(replica))
    for name, gradient in found.items():
        first, second = (plain.get_parameter(name).grad for plain in expected)
        assert (gradient is None) == (first is None)
        if gradient is not None and first is not None and second is not None:
            torch.testing.assert_close(gradient, 2 * first - 3 * second, rtol=1e-12, atol=1e-15)


def test_a_backward_that_breaks_off_leaves_nothing_for_later_ones() -> None:
    """Between the step and its parameters, in another part of the graph."""
    chain, parallel = alone()
    plain = Plain(chain)
    plain.gradients(chain.batch(1))
    parallel(**chain.batch())  # makes the node that hands over, which is the oldest then
    outer = torch.ones((), dtype=torch.float64, requires_grad=True).sin()  # differentiated after the step

    def stop(_: Tensor) -> None:
        raise KeyboardInterrupt

    handle = outer.register_hook(stop)
    one, two = (parallel(**chain.batch(replica))["loss"] for replica in (0, 1))
    with pytest.raises(KeyboardInterrupt):
        (one + outer).backward()
    handle.remove()
    two.backward()
    for name, p in parallel.named_parameters():
        expected = plain.get_parameter(name).grad
        assert (p.grad is None) == (expected is None)
        if p.grad is not None and expected is not None:
            torch.testing.assert_close(p.grad, expected, rtol=1e-13, atol=1e-15)


def test_autograd_returns_gradients_and_leaves_none() -> None:
    chain, parallel = alone()
    plain = Plain(chain)
    plain.gradients(chain.batch())
    weight = parallel.get_parameter("layer.0.row.weight")
    (found,) = torch.autograd.grad(parallel(**chain.batch())["loss"], [weight])
    torch.testing.assert_close(found, plain.get_parameter("layer.0.row.weight").grad, rtol=1e-13, atol=1e-15)
    assert all(p.grad is None for p in parallel.parameters())


def test_frozen_parameters_get_no_gradient() -> None:
    chain, parallel = alone()
    frozen = parallel.get_parameter("layer.0.row.weight")
    frozen.requires_grad_(False)
    parallel(**chain.batch())["loss"].backward()
    assert frozen.grad is None
    assert parallel.get_parameter("layer.0.row.bias").grad is not None


def test_wholly_frozen_rank_still_takes_backward() -> None:
    chain = Chain((1, 2, 1), "1f1b", 1, 2)

    def body(connection: Connection) -> list[str]:
        parallel = chain.parallel(connection)
        if connection.rank.coordinates.pipeline == 0:
            parallel.requires_grad_(False)
        parallel(**chain.batch())["loss"].backward()
        return [n for n, p in parallel.named_parameters() if p.grad is not None]

    first, second = run_threads(chain.manifest, body)
    assert first == []
    assert len(second) == 4


def test_positional_arguments_and_absent_ones() -> None:
    chain, parallel = alone()
    batch = chain.batch()
    by_name = parallel(**batch)["loss"]
    assert torch.equal(parallel(*batch.values(), attention_mask=None)["loss"], by_name)


def test_positions_are_those_of_the_models_own_forward() -> None:
    chain, parallel = alone()
    x, ids, target = chain.batch().values()
    expected = parallel(x, ids, target)["loss"]
    chain.manifest = replace(chain.manifest, arguments=("x", "mask", "ids", "scale", "target"))
    parallel = chain.parallel(connect(chain.manifest, CPU, "text"))
    assert torch.equal(parallel(x, None, ids, None, target)["loss"], expected)
    assert torch.equal(parallel(x, None, ids, target=target)["loss"], expected)
    with pytest.raises(TypeError, match=r"unexpected argument mask \(position 1\).* compiled for x, ids, target: "):
        parallel(x, ids, target)
    with pytest.raises(TypeError, match=r"unexpected argument scale \(position 3\)"):
        parallel(x, None, ids, 0.5, target)
    with pytest.raises(TypeError, match="argument ids is missing"):
        parallel(x, None, None, target=target)
    with pytest.raises(TypeError, match="6 positional arguments: the model takes 5, x, mask, ids"):
        parallel(x, None, ids, None, target, None)


def label_chain(mesh: tuple[int, int, int] = (1, 1, 1)) -> Chain:
    """The last stage reads `ids` too, as it reads labels."""
    chain = Chain(mesh, "gpipe", 1, 3)
    last = chain.count - 1
    stage = chain.manifest.stages[last]
    stages = (*chain.manifest.stages[:last], replace(stage, inputs=(*stage.inputs, "ids")))
    chain.manifest = replace(chain.manifest, stages=stages)
    inner = chain.functions[last]
    chain.functions[last] = lambda rank, p, *values: inner(rank, p, *values[:-1])
    inputs = (replace(i, ignore_index=-100) if i.name == "ids" else i for i in chain.manifest.inputs)
    chain.manifest = replace(chain.manifest, inputs=tuple(inputs))
    return chain


LABELS = [
    ([1, -100, 3, -100, 5, -100], ""),
    ([1, 2, 3, 4, 5, 6], ""),
    ([-1, 2, 3, -1, -1, -1], ""),
    ([1, 2, 3, -100, -100, -100], "2, 1, 0"),
]


@pytest.mark.parametrize(("ids", "counts"), LABELS)
def test_unequal_counts_of_labels_are_found(ids: list[int], counts: str) -> None:
    chain = label_chain((1, 2, 1))
    batch = {**chain.batch(), "ids": torch.tensor(ids)}
    found = unequal_counts(chain.manifest, batch)
    start = f"the microbatches have unequal counts of ids other than -100: {counts}. The model's loss has other"
    assert found.startswith(start) if counts else found == ""
    whole = replace(chain.manifest, inputs=tuple(replace(i, batch_dim=None) for i in chain.manifest.inputs))
    assert unequal_counts(whole, batch) == ""
    assert unequal_counts(Chain((1, 2, 1)).manifest, batch) == ""  # no label


def test_unequal_counts_of_labels_are_warned_of_once() -> None:
    chain = label_chain((2, 2, 1))
    batch = {**chain.batch(), "ids": torch.tensor(LABELS[-1][0])}

    def body(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        for _ in range(2):
            parallel(**batch)

    with pytest.warns(UserWarning, match="unequal counts of ids") as caught:
        run_threads(chain.manifest, body)
    assert len(caught) == 1  # on one tensor rank of the last pipeline rank


def test_wrong_batches_are_named() -> None:
    chain, parallel = alone()
    batch = chain.batch()

    def refused(kind: type[Exception], message: str, *args: Any, **changes: Any) -> None:
        with pytest.raises(kind, match=message):
            parallel(*args, **{**batch, **changes})

    with pytest.raises(TypeError, match="argument target is missing"):
        parallel(x=batch["x"], ids=batch["ids"])
    refused(TypeError, "unexpected argument targets; did you mean target?", targets=batch["target"])
    refused(TypeError, "argument x is given twice", batch["x"])
    refused(TypeError, "argument ids is a list, expected a tensor", ids=[1])
    refused(
        ValueError,
        r"argument x has shape \[5, 8\], expected \[6, 8\] "
        r"\(microbatch_size 2 x num_microbatches 3 = 6 sequences of this replica in dimension 0\)",
        x=batch["x"][:5],
    )
    refused(ValueError, "argument ids is torch.int32, expected torch.int64", ids=batch["ids"].int())
    refused(ValueError, "argument x is on meta, expected cpu", x=batch["x"].to("meta"))


def test_autocast_at_the_call_is_warned_of_and_has_no_effect() -> None:
    chain, parallel = alone(dtype=torch.float32)
    loss = parallel(**chain.batch())["loss"]
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match="autocast has no effect"):
        assert torch.equal(parallel(**chain.batch())["loss"], loss)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clip_takes_the_norm_of_the_whole_model(norm_type: float) -> None:
    chain = Chain((2, 2, 2), "interleaved_1f1b", 2, 2, tied=True)

    def body(connection: Connection) -> tuple[Tensor, dict[str, Tensor]]:
        parallel = chain.parallel(connection)
        parallel(**chain.batch())["loss"].backward()
        norm = parallel.clip_grad_norm_(0.01, norm_type)
        return norm, {n: p.grad for n, p in parallel.named_parameters() if p.grad is not None}

    plain = Plain(chain)
    plain.gradients(chain.batch())
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
    results = run_threads(chain.manifest, body)
    for rank, (norm, own) in enumerate(results):
        assert torch.equal(norm, results[0][0])
        torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
        for name, gradient in own.items():
            whole = plain.get_parameter(name).grad
            assert whole is not None
            placement = chain.manifest.parameters[name].placement["tensor"]
            part = placement.take(whole, 2, chain.mesh.coordinates(rank).tensor)
            torch.testing.assert_close(gradient, part, rtol=1e-11, atol=1e-14)


def test_clip_can_refuse_what_is_not_finite() -> None:
    chain, parallel = alone()
    parallel(**chain.batch())["loss"].backward()
    parallel.get_parameter("layer.0.row.bias").grad = torch.full((8,), float("nan"), dtype=chain.dtype)
    with pytest.raises(RuntimeError, match=r"2\.0-norm of the gradient is nan"):
        parallel.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_full_state_loads_into_the_plain_model_and_back() -> None:
    chain = Chain((2, 2, 2), "interleaved_1f1b", 2, 2, tied=True)

    def body(rank: int) -> tuple[dict[str, Tensor], bool]:
        parallel = chain.parallel(connect(chain.manifest, CPU, "text"))
        before = {n: x.clone() for n, x in parallel.state_dict().items()}
        state = parallel.full_state_dict()
        with torch.no_grad():
            for p in parallel.parameters():
                p.zero_()
        given = {n: w for n, w in chain.weights().items() if n != "scale"} | {"head.scale": chain.weights()["scale"]}
        parallel.load_full_state_dict(given)
        after = parallel.state_dict()
        return state, all(torch.equal(after[n], x) for n, x in before.items())

    results = run_ranks(body, 8)
    assert all(same for _, same in results)
    assert all(state == {} for state, _ in results[1:])
    plain = Plain(chain)
    expected = {n: x.clone() for n, x in plain.state_dict().items()}
    with torch.no_grad():
        for p in plain.parameters():
            p.zero_()
    plain.load_state_dict(results[0][0], strict=True)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_wrong_states_are_named() -> None:
    chain, parallel = alone()
    state = chain.weights()
    with pytest.raises(ValueError, match="1 names of the state are unknown to the compiled model: wte"):
        parallel.load_full_state_dict({**state, "wte": torch.zeros(1)})
    with pytest.raises(
        ValueError, match=r"layer.0.row.bias has shape \[3\] in the weights given, \[8\] in the program"
    ):
        parallel.load_full_state_dict({**state, "layer.0.row.bias": torch.zeros(3)})
    del state["layer.0.row.bias"]
    with pytest.raises(ValueError, match=r"no tensor layer.0.row.bias\[8\] among"):
        parallel.load_full_state_dict(state)


def test_a_state_that_unties_is_refused() -> None:
    chain, parallel = alone(tied=True)
    before = {name: tensor.clone() for name, tensor in parallel.state_dict().items()}
    given = {name: torch.zeros_like(tensor) for name, tensor in chain.weights().items()}
    with pytest.raises(ValueError, match=r"scale and head\.scale are one tensor in the program, and differ"):
        parallel.load_full_state_dict({**given, "head.scale": chain.weights()["scale"]})
    assert all(torch.equal(before[name], tensor) for name, tensor in parallel.state_dict().items())
    parallel.load_full_state_dict({**given, "head.scale": given["scale"].clone()})
    assert not parallel.get_parameter("head.scale").any()


def test_a_buffer_with_two_names_stays_one() -> None:
    chain = Chain((1, 1, 1), "gpipe", 1, 1)
    chain.manifest = replace(chain.manifest, aliases={"layer.offset": "offset"})
    parallel = chain.parallel(connect(chain.manifest, CPU, "text"))
    assert parallel.layer.offset is parallel.offset
    parallel(**chain.batch())
    parallel.layer.offset = torch.zeros_like(chain.weights()["offset"])
    with pytest.raises(ValueError, match=r"the buffer layer\.offset was replaced after bind, and is one with offset"):
        parallel(**chain.batch())
    parallel.offset = parallel.layer.offset
    parallel(**chain.batch())


def test_constants_and_transient_buffers_are_not_saved() -> None:
    chain = Chain((1, 1, 1), "gpipe", 1, 1)
    chain.manifest = replace(chain.manifest, transient=("offset",))
    parallel = chain.parallel(connect(chain.manifest, CPU, "text"))
    assert {n for n, _ in parallel.named_buffers()} == {"offset", "constant.shift"}
    assert not {"offset", "constant.shift"} & set(parallel.state_dict())
    assert set(parallel.full_state_dict()) == set(parallel.state_dict())
    assert "unused.weight" in parallel.state_dict()


@dataclass
class Result:
    loss: Tensor
    logits: Tensor | None


class Fields(dict[str, Any]):
    pass


def test_outputs_are_rebuilt_round_the_loss() -> None:
    loss = torch.tensor(3.0)
    assert output_builder(Output("tensor"))(loss, {}) is loss
    assert output_builder(Output("tuple", "1", "", ("0", "1")))(loss, {}) == (None, loss)
    assert output_builder(Output("dict", "loss", "", ("loss", "logits")))(loss, {}) == {"loss": loss, "logits": None}
    named = output_builder(Output("dict", "loss", f"{__name__}:Fields", ("loss", "logits")))(loss, {})
    assert isinstance(named, Fields)
    assert output_builder(Output("dataclass", "loss", f"{__name__}:Result", ("loss", "logits")))(loss, {}) == Result(
        loss, None
    )
    with pytest.raises(ValueError, match="output class Missing is not found in module"):
        output_builder(Output("dataclass", "loss", f"{__name__}:Missing", ("loss",)))


@pytest.fixture
def accelerate() -> Iterator[Any]:
    """The package, whose state is not left to what this process tests next."""
    package = pytest.importorskip("accelerate")
    yield package
    package.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_accelerate_loop_accumulates_clips_and_schedules(accelerate: Any) -> None:
    chain, parallel = alone(dtype=torch.float32)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.9**number)
    model, optimizer, scheduler = accelerator.prepare(parallel, optimizer, scheduler)
    losses = []
    for _ in range(12):
        with accelerator.accumulate(model):
            loss = model(**chain.batch())["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.unwrap_model(model).clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    assert losses[-1] < losses[0]


def test_methods_of_the_model_are_not_there() -> None:
    _, parallel = alone()
    assert not hasattr(parallel, "generate")
    with pytest.raises(
        AttributeError, match=r"no attribute 'gradient_checkpointing_enable': .*compile.recompute="
    ) as found:
        parallel.gradient_checkpointing_enable()
    assert found.value.name == "gradient_checkpointing_enable"
    with pytest.raises(AttributeError, match="instead of the Trainer's label_smoothing_factor"):
        parallel.config  # noqa: B018


def test_second_order_gradients_are_refused() -> None:
    chain, parallel = alone()
    with pytest.raises(RuntimeError, match=r"create_graph=True: .* compute the second order in forward"):
        parallel(**chain.batch())["loss"].backward(create_graph=True)
    loss = parallel(**chain.batch())["loss"]
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(loss, list(parallel.parameters()), create_graph=True, allow_unused=True)
    assert all(p.grad is None for p in parallel.parameters())
    parallel(**chain.batch())["loss"].backward(retain_graph=True)
    with torch.enable_grad():
        parallel(**chain.batch())["loss"].backward()


class InterruptionError(Exception):
    """As an allocator's error that a loop skips the batch of."""


def interrupt_run(monkeypatch: pytest.MonkeyPatch, parallel: Parallel, calls: int) -> None:
    """Let the `calls`-th run of the schedule from now on break off after the first microbatch's forward."""
    executor = parallel._runner.shape
    run, left = executor.run, iter(range(calls, 0, -1))

    def interrupt(inputs: Any, seeds: Any, *others: Any, **options: Any) -> Any:
        if next(left, 0) != 1:
            return run(inputs, seeds, *others, **options)
        first = min(executor.stages)
        executor.stages[first].start(executor.leaves.by_stage[first], inputs[first], seeds)
        raise InterruptionError

    monkeypatch.setattr(executor, "run", interrupt)


@pytest.mark.parametrize("repeated", [False, True])
def test_a_call_after_one_that_broke_off_is_refused(monkeypatch: pytest.MonkeyPatch, repeated: bool) -> None:
    """Where other ranks' messages are under way: in the schedule, or where it is repeated to explain a nan."""
    chain = Chain((1, 2, 1), "gpipe", 1, 2)

    def body(connection: Connection) -> None:
        parallel = chain.parallel(connection)
        interrupt_run(monkeypatch, parallel, 1 + repeated)
        batch = chain.batch()
        if repeated:
            batch["x"] = torch.full_like(batch["x"], torch.nan)
        with pytest.raises(InterruptionError):
            parallel(**batch)
        with pytest.raises(RuntimeError, match=r"broke off in the middle of its schedule, .* last checkpoint"):
            parallel(**chain.batch())

    run_threads(chain.manifest, body)


def test_one_process_goes_on_after_a_call_that_broke_off(monkeypatch: pytest.MonkeyPatch) -> None:
    (chain, parallel), (_, other) = alone(), alone()
    interrupt_run(monkeypatch, parallel, 1)
    with pytest.raises(InterruptionError):
        parallel(**chain.batch())
    for model in (parallel, other):
        model(**chain.batch())["loss"].backward()
    found, expected = ([p.grad for p in m.parameters() if p.grad is not None] for m in (parallel, other))
    assert expected
    assert all(torch.equal(one, another) for one, another in zip(found, expected, strict=True))
