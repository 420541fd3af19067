"""Arguments are packed by the entry's signature; what does not fit is refused, with the parameter's name and limit."""

from __future__ import annotations

import ctypes
import math
import struct
from typing import Any

import numpy
import pytest

from cudaops.arguments import Address, describe, pack
from cudaops.errors import LaunchError
from cudaops.signature import Entry, Param

SIZES = {"int8": 1, "int16": 2, "int32": 4, "int64": 8}


def one(kind: str, size: int, **known: Any) -> Entry:
    return Entry("k", (Param("x", 0, size, size, kind, **known),))


def integer(size: int, signed: bool | None) -> Entry:
    ctypes_of = {True: "int", False: "unsigned", None: None}
    return one("int", size, signed=signed, ctype=ctypes_of[signed])


FLOAT, DOUBLE = one("float", 4, ctype="float"), one("float", 8, ctype="double")
POINTER, WORD = one("pointer", 8, ctype="float*", pointee="float"), one("word", 8)
STRUCT = one("struct", 16, ctype="Pair")
HALF, BFLOAT = one("struct", 2, ctype="__half"), one("struct", 2, ctype="__nv_bfloat16")


# ---- integers ----


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("signed", [True, False, None])
def test_an_integer_of_each_width_has_its_range(size: int, signed: bool | None) -> None:
    bits = 8 * size
    low = 0 if signed is False else -(2 ** (bits - 1))
    high = 2 ** (bits - 1) - 1 if signed is True else 2**bits - 1
    entry = integer(size, signed)
    for value in (low, -1 if low else 0, 0, 1, high):
        assert pack(entry, (value,)) == (value % 2**bits).to_bytes(size, "little")
    for value in (low - 1, high + 1, 10**30, -(10**30)):
        with pytest.raises(LaunchError, match=rf"argument 0 \(x\): .* got {value}; it must be {low} to {high}"):
            pack(entry, (value,))


@pytest.mark.parametrize(
    "value", [numpy.int8(5), numpy.uint64(5), numpy.int64(5), numpy.array(5), numpy.array([5], "i2"), 5]
)
def test_an_integer_of_any_python_or_numpy_type_is_taken(value: Any) -> None:
    assert pack(integer(4, True), (value,)) == struct.pack("<i", 5)


def test_a_bool_is_an_integer_and_a_bool_parameter_takes_nothing_else() -> None:
    flag = one("int", 1, signed=False, ctype="bool")
    assert pack(flag, (True,)) == pack(flag, (numpy.bool_(True),)) == pack(flag, (1,)) == b"\1"
    assert pack(integer(4, True), (True,)) == struct.pack("<i", 1)
    with pytest.raises(LaunchError, match="it must be 0 to 1"):
        pack(flag, (2,))


@pytest.mark.parametrize("value", [1.0, 2.5, numpy.float32(1), numpy.float64(1), 1 + 0j, "1", b"1234", [1], None])
def test_what_is_no_whole_number_is_refused_for_an_integer(value: Any) -> None:
    with pytest.raises(LaunchError, match=r"argument 0 \(x\): it takes int, got"):
        pack(integer(4, True), (value,))


# ---- floats ----


@pytest.mark.parametrize(
    "value", [1.5, 3, numpy.float32(1.5), numpy.float16(1.5), numpy.float64(-0.0), numpy.int8(3), 0.1]
)
def test_a_number_is_packed_in_the_width_declared(value: Any) -> None:
    assert pack(FLOAT, (value,)) == struct.pack("<f", float(value))
    assert pack(DOUBLE, (value,)) == struct.pack("<d", float(value))


def test_infinities_nan_and_the_sign_of_zero_are_kept() -> None:
    for value in (math.inf, -math.inf, -0.0):
        assert pack(FLOAT, (value,)) == struct.pack("<f", value)
    assert math.isnan(struct.unpack("<f", pack(FLOAT, (math.nan,)))[0])


@pytest.mark.parametrize("value", [1e39, -1e300, 10**400])
def test_a_number_beyond_the_type_is_refused(value: Any) -> None:
    with pytest.raises(LaunchError, match="beyond the range of that type"):
        pack(FLOAT, (value,))


@pytest.mark.parametrize("value", [True, numpy.bool_(False), "1", 1j, None, b"1234", [1.0]])
def test_what_is_no_number_is_refused_for_a_float(value: Any) -> None:
    with pytest.raises(LaunchError, match=r"it takes float, got"):
        pack(FLOAT, (value,))


# ---- pointers ----


def test_an_address_and_null_go_to_a_pointer_or_to_a_word() -> None:
    for entry in (POINTER, WORD):
        assert pack(entry, (Address(0x1234),)) == struct.pack("<Q", 0x1234)
        assert pack(entry, (None,)) == bytes(8)


def test_a_word_also_takes_an_integer_of_either_sign() -> None:
    assert pack(WORD, (-1,)) == b"\xff" * 8
    assert pack(WORD, (2**64 - 1,)) == b"\xff" * 8
    with pytest.raises(LaunchError, match="it takes pointer or 64-bit integer"):
        pack(WORD, (2**64,))


@pytest.mark.parametrize("value", [0, 0x1234, 1.0, "x", numpy.uint64(5)])
def test_a_number_is_refused_for_a_pointer(value: Any) -> None:
    with pytest.raises(LaunchError, match=r"it takes float\*, got .*; pass the tensor itself, or None"):
        pack(POINTER, (value,))


@pytest.mark.parametrize("entry", [FLOAT, integer(4, True), integer(8, False), STRUCT])
def test_a_tensor_is_refused_where_no_pointer_is_declared(entry: Entry) -> None:
    with pytest.raises(LaunchError, match="got a tensor; pass"):
        pack(entry, (Address(8),))


# ---- structs ----


class Pair(ctypes.Structure):
    _fields_ = (("a", ctypes.c_short), ("b", ctypes.c_double))


BYTES = struct.pack("<h6xd", 7, 0.25)
RECORD = numpy.dtype([("a", "<i2"), ("b", "<f8")], align=True)


@pytest.mark.parametrize(
    "value",
    [
        BYTES,
        bytearray(BYTES),
        memoryview(BYTES),
        Pair(7, 0.25),
        numpy.array([(7, 0.25)], RECORD),
        numpy.array((7, 0.25), RECORD),
        numpy.array([(7, 0.25)], RECORD)[0],
    ],
)
def test_a_struct_is_taken_as_bytes_or_as_a_record(value: Any) -> None:
    packed = pack(STRUCT, (value,))
    assert (packed[:2], packed[8:]) == (BYTES[:2], BYTES[8:])  # what lies between is padding
    assert len(packed) == 16


@pytest.mark.parametrize("value", [BYTES[:-1], BYTES + b"\0", numpy.zeros(1, [("a", "<i2"), ("b", "<f8")])[0]])
def test_a_struct_of_another_size_is_refused(value: Any) -> None:
    with pytest.raises(LaunchError, match=rf"it takes Pair, got {len(bytes(value))} bytes; pass exactly 16"):
        pack(STRUCT, (value,))


@pytest.mark.parametrize("value", [1, 1.0, "text", (7, 0.25), {"a": 1}])
def test_what_is_no_struct_is_refused(value: Any) -> None:
    with pytest.raises(LaunchError, match=r"pass its bytes, a ctypes\.Structure, or a numpy record"):
        pack(STRUCT, (value,))


def test_a_complex_number_fills_two_floats_or_two_doubles() -> None:
    assert pack(one("struct", 8), (1 + 2j,)) == struct.pack("<ff", 1, 2)
    assert pack(one("struct", 16), (1 + 2j,)) == struct.pack("<dd", 1, 2)
    assert pack(one("struct", 8), (numpy.complex64(1 + 2j),)) == struct.pack("<ff", 1, 2)
    with pytest.raises(LaunchError, match="pass its bytes"):
        pack(one("struct", 4), (1j,))


def test_halves_are_rounded_to_nearest_even() -> None:
    for value in (0.0, -0.0, 1.0, 0.1, 65504.0, 6e-8, math.inf, 2049.0, 2051.0):
        assert pack(HALF, (value,)) == numpy.float16(value).tobytes()
    assert pack(HALF, (numpy.float16(0.1),)) == numpy.float16(0.1).tobytes()
    assert pack(HALF, (3,)) == numpy.float16(3).tobytes()
    with pytest.raises(LaunchError, match="beyond the range"):
        pack(HALF, (1e6,))


def test_bfloats_are_rounded_to_nearest_even_as_torch_does() -> None:
    import torch

    values = [0.0, -0.0, 1.0, 0.1, -3.3, 1.00390625, 1.01171875, 3.3e38, 1e-40, math.inf, -math.inf]
    values += torch.randn(200, dtype=torch.float64).float().tolist()
    for value in values:
        wanted = torch.tensor(value, dtype=torch.float32).to(torch.bfloat16).view(torch.int16).item()
        assert pack(BFLOAT, (value,)) == struct.pack("<h", wanted), value
    assert torch.frombuffer(bytearray(pack(BFLOAT, (math.nan,))), dtype=torch.bfloat16).isnan().all()
    for value in (1e39, 3.4e38):
        with pytest.raises(LaunchError, match="beyond the range"):
            pack(BFLOAT, (value,))


@pytest.mark.parametrize("entry", [HALF, BFLOAT])
def test_a_bool_or_text_is_no_half(entry: Entry) -> None:
    for value in (True, "1"):
        with pytest.raises(LaunchError, match="pass its bytes"):
            pack(entry, (value,))


# ---- the block ----

MIXED = Entry(
    "mixed",
    (
        Param("out", 0, 8, 8, "pointer", "float*", "float"),
        Param("flag", 8, 1, 1, "int", "bool", signed=False),
        Param("n", 12, 4, 4, "int", "int", signed=True),
        Param("scale", 16, 8, 8, "float", "double"),
        Param("word", 24, 8, 8, "word"),
        Param("anything", 32, 4, 4, "int"),
    ),
)


def test_each_argument_stands_at_its_offset() -> None:
    block = pack(MIXED, (Address(5), True, -2, 0.5, None, 2**32 - 1))
    assert block == struct.pack("<Q?3xidQI", 5, True, -2, 0.5, 0, 2**32 - 1)


def test_only_what_follows_may_be_packed() -> None:
    block = pack(MIXED, (7, 0.5, 1, 2), first=2)
    assert block == struct.pack("<12xidQI", 7, 0.5, 1, 2)
    with pytest.raises(LaunchError, match=r"argument 3 \(scale\)"):
        pack(MIXED, (7, "x", 1, 2), first=2)


@pytest.mark.parametrize("count", [0, 5, 7])
def test_a_wrong_count_is_said_with_the_signature(count: int) -> None:
    signature = r"float\* out, bool flag, int n, double scale, pointer or 64-bit integer word, 32-bit integer anything"
    with pytest.raises(LaunchError, match=rf"kernel mixed takes 6 arguments \({signature}\), got {count}"):
        pack(MIXED, (None,) * count)


def test_nothing_is_packed_for_a_kernel_without_parameters() -> None:
    assert pack(Entry("k", ()), ()) == b""
    assert describe(Entry("k", ())) == "none"
    assert describe(Entry("k", (Param("p", 0, 12, 4, "struct"),))) == "struct of 12 bytes p"


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(LaunchError) as caught:
        pack(FLOAT, ("x" * 1000,))
    assert len(str(caught.value)) < 200
