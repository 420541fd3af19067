"""Arguments packed by what the compiled entry takes, never by Python's own type.

CuPy packs a Python int as 8 bytes and a float as a double, whatever the kernel declares; here the entry's signature
decides, and what does not fit is refused before anything is launched.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from cudaops.errors import LaunchError
from cudaops.signature import Entry, Param


@dataclass(frozen=True, slots=True)
class Address:
    """A pointer argument, checked by whoever made it. None stands for a null pointer elsewhere."""

    value: int


def pack(entry: Entry, values: Sequence[object], first: int = 0) -> bytes:
    """The parameter block of `entry` from its parameter `first` on, as bytes from offset 0.

    Arguments:
        values: one a parameter: `Address` or None for a pointer, a number, or a struct's bytes.

    Raises:
        LaunchError: count, kind or range does not fit.
    """
    params = entry.params[first:]
    if len(values) != len(params):
        raise LaunchError(
            f"kernel {entry.name} takes {len(entry.params)} arguments ({describe(entry)}), got {first + len(values)}"
        )
    block = bytearray(entry.arguments_bytes)
    for index, (param, value) in enumerate(zip(params, values, strict=True), start=first):
        block[param.offset : param.offset + param.size] = _packed(entry, index, param, value)
    return bytes(block)


def describe(entry: Entry) -> str:
    """The parameters in C's words: `float *out, int n`."""
    return ", ".join(f"{type_name(param)} {param.name}" for param in entry.params) or "none"


def type_name(param: Param) -> str:
    """What the parameter takes, in words."""
    if param.ctype:
        return param.ctype
    bits = param.size * 8
    return {
        "pointer": "pointer",
        "word": "pointer or 64-bit integer",
        "int": f"{bits}-bit integer",
        "float": f"{bits}-bit float",
    }.get(param.kind, f"struct of {param.size} bytes")


def refusal(entry: Entry, index: int, got: str, advice: str) -> LaunchError:
    """The error for one argument."""
    param = entry.params[index]
    return LaunchError(
        f"kernel {entry.name}, argument {index} ({param.name}): it takes {type_name(param)}, got {got}; {advice}"
    )


def _packed(entry: Entry, index: int, param: Param, value: object) -> bytes:
    if type(value) is Address and param.kind in ("pointer", "word"):
        return value.value.to_bytes(8, "little")
    if isinstance(value, numpy.ndarray) and value.size == 1 and param.kind != "pointer":
        value = value.reshape(())[()]  # by value, as CuPy takes it
    if value is None or isinstance(value, Address):
        if param.kind not in ("pointer", "word"):
            got = "None" if value is None else "a tensor"
            raise refusal(entry, index, got, "pass a number" if param.kind != "struct" else "pass the struct's bytes")
        return struct.pack("<Q", value.value if isinstance(value, Address) else 0)
    if param.kind == "struct":
        return _struct(entry, index, param, value)
    if param.kind == "pointer":
        raise refusal(entry, index, _shown(value), "pass the tensor itself, or None for a null pointer")
    if param.kind == "float":
        return _float(entry, index, param, value)
    return _int(entry, index, param, value)


def _int(entry: Entry, index: int, param: Param, value: object) -> bytes:
    if not isinstance(value, int | numpy.integer | numpy.bool_):
        raise refusal(entry, index, _shown(value), "pass a whole number: int(...) says that the fraction may go")
    number, bits = int(value), param.size * 8
    low = 0 if param.signed is False else -(2 ** (bits - 1))
    high = 2 ** (bits - 1) - 1 if param.signed else 2**bits - 1
    if param.ctype is not None and param.ctype.split()[-1] == "bool":
        high = 1
    if not low <= number <= high:
        raise refusal(entry, index, str(number), f"it must be {low} to {high}")
    return (number % 2**bits).to_bytes(param.size, "little")


_FLOATS = {2: "<e", 4: "<f", 8: "<d"}


def _float(entry: Entry, index: int, param: Param, value: object) -> bytes:
    if isinstance(value, bool | numpy.bool_) or not isinstance(value, int | float | numpy.integer | numpy.floating):
        raise refusal(entry, index, _shown(value), "pass a number")
    try:
        return struct.pack(_FLOATS[param.size], float(value))
    except OverflowError:
        raise refusal(entry, index, _shown(value), "it is beyond the range of that type") from None


def _struct(entry: Entry, index: int, param: Param, value: object) -> bytes:
    data: bytes
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
    elif isinstance(value, numpy.void | numpy.float16 | numpy.complexfloating):
        data = value.tobytes()
    elif isinstance(value, ctypes.Structure | ctypes.Array | ctypes.Union):
        data = bytes(value)
    elif isinstance(value, complex) and param.size in (8, 16):
        data = struct.pack("<ff" if param.size == 8 else "<dd", value.real, value.imag)
    elif _is_small_float(param) and isinstance(value, int | float | numpy.floating) and not isinstance(value, bool):
        data = _small_float(entry, index, param, float(value))
    else:
        raise refusal(entry, index, _shown(value), "pass its bytes, a ctypes.Structure, or a numpy record")
    if len(data) != param.size:
        raise refusal(
            entry, index, f"{len(data)} bytes", f"pass exactly {param.size} (check the padding: align=True in numpy)"
        )
    return data


def _is_small_float(param: Param) -> bool:
    return param.size == 2 and (param.ctype or "").split()[-1:] in (
        ["half"],
        ["__half"],
        ["nv_bfloat16"],
        ["__nv_bfloat16"],
    )


def _small_float(entry: Entry, index: int, param: Param, value: float) -> bytes:
    """Half or bfloat16 of a number, rounded to nearest even."""
    if (param.ctype or "").endswith("half"):
        try:
            return struct.pack("<e", value)
        except OverflowError:
            raise refusal(entry, index, str(value), "it is beyond the range of that type") from None
    if math.isnan(value):
        return b"\xc0\x7f"
    try:
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
    except OverflowError:
        raise refusal(entry, index, str(value), "it is beyond the range of that type") from None
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    if math.isfinite(value) and rounded & 0x7F80 == 0x7F80:
        raise refusal(entry, index, str(value), "it is beyond the range of that type")
    return int(rounded).to_bytes(2, "little")


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"
