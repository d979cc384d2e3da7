"""Storage form: the dtype in which large arrays are held that programs slice or update in place.

XLA's CPU backend converts or rewrites a whole bfloat16 array to slice or update a part of it, and leaves unsigned
integers alone. So 16-bit floats are held as uint16, and a part is viewed as what it is once it has been cut out.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax


def storage_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype that holds elements of `dtype`: uint16 for 16-bit floats, others as they are."""
    return np.dtype(np.uint16) if dtype.itemsize == 2 else dtype


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays in a tree, or of what their shapes stand for."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def delete_arrays(tree: Any) -> None:
    """Frees the memory of all arrays in a tree. Those that are gone stay so."""
    for leaf in jax.tree.leaves(tree):
        leaf.delete()


def view_as(array: jax.Array, dtype: np.dtype) -> jax.Array:
    """The same bits as another dtype of the same width; to storage form, or back from it."""
    return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)
