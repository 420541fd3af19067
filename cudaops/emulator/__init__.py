"""PTX on the CPU: the 32 lanes of a warp are one LLVM vector. See runtime.prepare and runtime.execute."""

from cudaops.emulator.faults import Buffer, Finding
from cudaops.emulator.options import emulation, sanitize
from cudaops.emulator.runtime import Prepared, describe, execute, prepare

__all__ = ["Buffer", "Finding", "Prepared", "describe", "emulation", "execute", "prepare", "sanitize"]
