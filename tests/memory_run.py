"""Runs a model once, prompt and steps, and says what this took. As a script it is a process of its own, whose peak
nothing else has raised: `python memory_run.py FOLDER OPTIONS_AS_JSON`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from novalm_jax import LLM, SamplingParams


def run(folder: str | Path, options: dict[str, Any]) -> dict[str, Any]:
    """Two requests of 20 tokens, and the logits of a prompt of several chunks."""
    ids = [5 + i * 7 % 250 for i in range(600)]
    with LLM(folder, **options) as llm:
        outs = llm.generate([ids[:80], ids[:300]], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
        logits = llm.logits(ids)
        report = llm.report().to_dict()
    tokens = [list(out.token_ids) for out in outs]
    return {"tokens": tokens, "best": logits.argmax(-1).tolist(), "report": report, "peak_rss": _peak_rss()}


def _peak_rss() -> int:
    """Bytes of memory that this process has had at most. `ru_maxrss` would also count what it was forked from."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(status["VmHWM"].split()[0]) * 1024


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], json.loads(sys.argv[2]))))
