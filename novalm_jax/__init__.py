"""NovaLM-JAX: Mixture-of-Experts language models larger than the accelerator, in JAX.

The names below are the public interface. They are loaded when first used: `import novalm_jax` does no work.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from novalm_jax.checkpoint.load import load_model as load_model
    from novalm_jax.checkpoint.orbax import load_orbax as load_orbax
    from novalm_jax.checkpoint.orbax import save_orbax as save_orbax
    from novalm_jax.checkpoint.write import save_model as save_model
    from novalm_jax.engine.async_llm import AsyncLLM as AsyncLLM
    from novalm_jax.engine.llm import LLM as LLM
    from novalm_jax.engine.report import Report as Report
    from novalm_jax.engine.request import Completion as Completion
    from novalm_jax.errors import BudgetError as BudgetError
    from novalm_jax.errors import CheckpointError as CheckpointError
    from novalm_jax.errors import ConfigError as ConfigError
    from novalm_jax.errors import EngineError as EngineError
    from novalm_jax.errors import NovaError as NovaError
    from novalm_jax.errors import OptionError as OptionError
    from novalm_jax.errors import RequestError as RequestError
    from novalm_jax.errors import WriteError as WriteError
    from novalm_jax.options import ConvertOptions as ConvertOptions
    from novalm_jax.options import EngineOptions as EngineOptions
    from novalm_jax.options import SamplingParams as SamplingParams
    from novalm_jax.options import TrainOptions as TrainOptions

__version__ = "0.1.0"

_HOMES = {
    "load_model": "checkpoint.load",
    "save_model": "checkpoint.write",
    "load_orbax": "checkpoint.orbax",
    "save_orbax": "checkpoint.orbax",
    "LLM": "engine.llm",
    "AsyncLLM": "engine.async_llm",
    "Report": "engine.report",
    "Completion": "engine.request",
    "ConvertOptions": "options",
    "EngineOptions": "options",
    "SamplingParams": "options",
    "TrainOptions": "options",
    "NovaError": "errors",
    "BudgetError": "errors",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "EngineError": "errors",
    "OptionError": "errors",
    "RequestError": "errors",
    "WriteError": "errors",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
