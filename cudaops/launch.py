"""Run a plan where its tensors are: the emulator for CPU tensors, CuPy for CUDA tensors.

What a plan needs on a device (compiled kernel, checked limits, packed scalars) is prepared once; a launch then checks
its tensors, packs their addresses and goes.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from cudaops import arguments
from cudaops.compile import CompiledKernel, compile_kernel
from cudaops.environment import variable
from cudaops.errors import LaunchError, UnsupportedError
from cudaops.plan import KernelSource, LaunchConfig, Plan, TensorSpec, check_limits
from cudaops.pointees import alignment_of, dtypes_of
from cudaops.signature import Entry

if TYPE_CHECKING:
    from cudaops.emulator import Buffer

DEFAULT_ARCH = "sm_80"

_logger = logging.getLogger("cudaops")
_lock = threading.Lock()
_counts: Counter[str] = Counter()
_observers: tuple[Callable[[Plan, float], None], ...] = ()
_said_emulated = False


# ---- where ----


def arch_of(device: torch.device) -> str:
    """The arch that kernels for tensors on `device` are compiled for.

    A CUDA device's own; for the CPU `CUDAOPS_EMULATE_ARCH`, by default sm_80.

    Raises:
        UnsupportedError: another kind of device.
    """
    if device.type == "cpu":
        chosen = variable(b"CUDAOPS_EMULATE_ARCH")
        return chosen.decode() if chosen else DEFAULT_ARCH
    if device.type == "cuda":
        return _cuda_arch(torch.cuda.current_device() if device.index is None else device.index)
    raise UnsupportedError(
        f"kernels run on CUDA and CPU tensors, got a tensor on {device}; move it with .to('cuda') or .cpu()"
    )


@cache
def _cuda_arch(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """What a plan may know of `tensor`; one without memory (empty, meta) counts as aligned."""
    alignment = address_alignment(tensor.data_ptr())
    return TensorSpec(tuple(tensor.shape), tensor.stride(), dtype_name(tensor.dtype), alignment)


def address_alignment(address: int) -> int:
    """The largest power of two, at most 16, that divides `address`."""
    return min(16, address & -address) if address else 16


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """`'float32'` of torch.float32."""
    return str(dtype).removeprefix("torch.")


# ---- launching ----


def _no_buffer(*_: object) -> Buffer:
    raise AssertionError("a CUDA launch has no emulator buffers")


@dataclass(slots=True)
class Ready:
    """One kernel with one geometry on one device: compiled, checked against the limits, and loaded."""

    compiled: CompiledKernel
    entry: Entry
    config: LaunchConfig
    # on the CPU: the emulator's launch and its type for the memory a kernel may touch
    run: Callable[[bytes, Sequence[Buffer], int], None] | None = None
    buffer: Callable[..., Buffer] = _no_buffer


@dataclass(slots=True)
class _Prepared:
    """A plan on one device: everything but the addresses."""

    ready: Ready
    pointers: struct.Struct
    tail: bytes
    params: tuple[tuple[frozenset[torch.dtype] | None, int, str], ...]  # dtypes and alignment it takes, name


_MOST_PREPARED = 4096
_prepared: dict[tuple[Plan, str | torch.device], _Prepared] = {}


def launch(plan: Plan, tensors: Sequence[torch.Tensor]) -> None:
    """Run `plan` on `tensors`, one a pointer parameter, output first, all on one device.

    CUDA: on the tensors' device, on torch's current stream there. CPU: the emulator, with torch.get_num_threads()
    threads. Nothing is launched when a check fails.

    Raises:
        LaunchError: count, device, dtype, alignment, geometry or shared memory does not fit.
        CompileError, UnsupportedError: as `compile_kernel`.
        EmulatorError: on the CPU, what went wrong inside the kernel.
    """
    if not tensors:
        raise LaunchError(f"{plan.op}: a launch needs at least one tensor, to say where to run")
    device = tensors[0].device
    on_cpu = tensors[0].is_cpu
    key = (plan, arch_of(device) if on_cpu else device)
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = _prepare(plan, device)
        if len(_prepared) >= _MOST_PREPARED:
            _prepared.clear()
        _prepared[key] = prepared
    ready = prepared.ready
    if len(tensors) != len(prepared.params):
        raise LaunchError(
            f"kernel {ready.entry.name} takes {len(prepared.params)} tensors and {len(plan.scalars)} scalars "
            f"({arguments.describe(ready.entry)}), got {len(tensors)} tensors"
        )
    addresses: list[int] = []
    buffers: list[Buffer] = []
    for tensor, (dtypes, alignment, name) in zip(tensors, prepared.params, strict=True):
        address = tensor.data_ptr()
        if (
            tensor.device != device
            or (dtypes is not None and tensor.dtype not in dtypes)
            or address % alignment
            or tensor.is_neg()
            or tensor.is_conj()
        ):
            check_tensor(ready.entry, len(addresses), tensor, device)
        addresses.append(address)
        if on_cpu:
            # The first tensor is the output: a kernel that reads it before it wrote it is a finding of the sanitizer.
            buffers.append(ready.buffer(address, extent(tensor), name, len(addresses) > 1))
    go(ready, plan, prepared.pointers.pack(*addresses) + prepared.tail, device, buffers)


def go(ready: Ready, plan: Plan, block: bytes, device: torch.device, buffers: Sequence[Buffer]) -> None:
    """Launch with a packed parameter block; on the CPU `buffers` are the memory the kernel may touch.

    Raises:
        LaunchError, EmulatorError: as `launch`.
    """
    observers = _observers
    if observers:
        _wait(device)
    start = time.perf_counter() if observers else 0.0
    if ready.run is not None:
        if not _said_emulated:
            _say_emulated()
        ready.run(block, buffers, torch.get_num_threads())
    else:
        from cudaops import launch_cupy

        index = device.index
        stream = torch._C._cuda_getCurrentRawStream(index)
        launch_cupy.launch(ready.compiled, ready.entry, ready.config, block, index, stream)
    with _lock:
        _counts[plan.source.entry] += 1
    if observers:
        _wait(device)
        seconds = time.perf_counter() - start
        for observer in observers:
            observer(plan, seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def prepare(source: KernelSource, config: LaunchConfig, device: torch.device) -> Ready:
    """Compile, check and load a kernel, so that launching it needs nothing more.

    Raises:
        LaunchError: geometry, registers or shared memory beyond the arch, or a CUDA graph is being captured.
        CompileError, UnsupportedError: as `compile_kernel`.
    """
    on_gpu = device.type == "cuda"
    if on_gpu and torch.cuda.is_current_stream_capturing():
        raise LaunchError(
            f"kernel {source.entry} is not compiled and loaded yet, and that cannot be done while a CUDA graph is "
            "captured; run it once, with these shapes, before the capture"
        )
    arch = arch_of(device)
    try:
        compiled = compile_kernel(source, arch)
    except UnsupportedError as error:
        if on_gpu:
            raise UnsupportedError(f"{torch.cuda.get_device_name(device)} ({device}): {error}") from error
        raise
    entry = compiled.entry
    check_limits(config, entry, arch)
    if on_gpu:
        from cudaops import launch_cupy

        launch_cupy.load(compiled, entry, config, device.index)
        return Ready(compiled, entry, config)
    from cudaops import emulator

    run = emulator.prepare(compiled.ptx, compiled.key, entry.name, config)
    return Ready(compiled, entry, config, run, emulator.Buffer)


def _prepare(plan: Plan, device: torch.device) -> _Prepared:
    ready = prepare(plan.source, plan.config, device)
    entry = ready.entry
    count = len(entry.params) - len(plan.scalars)
    if count < 1 or any(param.kind not in ("pointer", "word") for param in entry.params[:count]):
        raise LaunchError(
            f"kernel {entry.name} takes {arguments.describe(entry)}, which is not pointers first and then the plan's "
            f"{len(plan.scalars)} scalars"
        )
    tail = arguments.pack(entry, plan.scalars, first=count)[8 * count :]
    params = tuple((dtypes_of(param), alignment_of(param), param.name) for param in entry.params[:count])
    return _Prepared(ready, struct.Struct(f"<{count}Q"), tail, params)


def check_tensor(entry: Entry, index: int, tensor: torch.Tensor, device: torch.device) -> None:
    """Refuse a tensor that parameter `index` cannot take.

    Raises:
        LaunchError: not a pointer parameter, or device, dtype, alignment, or a lazy negation or conjugation.
    """
    param = entry.params[index]
    if param.kind not in ("pointer", "word"):
        raise arguments.refusal(entry, index, "a tensor", "pass a number (tensor.item() reads one)")
    if tensor.device != device:
        raise arguments.refusal(
            entry, index, f"a tensor on {tensor.device}", f"all must be on {device}: use .to('{device}')"
        )
    dtypes = dtypes_of(param)
    if dtypes is not None and tensor.dtype not in dtypes:
        wanted = " or ".join(sorted(map(str, dtypes)))
        raise arguments.refusal(entry, index, f"a tensor of {tensor.dtype}", f"pass {wanted}")
    if tensor.is_neg() or tensor.is_conj():
        advice = "use tensor.resolve_neg().resolve_conj()"
        raise arguments.refusal(entry, index, "a view that is negated or conjugated lazily", advice)
    needed, given = alignment_of(param), address_alignment(tensor.data_ptr())
    if given < needed:
        raise arguments.refusal(
            entry, index, f"an address aligned to {given} bytes", f"it must be {needed}: .clone() it"
        )


def extent(tensor: torch.Tensor) -> int:
    """The bytes from a tensor's first element to the end of its last."""
    if tensor.is_contiguous():
        return tensor.numel() * tensor.itemsize
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _say_emulated() -> None:
    """One warning a process, at the first launch on CPU tensors."""
    global _said_emulated
    with _lock:
        first, _said_emulated = not _said_emulated, True
    if first:
        _logger.warning(
            "CPU tensors: kernels run on the emulator, which is for results and checks, not for speed; "
            "move the tensors with .to('cuda') to use a GPU"
        )


# ---- counting and watching ----


def launch_counts() -> Counter[str]:
    """How often each entry was launched by this process, by its name in the plan."""
    with _lock:
        return Counter(_counts)


def total_launches() -> int:
    """How many kernels this process launched."""
    with _lock:
        return _counts.total()


@contextmanager
def on_launch(observer: Callable[[Plan, float], None]) -> Iterator[None]:
    """Call `observer(plan, seconds)` after every launch inside, from whichever thread launched.

    On CUDA the stream is waited for after each, so that the time is the kernel's; without an observer nothing waits.
    """
    global _observers
    with _lock:
        _observers = (*_observers, observer)
    try:
        yield
    finally:
        with _lock:
            remaining = list(_observers)
            remaining.remove(observer)
            _observers = tuple(remaining)


def _after_fork() -> None:
    """A lock that another thread held at the fork is held for ever in the child."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
