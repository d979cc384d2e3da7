"""The native code as it is built for this machine, and as it would be for one whose processor has no tiles."""

from collections.abc import Iterator

import pytest

from novalm_jax.kernels.native import build


@pytest.fixture(params=["", "-DNOVALM_WITHOUT_TILES"], ids=["as built", "without tiles"])
def any_processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has built one of both, and uses it."""
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, *filter(None, [request.param])))
    build._loaded.cache_clear()
    yield
    build._loaded.cache_clear()
