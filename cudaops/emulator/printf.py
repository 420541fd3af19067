"""What a kernel printed: records of a launch's log -> text, in C's format language."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator

from cudaops.emulator import layout

_SPECIFIER = re.compile(r"%([-+ #0]*)(\d+|\*)?(?:\.(\d+|\*))?(hh|h|ll|l|z|j|t|L)?([diouxXeEfFgGaAcsp%n])")

_WIDEST = 4096


def lines(log: bytes, string_at: Callable[[int], str]) -> Iterator[str]:
    """The text of each printf, blocks in ascending order and in a block as they came.

    Arguments:
        log: its first 8 bytes count the bytes asked for, see layout.RECORD.
        string_at: the C string at an address, for formats and %s.
    """
    asked = int.from_bytes(log[:8], "little")
    count = min(asked, len(log) - 8) // layout.RECORD_BYTES
    records = []
    for n in range(count):
        record = log[8 + n * layout.RECORD_BYTES :][: layout.RECORD_BYTES]
        block, line, pattern = struct.unpack_from("<QQQ", record)
        records.append((block, line, pattern, record[layout.RECORD["arguments"] :]))
    for _, _, pattern, arguments in sorted(records, key=lambda r: r[:2]):
        yield format_c(string_at(pattern), arguments, string_at)
    dropped = asked // layout.RECORD_BYTES - count
    if dropped > 0:
        yield f"[{dropped} more lines of printf: the log of a launch holds {layout.LOG_BYTES} bytes]\n"


def format_c(pattern: str, arguments: bytes, string_at: Callable[[int], str]) -> str:
    """printf(pattern, ...) with the arguments as device code lays them out: each at a multiple of its size, 4 or 8."""
    position = 0

    def take(size: int) -> bytes:
        nonlocal position
        position = -(-position // size) * size
        data = arguments[position : position + size]
        position += size
        return data.ljust(size, b"\0")

    def one(match: re.Match[str]) -> str:
        flags, width, precision, length, kind = match.groups()
        if kind == "%":
            return "%"
        if width == "*":
            width = str(int.from_bytes(take(4), "little", signed=True))
        if precision == "*":
            precision = str(int.from_bytes(take(4), "little", signed=True))
        if kind == "n":  # writes nothing on a GPU
            take(8)
            return ""
        width, precision = (_bounded(text) for text in (width, precision))
        head = "%" + flags + (width or "") + (f".{precision}" if precision is not None else "")
        if kind in "eEfFgGaA":
            value = struct.unpack("<d", take(8))[0]
            return _hexadecimal(value, flags, width, kind) if kind in "aA" else (head + kind) % value
        if kind == "s":
            return (head + "s") % string_at(int.from_bytes(take(8), "little"))
        if kind == "p":
            return (head + "s") % hex(int.from_bytes(take(8), "little"))
        size = 8 if length in ("l", "ll", "z", "j", "t") else 4
        number = int.from_bytes(take(size), "little", signed=kind in "di")
        if kind == "c":
            return (head + "c") % (number & 0xFF)
        bits = {"hh": 8, "h": 16}.get(length or "", 0)
        if bits:
            number &= (1 << bits) - 1
            if kind in "di" and number >> (bits - 1):
                number -= 1 << bits
        return (head + {"i": "d", "u": "d"}.get(kind, kind)) % number

    return _SPECIFIER.sub(one, pattern)


def _bounded(text: str | None) -> str | None:
    """A width or a precision, which may be what is left in a register: no more than a line can want."""
    return text and str(max(min(int(text), _WIDEST), -_WIDEST))


def _hexadecimal(value: float, flags: str, width: str | None, kind: str) -> str:
    """%a with as many digits as it takes."""
    text = re.sub(r"\.?0*p", "p", value.hex())
    sign = "" if text.startswith("-") else "+" if "+" in flags else " " if " " in flags else ""
    text = ("%" + ("-" if "-" in flags else "") + (width or "") + "s") % (sign + text)
    return text.upper() if kind == "A" else text
