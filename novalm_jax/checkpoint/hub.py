"""Names of models on the Hugging Face Hub, such as org/name, -> folders of the local cache that hold them.

Knows what such names look like, and asks huggingface_hub where its cache is. Never downloads, and refuses to know what
is in a folder. huggingface_hub is an extra: it is imported only for a name that is no path.
"""

from __future__ import annotations

import re
from pathlib import Path

from novalm_jax.errors import CheckpointError
from novalm_jax.resources import embedded_checkpoint

_NAME = re.compile(r"(?P<id>\w[\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?", re.ASCII)
_ADDRESS = re.compile(r"(?:https?:/+)?(?:www\.)?(?:huggingface\.co|hf\.co)/+([\w.-]+/[\w.-]+).*", re.ASCII)


def find_folder(model: str | Path | None) -> Path:
    """The folder that `model` means: what exists under that path, else the model of that name in the local cache; None
    is the model in this package.

    Args:
      model: a path, in which `~` is the user's home; or `org/name`, with `@` and a branch, tag or commit if it is not
        to be main. The cache is where huggingface_hub has it (HF_HOME, HF_HUB_CACHE).

    Returns:
      A folder of the cache, or `model` as a path. Whether that exists is not said.

    Raises:
      CheckpointError: a name of the hub that is not in the cache, is malformed, or cannot be looked up because
        huggingface_hub is not installed.
    """
    if model is None:
        return embedded_checkpoint()
    text = str(model).rstrip("/") or str(model)
    path = Path(text)
    if _exists(path):
        return path
    if text.startswith("~"):
        return _at_home(path)
    if address := _ADDRESS.fullmatch(text):
        raise CheckpointError(
            f"{text} is an address, and nothing is downloaded here. Run `hf download {address[1]}`, then give "
            f"{address[1]}."
        )
    name = _NAME.fullmatch(text)
    return _cached(name["id"], name["revision"]) if name else path


def cached_name(folder: Path) -> str | None:
    """The name of the model whose version `folder` is in a cache, None for any other folder."""
    repository = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not repository.startswith("models--"):
        return None
    return repository.removeprefix("models--").replace("--", "/")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        # Something is there that may not be looked at, or the text is no path; whoever opens it says which.
        return True


def _at_home(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def _cached(name: str, revision: str | None) -> Path:
    download = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    try:
        from huggingface_hub import constants, try_to_load_from_cache
    except ImportError:
        raise CheckpointError(
            f"There is no folder {name}, and whether a model of that name was downloaded cannot be told without "
            "huggingface_hub. Run `pip install huggingface_hub`, or give the folder that holds config.json."
        ) from None
    try:
        # Not snapshot_download: it refuses a version of which only some files were asked for.
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except ValueError as error:
        raise CheckpointError(
            f"There is no folder {name}, and it is no name that a model of the Hugging Face Hub can have: {error} Give "
            "the folder that holds config.json, or a name such as org/name."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{name}: the cache {constants.HF_HUB_CACHE} cannot be read: {error}.") from None
    if isinstance(found, str):
        return Path(found).parent
    version = f"{name}@{revision}" if revision else name
    raise CheckpointError(
        f"There is no folder {version}, and the Hugging Face cache ({constants.HF_HUB_CACHE}) holds no config.json of "
        f"such a model. Run `{download}`, or give the folder that holds config.json; nothing is downloaded here."
    )
