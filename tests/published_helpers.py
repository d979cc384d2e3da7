"""What is known of published models, from `tests/published`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PUBLISHED = Path(__file__).parent / "published"
CONFIGS: dict[str, dict[str, Any]] = json.loads((PUBLISHED / "configs.json").read_text())
TENSORS: dict[str, dict[str, Any]] = json.loads((PUBLISHED / "tensors.json").read_text())


def published(name: str) -> dict[str, Any]:
    """The model's config.json."""
    own = dict(CONFIGS[name])
    shared = published(own.pop("like")) if "like" in own else {}
    absent = own.pop("without", ())
    return {**{field: value for field, value in shared.items() if field not in absent}, **own}
