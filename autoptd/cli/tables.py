"""Print the results of the command line: tables on a terminal, plain columns elsewhere."""

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autoptd.passes.cost.call_work import describe_uncounted
from autoptd.passes.cost.throughput import format_speed
from autoptd.planning.plan import Plan
from autoptd.reports.summary import format_seconds, list_numbers
from autoptd.simulate.step import Simulation
from autoptd.text.comments import write_bytes

PLAIN_WIDTH = 110  # of what goes to a file or a pipe
SHOWN_RANKS = 16


def open_console() -> Console:
    """Return a console of the terminal's width, or of a fixed width elsewhere, to compare run with run."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def print_simulation(console: Console, simulation: Simulation, speed: Mapping[str, float]) -> None:
    """Print the step's time with its breakdown, and the memory of every rank."""
    console.print(f"[bold]{escape(simulation.cluster.name)}[/], {simulation.dtype}")
    _print_table(console, ("", ""), {**list_numbers(simulation), **format_speed(speed)}.items())
    step = simulation.step_seconds
    print_lines(console, [simulation.cluster.expect(step), *describe_uncounted(simulation.uncounted)])
    console.print(f"pipeline rank {simulation.critical_rank}, which works most")
    spent = [(n, format_seconds(s), f"{s / step:.1%}") for n, s in simulation.breakdown.items()]
    _print_table(console, ("kind", "time", "of the step"), spent)
    _print_memory(console, simulation)


def print_plans(console: Console, plans: Sequence[Plan], considered: int, lines: Iterable[str]) -> None:
    """Print the best plans, of so many `considered`, and `lines` on the first: speed, trust and command."""
    head = ("t", "p", "d", "v", "b", "m", "schedule", "recompute", "step", "memory", "MFU", "why")
    rows = []
    for plan in plans:
        data = f"{plan.data}{f' e={plan.expert}' if plan.expert else ''}"
        tensor = f"{plan.tensor}{' sp' * plan.sequence_parallel}"
        sizes = tensor, plan.pipeline, data, plan.num_model_chunks, plan.microbatch_size, plan.num_microbatches
        found = format_seconds(plan.step_seconds), write_bytes(plan.memory_bytes), f"{plan.mfu:.1%}", plan.why
        rows.append([str(cell) for cell in (*sizes, plan.schedule, plan.recompute, *found)])
    _print_table(console, head, rows, words=(6, 7, 11))
    console.print("t tensor (sp: tokens too), p pipeline, d data ranks; v chunks a rank; m microbatches of b sequences")
    console.print("memory of the fullest rank; MFU model FLOPs utilisation; why: the largest loss")
    print_lines(console, describe_uncounted(plans[0].uncounted))
    if considered > len(plans):
        console.print(f"{considered - len(plans)} more meshes are slower or do not fit: --top, --mesh, --json")
    print_lines(console, lines)


def _print_memory(console: Console, simulation: Simulation) -> None:
    peaks = simulation.memory_bytes
    fullest, size = peaks.index(max(peaks)), simulation.cluster.device.usable_bytes
    held = ", ".join(f"{name} {write_bytes(count)}" for name, count in simulation.held_bytes.items())
    verdict = "[green]fits[/]" if simulation.fits else "[bold red]does not fit[/]"
    console.print(
        f"{verdict} in {write_bytes(round(size))}: at most {write_bytes(max(peaks))}, on pipeline rank {fullest}"
    )
    console.print(f"there: {held}", markup=False)
    shown = [r for r in range(len(peaks)) if len(peaks) <= SHOWN_RANKS or r in (0, fullest, len(peaks) - 1)]
    rows = [(str(rank), write_bytes(peaks[rank]), f"{peaks[rank] / size:.1%}") for rank in shown]
    _print_table(console, ("rank", "peak memory", "of the device"), rows)


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print lines as they are, without reading a user's names as markup."""
    for line in lines:
        console.print(line, markup=False, soft_wrap=not console.is_terminal)


def _print_table(
    console: Console, head: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] = (0,)
) -> None:
    """Print columns `words` to the left, numbers to the right."""
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, show_header=any(head), pad_edge=False)
    for column, name in enumerate(head):
        table.add_column(name, justify="left" if column in words else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    console.print()
    console.print(table)
    console.print()
