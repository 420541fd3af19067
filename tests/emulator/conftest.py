"""Kernels made up by these tests do not fill the user's cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDAOPS_CACHE_DIR", str(tmp_path_factory.mktemp("cudaops")))
        yield
