"""The speed of training in tokens, and the days and the money that it takes."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Throughput:
    """The `tokens` of a step of `step_seconds` on `devices`; none for a model without an input of tokens."""

    step_seconds: float
    devices: int
    tokens: int

    def describe(self, tokens: float | None = None, price: float | None = None) -> dict[str, float]:
        """Return the speed, and of a training on `tokens` the days, and the cost at a `price` of a device-hour."""
        if any(n is not None and n <= 0 for n in (tokens, price)) or (tokens and not self.tokens):
            raise ValueError(
                f"tokens={tokens}, price={price}: expected positive numbers, for a model that takes tokens"
            )
        rate = self.tokens / self.step_seconds
        found = {"tokens_per_second": rate, "tokens_per_second_per_device": rate / self.devices} if rate else {}
        if tokens:
            found["days"] = tokens / rate / 86400
            found |= {"cost": found["days"] * 24 * self.devices * price} if price else {}
        return found


def format_speed(speed: Mapping[str, float]) -> dict[str, str]:
    """Return the numbers of `Throughput.describe` in words."""
    return {name.replace("_", " "): f"{n:,.0f}" if n >= 100 else f"{n:.3g}" for name, n in speed.items()}
