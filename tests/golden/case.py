"""What a golden case is, and the configuration keys that most of them share.

Knows configuration keys only. Refuses to know the cases themselves (cases.py) and how they are made (make.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """One folder. `fields` are config.json's own keys; `bites` names what must matter.

    `bites` maps a dotted path in config.json to another value (ABSENT: the key is deleted), or "tensor:REGEX" to a
    number that fills the tensors whose in-memory name holds the pattern.
    """

    family: str
    fields: Mapping[str, Any]
    bites: Mapping[str, Any]
    # config.json is `fields` as they are (the dialect of the hub), not what save_pretrained makes of them.
    hub_config: bool = False
    # hub: the published tensor names; packed: transformers' in-memory names; w123: hub with w1/w3/w2 for gate/up/down.
    layout: str = "hub"
    dtype: str = "float32"
    # Draw the weights of this other case, which has the same configuration.
    like: str = ""
    # config.json's top-level keys that this case means and the reference does not read where they stand: key -> path.
    meant: Mapping[str, str] = field(default_factory=dict)
    # Tensors that published files hold besides and no model of text uses: name -> shape.
    ignored: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # Off where rotary frequencies depend on the length: cached and repeated full decoding differ there.
    greedy: bool = True


ABSENT = object()
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
# What published config.json files hold besides, whether it matters or not.
HUB: dict[str, Any] = {
    **{key: value for key, value in SMALL.items() if key != "pad_token_id"},
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.40.0",
    "use_cache": True,
}
