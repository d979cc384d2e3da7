"""Pictures of a training run, from its metrics: losses by step, and how evenly experts were chosen.

Needs matplotlib, which the `notebook` extra brings.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from novalm_jax.training.run_folder import read_metrics
from novalm_jax.training.summary import of_kind

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_pictures(output: Path) -> None:
    """Writes losses.png and experts.png into the folder of a run."""
    records = read_metrics(output)
    draw_losses(records).savefig(output / "losses.png", dpi=150)
    draw_experts(records).savefig(output / "experts.png", dpi=150)


def draw_losses(records: list[dict[str, Any]]) -> Figure:
    """Next-token losses by step, on training batches and on the validation text, beside those of counting."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    updates, validations = of_kind(records, "update"), of_kind(records, "validation")
    axes.plot([each["step"] for each in updates], [each["next_token"] for each in updates], lw=0.7, label="training")
    steps = [each["step"] for each in validations]
    axes.plot(steps, [each["nats_per_token"] for each in validations], "o-", ms=3, label="validation")
    for name, loss in of_kind(records, "baselines")[0]["losses"].items():
        axes.axhline(loss["nats_per_token"], ls=":", lw=1, color="gray")
        axes.annotate(name, (0, loss["nats_per_token"]), va="bottom", fontsize="small", color="gray")
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.legend()
    return figure


def draw_experts(records: list[dict[str, Any]]) -> Figure:
    """How often each expert of each layer was chosen on the validation text, at the end; 1 is an even share."""
    from matplotlib.figure import Figure

    load = of_kind(records, "validation")[-1]["load"]
    shares = [[part * len(layer) for part in layer] for layer in load]
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shares, aspect="auto", vmin=0, vmax=2, cmap="RdBu_r")
    axes.set(xlabel="expert", ylabel="layer")
    figure.colorbar(image, label="times an even share")
    return figure
