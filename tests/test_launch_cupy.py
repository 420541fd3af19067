"""The CUDA seam, every line of it, against a stand-in that packs and launches by CuPy's own rules."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from cudaops import interop, launch, launch_cupy
from cudaops.compile import CompiledKernel, compile_kernel
from cudaops.emulator import Buffer
from cudaops.errors import LaunchError, UnsupportedError
from cudaops.kernel import RawKernel
from cudaops.plan import KernelSource, LaunchConfig, Plan
from tests import fake_cupy
from tests.fake_cupy import CPointer, FakeCupy, pointer

ARCH = "sm_80"
TEXT = r"""
struct Pair { short a; double b; };
extern "C" __global__ void mix(float* out, const float* in, float scale, int n, bool twice, Pair pair, long long far) {
    extern __shared__ float row[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    row[threadIdx.x] = i < n ? in[i] : 0.0f;
    __syncthreads();
    if (i < n) out[i] = row[threadIdx.x] * scale * (twice ? 2.0f : 1.0f) + pair.a + (float)pair.b + (float)(far >> 33);
}
extern "C" __global__ void mix2(float* out) { __shared__ float fixed[4096]; fixed[threadIdx.x] = 3; out[0] = fixed[0]; }
extern "C" __global__ void nothing() {}
"""


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> Iterator[FakeCupy]:
    """The stand-in in CuPy's place, with nothing loaded yet."""
    compile_kernel(KernelSource(None, "mix", text=TEXT), ARCH)  # NVRTC is CuPy's real one
    stand_in = FakeCupy()
    stand_in.install(monkeypatch)
    monkeypatch.setattr(launch_cupy, "_loaded", {})
    launch_cupy._stream.cache_clear()
    yield stand_in
    launch_cupy._stream.cache_clear()
    assert stand_in.device == [0], "a device guard was left open"


def compiled(entry: str = "mix") -> CompiledKernel:
    return compile_kernel(KernelSource(None, entry, text=TEXT), ARCH)


def packed(out: torch.Tensor, x: torch.Tensor, n: int) -> bytes:
    block = struct.pack("<QQfi?7xh6xdq", out.data_ptr(), x.data_ptr(), 0.5, n, True, 7, 0.25, 3 << 33)
    assert len(block) == compiled().entry.arguments_bytes
    return block


def expected(x: torch.Tensor) -> torch.Tensor:
    """Exact: the products are by powers of two, and the sums are in the kernel's order."""
    return x * 0.5 * 2 + 7 + 0.25 + 3


def buffers(*tensors: torch.Tensor) -> list[Buffer]:
    return [Buffer(t.data_ptr(), t.nbytes, "gpu memory") for t in tensors]


def test_a_launch_runs_on_its_device_and_stream_with_its_geometry_and_typed_arguments(cupy: FakeCupy) -> None:
    x, out = torch.randn(300), torch.full((300,), float("nan"))
    cupy.buffers = buffers(x, out)
    kernel, config = compiled(), LaunchConfig((3, 1, 1), (128, 1, 1), 512)
    launch_cupy.launch(kernel, kernel.entry, config, packed(out, x, 300), 1, 0xABC0)
    (seen,) = cupy.launches
    assert (seen.entry, seen.device, seen.stream) == ("mix", 1, 0xABC0)
    assert (seen.grid, seen.block, seen.smem_bytes) == ((3, 1, 1), (128, 1, 1), 512)
    assert seen.arguments == packed(out, x, 300)
    assert torch.equal(out, expected(x))
    assert cupy.loads == [("mix", 1)]


def test_a_kernel_is_loaded_once_a_device_from_a_whole_cubin(cupy: FakeCupy, cache_dir: Path) -> None:
    kernel, config = compiled("nothing"), LaunchConfig((1, 1, 1), (32, 1, 1))
    for device in (0, 1, 1, 0):
        launch_cupy.launch(kernel, kernel.entry, config, b"", device, 0)
    assert cupy.loads == [("nothing", 0), ("nothing", 1)]
    assert [(seen.device, seen.stream) for seen in cupy.launches] == [(0, 0), (1, 0), (1, 0), (0, 0)]
    assert (cache_dir / "files" / f"{kernel.key}.cudaops.cubin").read_bytes() == kernel.cubin


def test_loading_ahead_leaves_nothing_for_the_launch(cupy: FakeCupy) -> None:
    kernel, config = compiled("nothing"), LaunchConfig((1, 1, 1), (32, 1, 1), 100_000)
    launch_cupy.load(kernel, kernel.entry, config, 1)
    assert cupy.loads == [("nothing", 1)]
    assert cupy.opted_in == [("nothing", 1, 100_000)]
    launch_cupy.launch(kernel, kernel.entry, config, b"", 1, 5)
    assert len(cupy.loads) == len(cupy.opted_in) == len(cupy.launches) == 1


def test_shared_memory_is_opted_into_only_where_static_and_dynamic_pass_48_kb(cupy: FakeCupy) -> None:
    out = torch.zeros(1)
    cupy.buffers = buffers(out)
    kernel = compiled("mix2")
    assert kernel.entry.smem_bytes == 16_384
    for smem_bytes in (32_768, 32_769, 40_000, 36_000, 40_000, 0):
        config = LaunchConfig((1, 1, 1), (32, 1, 1), smem_bytes)
        launch_cupy.launch(kernel, kernel.entry, config, struct.pack("<Q", out.data_ptr()), 0, 0)
    assert cupy.opted_in == [("mix2", 0, 32_769), ("mix2", 0, 40_000)]
    assert [seen.smem_bytes for seen in cupy.launches] == [32_768, 32_769, 40_000, 36_000, 40_000, 0]


def test_a_refused_load_says_what_to_do(cupy: FakeCupy) -> None:
    kernel, config = compiled("nothing"), LaunchConfig((1, 1, 1), (32, 1, 1))
    cupy.refuse_load = True
    with pytest.raises(
        LaunchError, match=r"nothing: cuda:1 does not load the cubin for sm_80 \(CUDA_ERROR_NO_BINARY.*driver"
    ):
        launch_cupy.load(kernel, kernel.entry, config, 1)
    cupy.refuse_load = False
    launch_cupy.launch(kernel, kernel.entry, config, b"", 1, 0)  # and is tried again
    assert len(cupy.launches) == 1


def test_a_refused_launch_is_a_launch_error(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, config = compiled("nothing"), LaunchConfig((1, 1, 1), (32, 1, 1), 60_000)
    monkeypatch.setattr(fake_cupy.RawKernel, "_set_max_dynamic_shared_size_bytes", lambda *_: None)
    monkeypatch.setattr(fake_cupy.RawKernel, "max_dynamic_shared_size_bytes", property(None, lambda *_: None))
    with pytest.raises(
        LaunchError, match=r"nothing on cuda:0, grid \(1, 1, 1\) .* the driver refused it \(CUDA_ERROR_INV"
    ):
        launch_cupy.launch(kernel, kernel.entry, config, b"", 0, 0)


def test_threads_load_a_kernel_once(cupy: FakeCupy) -> None:
    kernel, config = compiled("nothing"), LaunchConfig((1, 1, 1), (32, 1, 1))
    cupy.device_count, cupy.device = 1, [0]
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        launch_cupy.launch(kernel, kernel.entry, config, b"", 0, 0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(cupy.launches) == 4
    assert cupy.loads == [("nothing", 0)]


# ---- the whole way: launch() with tensors that say they are on a GPU ----


class GpuTensor:
    """As much of a CUDA tensor as a launch looks at, on the memory of a CPU tensor."""

    is_cpu = False
    layout = torch.strided

    def __init__(self, memory: torch.Tensor, index: int = 1) -> None:
        self.memory, self.device, self.dtype = memory, torch.device("cuda", index), memory.dtype

    def data_ptr(self) -> int:
        return self.memory.data_ptr()

    def is_neg(self) -> bool:
        return False

    is_conj = is_neg

    def is_contiguous(self) -> bool:
        return True


@pytest.fixture
def gpu(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    """torch's side of a machine with two GPUs."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Imaginary GPU")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0x1000 + index)
    monkeypatch.setattr(launch, "_prepared", {})
    launch._cuda_arch.cache_clear()
    return cupy


def plan(n: int) -> Plan:
    scalars = (0.5, n, True, struct.pack("<h6xd", 7, 0.25), 3 << 33)
    return Plan(
        "mix", KernelSource(None, "mix", text=TEXT), LaunchConfig((3, 1, 1), (128, 1, 1), 512), scalars, "a test"
    )


def test_a_plan_on_cuda_tensors_runs_on_their_gpu_and_torchs_current_stream(gpu: FakeCupy) -> None:
    x, out = torch.randn(300), torch.full((300,), float("nan"))
    gpu.buffers = buffers(x, out)
    before = launch.launch_counts()["mix"]
    launch.launch(plan(300), [GpuTensor(out), GpuTensor(x)])  # type: ignore[list-item]
    (seen,) = gpu.launches
    assert (seen.device, seen.stream, seen.grid, seen.block, seen.smem_bytes) == (
        1,
        0x1001,
        (3, 1, 1),
        (128, 1, 1),
        512,
    )
    assert torch.equal(out, expected(x))
    assert launch.launch_counts()["mix"] == before + 1


def test_tensors_on_two_gpus_are_refused_before_anything_runs(gpu: FakeCupy) -> None:
    x, out = torch.randn(300), torch.zeros(300)
    with pytest.raises(LaunchError, match=r"argument 1 \(in\): .* a tensor on cuda:1; all must be on cuda:0"):
        launch.launch(plan(300), [GpuTensor(out, 0), GpuTensor(x, 1)])  # type: ignore[list-item]
    assert gpu.launches == []


def test_while_a_graph_is_captured_nothing_is_compiled_or_loaded(
    gpu: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, out = torch.randn(300), torch.zeros(300)
    gpu.buffers = buffers(x, out)
    tensors: Any = [GpuTensor(out), GpuTensor(x)]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(LaunchError, match=r"mix is not compiled and loaded yet.*run it once.*before the capture"):
        launch.launch(plan(300), tensors)
    assert gpu.loads == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    launch.launch(plan(300), tensors)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    launch.launch(plan(300), tensors)
    assert len(gpu.launches) == 2


def test_a_gpu_that_this_nvrtc_does_not_know_is_named(gpu: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (3, 5))
    launch._cuda_arch.cache_clear()
    with pytest.raises(UnsupportedError, match=r"Imaginary GPU \(cuda:1\): arch 'sm_35' is not one that NVRTC"):
        launch.launch(plan(1), [GpuTensor(torch.zeros(1)), GpuTensor(torch.zeros(1))])  # type: ignore[list-item]
    launch._cuda_arch.cache_clear()


def test_an_observer_waits_for_the_stream(gpu: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    x, out = torch.randn(300), torch.zeros(300)
    gpu.buffers = buffers(x, out)
    order: list[str] = []

    class Waiting:
        def synchronize(self) -> None:
            order.append(f"wait after {len(gpu.launches)}")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Waiting())
    with launch.on_launch(lambda plan, seconds: order.append(f"{plan.op} {seconds > 0}")):
        launch.launch(plan(300), [GpuTensor(out), GpuTensor(x)])  # type: ignore[list-item]
    assert order == ["wait after 0", "wait after 1", "mix True"]


def test_a_raw_kernel_without_tensors_runs_on_the_gpu_that_torch_is_on(
    gpu: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    RawKernel(TEXT, "nothing")(2, 64, (), shared_mem=16)
    (seen,) = gpu.launches
    assert (seen.device, seen.stream, seen.grid, seen.block, seen.smem_bytes) == (0, 0x1000, (2, 1, 1), (64, 1, 1), 16)


def test_after_a_raw_kernel_on_cupys_arrays_cupys_stream_waits(gpu: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy may give the memory to its next array as soon as the caller drops this one."""
    out = torch.zeros(1)
    gpu.buffers = buffers(out)
    order: list[Any] = []
    monkeypatch.setattr(interop, "to_torch", lambda array: GpuTensor(torch.from_numpy(array)))
    monkeypatch.setattr(interop, "give_back", lambda device: order.append((str(device), len(gpu.launches))))
    monkeypatch.setattr(torch.autograd.graph, "increment_version", lambda tensors: order.append(len(tensors)))
    RawKernel(TEXT, "mix2")(1, 32, (out.numpy(),))
    assert order == [1, ("cuda:1", 1)]
    assert out.item() == 3


# ---- the stand-in itself, against CuPy ----


def test_the_stand_in_packs_as_cupy_does() -> None:
    """A Python int is 8 bytes and a float a double there, whatever the kernel declares: hence the packed block."""

    def read(value: Any, count: int) -> bytes:
        address, held = pointer(value)
        import ctypes

        found = ctypes.string_at(address, count)
        del held
        return found

    assert read(3, 8) == struct.pack("<q", 3)
    assert read(1.0, 4) == b"\0\0\0\0"  # half a double: not 1.0f
    assert read(numpy.float32(1), 4) == struct.pack("<f", 1)
    assert read(True, 1) == b"\1"
    assert read(1j, 16) == struct.pack("<dd", 0, 1)
    assert read(None, 8) == bytes(8)
    assert read(numpy.array([1, 2], "<i2").view("<i4"), 4) == struct.pack("<hh", 1, 2)
    with pytest.raises(TypeError, match=r"numpy\.ndarray of shape \(2,\)"):
        pointer(numpy.zeros(2))
    with pytest.raises(TypeError, match="Unsupported type"):
        pointer("text")
    assert pointer(CPointer(99))[0] == 99


def test_the_calls_of_the_seam_exist_in_the_real_cupy(run_python: Callable[..., str], tmp_path: Path) -> None:
    """What can be run without a driver: the names, how they are called, and that none of it is deprecated."""
    code = f"""
import torch, cupy
from cupy.cuda.function import CPointer, Function
from cudaops.launch_cupy import _stream
assert CPointer(1234).ptr == 1234
assert _stream(4321).ptr == 4321 and isinstance(_stream(4321), cupy.cuda.Stream)
assert _stream(0).ptr == 0
assert callable(cupy.cuda.Device) and callable(cupy.cuda.get_current_stream) and callable(Function.__call__)
cupy.RawModule(path={str(tmp_path / "k.cubin")!r}).get_function  # loads when a function is asked for
assert hasattr(cupy.RawKernel, "kernel") and hasattr(cupy.RawKernel, "max_dynamic_shared_size_bytes")
"""
    run_python(code)
