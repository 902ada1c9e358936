"""A program that fits the memory of its devices, as the simulator has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from autoptd.compiled import CompiledProgram
from autoptd.passes.cluster import Cluster
from autoptd.passes.stages import Found
from autoptd.runtime.caller import warn_caller

CUTS = 8  # that are tried


def fit_program(
    find: Callable[[Sequence[int]], Found],
    finish: Callable[[Found], CompiledProgram],
    cluster: Cluster | None,
) -> tuple[tuple[int, ...], CompiledProgram]:
    """Where a program is cut, and the program: within the memory of a `cluster` that is given, if it can be.

    `find` counts neither the buffers of receives nor all that a backward holds: where the program that is to `finish`
    has too much, it is asked again with what each rank was found to hold besides. That is of one cut, and another may
    hold less: where no cut has room for so much, half of what was added is tried. What no cut makes fit is warned of.
    """
    if cluster is None:
        found = find(())
        return found.positions, finish(found)
    limit = int(cluster.device.memory_bytes)
    made: dict[tuple[int, ...], CompiledProgram] = {}
    besides: Sequence[int] = ()
    above: Sequence[int] = ()  # for which there is no cut
    for _ in range(CUTS):
        found = find(besides)
        if made and not found.fits:
            above = besides
        else:
            known = besides or [0] * len(found.held)
            fresh = found.positions not in made
            if fresh:
                program = made[found.positions] = finish(found)
                memory = program.simulate(cluster).memory_bytes
                if max(memory) <= limit:
                    return found.positions, program
            if not found.fits or not (fresh or above):
                break
        if above:
            besides = [(low + high) // 2 for low, high in zip(known, above, strict=True)]
        else:
            rows = zip(known, found.held, memory, strict=True)
            besides = [own + max(0, real - counted) for own, counted, real in rows]
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
