"""LLVM IR as text: fresh names, lines, declarations; how types and constants are spelled."""

from __future__ import annotations

import struct

from cudaops.emulator.layout import WORKER
from cudaops.emulator.ptx import TYPE_BITS

LLVM_TYPES = {"pred": "i1", "f32": "float", "f64": "double"}


def llvm_type(type_: str) -> str:
    """The LLVM element type that holds a PTX type."""
    return LLVM_TYPES.get(type_) or f"i{TYPE_BITS[type_]}"


def element_bits(element: str) -> int:
    return {"float": 32, "double": 64}.get(element) or int(element[1:])


def integer_text(element: str, value: int) -> str:
    bits = int(element[1:])
    if bits == 1:
        return "true" if value & 1 else "false"
    value &= (1 << bits) - 1
    return str(value - (1 << bits) if value >> (bits - 1) else value)


def float_text(type_: str, bits: int) -> str:
    """LLVM writes floats of both widths as the 64 bits of the double; NaN payloads move along."""
    if type_ == "f64":
        return f"0x{bits:016X}"
    exponent, fraction = bits >> 23 & 0xFF, bits & 0x7FFFFF
    if exponent == 0xFF:
        wide = (bits >> 31) << 63 | 0x7FF << 52 | fraction << 29
    else:
        wide = struct.unpack("<Q", struct.pack("<d", struct.unpack("<f", bits.to_bytes(4, "little"))[0]))[0]
    return f"0x{wide:016X}"


def argument_types(arguments: str) -> list[str]:
    """The types in `type value, type value`, where a vector type holds blanks but no comma."""
    found, depth, item = [], 0, ""
    for ch in arguments + ",":
        if ch == "," and depth == 0:
            item = item.strip()
            if item.startswith("<"):
                found.append(item[: item.index(">") + 1])
            else:
                found.append(item.split(" ", 1)[0])
            item = ""
            continue
        depth += ch in "<(" or -(ch in ">)")
        item += ch
    return found


def load_field(name: str, value: str, ty: str = "i64", offsets: dict[str, int] = WORKER, base: str = "%ctx") -> str:
    """Text that loads a field of one of layout's structures into `value`."""
    return f"""
  {value}.at = getelementptr i8, ptr {base}, i64 {offsets[name]}
  {value} = load {ty}, ptr {value}.at, align 8"""


def each_lane(mask: str, before: str, body: str) -> str:
    """Text that runs `body` for each lane of a mask, as %lane, one after the other, and goes on at the label `out`.

    Control comes from the block `before`; the body ends by going to `more`.
    """
    return f"""
next:
  %lane = phi i32 [ 0, %{before} ], [ %lane.next, %more ]
  %bit = shl i32 1, %lane
  %on = and i32 {mask}, %bit
  %active = icmp ne i32 %on, 0
  br i1 %active, label %do, label %more
do:{body}
more:
  %lane.next = add i32 %lane, 1
  %end = icmp eq i32 %lane.next, 32
  br i1 %end, label %out, label %next
out:"""


class Text:
    """LLVM IR as text: fresh names, the function being written, its declarations."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0
        self.declarations: dict[str, str] = {}

    def name(self) -> str:
        self.count += 1
        return f"%v{self.count}"

    def line(self, text: str) -> None:
        self.lines.append("  " + text)

    def emit(self, text: str) -> str:
        name = self.name()
        self.lines.append(f"  {name} = {text}")
        return name

    def binary(self, op: str, ty: str, a: str, b: str) -> str:
        return self.emit(f"{op} {ty} {a}, {b}")

    def label(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def place(self, label: str) -> None:
        self.lines.append(f"{label}:")

    def declare(self, name: str, result: str, arguments: str) -> str:
        self.declarations[name] = f"declare {result} @{name}({arguments})"
        return name
