"""The instruction table: opcode, modifiers and types -> how the instruction is emitted as LLVM IR."""

from cudaops.emulator.isa import (
    async_copy,
    atomic,
    barrier,
    convert,
    floating,
    half,
    integer,
    mbarrier,
    memory,
    mma,
    tensor,
    warp,
    wmma,
)
from cudaops.emulator.isa.table import TABLE, lookup

__all__ = [
    "TABLE", "async_copy", "atomic", "barrier", "convert", "floating", "half", "integer", "lookup", "mbarrier",
    "memory", "mma", "tensor", "warp", "wmma",
]  # fmt: skip
