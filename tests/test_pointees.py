"""Which tensors a declared pointer takes."""

from __future__ import annotations

import pytest
import torch

from cudaops.pointees import alignment_of, dtypes_of
from cudaops.signature import Param


def pointer(pointee: str | None) -> Param:
    return Param("x", 0, 8, 8, "pointer", None, pointee)


@pytest.mark.parametrize(
    ("pointee", "dtypes", "alignment"),
    [
        ("float", {torch.float32}, 4),
        ("double", {torch.float64}, 8),
        ("__half", {torch.float16}, 2),
        ("__half2", {torch.float16}, 4),
        ("__nv_bfloat16", {torch.bfloat16}, 2),
        ("__nv_bfloat162", {torch.bfloat16}, 4),
        ("bool", {torch.bool, torch.uint8}, 1),
        ("char", {torch.int8, torch.uint8, torch.bool}, 1),
        ("signed char", {torch.int8}, 1),
        ("unsigned char", {torch.uint8, torch.bool}, 1),
        ("short", {torch.int16}, 2),
        ("unsigned short", {torch.uint16, torch.float16, torch.bfloat16}, 2),
        ("int", {torch.int32}, 4),
        ("unsigned int", {torch.uint32}, 4),
        ("long", {torch.int64}, 8),
        ("long long", {torch.int64}, 8),
        ("unsigned long", {torch.uint64}, 8),
        ("unsigned long long", {torch.uint64}, 8),
        ("float1", {torch.float32}, 4),
        ("float2", {torch.float32, torch.complex64}, 8),
        ("float3", {torch.float32}, 4),
        ("float4", {torch.float32}, 16),
        ("double2", {torch.float64, torch.complex128}, 16),
        ("double4", {torch.float64}, 16),
        ("char4", {torch.int8}, 4),
        ("uchar2", {torch.uint8, torch.bool}, 2),
        ("short4", {torch.int16}, 8),
        ("uint4", {torch.uint32}, 16),
        ("longlong2", {torch.int64}, 16),
        ("cuFloatComplex", {torch.complex64}, 8),
        ("cuComplex", {torch.complex64}, 8),
        ("cuDoubleComplex", {torch.complex128}, 16),
    ],
)
def test_a_known_type_takes_its_dtypes_at_its_alignment(pointee: str, dtypes: set[torch.dtype], alignment: int) -> None:
    assert dtypes_of(pointer(pointee)) == dtypes
    assert alignment_of(pointer(pointee)) == alignment


@pytest.mark.parametrize("pointee", [None, "void", "Thing", "float *", "float5", "4", "", "x"])
def test_an_unknown_type_takes_anything(pointee: str | None) -> None:
    assert dtypes_of(pointer(pointee)) is None
    assert alignment_of(pointer(pointee)) == 1
