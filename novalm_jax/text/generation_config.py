"""What a checkpoint says about how to sample from it and when to stop: `generation_config.json`.

Knows the two files that say so. Refuses to know tokenizers and requests; nothing here is a default of ours.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from novalm_jax.errors import CheckpointError
from novalm_jax.text.files import read_optional_json

_TOP = sys.float_info.max
_INT32 = 2**31 - 1
# Field -> (least, greatest) value; a field absent from the file is None.
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, _TOP),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, _TOP),
}


@dataclass(frozen=True)
class GenerationConfig:
    """Stop ids and sampling values of one checkpoint; None means that the checkpoint does not say.

    `do_sample: false` is temperature 0, whatever temperature stands beside it. `do_sample: true` without a temperature
    is temperature 1. Without `do_sample` the values count as they stand.
    """

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def load(cls, folder: Path) -> GenerationConfig:
        """Reads `generation_config.json`; stop ids it does not give come from the top level of `config.json`.

        Raises:
          CheckpointError: damaged JSON, or a value of the wrong kind; names the file and the field.
        """
        path, fallback = folder / "generation_config.json", folder / "config.json"
        data = read_optional_json(path)
        eos = _ids(data, "eos_token_id", path)
        # The model's file is asked only where this one is silent, so a mistake there cannot matter otherwise.
        if eos is None:
            eos = _ids(read_optional_json(fallback), "eos_token_id", fallback)
        numbers = {name: _number(data, name, path) for name in _RANGES}
        top_k = _integer(data, "top_k", path)
        do_sample = data.get("do_sample")
        if do_sample is not None and not isinstance(do_sample, bool):
            raise _wrong(path, "do_sample", do_sample, "true or false")
        if do_sample is False:
            numbers["temperature"] = 0.0
        elif do_sample is True and numbers["temperature"] is None:
            numbers["temperature"] = 1.0
        return cls(eos_token_ids=eos or (), top_k=top_k, **numbers)

    def sampling(self) -> dict[str, float]:
        """The sampling values that the checkpoint gives, by name."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def _ids(data: Mapping[str, Any], field: str, path: Path) -> tuple[int, ...] | None:
    value = data.get(field)
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    if not all(type(token_id) is int and 0 <= token_id <= _INT32 for token_id in ids):
        raise _wrong(path, field, value, "a token id, a list of token ids, or null")
    return tuple(dict.fromkeys(ids))


def _integer(data: Mapping[str, Any], field: str, path: Path) -> int | None:
    value = data.get(field)
    if value is None or (type(value) is int and 0 <= value <= _INT32):
        return value
    raise _wrong(path, field, value, f"an integer from 0 to {_INT32}, or null")


def _number(data: Mapping[str, Any], field: str, path: Path) -> float | None:
    value = data.get(field)
    if value is None:
        return None
    least, most = _RANGES[field]
    # Neither NaN nor an integer too large for a float passes: it is compared before it is converted.
    if type(value) not in (int, float) or not least <= value <= most:
        limits = f"of at least {least:g}" if most == _TOP else f"from {least:g} to {most:g}"
        raise _wrong(path, field, value, f"a number {limits}, or null")
    return float(value)


def _wrong(path: Path, field: str, value: object, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {field} is {value!r:.60}; it must be {wanted}. Correct the file or remove the field."
    )
