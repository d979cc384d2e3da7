"""Small checkpoint folders, some of them written by hand, and what reading them gives or says."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from novalm_jax.checkpoint.dtypes import numpy_dtype
from novalm_jax.checkpoint.files import INDEX, TensorReader, list_tensors
from novalm_jax.checkpoint.header import StoredTensor
from novalm_jax.errors import CheckpointError


def weights(*names: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng(len(names))
    return {name: random.standard_normal((3, 4)).astype(ml_dtypes.bfloat16) for name in names}


def save(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    save_file(dict(tensors), path)


def by_hand(path: Path, header: Any, data: bytes = bytes(8)) -> None:
    """A file with a header that the library would not write; text and bytes are written as they are."""
    if not isinstance(header, bytes):
        header = (header if isinstance(header, str) else json.dumps(header)).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def entry(dtype: Any = "U8", shape: Any = (8,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def sharded(folder: Path, count: int = 3) -> dict[str, np.ndarray]:
    """A checkpoint of one tensor per shard, with its index."""
    tensors = weights(*(f"layer.{i}" for i in range(count)))
    weight_map = {}
    for i, (name, value) in enumerate(tensors.items(), 1):
        weight_map[name] = f"model-{i:05}-of-{count:05}.safetensors"
        save(folder / weight_map[name], {name: value})
    # The total is wrong on purpose, as it is in many real files.
    write_index(folder, weight_map)
    return tensors


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 17}, "weight_map": weight_map}))


def read(tensor: StoredTensor) -> np.ndarray:
    out = np.zeros(tensor.nbytes, np.uint8)
    with TensorReader() as reader:
        reader.read_into(tensor, out)
    return out.view(numpy_dtype(tensor.dtype)).reshape(tensor.shape)


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        list_tensors(folder)
    return str(caught.value)
