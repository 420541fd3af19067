"""The instruction table: opcode, modifiers and types -> how the instruction is emitted as LLVM IR."""

from cudaops.emulator.isa import atomic, convert, floating, half, integer, memory, mma, tensor, warp, wmma
from cudaops.emulator.isa.table import TABLE, lookup

__all__ = [
    "TABLE",
    "atomic",
    "convert",
    "floating",
    "half",
    "integer",
    "lookup",
    "memory",
    "mma",
    "tensor",
    "warp",
    "wmma",
]
