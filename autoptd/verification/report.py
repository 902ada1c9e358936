"""The result of `verify`: the loss and every gradient of all ranks, compared with the plain model's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

TOLERANCE = 1e-12  # relative, in float64
SHOWN = 5
LOSS, NORM = "the loss", "the norm of the gradient"  # in `Report.wrong`, beside the names of parameters


def compare_numbers(found: float, expected: float) -> float:
    """Return the relative error of a number."""
    return abs(found - expected) / max(abs(expected), 1e-300)


@dataclass(frozen=True)
class Report:
    """The errors of a verification, relative: a gradient's largest difference over its largest element.

    A gradient of almost zero is measured against 1e-6 of the largest of all, and one of rounding alone against 1e-3.
    `disagreements` say where ranks that must hold the same do not. `further` are the reports of further input shapes;
    `shape` names this one if there are several. `fault` says where in the texts the first wrong value is made. `bounds`
    are the errors that are allowed where the model's own dtype rounds more, under the same names as `errors`.
    `output_errors` are those of what a call returns besides the loss.
    """

    loss: float
    reference_loss: float
    gradient_errors: Mapping[str, float]
    disagreements: tuple[str, ...]
    ranks: int
    seconds: float
    notes: tuple[str, ...] = ()
    shape: str = ""
    fault: str = ""
    bounds: Mapping[str, float] = field(default_factory=dict)
    norm_error: float = 0.0
    further: tuple[Report, ...] = ()
    output_errors: Mapping[str, float] = field(default_factory=dict)

    @property
    def loss_error(self) -> float:
        """Return the relative error of the loss."""
        return compare_numbers(self.loss, self.reference_loss)

    @property
    def worst(self) -> tuple[str, float]:
        """Return the parameter with the largest error, and that error; ("", 0.0) without parameters."""
        return max(self.gradient_errors.items(), key=lambda item: _rank(item[1]), default=("", 0.0))

    @property
    def errors(self) -> Mapping[str, float]:
        """Return the errors of the loss, of the norm by which the gradient is clipped, of each gradient and output."""
        return {LOSS: self.loss_error, NORM: self.norm_error, **self.gradient_errors, **self.output_errors}

    @property
    def wrong(self) -> tuple[str, ...]:
        """Return what is not the plain model's, the worst first: names of parameters, `LOSS` and `NORM`."""
        return self._find_wrong(TOLERANCE)

    @property
    def passed(self) -> bool:
        """Return whether loss and all gradients are the plain model's, to rounding."""
        return self.ok()

    def ok(self, tolerance: float = TOLERANCE) -> bool:
        """Return whether no error of any shape exceeds `tolerance` and no rank disagrees; nan is an error."""
        own = not self._find_wrong(tolerance) and not self.disagreements
        return own and all(report.ok(tolerance) for report in self.further)

    def _find_wrong(self, tolerance: float) -> tuple[str, ...]:
        listed = sorted(self.errors.items(), key=lambda item: -_rank(item[1]))
        return tuple(n for n, error in listed if not error <= max(tolerance, self.bounds.get(n, 0.0)))

    def __str__(self) -> str:
        """Write a short table: the loss, then the parameters with the largest errors."""
        passed = replace(self, further=()).passed
        verdict = "passed" if passed else "FAILED"
        shape = f", microbatches of {self.shape}" if self.shape else ""
        ranks = f"{self.ranks} rank{'s' * (self.ranks > 1)}"
        name, error = self.worst
        how = f"the plain model in {'its own dtype' if self.bounds else 'float64'}"
        how += f", whose rounding may make errors of {max(self.bounds.values()):.1e}" if self.bounds else ""
        lines = [
            f"verify {verdict}: {ranks} against {how}, {self.seconds:.1f} s{shape}",
            f"  loss {self.loss:.15g}, plain {self.reference_loss:.15g}, relative error {self.loss_error:.1e}",
            f"  {len(self.gradient_errors)} gradients, worst {name or 'none'}: relative error {error:.1e}",
        ]
        if self.output_errors:
            worst, error = max(self.output_errors.items(), key=lambda item: _rank(item[1]))
            lines += [f"  {len(self.output_errors)} outputs, worst {worst[7:]}: relative error {error:.1e}"]
        if not passed:
            lines += [f"    {self.errors[name]:8.1e}  {name}" for name in self.wrong[:SHOWN]]
            lines += [f"    and {len(self.wrong) - SHOWN} more"] if len(self.wrong) > SHOWN else []
            lines += [f"  {disagreement}" for disagreement in self.disagreements[:SHOWN]]
            lines += [f"  {self.fault}"] if self.fault else []
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join([*lines, *map(str, self.further)])


def _rank(error: float) -> float:
    """Order nan as the worst."""
    return error if error == error else float("inf")
