"""RawKernel and RawModule: CUDA C in, a checked launch on tensors and arrays out."""

from __future__ import annotations

import copy
import ctypes
import math
import pickle
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import cudaops
from cudaops import RawKernel, RawModule
from cudaops.compile import compilations
from cudaops.errors import CompileError, EmulatorError, LaunchError, UnsupportedError
from cudaops.launch import on_launch, total_launches

AXPY = r"""
extern "C" __global__ void __launch_bounds__(256) axpy(float* y, const float* x, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}
"""

MANY = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
struct Pair { short a; double b; };
template <typename T> __global__ void fill(T* out, T value, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = value;
}
extern "C" __global__ void scalars(
    double* out, bool flag, signed char a, unsigned char b, short c, unsigned short d, int e, unsigned f,
    long long g, unsigned long long h, float x, double y, Pair pair) {
    out[0] = flag; out[1] = a; out[2] = b; out[3] = c; out[4] = d; out[5] = e; out[6] = f;
    out[7] = (double)g; out[8] = (double)h; out[9] = x; out[10] = y; out[11] = pair.a; out[12] = pair.b;
}
extern "C" __global__ void truth(int* out, const bool* in) { out[threadIdx.x] = in[threadIdx.x] ? 10 : 20; }
extern "C" __global__ void is_null(int* out, const float* maybe) { out[0] = maybe == nullptr; }
extern "C" __global__ void tile(float* out, const float* in) {
    extern __shared__ float row[];
    row[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = row[blockDim.x - 1 - threadIdx.x];
}
extern "C" __global__ void copy(__nv_bfloat16* out, const __nv_bfloat16* in) { out[threadIdx.x] = in[threadIdx.x]; }
extern "C" __global__ void nothing() {}
extern "C" __global__ void where(int* out) {
    if (threadIdx.x == 0 && threadIdx.y == 0)
        out[(blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x] = blockDim.x * 10 + blockDim.y;
}
"""


@pytest.fixture(scope="module")
def axpy() -> RawKernel:
    return RawKernel(AXPY, "axpy")


@pytest.fixture(scope="module")
def many() -> RawModule:
    return RawModule(MANY, name_expressions=("fill<float>", "fill<double>"))


def pair(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n), torch.randn(n)


# ---- running ----


@pytest.mark.parametrize("n", [1, 255, 256, 257, 1000])
def test_it_runs_on_torch_tensors(axpy: RawKernel, n: int) -> None:
    y, x = pair(n)
    wanted = y + 2 * x
    axpy((-(-n // 256),), (256,), (y, x, 2.0, n))
    assert torch.equal(y, wanted)


def test_grid_and_block_have_up_to_three_axes(many: RawModule) -> None:
    out = torch.zeros(3, 2, 4, dtype=torch.int32)
    many.get_function("where")((4, 2, 3), (8, 5), (out,))
    assert (out == 85).all()
    out = torch.zeros(7, dtype=torch.int32)
    many.get_function("where")(7, 8, (out,))
    assert (out == 81).all()


def test_every_scalar_is_packed_in_the_kernels_type(many: RawModule) -> None:
    out = torch.full((13,), math.nan, dtype=torch.float64)
    record = numpy.array((-7, 0.25), numpy.dtype([("a", "<i2"), ("b", "<f8")], align=True))
    args = (True, -128, 255, -(2**15), 2**16 - 1, -(2**31), 2**32 - 1, -(2**62), 2**63, 0.1, 0.1, record)
    many.get_function("scalars")(1, 1, (out, *args))
    single = struct.unpack("<f", struct.pack("<f", 0.1))[0]
    assert out.tolist() == [
        1,
        -128,
        255,
        -(2**15),
        2**16 - 1,
        -(2**31),
        2**32 - 1,
        -(2.0**62),
        2.0**63,
        single,
        0.1,
        -7,
        0.25,
    ]


def test_numpy_scalars_and_ctypes_structures_are_taken(many: RawModule) -> None:
    class Pair(ctypes.Structure):
        _fields_ = (("a", ctypes.c_short), ("b", ctypes.c_double))

    out = torch.full((13,), math.nan, dtype=torch.float64)
    numbers = [numpy.bool_(True), *(numpy.int64(n) for n in range(2, 10)), numpy.float64(0.5), numpy.float32(0.25)]
    many.get_function("scalars")(1, 1, (out, *numbers, Pair(3, 4.0)))
    assert out.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0.5, 0.25, 3, 4]


@pytest.mark.parametrize(
    ("name", "dtype", "value"),
    [
        ("fill<float>", torch.float32, 1.5),
        ("fill<double>", torch.float64, 1.5),
        ("fill<long long>", torch.int64, -(2**40)),
    ],
)
def test_templates_are_named_by_their_arguments(many: RawModule, name: str, dtype: torch.dtype, value: Any) -> None:
    out = torch.zeros(70, dtype=dtype)
    many.get_function(name)(2, 64, (out, value, 70))
    assert (out == value).all()


def test_bool_tensors_are_bytes(many: RawModule) -> None:
    flags = torch.tensor([True, False, True])
    out = torch.zeros(3, dtype=torch.int32)
    for given in (flags, flags.to(torch.uint8), flags.numpy()):
        out.zero_()
        many.get_function("truth")(1, 3, (out, given))
        assert out.tolist() == [10, 20, 10]


def test_bfloat16_tensors_pass_by_pointer(many: RawModule) -> None:
    x = torch.randn(32).to(torch.bfloat16)
    out = torch.zeros_like(x)
    many.get_function("copy")(1, 32, (out, x))
    assert torch.equal(out, x)
    with pytest.raises(LaunchError, match=r"got a tensor of torch\.float16; pass torch\.bfloat16"):
        many.get_function("copy")(1, 32, (out, x.to(torch.float16)))


def test_none_and_an_empty_tensor_are_null(many: RawModule) -> None:
    out = torch.zeros(1, dtype=torch.int32)
    for nothing in (None, torch.zeros(0)):
        out.zero_()
        many.get_function("is_null")(1, 1, (out, nothing))
        assert out.item() == 1
    many.get_function("is_null")(1, 1, (out, torch.zeros(1)))
    assert out.item() == 0


def test_dynamic_shared_memory_is_given(many: RawModule) -> None:
    x = torch.randn(64)
    out = torch.zeros(64)
    many.get_function("tile")(1, 64, (out, x), shared_mem=256)
    assert torch.equal(out, x.flip(0))
    with pytest.raises(EmulatorError, match="shared"):
        many.get_function("tile")(1, 64, (out, x), shared_mem=252)


def test_a_kernel_without_arguments_runs_too(many: RawModule) -> None:
    before = total_launches()
    many.get_function("nothing")(1, 32, ())
    assert total_launches() == before + 1


def test_numpy_arrays_and_anything_with_dlpack_are_taken(axpy: RawKernel) -> None:
    class Exporter:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __dlpack__(self, **options: Any) -> Any:
            return self.tensor.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.tensor.__dlpack_device__()

    y, x = numpy.zeros(100, numpy.float32), torch.randn(100)
    axpy(1, 128, (y, Exporter(x), 1.0, 100))
    assert numpy.array_equal(y, x.numpy())
    one = numpy.zeros(1, numpy.float32)
    axpy(1, 128, (one, x, numpy.array([2.0]), numpy.array(1)))  # arrays of one element are values where no pointer is
    assert one[0] == 2 * x[0]


def test_what_autograd_cannot_see_counts_as_a_change_in_place(axpy: RawKernel) -> None:
    x = torch.randn(8, requires_grad=True)
    y = x * 2
    loss = (y * y).sum()  # backward needs y as it was
    axpy(1, 32, (y, x, 1.0, 8))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_is_only_read_does_not_count_as_changed(axpy: RawKernel) -> None:
    x = torch.randn(8, requires_grad=True)
    loss = (x * x).sum()
    axpy(1, 32, (torch.zeros(8), x, 1.0, 8))
    loss.backward()
    assert x.grad is not None


def test_observers_see_it(axpy: RawKernel) -> None:
    seen: list[str] = []
    with on_launch(lambda plan, seconds: seen.append(f"{plan.op} {plan.config}")):
        axpy(1, 32, (*pair(8), 1.0, 8))
    assert seen == ["axpy grid (1, 1, 1) x block (32, 1, 1)"]


def test_many_threads_may_call_it() -> None:
    kernel = RawKernel(AXPY + "// of many threads", "axpy")
    wrong: list[int] = []

    def work() -> None:
        for _ in range(20):
            y, x = pair(100)
            wanted = y + 2 * x
            kernel(1, 128, (y, x, 2.0, 100))
            if not torch.equal(y, wanted):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_it_is_compiled_at_the_first_call_and_once(cache_dir: Path) -> None:
    before = compilations()
    kernel = RawKernel(AXPY + f"// {cache_dir}", "axpy")
    assert compilations() == before
    for n in (5, 6):
        kernel(1, 32, (*pair(n), 1.0, n))
    kernel(2, 64, (*pair(5), 1.0, 5))
    kernel.compile()
    RawKernel(AXPY + f"// {cache_dir}", "axpy")(1, 32, (*pair(5), 1.0, 5))
    assert compilations() == before + 1


def test_many_geometries_do_not_pile_up(axpy: RawKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cudaops.kernel._MOST_READY", 3)
    for grid in range(1, 8):
        axpy(grid, 32, (*pair(8), 1.0, 8))
    assert len(axpy._ready) <= 3


def test_attributes_are_those_of_the_compiled_kernel(many: RawModule) -> None:
    kernel = RawKernel(AXPY, "axpy")
    assert kernel.attributes == {
        "max_threads_per_block": 256,
        "shared_size_bytes": 0,
        "local_size_bytes": 0,
        "num_regs": kernel.num_regs,
    }
    assert 8 <= kernel.num_regs <= 32
    body = "__shared__ float a[50]; a[threadIdx.x] = 1; __syncthreads(); out[0] = a[5];"
    fixed = f'extern "C" __global__ void k(float* out) {{ {body} }}'
    assert RawKernel(fixed, "k").shared_size_bytes == 200
    assert many.get_function("nothing").max_threads_per_block == 1024


def test_it_survives_copying_and_pickling(axpy: RawKernel) -> None:
    axpy(1, 32, (*pair(8), 1.0, 8))
    for other in (copy.deepcopy(axpy), pickle.loads(pickle.dumps(axpy))):
        y, x = pair(8)
        wanted = y + x
        other(1, 32, (y, x, 1.0, 8))
        assert torch.equal(y, wanted)
        assert (other.name, other.code, other.options) == ("axpy", AXPY, ())
    assert repr(axpy) == "<cudaops.RawKernel axpy>"


def test_options_reach_the_compiler() -> None:
    text = 'extern "C" __global__ void k(int* out) { out[0] = NUMBER; }'
    out = torch.zeros(1, dtype=torch.int32)
    RawKernel(text, "k", ("-DNUMBER=41+1",))(1, 1, (out,))
    assert out.item() == 42


# ---- modules ----


def test_a_module_from_a_file_finds_its_headers_and_names_its_lines(tmp_path: Path) -> None:
    (tmp_path / "two.cuh").write_text("#define TWO 2\n")
    file = tmp_path / "mine.cu"
    file.write_text('#include "two.cuh"\nextern "C" __global__ void k(int* out) { out[threadIdx.x] = TWO; }\n')
    out = torch.zeros(4, dtype=torch.int32)
    kernel = RawModule(path=file).get_function("k")
    kernel(1, 4, (out,))
    assert out.tolist() == [2] * 4
    with pytest.raises(EmulatorError, match=rf"{file}:2.*out\[4\]"):
        kernel(1, 5, (out,))
    file.write_text("int wrong\n")
    with pytest.raises(CompileError, match=rf"refused {file}:1 "):
        RawModule(path=str(file)).get_function("k")


def test_a_changed_header_is_seen_by_a_new_kernel(tmp_path: Path) -> None:
    text = '#include "number.cuh"\nextern "C" __global__ void k(int* out) { out[0] = NUMBER; }'
    out = torch.zeros(1, dtype=torch.int32)
    for number in (1, 2, 1):
        (tmp_path / "number.cuh").write_text(f"#define NUMBER {number}\n")
        RawKernel(text, "k", (f"-I{tmp_path}",))(1, 1, (out,))
        assert out.item() == number


def test_a_module_compiles_its_expressions_ahead(many: RawModule) -> None:
    many.compile()
    before = compilations()
    many.get_function("fill<float>")
    many.get_function("fill<double>")
    assert compilations() == before
    with pytest.raises(CompileError, match="fil<float>"):
        RawModule(MANY, name_expressions=["fil<float>"]).compile()
    with pytest.raises(CompileError, match=r"module\.cu:1"):
        RawModule("nonsense").compile()


def test_a_module_is_made_of_code_or_a_file() -> None:
    for wrong in ({}, {"code": AXPY, "path": "k.cu"}):
        with pytest.raises(TypeError, match="exactly one of code and path"):
            RawModule(**wrong)  # type: ignore[arg-type]
    for name in ("k.cubin", "k.ptx"):
        with pytest.raises(UnsupportedError, match=rf"takes CUDA C source, got {name}"):
            RawModule(path=name)
    with pytest.raises(FileNotFoundError):
        RawModule(path="not there.cu")


# ---- what is refused: nothing runs ----


@pytest.fixture
def refused() -> Callable[..., None]:
    """Call a kernel that must be refused, with the message it must give; nothing may have been launched."""

    def check(message: str, kernel: RawKernel, grid: Any, block: Any, args: Any, **more: Any) -> None:
        before = total_launches()
        with pytest.raises(LaunchError, match=message):
            kernel(grid, block, args, **more)
        assert total_launches() == before

    return check


def test_wrong_geometry_is_refused(axpy: RawKernel, refused: Callable[..., None]) -> None:
    args = (*pair(8), 1.0, 8)
    refused(r"grid\.x is 0", axpy, 0, 32, args)
    refused(r"grid\.y is 70000 .* 1 to 65535", axpy, (1, 70_000), 32, args)
    refused(r"block\.z is 65", axpy, 1, (1, 1, 65), args)
    refused(r"block must be one to three whole numbers, got 1\.5", axpy, 1, 1.5, args)
    refused(r"has 257 threads, the kernel allows 256 \(__launch_bounds__\)", axpy, 1, 257, args)
    refused(r"shared memory must be a whole number of bytes from 0, got -4", axpy, 1, 32, args, shared_mem=-4)
    refused(
        r"166913 bytes of shared memory a block \(0 static \+ 166913 dynamic\); sm_80 allows 166912",
        axpy,
        1,
        32,
        args,
        shared_mem=166_913,
    )


def test_wrong_arguments_are_refused(axpy: RawKernel, refused: Callable[..., None]) -> None:
    y, x = pair(8)
    takes = r"argument \d \(.\): it takes "
    refused(r"takes 4 arguments \(float\* y, const float\* x, float a, int n\), got 3", axpy, 1, 32, (y, x, 1.0))
    refused(r"takes 4 arguments .* got 5", axpy, 1, 32, (y, x, 1.0, 8, 8))
    refused(r"args must be a tuple of arguments, got Tensor; a single argument is \(x,\)", axpy, 1, 32, y)
    refused(takes + r"int, got float 8\.0", axpy, 1, 32, (y, x, 1.0, 8.0))
    refused(takes + r"int, got 2147483648; it must be -2147483648 to 2147483647", axpy, 1, 32, (y, x, 1.0, 2**31))
    refused(takes + r"float, got str 'a'", axpy, 1, 32, (y, x, "a", 8))
    refused(takes + r"float, got float 1e\+60", axpy, 1, 32, (y, x, 1e60, 8))
    refused(takes + r"float, got a tensor; pass a number", axpy, 1, 32, (y, x, torch.tensor(1.0), 8))
    refused(takes + r"const float\*, got float 1\.0; pass the tensor itself", axpy, 1, 32, (y, 1.0, 1.0, 8))
    refused(takes + r"const float\*, got int", axpy, 1, 32, (y, x.data_ptr(), 1.0, 8))


def test_wrong_tensors_are_refused(axpy: RawKernel, refused: Callable[..., None]) -> None:
    y, x = pair(8)
    matrix = torch.randn(4, 4)
    refused(r"got a tensor of torch\.float64; pass torch\.float32", axpy, 1, 32, (y, x.double(), 1.0, 8))
    refused(
        r"a tensor of shape \(4, 4\) that is not contiguous \(strides \(1, 4\)\).*\.contiguous\(\)",
        axpy,
        1,
        32,
        (y, matrix.t(), 1.0, 8),
    )
    refused(r"\(4,\) that is not contiguous \(strides \(2,\)\)", axpy, 1, 32, (y, x[::2], 1.0, 4))
    refused(r"not contiguous", axpy, 1, 32, (y, torch.ones(1).expand(8), 1.0, 8))
    refused(r"got a tensor on meta", axpy, 1, 32, (y, x.to("meta"), 1.0, 8))
    refused(r"torch\.sparse_coo tensor; pass a dense tensor", axpy, 1, 32, (y, matrix.to_sparse(), 1.0, 8))
    refused(
        r"negated or conjugated lazily",
        axpy,
        1,
        32,
        (y, torch.zeros(8, dtype=torch.complex64).conj().imag.contiguous()._neg_view(), 1.0, 8),
    )
    read_only = x.numpy().copy()
    read_only.flags.writeable = False
    refused(r"argument 1: to_torch: the array is read-only", axpy, 1, 32, (y, read_only, 1.0, 8))
    refused(r"argument 1: to_torch: torch has no negative strides", axpy, 1, 32, (y, x.numpy()[::-1], 1.0, 8))


def test_a_tensor_on_another_kind_of_device_is_refused(axpy: RawKernel) -> None:
    with pytest.raises(UnsupportedError, match="got a tensor on meta"):
        axpy(1, 32, (torch.zeros(8, device="meta"), torch.zeros(8, device="meta"), 1.0, 8))


def test_a_bad_index_is_named_with_line_block_thread_and_argument() -> None:
    text = r"""extern "C" __global__ void bad(float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i + n] = 1;
}"""
    kernel = RawKernel(text, "bad")
    out = torch.zeros(100)
    with pytest.raises(EmulatorError) as caught:
        kernel(2, 64, (out, 0))
    message = str(caught.value)
    for part in ("bad", "bad.cu:3", "block (1, 0, 0)", "thread (36, 0, 0)", "out[100]"):
        assert part in message
    kernel(1, 64, (out, 0))  # and the next launch is fine
    assert out[:64].eq(1).all()


def test_compile_errors_name_the_kernels_own_line() -> None:
    with pytest.raises(CompileError, match=r"refused axpy\.cu:3 "):
        RawKernel(AXPY.replace("int i =", "int i"), "axpy")(1, 32, (*pair(8), 1.0, 8))
    with pytest.raises(CompileError, match="there is no kernel 'axpby' in the source; there is: axpy"):
        RawKernel(AXPY, "axpby").compile()


@pytest.mark.parametrize(("code", "name"), [(b"x", "k"), ("x", 3), (None, "k")])
def test_code_and_name_must_be_text(code: Any, name: Any) -> None:
    with pytest.raises(TypeError, match="must be a str, got"):
        RawKernel(code, name)


def test_options_must_be_a_tuple() -> None:
    with pytest.raises(
        TypeError, match=r"options must be a tuple of strings, got the string '-DN=4'; pass \('-DN=4',\)"
    ):
        RawKernel(AXPY, "axpy", "-DN=4")  # type: ignore[arg-type]


def test_a_wrong_arch_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDAOPS_EMULATE_ARCH", "sm_1")
    with pytest.raises(UnsupportedError, match="'sm_1' is not one that NVRTC"):
        RawKernel(AXPY, "axpy")(1, 32, (*pair(8), 1.0, 8))


def test_they_are_public() -> None:
    assert cudaops.RawKernel is RawKernel
    assert cudaops.RawModule is RawModule


@pytest.mark.gpu
def test_on_a_gpu_it_runs_on_torchs_stream_and_takes_cupys_arrays(axpy: RawKernel) -> None:
    import cupy

    y, x = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    wanted = y + 2 * x
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10_000_000)
        y.add_(0)
        axpy(4, 256, (y, cudaops.to_cupy(x), 2.0, 1000))
    torch.cuda.synchronize()
    assert torch.equal(y, wanted)
    array = cupy.zeros(1000, cupy.float32)
    axpy(4, 256, (array, x, 1.0, 1000))
    assert torch.equal(cudaops.to_torch(array), x)
