"""Kernels made up by these tests do not fill the user's cache; every instruction that they run is written down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cudaops.emulator import codegen
from cudaops.emulator.isa.table import Rule
from cudaops.emulator.ptx import Instruction
from tests.emulator import harness


@pytest.fixture(scope="session")
def emulator_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cudaops")


@pytest.fixture(autouse=True, scope="module")
def own_cache(emulator_cache: Path) -> Iterator[None]:
    look_up = codegen.lookup

    def recorded(ins: Instruction) -> Rule:
        harness.OPCODES_RUN.add(ins.opcode)
        return look_up(ins)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDAOPS_CACHE_DIR", str(emulator_cache))
        patch.setattr(codegen, "lookup", recorded)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What looks at all that was run comes last."""
    items.sort(key=lambda item: item.name.startswith("test_every_entry_of_the_table"))
