"""The picture of a simulation: hits by slots, of all policies that were tried.

Needs matplotlib, which the `notebook` extra brings.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from novalm_jax.checkpoint.atomic import check_file, write_whole
from novalm_jax.compat import require_matplotlib
from novalm_jax.errors import OptionError
from novalm_jax.experts.simulation import Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg", ".pdf")
"""Of files that a picture can be written to."""


def check_picture(option: str, path: Path) -> None:
    """Refuses what cannot be drawn, before anything is computed for it.

    Raises:
      OptionError: matplotlib is not installed, the name says no kind of picture, or no file can be written there.
        `option` is the one to blame.
    """
    if path.suffix not in SUFFIXES:
        raise OptionError(f"{option}: {path} ends in none of {', '.join(SUFFIXES)}; give a file that does.")
    require_matplotlib(option)
    check_file(path, option)


def save_picture(simulation: Simulation, path: Path) -> None:
    """Writes it whole or not at all.

    Raises:
      WriteError: it cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    draw_hits(simulation, figure.subplots())
    picture = io.BytesIO()
    figure.savefig(picture, format=path.suffix[1:], dpi=150)
    write_whole(path, picture.getvalue())


def draw_hits(simulation: Simulation, axes: Axes) -> None:
    """Hits by slots: `lru` as a curve, where the simulation has it, and what was replayed as points."""
    records = simulation.layers * simulation.experts
    if simulation.lru_curve is not None:
        axes.plot(
            100 * simulation.curve_slots / records, 100 * simulation.lru_curve, color="gray", lw=1, label="lru, all"
        )
    for policy in dict.fromkeys(cell.policy for cell in simulation.cells):
        cells = sorted((cell for cell in simulation.cells if cell.policy == policy), key=lambda cell: cell.slots)
        shares = [100 * cell.slots / records for cell in cells]
        axes.plot(shares, [100 * cell.hit_rate for cell in cells], "o--", ms=4, lw=0.7, label=policy)
    axes.set(xlabel="slots (% of all experts)", ylabel="hits (%)", xlim=(0, 100), ylim=(0, 100))
    # A file may be called like a formula.
    axes.set_title(simulation.trace, parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend()
