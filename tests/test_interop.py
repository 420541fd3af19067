"""Tensors and arrays share memory, in both directions, or are refused with a reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from cudaops import interop
from cudaops.interop import to_cupy, to_torch
from tests.fake_cupy import FakeCupy

PLAIN = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def address(array: Any) -> int:
    pointer: int = array.__array_interface__["data"][0]
    return pointer


@pytest.mark.parametrize("dtype", PLAIN, ids=str)
def test_both_ways_there_is_no_copy(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (3, 4)).to(dtype)
    array = to_cupy(tensor)
    assert isinstance(array, numpy.ndarray)
    assert str(array.dtype) == str(dtype).removeprefix("torch.")
    assert address(array) == tensor.data_ptr()
    assert array.shape == tensor.shape
    back = to_torch(array)
    assert back.dtype == dtype
    assert back.data_ptr() == tensor.data_ptr()
    assert torch.equal(back, tensor)
    array[1, 2] = not tensor[1, 2]
    assert torch.equal(back, tensor), "a write to one is a write to all"
    assert tensor[1, 2].item() == array[1, 2].item()


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[::2, 1:3],
        lambda t: t[:, :1].expand(6, 5),
        lambda t: t[2, 3],
        lambda t: t.reshape(2, 3, 4).permute(2, 0, 1),
        lambda t: t[3:4],
    ],
    ids=["transposed", "stepped", "expanded", "0-d", "permuted", "sliced"],
)
def test_any_strides_are_kept(view: Any) -> None:
    tensor = view(torch.randn(6, 4))
    array = to_cupy(tensor)
    assert address(array) == tensor.data_ptr()
    assert array.shape == tuple(tensor.shape)
    assert all(s == 1 or a == 4 * t for s, a, t in zip(array.shape, array.strides, tensor.stride(), strict=True))
    back = to_torch(array)
    assert back.data_ptr() == tensor.data_ptr()
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0, 2)])
def test_empty_tensors_keep_shape_and_type(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    array = to_cupy(torch.zeros(shape, dtype=dtype))
    assert array.shape == shape
    back = to_torch(array)
    assert tuple(back.shape) == shape
    if dtype != torch.bfloat16:
        assert back.dtype == dtype


def test_a_tensor_that_requires_grad_is_taken_detached() -> None:
    leaf = torch.randn(3, requires_grad=True)
    for tensor in (leaf, leaf * 2):
        array = to_cupy(tensor)
        assert address(array) == tensor.data_ptr()
        assert not to_torch(array).requires_grad
    assert leaf.requires_grad


def test_bfloat16_travels_as_its_bits() -> None:
    tensor = torch.randn(4, 4).to(torch.bfloat16).t()
    array = to_cupy(tensor)
    assert array.dtype == numpy.int16
    assert address(array) == tensor.data_ptr()
    assert torch.equal(to_torch(array).view(torch.bfloat16), tensor)


def test_an_array_of_bfloat16_becomes_a_tensor_of_it() -> None:
    """ml_dtypes gives NumPy such a type; what is looked at is its name and that it can be viewed as int16."""

    class Bfloat16Array:
        def __init__(self, bits: numpy.ndarray) -> None:
            self.bits, self.dtype, self.strides = bits, "bfloat16", bits.strides

        def view(self, dtype: str) -> numpy.ndarray:
            return self.bits.view(dtype)

        def __dlpack__(self, **_: Any) -> Any:
            raise BufferError("DLPack only supports signed/unsigned integers, float and complex dtypes.")

    bits = numpy.array([0x3F80, 0x4000], numpy.int16)
    tensor = to_torch(Bfloat16Array(bits))
    assert tensor.dtype == torch.bfloat16
    assert tensor.tolist() == [1.0, 2.0]
    assert tensor.data_ptr() == address(bits)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_travels_as_its_bits(name: str) -> None:
    tensor = torch.tensor([1.0, -2.0]).to(getattr(torch, name))
    array = to_cupy(tensor)
    assert array.dtype == numpy.uint8
    assert address(array) == tensor.data_ptr()


def test_lazy_negation_and_conjugation_are_resolved() -> None:
    tensor = torch.randn(3, dtype=torch.complex64)
    assert numpy.array_equal(to_cupy(tensor.conj()), numpy.conj(tensor.numpy()))
    negated = tensor.conj().imag
    assert negated.is_neg()
    assert numpy.array_equal(to_cupy(negated), -tensor.numpy().imag)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (torch.zeros(2, device="meta"), "on meta"),
        (torch.empty(2, dtype=torch.bits8), "no element type for torch.bits8"),
    ],
)
def test_what_has_no_array_is_refused(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        to_cupy(tensor)


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"to_cupy takes a torch\.Tensor, got ndarray; to_torch goes the other way"):
        to_cupy(numpy.zeros(2))  # type: ignore[arg-type]


def test_a_tensor_is_a_tensor_already() -> None:
    tensor = torch.randn(3)
    assert to_torch(tensor) is tensor


@pytest.mark.parametrize("array", [[1.0], 1.0, None, "text"])
def test_what_has_no_dlpack_is_refused(array: Any) -> None:
    with pytest.raises(TypeError, match="to_torch takes an array with __dlpack__"):
        to_torch(array)


def test_read_only_memory_is_refused() -> None:
    array = numpy.zeros(3)
    array.flags.writeable = False
    with pytest.raises(ValueError, match=r"read-only.*pass array\.copy\(\)"):
        to_torch(array)


def test_negative_strides_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no negative strides, got \(-8,\); pass array\.copy\(\)"):
        to_torch(numpy.zeros(3)[::-1])


@pytest.mark.parametrize(
    "array", [numpy.zeros(3, ">f4"), numpy.array([object()]), numpy.zeros(2, "U3"), numpy.zeros(2, "M8[s]")]
)
def test_element_types_torch_does_not_have_are_refused(array: Any) -> None:
    with pytest.raises(TypeError, match=rf"cannot share this array of {re.escape(str(array.dtype))}.*convert it first"):
        to_torch(array)


def test_memory_lives_as_long_as_either_side() -> None:
    array = to_cupy(torch.arange(1000.0))
    assert array.sum() == 499_500
    tensor = to_torch(numpy.arange(1000.0))
    assert tensor.sum() == 499_500


# ---- on a GPU: the branch that a stand-in can run ----


class GpuTensor:
    """A CUDA tensor as far as `_array_on_gpu` looks at it, on the memory of a CPU tensor."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.device, self.shape, self.dtype = memory, torch.device("cuda", 1), memory.shape, memory.dtype
        self.recorded: list[Any] = []

    def numel(self) -> int:
        return self.memory.numel()

    def record_stream(self, stream: Any) -> None:
        self.recorded.append(stream.cuda_stream)

    def __dlpack__(self, **options: Any) -> Any:
        return self.memory.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.memory.__dlpack_device__()


class TorchStream:
    def __init__(self, handle: int, waits: list[tuple[int, int]]) -> None:
        self.cuda_stream, self.waits = handle, waits

    def wait_stream(self, other: TorchStream) -> None:
        self.waits.append((self.cuda_stream, other.cuda_stream))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(who waits, for whom), of torch's streams on cuda:1; torch's current one is 0x77."""
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: TorchStream(0x77, seen))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: TorchStream(0, seen))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: TorchStream(handle, seen))
    return seen


@pytest.mark.parametrize("theirs", [0, 0x88])
def test_where_streams_differ_the_one_that_takes_over_waits(
    monkeypatch: pytest.MonkeyPatch, waits: list[tuple[int, int]], theirs: int
) -> None:
    cupy = FakeCupy(current_streams={1: theirs})
    cupy.install(monkeypatch)
    tensor = GpuTensor(torch.randn(3, 4))
    array = interop._array_on_gpu(tensor)  # type: ignore[arg-type]
    assert address(array) == tensor.memory.data_ptr()
    assert waits == [(theirs, 0x77)]
    assert tensor.recorded == [theirs], "torch must not hand the memory out again before CuPy is done"
    waits.clear()
    interop.give_back(torch.device("cuda", 1))
    assert waits == [(theirs, 0x77)]
    assert cupy.device == [0]


def test_where_streams_are_the_same_nobody_waits(monkeypatch: pytest.MonkeyPatch, waits: list[tuple[int, int]]) -> None:
    FakeCupy(current_streams={1: 0x77}).install(monkeypatch)
    tensor = GpuTensor(torch.randn(3))
    interop._array_on_gpu(tensor)  # type: ignore[arg-type]
    interop.give_back(torch.device("cuda", 1))
    assert waits == []
    assert tensor.recorded == []


def test_an_empty_gpu_tensor_becomes_an_empty_array(
    monkeypatch: pytest.MonkeyPatch, waits: list[tuple[int, int]]
) -> None:
    FakeCupy(current_streams={1: 0x77}).install(monkeypatch)
    array = interop._array_on_gpu(GpuTensor(torch.zeros(0, 3)))  # type: ignore[arg-type]
    assert array.shape == (0, 3)
    assert array.dtype == numpy.float32


def test_a_cupy_array_is_waited_for_by_torch(monkeypatch: pytest.MonkeyPatch, waits: list[tuple[int, int]]) -> None:
    FakeCupy(current_streams={1: 0x88}).install(monkeypatch)

    class CudaTensor:
        is_cuda, device = True, torch.device("cuda", 1)

    monkeypatch.setattr(interop.torch.utils.dlpack, "from_dlpack", lambda array: CudaTensor())
    to_torch(numpy.zeros(3))
    assert waits == [(0x77, 0x88)]


@pytest.mark.gpu
def test_on_a_gpu_both_ways_there_is_no_copy() -> None:
    tensor = torch.randn(5, 7, device="cuda")
    array = to_cupy(tensor)
    assert array.data.ptr == tensor.data_ptr()
    array *= 2
    back = to_torch(array)
    assert back.data_ptr() == tensor.data_ptr()
    assert torch.equal(back, tensor)


def test_no_capsule_of_ours_is_ever_made() -> None:
    text = Path(interop.__file__).read_text()
    assert "to_dlpack(" not in text
    assert ".__dlpack__(" not in text
