"""The instruction table: opcode, modifiers and types -> how the instruction is emitted as LLVM IR."""

from cudaops.emulator.isa import convert, floating, integer, memory, warp
from cudaops.emulator.isa.table import TABLE, lookup

__all__ = ["TABLE", "convert", "floating", "integer", "lookup", "memory", "warp"]
