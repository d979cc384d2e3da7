"""How far a reference model's routers are from choosing otherwise.

Knows how each family of the reference chooses its experts. Refuses to know configuration files, weights and folders.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch  # type: ignore[import-not-found]

Tensor = Any


def watch_routers(model: Any) -> list[float]:
    """Gives a list to which every router of `model` adds its least gap each time it runs."""
    gaps: list[float] = []
    family = model.config.model_type

    def note(module: Any, inputs: tuple[Tensor, ...], output: Any) -> None:
        logits = output if isinstance(output, torch.Tensor) else output[1 if family == "llama4_text" else 0]
        gaps.append(RULES.get(family, gap_of_softmax)(model.config, module, inputs, logits))

    for name, module in model.named_modules():
        if name.endswith((".gate", ".router")):
            module.register_forward_hook(note)
    return gaps


def gap_after(scores: Tensor, k: int) -> float:
    """The least gap between the k-th and the next of scores [t, n]; infinite where nothing is left out."""
    if k >= scores.shape[-1]:
        return math.inf
    ordered = scores.sort(-1, descending=True).values
    return float((ordered[:, k - 1] - ordered[:, k]).min())


def gap_in_groups(config: Any, module: Any, scores: Tensor, score_of: Callable[[Tensor], Tensor]) -> float:
    """As gap_after, also between the last group that is kept and the first that is not."""
    grouped = scores.unflatten(-1, (config.n_group, -1))
    group_scores = score_of(grouped)
    kept = group_scores.topk(config.topk_group, dim=-1).indices
    masked = torch.full_like(grouped, -math.inf)
    index = kept[..., None].expand(*kept.shape, grouped.shape[-1])
    masked.scatter_(1, index, grouped.gather(1, index))
    return min(gap_after(group_scores, config.topk_group), gap_after(masked.flatten(1), module.top_k))


def gap_of_softmax(config: Any, module: Any, inputs: tuple[Tensor, ...], logits: Tensor) -> float:
    return gap_after(logits.softmax(-1), module.top_k)


def gap_of_dbrx(config: Any, module: Any, inputs: tuple[Tensor, ...], logits: Tensor) -> float:
    return gap_after(logits.softmax(-1), config.ffn_config.moe_top_k)


def gap_of_deepseek_v2(config: Any, module: Any, inputs: tuple[Tensor, ...], logits: Tensor) -> float:
    if config.topk_method == "greedy":
        return gap_after(logits.softmax(-1), module.top_k)
    return gap_in_groups(config, module, logits.softmax(-1), lambda grouped: grouped.max(-1).values)


def gap_of_deepseek_v3(config: Any, module: Any, inputs: tuple[Tensor, ...], logits: Tensor) -> float:
    scores = logits.sigmoid() + module.e_score_correction_bias
    return gap_in_groups(config, module, scores, lambda grouped: grouped.topk(2, dim=-1).values.sum(-1))


def gap_of_minimax_m2(config: Any, module: Any, inputs: tuple[Tensor, ...], logits: Tensor) -> float:
    return gap_after(logits.sigmoid() + inputs[1], module.top_k)


def gap_of_ernie(config: Any, module: Any, inputs: tuple[Tensor, ...], logits: Tensor) -> float:
    return gap_after(logits.softmax(-1) + module.moe_statics.e_score_correction_bias[0], module.top_k)


def gap_of_phimoe(config: Any, module: Any, inputs: tuple[Tensor, ...], logits: Tensor) -> float:
    """Two choices one after the other, each of which also drops the experts below a threshold from its softmax."""
    gap, left = math.inf, logits
    for _ in range(2):
        best = left.max(-1, keepdim=True)
        distance = (best.values - logits) / logits.abs().clamp(min=best.values)
        gap = min(gap, gap_after(left, 1), float((distance - 2 * module.router_jitter_noise).abs().min()))
        left = left.scatter(-1, best.indices, -math.inf)
    return gap


RULES: dict[str, Callable[[Any, Any, tuple[Tensor, ...], Tensor], float]] = {
    "dbrx": gap_of_dbrx,
    "deepseek_v2": gap_of_deepseek_v2,
    "deepseek_v3": gap_of_deepseek_v3,
    "ernie4_5_moe": gap_of_ernie,
    "glm4_moe": gap_of_deepseek_v3,
    "minimax_m2": gap_of_minimax_m2,
    "phimoe": gap_of_phimoe,
}
