"""A checkpoint folder -> a checkpoint folder of another form, with the memory of one tensor.

Puts sources and writers together. Knows neither bytes nor formats itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from novalm_jax.checkpoint.atomic import Work, check_destination
from novalm_jax.checkpoint.companions import (
    WEIGHTS,
    Companions,
    config_bytes,
    identity_of,
    read_bytes,
    with_dtype,
)
from novalm_jax.checkpoint.files import CONFIG, TensorReader
from novalm_jax.checkpoint.hub import find_folder
from novalm_jax.checkpoint.load import Checkpoint, parameter_dtypes
from novalm_jax.checkpoint.sources import Source, StoredSource
from novalm_jax.checkpoint.store_write import StorePlan
from novalm_jax.checkpoint.write import Plan
from novalm_jax.config import ModelConfig
from novalm_jax.errors import CheckpointError, some
from novalm_jax.models.families.family import Family
from novalm_jax.options import ConvertOptions

if TYPE_CHECKING:
    from novalm_jax.checkpoint.orbax import OrbaxPlan


@dataclass(frozen=True)
class Summary:
    """What a conversion wrote.

    Attributes:
      folder: the new folder.
      weights: what its weights are, in words.
      needless: stored tensors of the source that the network does not need and that were not written.
      left: files of the source that are too large to go along.
    """

    folder: Path
    weights: str
    needless: tuple[str, ...]
    left: tuple[str, ...]

    def __str__(self) -> str:
        text = f"{self.folder}: {self.weights}"
        if self.needless:
            text += f"; not written, as the network does not need them: {some(self.needless, 4)}"
        if self.left:
            text += f"; not copied, as they are large: {some(self.left, 4)}"
        return text


def convert_checkpoint(source: str | Path, destination: str | Path, options: ConvertOptions | None = None) -> Summary:
    """Writes the checkpoint in `source` anew, in the form that `options` ask for.

    Ended early, it goes on where it was when it is called again with the same arguments.

    Args:
      source: a Hugging Face folder, the name of a model in the local cache, or an Orbax folder of `save_orbax`.
      destination: the folder to be made; must not exist, or be empty. It comes into being at once, complete.
      options: the form; by default .safetensors files with every bit as it is.

    Raises:
      OptionError: the folder cannot be made there, or holds something else.
      CheckpointError, ConfigError: the source cannot be read, or is a store that is not what was written.
      WriteError: the destination cannot be written.
    """
    options = options or ConvertOptions()
    folder = find_folder(source).resolve()
    place = check_destination(destination, folder)
    if (folder / WEIGHTS).is_dir():
        from novalm_jax.checkpoint.orbax import OrbaxSource

        with OrbaxSource(folder) as orbax:
            files = [path for path in (folder / WEIGHTS).rglob("*") if path.is_file()]
            return _convert(_Opened(folder, orbax.raw, orbax.family, orbax.config, orbax, files), place, options)
    checkpoint = Checkpoint.open(folder)
    with TensorReader() as reader:
        # Damage would get checksums of its own.
        checkpoint.verify(reader)
        weights, needless = StoredSource(checkpoint.weights, reader), checkpoint.weights.ignored
        described = (checkpoint.raw, checkpoint.family, checkpoint.config)
        return _convert(_Opened(folder, *described, weights, weights.files, needless), place, options)


@dataclass(frozen=True)
class _Opened:
    """What is known of a source before its weights are read."""

    folder: Path
    raw: Mapping[str, Any]
    family: Family
    config: ModelConfig
    weights: Source
    files: Collection[Path]
    needless: tuple[str, ...] = ()


def _convert(source: _Opened, destination: Path, options: ConvertOptions) -> Summary:
    companions, form = Companions.of(source.folder), _form(source, options)
    with Work(destination, _identity(source, companions, options)) as work:
        if not work.in_place:
            companions.put(work, _config_bytes(source, options))
            form.write(work, source.weights)
            if _identity(source, companions, options) != work.identity:
                raise CheckpointError(f"{source.folder} changed while it was read. Let that end, then convert it anew.")
        work.finish()
    return Summary(destination, str(form), source.needless, companions.left)


def _form(source: _Opened, options: ConvertOptions) -> Plan | StorePlan | OrbaxPlan:
    """All that is to be written, planned."""
    dtypes = None
    if options.dtype != "as-stored":
        dtypes = parameter_dtypes(source.config, options.dtype)
    if options.to == "store":
        return StorePlan.of(source.weights, dtypes)
    if options.to == "safetensors":
        return Plan.of(source.family, source.weights, dtypes, options.shard_bytes)
    from novalm_jax.checkpoint.orbax import OrbaxPlan

    return OrbaxPlan.of(source.weights, dtypes)


def _identity(source: _Opened, companions: Companions, options: ConvertOptions) -> dict[str, Any]:
    """What the work is made from and how: the same again may be resumed."""
    files = [source.folder / CONFIG, *companions.paths.values(), *source.files]
    form = asdict(options) | {"shard_size": options.shard_bytes}
    return {"source": str(source.folder.resolve()), "files": identity_of(files), "options": form}


def _config_bytes(source: _Opened, options: ConvertOptions) -> bytes:
    """The new config.json: byte for byte the old one, unless a field of it changes."""
    changed = with_dtype(source.raw, None if options.dtype == "as-stored" else options.dtype)
    return read_bytes(source.folder / CONFIG) if changed == source.raw else config_bytes(changed)
