"""Make the Markdown table of models on mesh (2, 2, 1): what is divided, and how exactly they train.

Tiny models (two layers), interleaved over four ranks; ``program.verify`` runs their step in float64 against the plain
model. The round trip reads a folder of safetensors, each rank its rows, and writes it again. Run ``python -m
samples.model_coverage > table.md``.
"""

from __future__ import annotations

import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import autoptd
from autoptd.compiled import CompiledProgram
from autoptd.passes.cost.work import forward_work
from autoptd.runtime.comm.connection import Connection, run_threads
from autoptd.runtime.engine.executor import ShapeFunctions
from autoptd.runtime.module.parallel import Parallel
from autoptd.runtime.program.program_text import read_program
from autoptd.text.reader import program_filename
from autoptd.weights.sources import read_weights
from samples.attention_coverage import CLASSES, LENGTH, VOCABULARY, make_inputs, make_model, randomize
from samples.gpt import GPT, GPTConfig

MESH = (2, 2, 1)
HEADINGS = (
    "model",
    "stages",
    "parameters divided by tensor",
    "replicated matrices",
    "loss",
    "largest gradient error",
    "round trip",
    "FLOPs",
    "remark",
)
GPTS: Mapping[str, bool] = {"nanoGPT's kind (samples/gpt.py)": True, "the same, head not tied (minGPT)": False}
REMARKS = {
    "Olmo2ForCausalLM": "queries and keys are normed over all heads together, so attention is replicated",
    "T5ForConditionalGeneration": "encoder and decoder in one pipeline",
    "ViTForImageClassification": "the patches' convolution is replicated",
}


def make(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model, and one microbatch of one sample for it."""
    if name in GPTS:
        sizes = GPTConfig(VOCABULARY, LENGTH, n_layer=2, n_head=4, n_embd=32, tie_weights=GPTS[name])
        ids = torch.randint(0, VOCABULARY, (1, LENGTH))
        return GPT(sizes), {"idx": ids, "targets": ids}
    model = make_model(name, "sdpa") or make_model(name, "eager")
    assert model is not None
    return model, {key: x[:1] for key, x in make_inputs(name).items()}


def save_plain(model: nn.Module, folder: Path) -> None:
    """Save the model as its own project does, under its own names."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder, save_original_format=False)  # type: ignore[operator]
        return
    folder.mkdir()
    first = dict(model.named_parameters())  # of tied ones the first name
    save_file({name: x.detach() for name, x in first.items()}, str(folder / "model.safetensors"), {"format": "pt"})


def pass_through(program: CompiledProgram, source: Path, target: Path) -> None:
    """Let every rank, a thread each, read its rows of `source`, and all together write `target`."""
    texts = [read_program(text, program_filename(i, len(program.texts))) for i, text in enumerate(program.texts)]

    def work(connection: Connection) -> None:
        text = texts[connection.rank.coordinates.pipeline]
        tensors = read_weights(source, program.buffers)
        parallel = Parallel(connection, ShapeFunctions(program.manifest, text, tensors))
        parallel.export_pretrained(target)

    run_threads(program.manifest, work)


def compare_folders(source: Path, target: Path) -> str:
    """Return whether both folders have the same files of weights, byte by byte."""
    names = [sorted(file.name for file in folder.glob("*.safetensors*")) for folder in (source, target)]
    equal = names[0] == names[1] and all(
        (source / name).read_bytes() == (target / name).read_bytes() for name in names[0]
    )
    return "equal bytes" if equal else "DIFFERS"


def describe_division(program: CompiledProgram) -> tuple[str, str]:
    """Return the fraction of parameters that tensor ranks divide, and the matrices that each holds whole."""
    own = [p for p in program.manifest.parameters.values() if p.kind == "parameter"]
    whole = [p for p in own if p.placement["tensor"].dim is None]
    names = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", p.name) for p in whole if len(p.shape) > 1)
    share = 1 - sum(p.bytes for p in whole) / sum(p.bytes for p in own)
    return f"{share:.0%}", ", ".join(f"`{name}`" for name in names)


def compare_flops(name: str) -> str:
    """Return the FLOPs of our forward's products over those that torch's own counter finds in the plain model's.

    The counter does not know a CPU's fused attention, so attention is computed as two products.
    """
    model, example = make(name)
    program = autoptd.compile(model, (1, 1, 1), example_inputs=example)
    works = (forward_work(node) for stage in program.stages for node in stage.graph.nodes)
    own = sum(product.flops for work in works for product in work.products)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**example)
    return f"{own / counter.get_total_flops():.3f}"


def measure_row(name: str) -> tuple[str, ...]:
    torch.manual_seed(0)
    model, example = make(name)
    randomize(model)
    program = autoptd.compile(model, MESH, example_inputs=example, num_microbatches=4, num_model_chunks=2)
    report = program.verify()
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "source", Path(folder) / "target"
        save_plain(model, source)
        pass_through(program, source, target)
        same = compare_folders(source, target)
    loss = abs(report.loss - report.reference_loss) / abs(report.reference_loss)
    errors = f"{loss:.0e}", f"{max(report.gradient_errors.values()):.0e}"
    division = describe_division(program)
    return (*(name, str(len(program.stages)), *division, *errors, same), *(compare_flops(name), REMARKS.get(name, "")))


def list_rows() -> Iterator[tuple[str, ...]]:
    for name in (*CLASSES, *GPTS):
        try:
            yield measure_row(name)
        except (ValueError, autoptd.ProgramError) as error:
            yield name, "refused", *[""] * (len(HEADINGS) - 3), str(error).replace("|", "/")


def main() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # transformers' own, about tiny models
    for row in (HEADINGS, ["---"] * len(HEADINGS), *list_rows()):
        print(f"| {' | '.join(row)} |")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
