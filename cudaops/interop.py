"""Tensors and arrays that share memory, both ways: torch on one side, CuPy on the other, NumPy where there is no GPU.

Only the DLPack protocol is used, never a capsule. It is not relied on for order between streams, whose numbering it has
kept changing: where torch's and CuPy's current streams differ, the one that takes over waits for the other.
"""

from __future__ import annotations

from typing import Any

import numpy
import torch
import torch.utils.dlpack

# Element types that NumPy and CuPy do not have: their bits travel as an integer of the same size.
_AS_BITS = {
    torch.bfloat16: torch.int16,
    **{
        getattr(torch, name): torch.uint8
        for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
        if hasattr(torch, name)
    },
}
_EXPORTED = {
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
}


def to_cupy(tensor: torch.Tensor) -> Any:
    """An array on the memory of `tensor`: CuPy's for a CUDA tensor, NumPy's for a CPU tensor.

    Shape and strides are the tensor's; writing to one writes to the other. One that requires grad is taken detached.
    bfloat16 arrives as int16 and float8 as uint8, bit for bit, because neither library has them. A lazily negated or
    conjugated view has its values nowhere in memory, so it is resolved first: the one case that copies.

    Raises:
        TypeError: not a dense CPU or CUDA tensor (sparse, quantised, meta), or of a dtype neither library has.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"to_cupy takes a torch.Tensor, got {type(tensor).__name__}; to_torch goes the other way")
    if tensor.device.type not in ("cpu", "cuda") or tensor.layout != torch.strided or tensor.is_quantized:
        raise TypeError(
            f"to_cupy takes a dense CPU or CUDA tensor, got {tensor.layout} of {tensor.dtype} on {tensor.device}; "
            "move it, or make it dense with .to_dense()"
        )
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype in _AS_BITS:
        plain = plain.view(_AS_BITS[plain.dtype])
    if plain.dtype not in _EXPORTED:
        raise TypeError(f"NumPy and CuPy have no element type for {tensor.dtype}; convert it with .to(...) first")
    is_bool = plain.dtype == torch.bool
    if is_bool:
        plain = plain.view(torch.uint8)
    array = _array_on_gpu(plain) if plain.is_cuda else _array(numpy, plain)
    return array.view(numpy.bool_) if is_bool else array


def _array(library: Any, plain: torch.Tensor) -> Any:
    if plain.numel() == 0:  # no memory to share, and some versions stumble over the null pointer
        return library.empty(tuple(plain.shape), dtype=str(plain.dtype).removeprefix("torch."))
    return library.from_dlpack(plain)


def _array_on_gpu(plain: torch.Tensor) -> Any:
    import cupy

    with cupy.cuda.Device(plain.device.index):
        ours, theirs = _streams(plain.device)
        if theirs is not None:
            theirs.wait_stream(ours)
            plain.record_stream(theirs)  # torch may not reuse the memory before CuPy's work with it is done
        return _array(cupy, plain)


def to_torch(array: Any) -> torch.Tensor:
    """A tensor on the memory of `array`: a CuPy or NumPy array, or anything with `__dlpack__`.

    Shape and strides are the array's; writing to one writes to the other. A torch.Tensor is returned as it is.

    Raises:
        TypeError: no `__dlpack__`, or an element type torch does not have.
        ValueError: read-only memory, or negative strides; a copy has neither.
    """
    if isinstance(array, torch.Tensor):
        return array
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"to_torch takes an array with __dlpack__, got {type(array).__name__}; torch.as_tensor copies")
    if isinstance(array, numpy.ndarray) and not array.flags.writeable:
        raise ValueError("to_torch: the array is read-only, and a tensor could be written to; pass array.copy()")
    strides = getattr(array, "strides", None)
    if isinstance(strides, tuple) and any(stride < 0 for stride in strides):
        raise ValueError(f"to_torch: torch has no negative strides, got {strides}; pass array.copy()")
    bits = _bits_of(array)
    source = array if bits is None else array.view(bits[0])
    try:
        tensor = torch.utils.dlpack.from_dlpack(source)
    except (BufferError, RuntimeError, TypeError) as error:
        what = getattr(array, "dtype", type(array).__name__)
        raise TypeError(f"to_torch: torch cannot share this array of {what} ({error}); convert it first") from error
    if tensor.is_cuda:
        ours, theirs = _streams(tensor.device)
        if theirs is not None:
            ours.wait_stream(theirs)
    return tensor if bits is None else tensor.view(bits[1])


def _bits_of(array: Any) -> tuple[str, torch.dtype] | None:
    """How an array of bfloat16 (as ml_dtypes adds it to NumPy) travels."""
    return ("int16", torch.bfloat16) if str(getattr(array, "dtype", "")) == "bfloat16" else None


def _streams(device: torch.device) -> tuple[Any, Any]:
    """torch's current stream, and CuPy's on the same GPU as torch sees it; None where the two are the same."""
    import cupy

    ours = torch.cuda.current_stream(device)
    handle = cupy.cuda.get_current_stream(device.index).ptr
    if handle == ours.cuda_stream:
        return ours, None
    if handle == 0:
        return ours, torch.cuda.default_stream(device)
    return ours, torch.cuda.ExternalStream(handle, device=device)


def give_back(device: torch.device) -> None:
    """After work on torch's stream with CuPy's arrays: what CuPy does next, reuse of their memory too, waits for it."""
    ours, theirs = _streams(device)
    if theirs is not None:
        theirs.wait_stream(ours)
