"""The instruction table: opcode, modifiers and types -> how the instruction is emitted as LLVM IR."""

from cudaops.emulator.isa import atomic, barrier, convert, floating, half, integer, memory, tensor, warp
from cudaops.emulator.isa.table import TABLE, lookup

__all__ = ["TABLE", "atomic", "barrier", "convert", "floating", "half", "integer", "lookup", "memory", "tensor", "warp"]
