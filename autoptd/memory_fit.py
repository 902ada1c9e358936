"""Find a program that fits the memory of its devices in the simulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from autoptd.compiled import CompiledProgram
from autoptd.passes.cost.cluster import Cluster
from autoptd.passes.stages.cut import Found, fit_cut
from autoptd.runtime.user_warnings import warn_caller


def fit_program(
    find: Callable[[Sequence[int]], Found],
    finish: Callable[[Found], CompiledProgram],
    cluster: Cluster | None,
) -> tuple[tuple[int, ...], CompiledProgram]:
    """Return a cut and its program, within the memory of a given `cluster` if possible.

    `find` and `finish` are those of `fit_cut`. Warns if no cut fits.
    """
    if cluster is None:
        found = find(())
        del find  # and the kernels that it timed, before the program is made
        return found.positions, finish(found)
    limit = int(cluster.device.memory_bytes)

    def make(found: Found) -> tuple[CompiledProgram, Sequence[int]]:
        program = finish(found)
        return program, program.simulate(cluster).memory_bytes

    found, program, memory = fit_cut(find, make, limit)
    if (held := max(memory)) > limit:
        warn_caller(
            f"the program does not fit {cluster.name}: pipeline rank {memory.index(held)} holds {held:,} bytes, "
            f"{held - limit:,} more than a device's {limit:,}, and no better cut was found; more pipeline ranks, a "
            'smaller microbatch or recompute="full" hold less (see autoptd.plan)'
        )
    return found.positions, program


def choose_fitting(programs: Iterator[CompiledProgram], cluster: Cluster) -> CompiledProgram:
    """Return the first of `programs` that fits the `cluster`, else the first; plans are only estimates."""
    first = next(programs)
    return next((program for program in chain((first,), programs) if program.simulate(cluster).fits), first)
