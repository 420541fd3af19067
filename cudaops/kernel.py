"""Kernels of your own: CUDA C in, a typed and checked launch on torch tensors out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from cudaops import arguments, interop
from cudaops.compile import CompiledKernel, compile_kernel, compile_source
from cudaops.errors import LaunchError, UnsupportedError
from cudaops.launch import Ready, arch_of, check_tensor, extent, go, prepare
from cudaops.plan import Dim3, KernelSource, LaunchConfig, Plan, dim3, threads_by_registers
from cudaops.pointees import alignment_of, dtypes_of
from cudaops.signature import Entry

_MOST_READY = 256

_Pointer = tuple[frozenset[torch.dtype] | None, int]  # the dtypes and the alignment that a parameter takes
_Ready = tuple[Ready, Plan, tuple[_Pointer | None, ...]]


class RawKernel:
    """A `__global__` function from CUDA C source, called as `kernel(grid, block, args, *, shared_mem=0)`.

    It is compiled at the first call on each arch and kept in the kernel cache. It runs where its tensors are: on their
    GPU and torch's current stream, or on the CPU through the emulator. Arguments are packed by the kernel's own
    signature and checked: a Python int fits any integer parameter whose range holds it, a float only a floating one.

    Arguments:
        code: CUDA C++ source.
        name: of the kernel: as declared, or a name expression for a template (`'scale<float>'`).
        options: of NVRTC, `('-DN=4', '-I/my/headers')`. The arch is not among them.

    Raises (when called):
        CompileError: the source is refused, with file and line, or has no such kernel, with the names it has.
        LaunchError: grid, block, shared memory or an argument does not fit; nothing was launched.
        UnsupportedError: CuPy or NVRTC is missing.
        EmulatorError: on CPU tensors, an access outside the arguments.
    """

    def __init__(self, code: str, name: str, options: tuple[str, ...] = ()) -> None:
        for what, value in (("code", code), ("name", name)):
            if not isinstance(value, str):
                raise TypeError(f"RawKernel: {what} must be a str, got {type(value).__name__}")
        self._start(KernelSource(file=None, entry=name, text=code, options=_options(options)))

    def _start(self, source: KernelSource) -> None:
        self._source = source
        self._compiled: dict[str, CompiledKernel] = {}
        self._ready: dict[tuple[object, ...], _Ready] = {}

    @classmethod
    def _of(cls, source: KernelSource) -> RawKernel:
        kernel = cls.__new__(cls)
        kernel._start(source)
        return kernel

    def __reduce__(self) -> tuple[Any, ...]:
        return RawKernel._of, (self._source,)

    def __repr__(self) -> str:
        return f"<cudaops.RawKernel {self.name}>"

    @property
    def name(self) -> str:
        """As given."""
        return self._source.entry

    @property
    def code(self) -> str:
        """The source."""
        return self._source.text or ""

    @property
    def options(self) -> tuple[str, ...]:
        """As given."""
        return self._source.options

    def __call__(
        self,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
    ) -> None:
        """Launch. On a GPU it returns before the kernel has run, as torch's own operations do.

        Arguments:
            grid, block: one to three sizes, x first.
            args: one a parameter. Contiguous torch tensors, CuPy or NumPy arrays, or anything with `__dlpack__`, for
                pointers, all on one device (None is a null pointer); numbers; for a struct its bytes, a
                ctypes.Structure or a NumPy record. Autograd does not see the kernel; what it may write to (a pointer
                that is not const) counts as changed in place.
            shared_mem: dynamic shared memory in bytes.
        """
        sizes = dim3(grid, "grid"), dim3(block, "block"), shared_mem
        if type(args) is not tuple and (not isinstance(args, Sequence) or isinstance(args, str | bytes)):
            raise LaunchError(
                f"kernel {self.name}: args must be a tuple of arguments, got {type(args).__name__}; "
                "a single argument is (x,)"
            )
        tensors, borrowed = self._tensors(args)
        device = next((tensor.device for tensor in tensors if tensor is not None), None) or _default_device()
        ready, plan, pointers = self._ready_on(device, *sizes)
        entry = ready.entry
        if len(args) != len(entry.params):
            arguments.pack(entry, args)  # raises, with the signature
        values: list[object] = []
        for index, (arg, tensor) in enumerate(zip(args, tensors, strict=True)):
            if tensor is None or _by_value(entry, index, arg):
                values.append(arg)
                continue
            if not _fits(tensor, device, pointers[index]):
                _check_memory(entry, index, tensor)
                check_tensor(entry, index, tensor, device)
            values.append(arguments.Address(tensor.data_ptr()))
        block_bytes = arguments.pack(entry, values)
        passed = [
            (tensor, param)
            for tensor, param, value in zip(tensors, entry.params, values, strict=True)
            if tensor is not None and isinstance(value, arguments.Address)
        ]
        written = [tensor for tensor, param in passed if not param.const]
        if written:
            torch.autograd.graph.increment_version(written)
        buffers = [ready.buffer(t.data_ptr(), extent(t), p.name) for t, p in passed] if ready.run else []
        go(ready, plan, block_bytes, device, buffers)
        if borrowed and device.type == "cuda":
            interop.give_back(device)

    def compile(self) -> None:
        """Compile now, for the GPU torch is on, or for the emulator where there is none."""
        self._compiled_for(_default_device())

    @property
    def attributes(self) -> dict[str, int]:
        """What the compiled kernel uses, by CuPy's names."""
        names = ("max_threads_per_block", "shared_size_bytes", "local_size_bytes", "num_regs")
        return {name: getattr(self, name) for name in names}

    @property
    def num_regs(self) -> int:
        """Registers a thread."""
        return self._entry().registers

    @property
    def shared_size_bytes(self) -> int:
        """Static shared memory a block."""
        return self._entry().smem_bytes

    @property
    def local_size_bytes(self) -> int:
        """Local memory a thread: its stack frame, spills included."""
        return self._entry().stack_bytes

    @property
    def max_threads_per_block(self) -> int:
        """The largest block that `__launch_bounds__` and the registers allow."""
        entry = self._entry()
        return min(entry.max_threads, threads_by_registers(entry.registers))

    def _entry(self) -> Entry:
        return self._compiled_for(_default_device()).entry

    def _compiled_for(self, device: torch.device) -> CompiledKernel:
        arch = arch_of(device)
        if arch not in self._compiled:
            self._compiled[arch] = compile_kernel(self._source, arch)
        return self._compiled[arch]

    def _ready_on(self, device: torch.device, grid: Dim3, block: Dim3, shared_mem: int) -> _Ready:
        key = (device, arch_of(device), grid, block, shared_mem, type(shared_mem))
        found = self._ready.get(key)
        if found is None:
            config = LaunchConfig(grid, block, shared_mem)
            ready = prepare(self._source, config, device)
            pointers = tuple(
                (dtypes_of(p), alignment_of(p)) if p.kind in ("pointer", "word") else None for p in ready.entry.params
            )
            found = ready, Plan(self.name, self._source, config, (), "RawKernel"), pointers
            if len(self._ready) >= _MOST_READY:
                self._ready.clear()
            self._ready[key] = found
        return found

    def _tensors(self, args: Sequence[Any]) -> tuple[list[torch.Tensor | None], bool]:
        """Each argument's memory as a tensor, None for those that have none; and whether some of it is not torch's."""
        tensors: list[torch.Tensor | None] = []
        borrowed = False
        for index, arg in enumerate(args):
            if isinstance(arg, torch.Tensor):
                tensors.append(arg)
            elif hasattr(arg, "__dlpack__") and not _is_value(arg):
                try:
                    tensors.append(interop.to_torch(arg))
                except (TypeError, ValueError) as error:
                    raise LaunchError(f"kernel {self.name}, argument {index}: {error}") from error
                borrowed = True
            else:
                tensors.append(None)
        return tensors, borrowed


class RawModule:
    """Several kernels from one source.

    Arguments:
        code: CUDA C++ source; or
        path: of a file with it (`.cu`): error messages give its name and lines, and headers beside it are found.
        options: of NVRTC.
        name_expressions: of the templates wanted, `('scale<float>', 'scale<double>')`; others can be asked for as well.

    Raises:
        TypeError: not exactly one of `code` and `path`.
        UnsupportedError: `path` is compiled code, which the emulator could not run.
    """

    def __init__(
        self,
        code: str | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        options: tuple[str, ...] = (),
        name_expressions: Sequence[str] | None = None,
    ) -> None:
        if (code is None) == (path is None):
            raise TypeError("RawModule takes exactly one of code and path")
        self._file = "module.cu"
        if path is not None:
            file = Path(path).absolute()
            if file.suffix in (".cubin", ".ptx", ".fatbin", ".o"):
                raise UnsupportedError(
                    f"RawModule takes CUDA C source, got {file.name}: pass the .cu file it was made from"
                )
            code = file.read_text(encoding="utf-8", errors="replace")
            self._file = str(file)
        self._code = code
        self._options = _options(options)
        self._expressions = tuple(name_expressions or ())

    def get_function(self, name: str) -> RawKernel:
        """The kernel `name`, compiled.

        Raises:
            CompileError: the source is refused, or has no such kernel, with the names it has.
        """
        kernel = RawKernel._of(self._source(name))
        kernel.compile()
        return kernel

    def _source(self, name: str) -> KernelSource:
        return KernelSource(self._file, name, text=self._code, options=self._options)

    def compile(self) -> None:
        """Compile now: every name expression, or the source alone where there is none.

        Raises:
            CompileError: the source is refused, or an expression names no kernel in it.
        """
        for name in self._expressions:
            self.get_function(name)
        if not self._expressions:
            compile_source(self._source(""), arch_of(_default_device()))


def _options(options: Sequence[str]) -> tuple[str, ...]:
    if isinstance(options, str):
        raise TypeError(f"options must be a tuple of strings, got the string {options!r}; pass ({options!r},)")
    return tuple(options)


def _default_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _is_value(arg: object) -> bool:
    """NumPy records and scalars are values, whatever protocols they have."""
    return isinstance(arg, numpy.generic) or (isinstance(arg, numpy.ndarray) and arg.dtype.names is not None)


def _by_value(entry: Entry, index: int, arg: object) -> bool:
    """A NumPy array of one element for a parameter that is no pointer is that element, as in CuPy."""
    kind = entry.params[index].kind
    return isinstance(arg, numpy.ndarray) and arg.size == 1 and kind not in ("pointer", "word")


def _fits(tensor: torch.Tensor, device: torch.device, pointer: _Pointer | None) -> bool:
    """Whether a parameter takes a tensor without another look; the checks that follow find the words where not."""
    return (
        pointer is not None
        and tensor.layout is torch.strided
        and tensor.device == device
        and (pointer[0] is None or tensor.dtype in pointer[0])
        and tensor.is_contiguous()
        and not tensor.data_ptr() % pointer[1]
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def _check_memory(entry: Entry, index: int, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.device.type not in ("cpu", "cuda"):
        got = f"a tensor on {tensor.device}" if tensor.layout == torch.strided else f"a {tensor.layout} tensor"
        raise arguments.refusal(entry, index, got, "pass a dense tensor on the CPU or a GPU")
    if not tensor.is_contiguous():
        raise arguments.refusal(
            entry,
            index,
            f"a tensor of shape {tuple(tensor.shape)} that is not contiguous (strides {tensor.stride()})",
            "a kernel sees memory, not strides: pass tensor.contiguous(), or the tensor it views and the strides",
        )
