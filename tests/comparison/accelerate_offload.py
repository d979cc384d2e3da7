"""Tokens a second of transformers with accelerate's offload to disk, beside `bench decode`, in the same memory.

Run by hand, never by the suite, from the top of the repository. `--accelerate` is a Python with torch 2.13.0 (CPU),
transformers 5.24.0 and accelerate 1.15.0, `--novalm` one with novalm_jax:

    python tests/comparison/accelerate_offload.py MODEL --accelerate env/bin/python --novalm env2/bin/python

Each runs in a process of its own, whose peak memory the system counts, after the system was asked to forget the files.
What one may hold of the model in its memory is what the other may hold on the device and on the host. The result is one
JSON line. Speed is that of tokens after the first two.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SKIPPED = 2  # tokens: those that `bench decode` does not count either


def main() -> None:
    """Both, or in a child the one that needs torch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a checkpoint")
    parser.add_argument("--accelerate", default=sys.executable, help="a Python with torch, transformers and accelerate")
    parser.add_argument("--novalm", default=sys.executable, help="a Python with novalm_jax")
    parser.add_argument("--device-memory", default="400MiB", help="of bench decode")
    parser.add_argument("--host-memory", default="256MiB", help="of bench decode")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument(
        "--forget-every", type=float, default=0, help="seconds between more forgetting (0: once before)"
    )
    parser.add_argument("--forget-all", action="store_true", help="empty the system's whole page cache (needs root)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(offloaded(options)))
        return
    same = ["--device-memory", options.device_memory, "--host-memory", options.host_memory]
    same += ["--prompt-tokens", str(options.prompt_tokens), "--tokens", str(options.tokens)]
    child = [options.accelerate, __file__, str(options.model), "--child", *same]
    bench = [options.novalm, "-m", "novalm_jax.bench", "decode", str(options.model), "--max-batch", "1", "--json"]
    theirs, ours = run(child, options), run([*bench, *same], options)
    ratio = ours["tokens_per_second"] / theirs["tokens_per_second"]
    memory = size(options.device_memory) + size(options.host_memory)
    kept = ("tokens_per_second", "peak_rss_bytes", "parts_on_disk")
    found = {
        name: {key: run[key] for key in kept if key in run} for name, run in (("accelerate", theirs), ("novalm", ours))
    }
    print(json.dumps({"model": str(options.model), "memory_bytes": memory, **found, "ratio": ratio}))


def run(command: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """What a command prints as JSON, and the most memory that it held."""
    forget(options)
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said)
        begin = time.monotonic()
        while True:
            # This parent stays small: a child's peak begins with that of the process it was made from.
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            if ended:
                break
            time.sleep(0.05)
            if options.forget_every and time.monotonic() - begin > options.forget_every:
                forget(options)
                begin = time.monotonic()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"{' '.join(command)} ended with exit code {process.returncode}")
        said.seek(0)
        figures: dict[str, Any] = json.loads(said.read().splitlines()[-1])
    return figures | {"peak_rss_bytes": usage.ru_maxrss * 1024}


def forget(options: argparse.Namespace) -> None:
    """Asks the system to drop its copies of the model's files, or of all files."""
    for path in options.model.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if options.forget_all:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("1")


def offloaded(options: argparse.Namespace) -> dict[str, Any]:
    """Decodes with as much of the model in memory as may be, and the rest on disk."""
    import torch  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM  # type: ignore[import-not-found]

    memory = size(options.device_memory) + size(options.host_memory)
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(
            options.model, dtype="auto", device_map="auto", max_memory={"cpu": memory}, offload_folder=folder
        )
        clock = Clock()
        torch.manual_seed(0)
        prompt = torch.randint(model.config.vocab_size, (1, options.prompt_tokens))
        count = {"max_new_tokens": options.tokens, "min_new_tokens": options.tokens, "do_sample": False}
        model.generate(prompt, attention_mask=torch.ones_like(prompt), streamer=clock, **count)
    times = clock.times[SKIPPED - 1 :]
    on_disk = [name for name, device in model.hf_device_map.items() if device == "disk"]
    return {"tokens_per_second": (len(times) - 1) / (times[-1] - times[0]), "parts_on_disk": on_disk}


class Clock:
    """When each token came; a streamer, as `generate` takes one."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt = True

    def put(self, value: Any) -> None:
        """The prompt first, then each token."""
        if not self._prompt:
            self.times.append(time.perf_counter())
        self._prompt = False

    def end(self) -> None:
        """Nothing is left to do."""


def size(text: str) -> int:
    """Bytes of a size such as 400MiB."""
    for unit, factor in (("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("", 1)):
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    raise AssertionError("every text ends with nothing")


if __name__ == "__main__":
    main()
