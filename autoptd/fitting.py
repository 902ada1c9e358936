"""A program that fits the memory of its devices, as the simulator has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from autoptd.compiled import CompiledProgram
from autoptd.passes.cluster import Cluster
from autoptd.runtime.caller import warn_caller

CUTS = 8  # that are tried
LESS = 0.92  # of its memory has the next

Cut = tuple[tuple[int, ...], str]  # positions, and a line for the log


def fit_program(
    find: Callable[[int | None], Cut], finish: Callable[[Cut], CompiledProgram], cluster: Cluster | None
) -> tuple[tuple[int, ...], CompiledProgram]:
    """Where a program is cut, and the program: within the memory of a `cluster` that is given, if it can be.

    `find` cuts within a number of bytes, but counts neither the buffers of receives nor all that a backward holds:
    where the program that is to `finish` has too much, it is asked again with less. What no cut makes fit is warned of.
    """
    if cluster is None:
        cut = find(None)
        return cut[0], finish(cut)
    limit = int(cluster.device.memory_bytes)
    made: dict[tuple[int, ...], CompiledProgram] = {}
    for number in range(CUTS):
        cut = find(int(limit * LESS**number))
        if cut[0] not in made:
            program = made[cut[0]] = finish(cut)
            if program.simulate(cluster).fits:
                return cut[0], program
    positions, program = min(made.items(), key=lambda pair: max(pair[1].simulate(cluster).memory_bytes))
    memory = program.simulate(cluster).memory_bytes
    held = max(memory)
    warn_caller(
        f"the program does not fit {cluster.name}: pipeline rank {memory.index(held)} holds {held:,} bytes, "
        f"{held - limit:,} more than a device's {limit:,}, and no better cut was found; more pipeline ranks, a smaller "
        'microbatch or recompute="full" hold less (see autoptd.plan)'
    )
    return positions, program


def choose_fitting(programs: Iterator[CompiledProgram], cluster: Cluster) -> CompiledProgram:
    """The first of `programs` that fits the `cluster`: plans are estimates until they are cut. Else the first."""
    first = next(programs)
    return next((program for program in (first, *programs) if program.simulate(cluster).fits), first)
