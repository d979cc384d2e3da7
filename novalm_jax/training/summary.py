"""A training run in a few lines, from its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any


def summary(records: Sequence[dict[str, Any]], tokens_per_step: int) -> str:
    """The losses of the model and of counting, how evenly experts are used, and how fast training was.

    Args:
      records: from `read_metrics`, of a run with at least one validation.
      tokens_per_step: of a batch.
    """
    (counting,) = of_kind(records, "baselines")
    last, updates = of_kind(records, "validation")[-1], of_kind(records, "update")
    shares = [part * len(layer) for layer in last["load"] for part in layer]
    seconds = median(record["seconds"] for record in updates)
    losses = counting["losses"] | {"model": last}
    return "\n".join(
        [
            "validation  nats a token  bits a byte",
            *(
                f"{name:<10} {loss['nats_per_token']:13.3f} {loss['bits_per_byte']:12.3f}"
                for name, loss in losses.items()
            ),
            f"experts     chosen {min(shares):.2f} to {max(shares):.2f} times as often as an even share",
            f"training    {last['step']} steps of {tokens_per_step} tokens, {tokens_per_step / seconds:.0f} tokens/s",
        ]
    )


def of_kind(records: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The records of one kind, in order."""
    return [record for record in records if record["kind"] == kind]
