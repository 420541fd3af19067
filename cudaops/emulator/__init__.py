"""PTX on the CPU: the 32 lanes of a warp are one LLVM vector. See runtime.prepare and runtime.execute."""

from cudaops.emulator.options import emulation
from cudaops.emulator.runtime import Buffer, Prepared, describe, execute, prepare

__all__ = ["Buffer", "Prepared", "describe", "emulation", "execute", "prepare"]
