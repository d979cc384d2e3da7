"""Sharding plans: which mesh there is, and which logical axis of the parameters is split over which of its axes.

A plan is a small TOML file that people edit; `sharding/README.md` says how. Knows parameters by their declared axes
alone, never by name.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from novalm_jax.errors import OptionError
from novalm_jax.models.params import LOGICAL_AXES, parameters_of
from novalm_jax.resources import resource_folder

MESH_AXES = ("data", "expert", "tensor")


@dataclass(frozen=True)
class ShardingPlan:
    """A mesh, axis name -> number of devices, and rules, logical axis -> mesh axis. Unnamed logical axes stay whole."""

    mesh_shape: Mapping[str, int]
    rules: Mapping[str, str]

    @classmethod
    def read(cls, plan: str | Path) -> ShardingPlan:
        """Reads a plan: the name of one in `sharding/`, or a path to a TOML file.

        Raises:
          OptionError: no such file, not TOML, or names and numbers that mean nothing here; all faults at once.
        """
        if not isinstance(plan, str | Path):
            raise OptionError(f"A sharding plan is given by its name or the path of a .toml file, not {plan!r:.60}.")
        path = Path(plan)
        if path.suffix != ".toml":
            path = resource_folder("sharding") / f"{plan}.toml"
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise OptionError(f"The sharding plan {path} cannot be read: {error}.") from None
        faults = [f"[{name}] is not a table of plans" for name in content if name not in ("mesh", "rules")]
        faults += [f"{name} = {value!r:.60} is not a table" for name, value in content.items() if not _is_table(value)]
        mesh, rules = (value if _is_table(value := content.get(name, {})) else {} for name in ("mesh", "rules"))
        faults += [
            f"mesh axis {name} = {size!r} (axes are {', '.join(MESH_AXES)}, and sizes whole numbers of at least 1)"
            for name, size in mesh.items()
            if name not in MESH_AXES or type(size) is not int or size < 1
        ]
        faults += [
            f"rule {logical} = {axis!r} (logical axes are {', '.join(LOGICAL_AXES)}; the mesh has {', '.join(mesh)})"
            for logical, axis in rules.items()
            if logical not in LOGICAL_AXES or not isinstance(axis, str) or axis not in mesh
        ]
        if faults:
            raise OptionError(f"The sharding plan {path} cannot be used: {'; '.join(faults)}.")
        return cls(mesh, rules)

    def mesh(self, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """The mesh over the first of these devices (default: all there are).

        Raises:
          OptionError: there are too few.
        """
        devices = jax.devices() if devices is None else devices
        needed = math.prod(self.mesh_shape.values())
        if needed > len(devices):
            raise OptionError(
                f"The sharding plan needs {needed} devices, and there are {len(devices)}. Make its [mesh] smaller."
            )
        grid = np.array(devices[:needed]).reshape(tuple(self.mesh_shape.values()))
        return Mesh(grid, tuple(self.mesh_shape), axis_types=(AxisType.Auto,) * grid.ndim)

    def spec(self, axes: Sequence[str], shape: Sequence[int]) -> PartitionSpec:
        """How an array with these logical axes is split.

        Raises:
          OptionError: two of its dimensions fall on one mesh axis, or one does not divide evenly.
        """
        names = [self.rules.get(axis) for axis in axes]
        used = [name for name in names if name is not None]
        if len(used) != len(set(used)):
            raise OptionError(
                f"The sharding plan puts two of the axes {', '.join(axes)} of one array on one mesh axis. Take one of "
                "them out of [rules], or give it another mesh axis."
            )
        for axis, name, size in zip(axes, names, shape, strict=True):
            if name is not None and size % self.mesh_shape[name]:
                raise OptionError(
                    f"The sharding plan splits {axis} over the {self.mesh_shape[name]} devices of {name}, but its size "
                    f"{size} is no multiple of that. Take {axis} out of [rules], or change the size of {name}."
                )
        return PartitionSpec(*names)

    def shardings(self, model: nnx.Module) -> dict[str, NamedSharding]:
        """The sharding of every parameter, by its path; what `load_model(shardings=...)` takes.

        Raises:
          OptionError: too few devices, or a parameter that the rules cannot split; the message names its axes.
        """
        mesh = self.mesh()

        def sharding(param: Any) -> NamedSharding:
            return NamedSharding(mesh, self.spec(param.get_metadata("axes"), param.shape))

        return {path: sharding(param) for path, param in parameters_of(model).items()}


def _is_table(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)
