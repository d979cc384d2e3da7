"""RMS norm, unit norm and layer norm against float64 numpy, their rounding, and their promise on row counts."""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from novalm_jax.config import NormConfig
from novalm_jax.models.norms import LayerNorm, RMSNorm, make_norm, unit_rms
from parts_helpers import plain_rms, random, random_module, rows_do_not_depend_on_company, wide


def test_rms_norm_is_x_over_its_root_mean_square_times_the_scale() -> None:
    norm, values = random_module(lambda rngs: RMSNorm(12, 0.3, dtype=jnp.float32, rngs=rngs))
    x = random(2, 5, 12)
    np.testing.assert_allclose(norm(x), plain_rms(wide(x), 0.3, values["scale"]), atol=1e-6)
    np.testing.assert_allclose(unit_rms(x, 0.3, jnp.float32), plain_rms(wide(x), 0.3), atol=1e-6)


def test_rms_norm_works_in_float32_and_rounds_before_the_scale() -> None:
    norm, _ = random_module(lambda rngs: RMSNorm(64, 1e-6, dtype=jnp.bfloat16, rngs=rngs))
    x = random(8, 64, dtype=jnp.bfloat16) * jnp.asarray(300, jnp.bfloat16)
    scaled = x.astype(jnp.float32) / jnp.sqrt(jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(
        wide(norm(x)), wide(scaled.astype(jnp.bfloat16) * norm.scale[...][None]), rtol=2**-8, atol=0
    )
    assert norm(x).dtype == jnp.bfloat16


def plain_layer_norm(x: np.ndarray, eps: float, values: dict[str, np.ndarray]) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * values["scale"] + values.get("bias", 0.0)


@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm_takes_the_mean_away_first(bias: bool) -> None:
    """The mean is far from zero and eps is not small, so that both count."""
    norm, values = random_module(lambda rngs: LayerNorm(12, 0.3, bias=bias, dtype=jnp.float32, rngs=rngs))
    assert set(values) == ({"scale", "bias"} if bias else {"scale"})
    x = random(2, 5, 12) + 7.0
    np.testing.assert_allclose(norm(x), plain_layer_norm(wide(x), 0.3, values), atol=3e-6)


def test_layer_norm_rounds_once() -> None:
    """In bfloat16 the mean of these is lost, if anything but the last step is rounded."""
    norm, values = random_module(lambda rngs: LayerNorm(64, 1e-5, bias=True, dtype=jnp.bfloat16, rngs=rngs))
    x = random(8, 64, dtype=jnp.bfloat16) + jnp.asarray(50, jnp.bfloat16)
    expected = plain_layer_norm(wide(x), 1e-5, values)
    assert norm(x).dtype == jnp.bfloat16
    np.testing.assert_allclose(wide(norm(x)), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norm_takes_float32_and_gives_the_dtype_of_its_weights(kind: Literal["rms", "layer"]) -> None:
    """Hidden states are float32: what they were rounded to before the sums would differ."""
    config = NormConfig(1e-6, kind)
    norm, values = random_module(lambda rngs: make_norm(64, config, dtype=jnp.bfloat16, rngs=rngs))
    x = random(8, 64) * jnp.float32(0.05) + jnp.float32(10 if kind == "layer" else 0)
    expected = plain_rms if kind == "rms" else plain_layer_norm
    found = expected(wide(x), 1e-6, values["scale"] if kind == "rms" else values)
    assert norm(x).dtype == jnp.bfloat16
    np.testing.assert_allclose(wide(norm(x)), found, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "kind", "bias"),
    [
        (NormConfig(0.1), RMSNorm, False),
        (NormConfig(0.1, "layer"), LayerNorm, False),
        (NormConfig(0.1, "layer", True), LayerNorm, True),
    ],
)
def test_make_norm(config: NormConfig, kind: type, bias: bool) -> None:
    norm = make_norm(8, config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    assert type(norm) is kind and norm.eps == 0.1
    assert (getattr(norm, "bias", None) is not None) == bias


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("width", [60, 512])
def test_a_normed_row_does_not_depend_on_the_number_of_rows(width: int, dtype: Any) -> None:
    """512 is the rank of DeepSeek's latents: XLA's own choice of sums changes between 4 of its rows and 8."""
    norm, _ = random_module(lambda rngs: LayerNorm(width, 1e-5, bias=True, dtype=dtype, rngs=rngs))
    x = random(32, 1, width, dtype=dtype)
    assert rows_do_not_depend_on_company(lambda x: unit_rms(x, 1e-6, jnp.float32), lambda n: (x[:n],))
    assert rows_do_not_depend_on_company(lambda x: norm(x), lambda n: (x[:n],))
