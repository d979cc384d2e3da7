"""Strict numerics for every test: no silent dtype or rank promotion, warnings are errors (pyproject.toml)."""

from collections.abc import Iterator
from typing import Any

import jax
import pytest

from streamed_helpers import shared_programs

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled programs are kept for the session, and the user's own cache is left alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def shared() -> Iterator[dict[Any, Any]]:
    """The programs that models of a module share."""
    with shared_programs() as programs:
        yield programs


@pytest.fixture(scope="module", autouse=True)
def programs_go_with_their_module() -> Iterator[None]:
    """A compiled program holds several memory mappings, and the system gives a process 65530 of them: without this, a
    whole run comes close, and then reading a program from the cache ends the process."""
    yield
    jax.clear_caches()
