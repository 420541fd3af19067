"""PTX on the CPU: the 32 lanes of a warp are one LLVM vector. See runtime.prepare and runtime.execute.

Only the options are loaded with the package; the rest comes with the first kernel.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cudaops.emulator.options import emulation, sanitize

if TYPE_CHECKING:
    from cudaops.emulator.faults import Buffer, Finding
    from cudaops.emulator.runtime import Prepared, describe, execute, prepare

__all__ = ["Buffer", "Finding", "Prepared", "describe", "emulation", "execute", "prepare", "sanitize"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(
        import_module("cudaops.emulator.faults" if name in ("Buffer", "Finding") else f"{__name__}.runtime"), name
    )
