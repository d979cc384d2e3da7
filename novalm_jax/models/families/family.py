"""What a family table is: which fields of `config.json` mean what, and which stored tensors fill which parameters.

A family is data. Strictness lives here, once: every field of a configuration is used, known to have no effect, or
refused by name. Reads dictionaries only; files and arrays are other people's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, get_args, get_type_hints

from novalm_jax.config import ModelConfig
from novalm_jax.errors import ConfigError
from novalm_jax.models.families.checks import check_traits
from novalm_jax.models.families.rope import (
    FRACTION,
    ROPE_FIELDS,
    RopeDialect,
    read_fraction,
    read_rope,
    stretched_context,
)
from novalm_jax.models.families.traits import Traits, build_config

REQUIRED: Final = object()
"""Marks a field that a configuration must have: no default would be a safe guess."""


@dataclass(frozen=True)
class Use:
    """The field sets a trait. `default` is the reference implementation's, for when the field is absent.

    `meanings` translates the values that are supported, where the trait speaks another language; others are refused.
    """

    trait: str
    default: Any = REQUIRED
    meanings: Mapping[Any, Any] | None = None


@dataclass(frozen=True)
class Only:
    """The field changes the network in ways that are implemented for these values alone; others are refused."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Ignore:
    """The field has no effect in this family, though it may have one in others."""


@dataclass(frozen=True)
class Stored:
    """The parameter is one stored tensor, as it is."""

    name: str


@dataclass(frozen=True)
class Flat:
    """The parameter `[e, ...]` is stored with its first two dimensions as one, `[e * f, ...]`; a vector as `[1, e]`."""

    name: str


@dataclass(frozen=True)
class PerExpert:
    """The parameter `[e, ...]` is stored one expert a tensor; `{e}` in the name is the expert's number."""

    name: str


@dataclass(frozen=True)
class Packed:
    """The parameter `[e, f, d]` is part `part` of `parts` equal parts of a packed tensor `[e, parts * f, d]`."""

    name: str
    part: int = 0
    parts: int = 1


@dataclass(frozen=True)
class Fused:
    """The parameters `paths` are stored one after another, along the first dimension; this is number `part` of them."""

    name: str
    paths: tuple[str, ...]
    part: int


Meaning = Use | Only | Ignore
Source = Stored | Flat | PerExpert | Packed | Fused


@dataclass(frozen=True)
class Family:
    """One `model_type`: how to read its configuration and where its parameters are stored.

    Attributes:
      model_type: the name in config.json.
      fields: config.json field -> what it means; `a.b` is the field b of the object a.
      traits: traits of the family that no field sets.
      tensors: parameter path, with `{l}` for the layer -> the ways it may be stored, the hub's own first.
      ignored_tensors: regular expressions of stored tensors that the network does not need.
      extra_layers: the field that says how many layers for multi-token prediction are stored after the last layer.
      rope: how its rotary settings differ from the usual ones.
      renamed: field -> the other name that some writers give it.
      text_section: the object of config.json that describes the text model, where that is not the whole.
      outer_fields: the fields around it that are known, and have no effect on text.
    """

    model_type: str
    fields: Mapping[str, Meaning]
    tensors: Mapping[str, Sequence[Source]]
    traits: Mapping[str, Any] = field(default_factory=dict)
    ignored_tensors: Sequence[str] = ()
    extra_layers: str | None = None
    rope: RopeDialect = field(default_factory=RopeDialect)
    renamed: Mapping[str, str] = field(default_factory=dict)
    text_section: str | None = None
    outer_fields: Sequence[str] = ()

    def read_config(self, stored: Mapping[str, Any]) -> ModelConfig:
        """The model that a `config.json` of this family describes.

        Raises:
          ConfigError: unknown, missing, mistyped or unsupported fields, all of them in one message.
        """
        problems = [*_not_causal(stored, self.text_section is not None)]
        stored = self._with_own_names(self._flat(self._text_section(stored)))
        problems += [*self._unknown(stored), *self._refused(stored)]
        values = dict(self.traits)
        for name, use in self.fields.items():
            if isinstance(use, Use):
                fault, value = _read_field(name, use, stored)
                if fault:
                    problems.append(fault)
                else:
                    values[use.trait] = value
        if problems:
            raise ConfigError(f"config.json ({self.model_type}): {'; '.join(problems)}.")
        if values["context_length"] < 1:
            raise ConfigError(
                f"config.json of a {self.model_type} model does not add up: context_length is "
                f"{values['context_length']}, not positive."
            )
        values["rope"] = read_rope(stored, self.rope, context_length=values["context_length"])
        values["context_length"] = stretched_context(values["rope"], values["context_length"])
        fraction = read_fraction(stored, self.rope)
        if fraction is None and values.get("rotary_dim") is None:
            fraction = self.rope.fraction
        values["rotary_fraction"] = fraction
        traits = Traits(**values)
        check_traits(self.model_type, traits)
        return build_config(self.model_type, traits)

    def count_extra_layers(self, stored: Mapping[str, Any]) -> int:
        """Layers for multi-token prediction that a `config.json` announces; the network does not need them."""
        value = self._with_own_names(stored).get(self.extra_layers) if self.extra_layers else None
        return value if type(value) is int and value > 0 else 0

    def _text_section(self, stored: Mapping[str, Any]) -> Mapping[str, Any]:
        """The fields of the text model, with what lies around them checked."""
        if self.text_section is None:
            return stored
        inner = stored.get(self.text_section)
        if not isinstance(inner, Mapping):
            raise ConfigError(f"config.json ({self.model_type}): {self.text_section} should be an object with fields.")
        known = {self.text_section, *self.outer_fields, *NO_EFFECT, *NOT_SUPPORTED}
        strange = [f"{name} = {_short(stored[name])} is not known here" for name in stored if name not in known]
        if strange:
            raise ConfigError(f"config.json ({self.model_type}): {'; '.join(strange)}.")
        return {**inner, **{name: stored[name] for name in NOT_SUPPORTED if stored.get(name) not in OFF}}

    def _flat(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """`stored` with the fields of its objects that this family reads one by one as `object.field`."""
        flat: dict[str, Any] = {}
        sections = {name.split(".")[0] for name in self.fields if "." in name}
        for name, value in stored.items():
            if "." in name:
                raise ConfigError(f"config.json ({self.model_type}): {name!r:.60} = {_short(value)} is not known here.")
            if name not in sections:
                flat[name] = value
            elif isinstance(value, Mapping):
                for key, entry in value.items():
                    if key not in NO_EFFECT and not (key in NOT_SUPPORTED and entry in OFF):
                        flat[f"{name}.{key}"] = entry
            else:
                raise ConfigError(
                    f"config.json ({self.model_type}): {name} should be an object with fields, and is {_short(value)}."
                )
        return flat

    def _with_own_names(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """`stored` with second names of fields replaced by their first."""
        stored = dict(stored)
        for name, other in self.renamed.items():
            if other in stored:
                value = stored.pop(other)
                if stored.setdefault(name, value) != value:
                    raise ConfigError(
                        f"config.json ({self.model_type}): {name} is {_short(stored[name])}, but {other}, another name "
                        f"for the same thing, is {_short(value)}. Keep the right one."
                    )
        return stored

    def _unknown(self, stored: Mapping[str, Any]) -> list[str]:
        known = {*self.fields, *ROPE_FIELDS, *NO_EFFECT, *NOT_SUPPORTED}
        if self.rope.fraction is not None:
            known.add(FRACTION)
        return [f"{name} = {_short(stored[name])} is not known here" for name in stored if name not in known]

    def _refused(self, stored: Mapping[str, Any]) -> list[str]:
        reasons = dict(NOT_SUPPORTED)
        quantised = stored.get("quantization_config")
        if isinstance(quantised, Mapping):
            reasons["quantization_config"] = (
                f"weights in the {quantised.get('quant_method', 'unnamed')!r} format cannot be read yet; use the "
                "bfloat16 or float32 checkpoint of this model"
            )
        problems = [f"{name}: {why}" for name, why in reasons.items() if stored.get(name) not in OFF]
        for name, only in self.fields.items():
            if isinstance(only, Only) and name in stored and stored[name] not in only.values:
                allowed = " or ".join(repr(value) for value in only.values)
                problems.append(f"{name} = {_short(stored[name])} is not supported ({allowed} is)")
        return problems


NO_EFFECT: Final = frozenset(
    # Training and its bookkeeping.
    "attention_dropout initializer_range output_router_logits router_aux_loss_coef router_jitter_noise pretraining_tp "
    "problem_type finetuning_task task_specific_params "
    # How a program runs the model, not what it computes.
    "use_cache torch_dtype dtype transformers_version architectures _name_or_path name_or_path _attn_implementation "
    "_attn_implementation_autoset attn_implementation auto_map model_type return_dict return_dict_in_generate "
    "output_attentions output_hidden_states output_scores torchscript use_bfloat16 pruned_heads "
    "chunk_size_feed_forward tf_legacy_loss is_decoder "
    # The text side reads these where they belong; labels are for classifiers.
    "bos_token_id eos_token_id eod_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class prefix "
    "id2label label2id forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens bad_words_ids "
    # Sampling defaults that old writers left in config.json; generation_config.json holds the ones that count.
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k "
    "top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
    "num_return_sequences remove_invalid_values exponential_decay_length_penalty".split()
)
"""Fields that no forward pass of any family here depends on."""

NOT_SUPPORTED: Final[Mapping[str, str]] = {
    "quantization_config": "quantised weights cannot be read yet",
    "compression_config": "compressed weights cannot be read yet",
    "is_encoder_decoder": "encoder-decoder models are not supported",
    "add_cross_attention": "cross attention is not supported",
    "cross_attention_hidden_size": "cross attention is not supported",
    "tie_encoder_decoder": "encoder-decoder models are not supported",
}
"""Fields that any family may carry and none supports, unless they are `OFF`."""

OFF: Final = (None, False)
"""How writers say that there is none."""


def _not_causal(stored: Mapping[str, Any], with_images: bool) -> list[str]:
    names = stored.get("architectures")
    if names is None:
        return []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return [f"architectures = {_short(names)} is not a list of names"]
    wanted = ("ForCausalLM", "ForConditionalGeneration") if with_images else ("ForCausalLM",)
    if names and not any(name.endswith(wanted) for name in names):
        return [f"architectures is {', '.join(names)}, which is not a causal language model"]
    return []


def _read_field(name: str, use: Use, stored: Mapping[str, Any]) -> tuple[str | None, Any]:
    """What is wrong with the field, or None and the trait's value."""
    value = stored.get(name, use.default)
    if value is REQUIRED:
        return f"{name} is missing", None
    if use.meanings is not None:
        for allowed, meaning in use.meanings.items():
            if value == allowed and isinstance(value, bool) == isinstance(allowed, bool):
                return None, meaning
        return f"{name} = {_short(value)} is not supported ({' or '.join(map(repr, use.meanings))} is)", None
    return _mistyped(name, value, use.trait), tuple(value) if isinstance(value, list) else value


_TYPES: Final = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(Traits).items()}
"""What each trait may be."""


def _mistyped(name: str, value: Any, trait: str) -> str | None:
    """Why `value` cannot be the trait, or None. An integer will do where a fraction is expected; a bool is neither."""
    # Beyond 64 bits there is no size, and soon no float that could hold it.
    if type(value) is int and abs(value) >= 2**63:
        return f"{name} = {_short(value)} is not usable: no number of a model is that large"
    for kind in _TYPES[trait]:
        if kind is type(None) and value is None:
            return None
        if kind is float and type(value) in (int, float):
            return None
        if kind in (int, bool, str) and type(value) is kind:
            return None
        if (item := (get_args(kind) or (None,))[0]) is not None and isinstance(value, list | tuple):
            return None if all(type(entry) is item for entry in value) else f"{name} = {_short(value)} has a bad entry"
    return f"{name} = {_short(value)} has the wrong type"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
