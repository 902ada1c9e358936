"""One input shape of a program on this rank: a schedule over stages of its own, and the parameters of all shapes."""

from types import CodeType

from autoptd.runtime.comm.connection import Connection
from autoptd.runtime.engine.executor import Executor, ShapeFunctions
from autoptd.runtime.optimizer.gradient_memory import StageLeaves
from autoptd.runtime.optimizer.gradient_sums import GradientSums, list_complete
from autoptd.runtime.weights.slices import Slices


class BoundShape:
    """A `ShapeFunctions` bound to the connection that all shapes of a parallel model share.

    `slices` are tensors of this shape alone beside those of the model: its constants, such as a mask of its
    length. `leaves` are what the stages compute with, as `read_leaves` made them last. Where the program `weighs`
    gradients, as an autograd function of the user's does, every rank needs the weights of the microbatches.
    """

    def __init__(self, program: ShapeFunctions, connection: Connection, slices: Slices, graphs: bool) -> None:
        self.manifest = program.manifest
        self.slices = slices
        self.leaves = StageLeaves()
        self.weighs = any(_names(f.__code__, "autograd_function") for f in program.functions.values())
        self._made_for: tuple[object, object] = None, None
        self.executor = Executor(program, connection, graphs)
        here = connection.rank.coordinates.pipeline
        self.complete = list_complete(program.manifest, here, program.schedule[here])
        self.constants = program.constants

    def read_leaves(
        self, tensors: Slices, narrow: Slices, trained: frozenset[str] | None, sums: GradientSums
    ) -> StageLeaves:
        """Return leaves in the memory of `tensors`, or of `narrow` ones instead; those of `trained` add to `sums`.

        They are made anew for one reason: `tensors` or `trained` is another object. A stage has leaves of its own: a
        tied parameter's uses add up separately.
        """
        if not self.leaves.by_stage or tensors is not self._made_for[0] or trained is not self._made_for[1]:
            self._made_for = tensors, trained
            slices = {**tensors, **self.slices, **narrow}
            by_stage = {
                index: {
                    name: slices[name].detach().requires_grad_(name in (trained or ()))
                    for name in self.manifest.stages[index].parameters
                }
                for index in self.executor.stages
            }
            self.leaves = sums.attach(by_stage, trained)
        return self.leaves

    def forget_leaves(self) -> None:
        """Let go of the leaves, and so of memory that tensors leave."""
        self.leaves = StageLeaves()


def _names(code: CodeType, name: str) -> bool:
    """Return whether a function, or one within it, has `name` in its code."""
    return name in code.co_names or any(_names(x, name) for x in code.co_consts if isinstance(x, CodeType))
