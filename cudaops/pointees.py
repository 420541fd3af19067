"""What a pointer parameter takes: the torch dtypes and the alignment that go with the type it points to."""

from __future__ import annotations

from functools import cache

import torch

from cudaops.signature import Param

_SCALARS: dict[str, tuple[torch.dtype, ...]] = {
    "bool": (torch.bool, torch.uint8),
    "char": (torch.int8, torch.uint8, torch.bool),
    "signed char": (torch.int8,),
    "unsigned char": (torch.uint8, torch.bool),
    "short": (torch.int16,),
    "unsigned short": (torch.uint16, torch.float16, torch.bfloat16),  # halves as their bits
    "int": (torch.int32,),
    "unsigned int": (torch.uint32,),
    "long": (torch.int64,),
    "long long": (torch.int64,),
    "unsigned long": (torch.uint64,),
    "unsigned long long": (torch.uint64,),
    "float": (torch.float32,),
    "double": (torch.float64,),
    "__half": (torch.float16,),
    "__nv_bfloat16": (torch.bfloat16,),
}

# CUDA's vector types by the stem of their name: float4 is four floats
_STEMS = {
    "char": "signed char",
    "uchar": "unsigned char",
    "short": "short",
    "ushort": "unsigned short",
    "int": "int",
    "uint": "unsigned int",
    "long": "long",
    "ulong": "unsigned long",
    "longlong": "long long",
    "ulonglong": "unsigned long long",
    "float": "float",
    "double": "double",
    "__half": "__half",
    "__nv_bfloat16": "__nv_bfloat16",
}

# two floats that may also be a complex number
_COMPLEX = {"float2": torch.complex64, "double2": torch.complex128}
_COMPLEX_NAMES = {"cuFloatComplex": "float2", "cuComplex": "float2", "cuDoubleComplex": "double2"}


@cache
def dtypes_of(param: Param) -> frozenset[torch.dtype] | None:
    """The torch dtypes a pointer takes; None where its type is not known here, and anything is accepted."""
    pointee = param.pointee or ""
    if pointee in _COMPLEX_NAMES:
        return frozenset({_COMPLEX[_COMPLEX_NAMES[pointee]]})
    element, _ = _split(pointee)
    if element is None:
        return None
    taken = set(_SCALARS[element])
    if pointee in _COMPLEX:
        taken.add(_COMPLEX[pointee])
    return frozenset(taken)


@cache
def alignment_of(param: Param) -> int:
    """The alignment in bytes that the kernel may count on; 1 where the type is not known here."""
    pointee = _COMPLEX_NAMES.get(param.pointee or "", param.pointee or "")
    element, lanes = _split(pointee)
    if element is None:
        return 1
    size = _SCALARS[element][0].itemsize
    return min(16, size * lanes) if lanes in (2, 4) else size


def _split(pointee: str) -> tuple[str | None, int]:
    """(element, lanes) of a scalar or vector type."""
    if pointee in _SCALARS:
        return pointee, 1
    if pointee[-1:] in ("1", "2", "3", "4") and pointee[:-1] in _STEMS:
        return _STEMS[pointee[:-1]], int(pointee[-1])
    return None, 0
