"""One NVRTC compile gives PTX and cubin, with no driver; it is done once, and errors give file and line."""

from __future__ import annotations

import logging
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import cudaops
from cudaops import compile as compiler
from cudaops import sources, toolkit
from cudaops.compile import compilations, compile_kernel, compile_source, whole_cubin
from cudaops.errors import CompileError, UnsupportedError
from cudaops.plan import KernelSource

ARCH = "sm_80"

SCALE = r"""
struct Range { int first; double step; };
extern "C" __global__ void __launch_bounds__(256) scale(REAL* __restrict__ out, const REAL* in, unsigned n, Range r) {
    __shared__ REAL row[100];
    if (threadIdx.x < 100) row[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    if (threadIdx.x < n) out[threadIdx.x] = row[(threadIdx.x + r.first) % 100] * (REAL)r.step;
}
template <typename T> __global__ void fill(T* out, T value) { out[threadIdx.x] = value; }
__global__ void plain(float* out) { out[0] = 1; }
namespace inner { __global__ void plain2(float* out) { out[0] = 2; } }
__global__ void twice(float* out) { out[0] = 1; }
__global__ void twice(int* out) { out[0] = 1; }
"""


def source(text: str = SCALE, entry: str = "scale", **more: object) -> KernelSource:
    made = KernelSource(None, entry, (("REAL", "float"),), text=text)
    return replace(made, **more)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def fresh(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in memory, nothing on disk."""
    monkeypatch.setattr(compiler, "_memory", {})


@pytest.fixture
def count() -> Callable[[], int]:
    """How many compiles there were since the fixture was made."""
    before = compilations()
    return lambda: compilations() - before


def forget() -> None:
    """Drop what is in memory, as a new process would start."""
    compiler._memory.clear()


# ---- what a compile gives ----


def test_ptx_cubin_signature_and_resources_come_from_one_compile(count: Callable[[], int]) -> None:
    compiled = compile_kernel(source(), ARCH)
    assert count() == 1
    assert f".target {ARCH}" in compiled.ptx
    assert compiled.name == "scale"
    assert compiled.arch == ARCH
    entry = compiled.entry
    assert [(p.name, p.offset, p.size, p.kind) for p in entry.params] == [
        ("out", 0, 8, "pointer"),
        ("in", 8, 8, "pointer"),
        ("n", 16, 4, "int"),
        ("r", 24, 16, "struct"),
    ]
    assert [p.pointee for p in entry.params[:2]] == ["float", "float"]
    assert [p.const for p in entry.params[:2]] == [False, True]
    assert entry.params[2].signed is False
    assert entry.max_threads == 256
    assert entry.smem_bytes == 400
    assert 8 <= entry.registers <= 64
    assert (entry.spill_bytes, entry.stack_bytes) == (0, 0)


def test_spills_and_stack_are_read() -> None:
    text = r"""
extern "C" __global__ void __launch_bounds__(1024, 2) hungry(float* out, const float* in) {
    float held[96];
    #pragma unroll
    for (int i = 0; i < 96; ++i) held[i] = in[threadIdx.x * 96 + i];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 96; ++i) out[threadIdx.x * 96 + 95 - i] = held[i] * held[(i + 7) % 96];
}"""
    entry = compile_kernel(source(text, "hungry"), ARCH).entry
    assert entry.spill_bytes > 0
    assert entry.stack_bytes > 0
    assert entry.registers <= 32


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_120"])
def test_the_cubin_is_whole_machine_code_for_the_arch(arch: str, tmp_path: Path) -> None:
    cubin = compile_kernel(source(), arch).cubin
    assert cubin[:4] == b"\x7fELF"
    (machine,) = struct.unpack_from("<H", cubin, 18)
    assert machine == 190  # EM_CUDA
    assert whole_cubin(cubin) == cubin
    assert b".text.scale" in cubin


def test_the_byte_that_cupys_binding_drops_is_put_back() -> None:
    cubin = compile_kernel(source(), ARCH).cubin
    assert cubin[-1:] == b"\0"
    assert whole_cubin(cubin[:-1]) == cubin
    with pytest.raises(CompileError, match=rf"cut short: {len(cubin) - 2} of {len(cubin)} bytes"):
        whole_cubin(cubin[:-2])
    for other in (b"", b"\x7fELF", b"not machine code" * 100):
        with pytest.raises(CompileError, match="no cubin"):
            whole_cubin(other)


def test_lines_in_the_ptx_are_those_of_the_real_file() -> None:
    file = sorted(sources.kernels_dir().glob("*.cu"))[0]
    program = sources.read(KernelSource(file.name, "?"))
    assert program.name == str(file)
    compiled = compile_kernel(source(file="/some/where/mine.cu"), ARCH)
    assert '"/some/where/mine.cu"' in compiled.ptx
    line = 1 + SCALE.splitlines().index("    __syncthreads();")
    assert re.search(rf"^\s*\.loc\s+1 {line} ", compiled.ptx, re.M)


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ("cuda_fp16.h", "out[0] = __half2float(__hfma(__float2half(in[0]), __float2half(in[1]), __float2half(1.f)));"),
        ("cuda_bf16.h", "out[0] = __bfloat162float(__hmul(__float2bfloat16(in[0]), __float2bfloat16(in[1])));"),
        ("cuda_fp8.h", "out[0] = float(__nv_fp8_e4m3(in[0]));"),
        (
            "mma.h",
            "using namespace nvcuda; wmma::fragment<wmma::accumulator, 16, 16, 16, float> f;"
            "wmma::fill_fragment(f, in[0]); wmma::store_matrix_sync(out, f, 16, wmma::mem_row_major);",
        ),
        ("cooperative_groups.h", "cooperative_groups::this_thread_block().sync(); out[0] = in[0];"),
        (
            "cub/block/block_reduce.cuh",
            "using Reduce = cub::BlockReduce<float, 128>; __shared__ typename Reduce::TempStorage room;"
            "float sum = Reduce(room).Sum(in[threadIdx.x]); if (threadIdx.x == 0) out[0] = sum;",
        ),
    ],
)
def test_cudas_headers_match_the_nvrtc_that_is_loaded(header: str, body: str) -> None:
    text = f'#include <{header}>\nextern "C" __global__ void k(float* out, const float* in) {{ {body} }}'
    assert compile_kernel(source(text, "k"), ARCH).entry.registers > 0


def test_the_users_options_reach_the_compiler(tmp_path: Path) -> None:
    (tmp_path / "two.cuh").write_text("#define TWO 2\n")
    text = r"""
#include <two.cuh>
static_assert(__cplusplus >= 202002L && TWO == 2 && N == 3);
extern "C" __global__ void k(float* out) { out[0] = N; }"""
    compile_kernel(source(text, "k", options=("-DN=3", f"-I{tmp_path}", "--std=c++20", "-default-device")), ARCH)


def test_a_header_beside_a_named_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "beside.cuh").write_text("#define N 3\n")
    text = '#include "beside.cuh"\nextern "C" __global__ void k(float* out) { out[0] = N; }'
    compile_kernel(source(text, "k", file=str(tmp_path / "mine.cu")), ARCH)


# ---- names ----


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ("scale", "scale"),
        ("plain", "_Z5plainPf"),
        ("_Z5plainPf", "_Z5plainPf"),
        ("fill<float>", "_Z4fillIfEvPT_S0_"),
        ("fill<unsigned long long>", "_Z4fillIyEvPT_S0_"),
        ("inner::plain2", "_ZN5inner6plain2EPf"),
        ("plain2", "_ZN5inner6plain2EPf"),
        ("_Z5twicePi", "_Z5twicePi"),
    ],
)
def test_a_kernel_is_found_by_its_name(entry: str, name: str) -> None:
    compiled = compile_kernel(source(entry=entry), ARCH)
    assert compiled.name == compiled.entry.name == name
    forget()
    assert compile_kernel(source(entry=entry), ARCH).name == name  # from disk as well


def test_the_types_of_a_template_are_those_it_was_asked_for_with() -> None:
    entry = compile_kernel(source(entry="fill<unsigned short>"), ARCH).entry
    assert (entry.params[0].pointee, entry.params[1].signed) == ("unsigned short", False)


def test_a_name_that_is_not_there_is_said_with_those_that_are(count: Callable[[], int]) -> None:
    with pytest.raises(CompileError) as caught:
        compile_kernel(source(entry="scael"), ARCH)
    message = str(caught.value)
    assert message.startswith("there is no kernel 'scael' in the source; there is: ")
    for part in ("scale", "_Z5plainPf = plain(float*)", "_ZN5inner6plain2EPf = inner::plain2(float*)"):
        assert part in message
    assert count() == 1


def test_an_ambiguous_name_is_said() -> None:
    with pytest.raises(CompileError, match=r"'twice' stands for several: .*twice\(float\*\).*twice\(int\*\)"):
        compile_kernel(source(entry="twice"), ARCH)


def test_no_kernel_at_all_is_said() -> None:
    with pytest.raises(CompileError, match="there is: none: a kernel is a __global__ function; a template needs"):
        compile_kernel(source("template <class T> __global__ void k(T* out) {}", "k"), ARCH)


def test_a_source_may_be_compiled_without_naming_a_kernel() -> None:
    compiled = compile_source(source(entry=""), ARCH)
    assert compiled.name == ""
    assert "scale" in compiled.entries


# ---- errors ----


def test_a_syntax_error_shows_file_line_and_code() -> None:
    text = SCALE.replace("__syncthreads();", "__syncthreads()")
    with pytest.raises(CompileError) as caught:
        compile_kernel(source(text), ARCH)
    message = str(caught.value)
    line = 1 + text.splitlines().index(
        "    if (threadIdx.x < n) out[threadIdx.x] = row[(threadIdx.x + r.first) % 100] * (REAL)r.step;"
    )
    assert message.startswith(
        f"kernel scale: NVRTC {'.'.join(map(str, toolkit.toolkit().version))} refused scale.cu:{line} for sm_80"
    )
    assert f'scale.cu({line}): error: expected a ";"' in message
    assert re.search(rf"^> +{line} \|     if \(threadIdx\.x < n\)", message, re.M)


def test_an_error_in_a_file_of_ours_names_that_file_and_in_a_header_the_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong.cuh").write_text("// first line\nint f() { return missing; }\n")
    (tmp_path / "bad.cu").write_text('#include "wrong.cuh"\nextern "C" __global__ void bad(float* out) {}\n')
    (tmp_path / "worse.cu").write_text('extern "C" __global__ void worse(float* out) { out = 1.0; }\n')
    monkeypatch.setattr(sources, "kernels_dir", lambda: tmp_path)
    with pytest.raises(CompileError, match=re.escape(f"refused {tmp_path / 'wrong.cuh'}:2 for")):
        compile_kernel(KernelSource("bad.cu", "bad"), ARCH)
    with pytest.raises(CompileError, match=re.escape(f"refused {tmp_path / 'worse.cu'}:1 for")):
        compile_kernel(KernelSource("worse.cu", "worse"), ARCH)


def test_an_error_of_ptxas_is_said_too() -> None:
    text = r"""
extern "C" __global__ void k(float* out) {
    __shared__ float big[20000];
    big[threadIdx.x] = 1;
    __syncthreads();
    out[0] = big[5];
}"""
    with pytest.raises(CompileError, match="too much shared data"):
        compile_kernel(source(text, "k"), ARCH)


def test_a_failed_compile_leaves_nothing_behind(cache_dir: Path, count: Callable[[], int]) -> None:
    for _ in range(2):
        with pytest.raises(CompileError):
            compile_kernel(source("nonsense", "k"), ARCH)
    assert count() == 2
    assert not cache_dir.exists()
    assert compiler._memory == {}


def test_a_missing_header_says_where_it_was_looked_for_and_where_to_get_it() -> None:
    with pytest.raises(CompileError) as caught:
        compile_kernel(source("#include <not_there.h>", "k"), ARCH)
    assert "k.cu:1" in str(caught.value)
    assert str(toolkit.toolkit().include_dirs[0]) in str(caught.value)
    assert "pip install 'cuda-toolkit[nvrtc,cudart,cccl,crt]==" in str(caught.value)


def test_a_define_that_breaks_nvrtcs_own_header_is_named() -> None:
    with pytest.raises(CompileError, match=r"NVRTC's own header: one of the defines \['N', 'REAL', 'T'\]") as caught:
        compile_kernel(source(options=("-DT=float", "-DN=4")), ARCH)
    assert len(str(caught.value).splitlines()) < 80


@pytest.mark.parametrize("option", ["-arch=sm_80", "--gpu-architecture=sm_90", "-arch"])
def test_an_arch_among_the_options_is_refused(option: str) -> None:
    with pytest.raises(CompileError, match=rf"option '{option}'; the arch is that of the tensors' GPU"):
        compile_kernel(source(options=(option,)), ARCH)


@pytest.mark.parametrize("option", ["-rdc=true", "--relocatable-device-code=true", "-dc", "-dlto"])
def test_options_that_need_a_linker_are_refused(option: str) -> None:
    with pytest.raises(CompileError, match="needs a linking step"):
        compile_kernel(source(options=(option,)), ARCH)


def test_options_must_be_strings() -> None:
    with pytest.raises(CompileError, match="options must be strings, got 3"):
        compile_kernel(source(options=(3,)), ARCH)


def test_an_option_nvrtc_does_not_know_is_said() -> None:
    with pytest.raises(CompileError, match="--no-such-option"):
        compile_kernel(source(options=("--no-such-option",)), ARCH)


def test_an_unknown_arch_is_said_before_anything_is_compiled(count: Callable[[], int]) -> None:
    with pytest.raises(UnsupportedError, match="'sm_42' is not one that NVRTC"):
        compile_kernel(source(), "sm_42")
    assert count() == 0


# ---- the cache ----


def test_the_second_compile_comes_from_memory_and_the_third_from_disk(count: Callable[[], int]) -> None:
    first = compile_kernel(source(), ARCH)
    assert compile_kernel(source(), ARCH) == first
    forget()
    again = compile_kernel(source(), ARCH)
    assert again == first
    assert again.entry == first.entry
    assert count() == 1


def test_a_new_process_compiles_nothing(run_python: Callable[..., str]) -> None:
    code = f"""
from cudaops.compile import compilations, compile_kernel
from cudaops.plan import KernelSource
compiled = compile_kernel(KernelSource(None, "scale", (("REAL", "float"),), text={SCALE!r}), {ARCH!r})
print(compiled.key, compilations())
"""
    first, second = run_python(code).split(), run_python(code).split()
    assert first[1] == "1"
    assert second == [first[0], "0"]


def test_all_that_matters_is_in_the_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: Callable[[], int]
) -> None:
    (tmp_path / "a.cuh").write_text("#define A 1\n")
    text = '#include "a.cuh"\n' + SCALE
    options = (f"-I{tmp_path}",)

    def key(arch: str = ARCH, **more: object) -> str:
        return compile_kernel(source(**({"text": text, "options": options} | more)), arch).key  # type: ignore[arg-type]

    keys = [key()]
    assert key() == keys[0]
    keys.append(key(text=text + "\n// a comment moves no line, but the text is another"))
    keys.append(key(defines=(("REAL", "double"),)))
    keys.append(key(options=(*options, "-DMORE=1")))
    keys.append(key("sm_90"))
    keys.append(key(entry="fill<int>"))
    (tmp_path / "a.cuh").write_text("#define A 2\n")
    keys.append(key())
    monkeypatch.setattr(cudaops, "__version__", "another")
    keys.append(key())
    tools = toolkit.toolkit()
    monkeypatch.setattr(compiler, "toolkit", lambda: replace(tools, version=(tools.version[0], tools.version[1] + 1)))
    keys.append(key())
    monkeypatch.setattr(compiler, "toolkit", lambda: replace(tools, header_versions="another"))
    keys.append(key())
    assert len(set(keys)) == len(keys)
    assert count() == len(keys)


def test_a_kernel_with_a_header_that_cannot_be_followed_is_compiled_each_time(
    cache_dir: Path, tmp_path: Path, count: Callable[[], int]
) -> None:
    (tmp_path / "a1.cuh").write_text("#define N 1\n")
    text = '#define GLUE(n) <a##n.cuh>\n#include GLUE(1)\nextern "C" __global__ void k(float* out) { out[0] = N; }'
    made = source(text, "k", options=(f"-I{tmp_path}",))
    first = compile_kernel(made, ARCH)
    (tmp_path / "a1.cuh").write_text("#define N 2\n")
    second = compile_kernel(made, ARCH)
    assert count() == 2
    assert first.ptx != second.ptx
    assert first.key != second.key
    assert not cache_dir.exists()


@pytest.mark.parametrize("damage", ["cut", "flipped", "another kernel's", "another format"])
def test_a_damaged_entry_is_compiled_again_and_mended(cache_dir: Path, damage: str, count: Callable[[], int]) -> None:
    compiled = compile_kernel(source(), ARCH)
    (path,) = (cache_dir / "kernels").iterdir()
    data = bytearray(path.read_bytes())
    match damage:
        case "cut":
            path.write_bytes(data[: len(data) // 2])
        case "flipped":
            data[-1] ^= 1
            path.write_bytes(data)
        case "another kernel's":
            other = compile_kernel(source(entry="fill<int>"), ARCH)
            shutil.copy(cache_dir / "kernels" / f"{other.key}.cudaops", path)
        case "another format":
            from cudaops import cache

            cache.store("kernels", compiled.key, b"\x02\0\0\0{}")
    forget()
    before = count()
    assert compile_kernel(source(), ARCH) == compiled
    assert count() == before + 1
    forget()
    assert compile_kernel(source(), ARCH) == compiled
    assert count() == before + 1


def test_a_folder_that_cannot_be_written_costs_a_warning_and_no_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: Callable[[], int], caplog: pytest.LogCaptureFixture
) -> None:
    from cudaops import cache

    monkeypatch.setattr(cache, "_warned", set())
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("CUDAOPS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with caplog.at_level(logging.WARNING, "cudaops"):
        for entry in ("scale", "fill<int>"):
            for _ in range(2):
                assert compile_kernel(source(entry=entry), ARCH).entry.registers > 0
    assert count() == 2  # from memory the second time
    assert [record.getMessage().count("cannot be written") for record in caplog.records] == [1]


def test_a_read_only_folder_as_another_user(cache_dir: Path, run_python: Callable[..., str]) -> None:
    """Permissions do not bind root, so where the tests run as root the child gives that up first."""
    cache_dir.mkdir()
    os.chmod(cache_dir, 0o555)
    code = f"""
import os
if os.geteuid() == 0:
    import cudaops.compile, cudaops.toolkit
    cudaops.toolkit.toolkit()
    os.seteuid(65534)
import logging
logging.basicConfig(level=logging.WARNING)
from cudaops.compile import compilations, compile_kernel
from cudaops.plan import KernelSource
for entry in ("scale", "fill<int>"):
    compile_kernel(KernelSource(None, entry, (("REAL", "float"),), text={SCALE!r}), {ARCH!r})
print("compiled", compilations())
"""
    try:
        output = run_python(code)
    finally:
        os.chmod(cache_dir, 0o755)
    assert "compiled 2" in output
    assert output.count("cannot be written") == 1


def test_many_threads_that_want_one_kernel_compile_it_once(count: Callable[[], int]) -> None:
    start = threading.Barrier(8)

    def work(_: int) -> str:
        start.wait()
        return compile_kernel(source(), ARCH).key

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(work, range(8)))) == 1
    assert count() == 1


def test_many_processes_that_want_one_kernel_all_get_it(cache_dir: Path) -> None:
    code = f"""
from cudaops.compile import compile_kernel
from cudaops.plan import KernelSource
for entry in ("scale", "fill<int>", "fill<float>"):
    assert compile_kernel(KernelSource(None, entry, (("REAL", "float"),), text={SCALE!r}), {ARCH!r}).entry.registers > 0
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    running = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [process.wait(timeout=300) for process in running] == [0] * 3
    assert len(list((cache_dir / "kernels").iterdir())) == 3


def test_a_child_after_a_fork_compiles_while_the_parent_was_compiling(run_python: Callable[..., str]) -> None:
    code = f"""
import os
from cudaops import compile as compiler
from cudaops.plan import KernelSource
from cudaops.toolkit import toolkit
toolkit()
source = KernelSource(None, "scale", (("REAL", "float"),), text={SCALE!r})
key = compiler.compile_kernel(source, {ARCH!r}).key
compiler._memory.clear()
compiler._lock.acquire()  # as another thread might at the moment of the fork
compiler._in_progress[key].acquire()
child = os.fork()
if child == 0:
    os._exit(0 if compiler.compile_kernel(source, {ARCH!r}).key == key else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    run_python(code)


def test_the_program_is_given_back_when_a_compile_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = toolkit.toolkit()
    open_programs: set[int] = set()

    def create(*args: object) -> int:
        handle: int = tools.nvrtc.createProgram(*args)
        open_programs.add(handle)
        return handle

    def destroy(handle: int) -> None:
        open_programs.remove(handle)
        tools.nvrtc.destroyProgram(handle)

    watched = SimpleNamespace(**vars(tools.nvrtc) | {"createProgram": create, "destroyProgram": destroy})
    monkeypatch.setattr(compiler, "toolkit", lambda: replace(tools, nvrtc=watched))
    compile_kernel(source(), ARCH)
    with pytest.raises(CompileError):
        compile_kernel(source("nonsense"), ARCH)
    assert open_programs == set()
