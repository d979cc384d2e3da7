"""What of a model takes how much device memory, against a budget. Plain arithmetic on bytes; takes none itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from novalm_jax.errors import BudgetError
from novalm_jax.units import format_size


@dataclass(frozen=True)
class MemoryPlan:
    """Device memory of one placement: every part that exists at the peak of a step, by name, in bytes."""

    parts: Mapping[str, int]

    @property
    def device_bytes(self) -> int:
        """The peak."""
        return sum(self.parts.values())

    def fits(self, budget: int) -> bool:
        """Whether the peak stays within `budget` bytes."""
        return self.device_bytes <= budget

    def require(self, budget: int, what: str, advice: Sequence[str]) -> None:
        """Refuses a budget below the peak; `what` names the model, `advice` says what would take less.

        Raises:
          BudgetError: carries what is needed, part by part.
        """
        if self.fits(budget):
            return
        table = ", ".join(f"{name} {format_size(size)}" for name, size in self.parts.items())
        raise BudgetError(
            f"{what} needs {self.device_bytes} bytes ({format_size(self.device_bytes)}) of device memory at least, and "
            f"device_memory allows {budget} ({format_size(budget)}): {table}. Give {' or '.join(advice)}.",
            least_bytes=self.device_bytes,
            table=self.parts,
        )
