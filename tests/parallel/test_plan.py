"""Sharding plans: what they refuse, and that a model split by one computes the same."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import PartitionSpec

from novalm_jax.errors import OptionError
from novalm_jax.parallel.plan import ShardingPlan

GOLDEN = Path(__file__).parent.parent / "golden" / "mixtral"


def write(folder: Path, text: str) -> Path:
    path = folder / "plan.toml"
    path.write_text(text)
    return path


def test_the_single_plan_splits_nothing() -> None:
    plan = ShardingPlan.read("single")
    assert plan.mesh().devices.size == 1
    assert plan.spec(("expert", "expert_mlp", "embed"), (8, 16, 32)) == PartitionSpec(None, None, None)


def test_all_faults_of_a_plan_are_named_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, '[mesh]\npipeline = 2\ntensor = 0\n[rules]\nhead = "tensor"\nmlp = "expert"\n[more]\n')
    with pytest.raises(OptionError) as caught:
        ShardingPlan.read(path)
    for part in ("pipeline", "tensor = 0", "head", "mlp", "[more]"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("mesh = 3\n", "mesh = 3 is not a table"),
        ("mesh = [1]\n", r"mesh = \[1\] is not a table"),
        ('rules = "tensor"\n', "rules = 'tensor' is not a table"),
        ("[mesh]\ntensor = 2\n[rules]\nmlp = ['tensor']\n", r"rule mlp = \['tensor'\]"),
        ("[mesh]\ntensor = 2\n[rules]\nmlp = 2\n", "rule mlp = 2"),
    ],
)
def test_values_of_another_kind_are_refused(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(OptionError, match=part):
        ShardingPlan.read(write(tmp_path, text))


@pytest.mark.parametrize("plan", [None, 3, b"single", {"mesh": {}}])
def test_a_plan_is_given_by_name_or_path(plan: Any) -> None:
    with pytest.raises(OptionError, match="by its name or the path"):
        ShardingPlan.read(plan)


@pytest.mark.parametrize("text", ["[mesh\n", "\xff"])
def test_what_is_not_toml_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(OptionError, match="cannot be read"):
        ShardingPlan.read(path)


def test_a_plan_that_is_not_there_is_refused() -> None:
    with pytest.raises(OptionError, match="no-such-plan"):
        ShardingPlan.read("no-such-plan")


def test_two_dimensions_on_one_mesh_axis_are_refused() -> None:
    plan = ShardingPlan({"tensor": 2}, {"mlp": "tensor", "embed": "tensor"})
    with pytest.raises(OptionError, match="two of the axes"):
        plan.spec(("mlp", "embed"), (4, 4))


def test_a_size_that_does_not_divide_is_refused() -> None:
    plan = ShardingPlan({"tensor": 2}, {"mlp": "tensor"})
    with pytest.raises(OptionError, match="no multiple"):
        plan.spec(("mlp", "embed"), (5, 4))


def test_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(OptionError, match="needs 64 devices"):
        ShardingPlan({"tensor": 64}, {}).mesh()
    with pytest.raises(OptionError, match=f"needs {2**64} devices"):
        ShardingPlan({"expert": 2**32, "tensor": 2**32}, {}).mesh()


SPLIT_RUN = """
import sys
import jax, numpy as np
import novalm_jax as nova
from novalm_jax.parallel.plan import ShardingPlan
golden, plan = sys.argv[1:]
assert len(jax.devices()) == 4
model = nova.load_model(golden, shardings=ShardingPlan.read(plan).shardings)
gate = model.layers[0].feed_forward.experts.gate.get_value()
e, f, d = gate.shape
assert {shard.data.shape for shard in gate.addressable_shards} == {(e // 2, f // 2, d)}
case = np.load(golden + "/golden.npz")
logits = jax.jit(lambda m, t: m(t))(model, case["input_ids"])
print(float(np.abs(np.asarray(logits) - case["logits"]).max()))
"""


def test_a_model_split_over_four_devices_computes_the_same(tmp_path: Path) -> None:
    rules = 'expert = "expert"\nexpert_mlp = "tensor"\nq_heads = "tensor"\nkv_heads = "tensor"\nvocab = "tensor"\n'
    plan = write(tmp_path, f"[mesh]\nexpert = 2\ntensor = 2\n[rules]\n{rules}")
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", SPLIT_RUN, str(GOLDEN), str(plan)]
    run = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) <= 1e-4
