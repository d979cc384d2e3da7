"""Two thousand broken checkpoints: each is refused by an error of this package, or loads as what its files say.

What the files say is worked out here a second time, from the bytes as the safetensors library reads them and from
config.json, without the tables and the reader of the package. A case is known by its number: `case(17)` is always the
same. Nothing may crash, hang, or take memory for what the files only claim.
"""

import json
import posixpath
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from flax import nnx

from fuzzing import BASES, CONFIG, INDEX, Files, base, mutated
from novalm_jax.checkpoint import load
from novalm_jax.checkpoint.dtypes import numpy_dtype
from novalm_jax.checkpoint.load import Checkpoint
from novalm_jax.config import ModelConfig, MoEConfig
from novalm_jax.errors import NovaError
from novalm_jax.models.decoder import Decoder
from novalm_jax.models.params import parameters_of

CASES, GROUPS = 2000, 10


def case(number: int) -> tuple[str, Files, list[str]]:
    """The family, the files and what was done to them."""
    random = np.random.default_rng([7, number])
    family = list(BASES)[number % 2]
    files = base(family)
    return family, files, mutated(random, files)


# --- what the files say ----------------------------------------------------------------------------------------------


def read_json(content: bytes) -> dict[str, Any]:
    """A JSON object that holds no key twice."""

    def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs), "a key is there twice"
        return dict(pairs)

    value: dict[str, Any] = json.loads(content.decode("utf-8-sig"), object_pairs_hook=checked)
    return value


def stored(files: Files) -> dict[str, np.ndarray]:
    """Every tensor of the checkpoint by name, in float32; with an index, in the files that it gives for them."""
    homes: dict[str, str] | None = None
    if INDEX in files:
        weight_map = read_json(files[INDEX])["weight_map"]
        homes = {tensor: posixpath.normpath(name) for tensor, name in weight_map.items()}
        names = set(homes.values())
    else:
        names = {name for name in files if name.endswith(".safetensors")}
        numbered = {name for name in names if re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name)}
        names = numbered or (names & {"model.safetensors"} or names)
    tensors: dict[str, np.ndarray] = {}
    for name in names:
        for tensor, entry in safetensors.deserialize(files[name]):
            assert tensor not in tensors, f"{tensor} is stored twice"
            assert homes is None or homes.get(tensor) == name, f"{tensor} is in {name}, and the index says otherwise"
            value = np.frombuffer(bytes(entry["data"]), numpy_dtype(entry["dtype"])).reshape(entry["shape"])
            tensors[tensor] = value.astype(np.float32)
    assert homes is None or homes.keys() == tensors.keys(), "the index names tensors that its files lack"
    return tensors


FIXED = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
IN_LAYER = {
    "attention_norm.scale": "input_layernorm.weight",
    "feed_forward_norm.scale": "post_attention_layernorm.weight",
    **{f"attention.{name}.weight": f"self_attn.{name}_proj.weight" for name in "qkv"},
    "attention.out.weight": "self_attn.o_proj.weight",
    **{f"attention.{name}_norm.scale": f"self_attn.{name}_norm.weight" for name in "qk"},
    **{f"feed_forward.{name}.weight": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
}
NUMBERED = {"gate": ("w1", "gate_proj"), "up": ("w3", "up_proj"), "down": ("w2", "down_proj")}
NEEDLESS = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|(model\.)?mtp\..*"


def expected(path: str, shape: tuple[int, ...], tensors: Mapping[str, np.ndarray]) -> tuple[list[str], np.ndarray]:
    """The names of the tensors that make a parameter, and its value."""
    if path in FIXED:
        return [FIXED[path]], tensors[FIXED[path]]
    number, rest = path.removeprefix("layers.").split(".", 1)
    layer = f"model.layers.{number}."
    if rest in IN_LAYER:
        return [layer + IN_LAYER[rest]], tensors[layer + IN_LAYER[rest]]
    moe = next(m for m in ("block_sparse_moe.", "mlp.") if f"{layer}{m}gate.weight" in tensors)
    if rest == "feed_forward.router.weight":
        return [f"{layer}{moe}gate.weight"], tensors[f"{layer}{moe}gate.weight"]
    part = rest.removeprefix("feed_forward.experts.")
    joint = f"{layer}mlp.experts.{'down_proj' if part == 'down' else 'gate_up_proj'}"
    if joint in tensors:
        value = tensors[joint]
        half = value.shape[1] // 2
        return [joint], {"gate": value[:, :half], "up": value[:, half:], "down": value}[part]
    prefix = f"{layer}{moe}experts."
    last = next(n for n in NUMBERED[part] if f"{prefix}0.{n}.weight" in tensors)
    names = [f"{prefix}{e}.{last}.weight" for e in range(shape[0])]
    return names, np.stack([tensors[name] for name in names])


def assert_holds(model: Decoder, files: Files) -> None:
    """Every parameter is what the files say, and every tensor of the files is in one or known to be needless."""
    tensors = stored(files)
    used = {"lm_head.weight"} if model.config.tie_embeddings else set()
    for path, parameter in parameters_of(model).items():
        found = np.asarray(parameter.get_value())
        names, value = expected(path, found.shape, tensors)
        assert found.shape == value.shape and found.dtype == np.float32, path
        assert np.array_equal(found, value, equal_nan=True), path
        used.update(names)
    assert [name for name in tensors if name not in used and not re.fullmatch(NEEDLESS, name)] == []


# --- what config.json says -------------------------------------------------------------------------------------------


def first_moe(config: ModelConfig) -> MoEConfig | None:
    return next((x.feed_forward for x in config.layers if isinstance(x.feed_forward, MoEConfig)), None)


def of_moe(name: str) -> Callable[[ModelConfig], Any]:
    return lambda config: attrgetter(name)(first_moe(config))


EFFECTS: dict[str, Callable[[ModelConfig], Any]] = {
    "model_type": lambda config: config.model_type,
    "vocab_size": lambda config: config.vocab_size,
    "hidden_size": lambda config: config.hidden_size,
    "num_hidden_layers": lambda config: len(config.layers),
    "rms_norm_eps": lambda config: config.norm.eps,
    "tie_word_embeddings": lambda config: config.tie_embeddings,
    "num_attention_heads": lambda config: config.layers[0].attention.num_heads,
    "num_key_value_heads": lambda config: config.layers[0].attention.num_kv_heads,
    "head_dim": lambda config: config.layers[0].attention.head_dim,
    "rope_theta": lambda config: config.layers[0].attention.rope.theta,
    "num_experts_per_tok": of_moe("experts_per_token"),
    "num_local_experts": of_moe("num_experts"),
    "moe_intermediate_size": of_moe("expert.width"),
    "norm_topk_prob": of_moe("router.renormalise"),
}
"""Fields that are found unchanged in a configuration."""

SHOWN = {"max_position_embeddings", "sliding_window", "use_sliding_window", "hidden_act", "intermediate_size"} | {
    *("rope_scaling", "mlp_only_layers", "num_experts", "decoder_sparse_step", "attention_bias", "layer_types"),
}
"""Fields that show in some other way."""

REFUSED = {"quantization_config", "is_encoder_decoder"}
"""Fields of what is not supported, unless they are null or false."""

HARMLESS = {"architectures", "torch_dtype", "initializer_range", "router_aux_loss_coef", "bos_token_id", "eos_token_id"}
"""Fields without effect."""


def assert_means(config: ModelConfig, usual: ModelConfig, fields: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """A configuration follows its fields, where they differ from those of the whole checkpoint."""
    changed = {
        name for name in {*fields, *before} if repr(fields.get(name, "absent")) != repr(before.get(name, "absent"))
    }
    assert changed <= EFFECTS.keys() | SHOWN | HARMLESS | REFUSED, "a field was accepted that nothing is known of"
    assert not any(fields.get(name) for name in REFUSED), "something was accepted that is not supported"
    for name in changed & EFFECTS.keys() & fields.keys():
        if fields[name] is not None:
            found = EFFECTS[name](config)
            assert found == fields[name] and isinstance(found, bool) == isinstance(fields[name], bool), name
    shows = {name for name in changed - HARMLESS - REFUSED if not same_meaning(name, fields, before)}
    assert (config != usual) == bool(shows), f"{sorted(shows)} should show, and nothing else"


def same_meaning(name: str, fields: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether a changed field has the effect that the old one has."""
    value, old = fields.get(name), before.get(name)
    if isinstance(value, int | float) and isinstance(old, int | float):
        return value == old and isinstance(value, bool) == isinstance(old, bool)
    return not value and not old


# --- the check -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def abstract_models_are_made_once() -> Iterator[None]:
    """Thousands of models of the same few configurations are opened."""
    known: dict[Any, Any] = {}
    real = load.abstract_model

    def shared(config: ModelConfig, dtype: str = "float32") -> Decoder:
        if (config, dtype) not in known:
            known[config, dtype] = nnx.split(real(config, dtype))
        return nnx.merge(*known[config, dtype], copy=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "abstract_model", shared)
        yield


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelConfig]:
    """The configurations of the whole checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    return {name: write(folder / name, base(name)).config for name in BASES}


def write(folder: Path, files: Files) -> Checkpoint:
    """Writes a checkpoint and opens it."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return Checkpoint.open(folder)


forward = jax.jit(lambda model, tokens: model(tokens))


def outcome(folder: Path, number: int, usual: Mapping[str, ModelConfig]) -> str:
    """Loads a case, and judges it: "refused", "loaded", or an AssertionError."""
    family, files, done = case(number)
    try:
        checkpoint = write(folder, files)
        model = checkpoint.load("float32", lambda _, buffer: jnp.asarray(buffer))
    except NovaError as error:
        assert str(error) and len(str(error)) < 20_000, (number, done)
        return "refused"
    fields = read_json(files[CONFIG])
    assert_means(checkpoint.config, usual[family], fields, BASES[family])
    assert_holds(model, files)
    tokens = jnp.zeros((1, 3), jnp.int32)
    logits = forward(model, tokens) if checkpoint.config == usual[family] else nnx.eval_shape(forward, model, tokens)
    assert logits.shape == (1, 3, checkpoint.config.vocab_size)
    return "loaded"


def memory(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.findall(field + r":\s+(\d+) kB", status)[0]) * 1024


@pytest.mark.parametrize("group", range(GROUPS))
def test_broken_checkpoints_are_refused_or_load_as_what_they_are(
    group: int, tmp_path: Path, usual: dict[str, ModelConfig]
) -> None:
    def hangs(*_: object) -> None:
        raise AssertionError(f"case {number} hangs")

    numbers = range(group * CASES // GROUPS, (group + 1) * CASES // GROUPS)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmHWM")
    signal.signal(signal.SIGALRM, hangs)
    outcomes = []
    for number in numbers:
        signal.alarm(120)
        try:
            outcomes.append(outcome(tmp_path / str(number), number, usual))
        except Exception as error:
            error.add_note(f"case {number}: {case(number)[2]}")
            raise
        finally:
            signal.alarm(0)
    assert outcomes.count("refused") > len(numbers) // 2 and outcomes.count("loaded") > len(numbers) // 20
    assert memory("VmHWM") - before < 500e6


@pytest.mark.parametrize("family", BASES)
def test_whole_checkpoints_pass_the_check(family: str, tmp_path: Path, usual: dict[str, ModelConfig]) -> None:
    files = base(family)
    checkpoint = write(tmp_path / "whole", files)
    model = checkpoint.load("float32", lambda _, buffer: jnp.asarray(buffer))
    assert_means(checkpoint.config, usual[family], BASES[family], BASES[family])
    assert_holds(model, files)
    # And a weight in the wrong place would be seen.
    for path, parameter in parameters_of(model).items():
        value = np.array(parameter.get_value())
        parameter.set_value(jnp.asarray(np.roll(value, 1)))
        with pytest.raises(AssertionError, match=re.escape(path)):
            assert_holds(model, files)
        parameter.set_value(jnp.asarray(value))
