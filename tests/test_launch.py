"""A plan runs where its tensors are, checked first, counted, and prepared once."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cudaops import launch as launcher
from cudaops.compile import compilations
from cudaops.errors import CompileError, EmulatorError, LaunchError, UnsupportedError
from cudaops.launch import (
    arch_of,
    extent,
    launch,
    launch_counts,
    on_launch,
    spec_of,
    total_launches,
)
from cudaops.plan import KernelSource, LaunchConfig, Plan, TensorSpec

AXPY = r"""
extern "C" __global__ void axpy(float* out, const float* x, const float* y, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a * x[i] + y[i];
}
extern "C" __global__ void wide(float4* out, const double* x, int n) { out[threadIdx.x] = make_float4(x[0], n, 0, 0); }
extern "C" __global__ void scalar_first(int n, float* out) { out[0] = n; }
"""
CPU = torch.device("cpu")


def axpy(n: int, a: float = 2.0, block: int = 128, **config: Any) -> Plan:
    geometry = LaunchConfig((-(-n // block), 1, 1), (block, 1, 1), **config)
    return Plan("axpy", KernelSource(None, "axpy", text=AXPY), geometry, (a, n), "a test")


def tensors(n: int) -> list[torch.Tensor]:
    """out, poisoned; x; y."""
    return [torch.full((n,), math.nan), torch.randn(n), torch.randn(n)]


# ---- where ----


def test_the_arch_of_the_cpu_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDAOPS_EMULATE_ARCH", raising=False)
    assert arch_of(CPU) == "sm_80"
    monkeypatch.setenv("CUDAOPS_EMULATE_ARCH", "sm_90")
    assert arch_of(CPU) == "sm_90"


def test_the_arch_of_a_gpu_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: {0: (8, 6), 1: (12, 0)}[index])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launcher._cuda_arch.cache_clear()
    assert [arch_of(torch.device(name)) for name in ("cuda:0", "cuda:1", "cuda")] == ["sm_86", "sm_120", "sm_120"]
    launcher._cuda_arch.cache_clear()


def test_another_kind_of_device_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"got a tensor on meta; move it with"):
        arch_of(torch.device("meta"))


def test_a_spec_is_what_a_plan_may_know() -> None:
    base = torch.zeros(100)
    assert base.data_ptr() % 16 == 0
    assert spec_of(base) == TensorSpec((100,), (1,), "float32", 16)
    assert spec_of(base[1:3]) == TensorSpec((2,), (1,), "float32", 4)
    assert spec_of(base[2:].reshape(2, 49).t()) == TensorSpec((49, 2), (1, 49), "float32", 8)
    assert spec_of(torch.zeros(3, dtype=torch.int64)[1:]).alignment == 8
    assert spec_of(torch.zeros(2, 0, 3)) == TensorSpec((2, 0, 3), (3, 3, 1), "float32", 16)
    assert spec_of(torch.zeros(2, device="meta")).alignment == 16


@pytest.mark.parametrize(
    ("make", "nbytes"),
    [
        (lambda t: t, 400),
        (lambda t: t[::2], 396),
        (lambda t: t.view(10, 10).t(), 400),
        (lambda t: t.view(10, 10)[2:4, 1:3], 48),
        (lambda t: t[3], 4),
        (lambda t: t[:0], 0),
        (lambda t: t.view(10, 10)[:0, ::2], 0),
        (lambda t: t[:1].expand(50), 4),
        (lambda t: t.double(), 800),
    ],
)
def test_the_extent_ends_with_the_last_element(make: Callable[[torch.Tensor], torch.Tensor], nbytes: int) -> None:
    assert extent(make(torch.zeros(100))) == nbytes


# ---- launching on the emulator ----


@pytest.mark.parametrize("n", [1, 31, 128, 129, 1000])
def test_a_plan_on_cpu_tensors_runs_the_kernel(n: int) -> None:
    out, x, y = tensors(n)
    launch(axpy(n), [out, x, y])
    assert torch.equal(out, 2 * x + y)


def test_the_result_does_not_depend_on_the_number_of_threads() -> None:
    n = 100_000
    results = []
    before = torch.get_num_threads()
    try:
        torch.manual_seed(0)
        out, x, y = tensors(n)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            out.fill_(math.nan)
            launch(axpy(n, 0.3), [out, x, y])
            results.append(out.clone())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results)


def test_what_is_prepared_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_prepared", {})
    args = tensors(64)
    launch(axpy(64), args)
    compiled = compilations()
    calls: list[Any] = []
    monkeypatch.setattr(launcher, "prepare", lambda *given: calls.append(given))
    launch(axpy(64), args)  # an equal plan, not the same
    assert calls == []
    assert compilations() == compiled
    monkeypatch.setenv("CUDAOPS_EMULATE_ARCH", "sm_90")
    with pytest.raises(AttributeError):  # another arch is prepared again: here by the stub, which returns nothing
        launch(axpy(64), args)
    assert len(calls) == 1


def test_what_is_prepared_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_prepared", {})
    monkeypatch.setattr(launcher, "_MOST_PREPARED", 3)
    args = tensors(8)
    for a in (1.0, 2.0, 4.0, 8.0, 16.0):  # powers of two: one rounding, fused or not
        launch(axpy(8, a), args)
        assert len(launcher._prepared) <= 3
        assert torch.equal(args[0], a * args[1] + args[2])


def test_scalars_that_compare_equal_are_not_mixed_up() -> None:
    out, x, _ = tensors(8)
    y = torch.full((8,), -0.0)
    for a in (0.0, -0.0):
        launch(axpy(8, a), [out, x.abs(), y])
        assert torch.equal(out.signbit(), torch.full((8,), math.copysign(1, a) < 0))


def test_launches_are_counted_by_entry_and_only_when_they_ran() -> None:
    args = tensors(8)
    counts, total = launch_counts(), total_launches()
    launch(axpy(8), args)
    launch(axpy(8), args)
    assert launch_counts()["axpy"] - counts["axpy"] == total_launches() - total == 2
    with pytest.raises(LaunchError):
        launch(axpy(8), args[:2])
    with pytest.raises(EmulatorError):
        launch(axpy(9, block=9), args)  # one beyond the end
    assert total_launches() - total == 2
    launch_counts().clear()  # a copy
    assert total_launches() - total == 2


def test_counting_is_exact_with_many_threads() -> None:
    launch(axpy(8), tensors(8))
    before = total_launches()

    def work() -> None:
        args = tensors(8)
        for _ in range(50):
            launch(axpy(8), args)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert total_launches() - before == 200


def test_observers_see_every_launch_and_go_even_after_an_error() -> None:
    seen: list[tuple[str, bool]] = []
    args = tensors(8)

    def observer(plan: Plan, seconds: float) -> None:
        seen.append((plan.op, seconds > 0))

    with on_launch(observer), on_launch(observer):
        launch(axpy(8), args)
    with pytest.raises(ZeroDivisionError), on_launch(observer):
        raise ZeroDivisionError
    launch(axpy(8), args)
    assert seen == [("axpy", True)] * 2
    assert launcher._observers == ()


def test_one_warning_says_that_kernels_are_emulated(run_python: Callable[..., str]) -> None:
    code = f"""
import torch, logging
logging.basicConfig(format="%(levelname)s %(name)s %(message)s")
from cudaops.launch import launch
from cudaops.plan import KernelSource, LaunchConfig, Plan
plan = Plan("axpy", KernelSource(None, "axpy", text={AXPY!r}), LaunchConfig((1, 1, 1), (32, 1, 1)), (2.0, 8))
for _ in range(3):
    launch(plan, [torch.zeros(8) for _ in range(3)])
"""
    output = run_python(code)
    assert output.count("WARNING cudaops CPU tensors: kernels run on the emulator") == 1
    assert output.count("WARNING") == 1


def test_a_launch_works_in_a_child_after_a_fork(run_python: Callable[..., str]) -> None:
    """As in a DataLoader's worker: the parent has launched, and one of its threads is in the middle of counting."""
    code = f"""
import os, torch
from cudaops import launch as launcher
from cudaops.plan import KernelSource, LaunchConfig, Plan
plan = Plan("axpy", KernelSource(None, "axpy", text={AXPY!r}), LaunchConfig((800, 1, 1), (128, 1, 1)), (2.0, 100_000))
tensors = [torch.zeros(100_000), torch.randn(100_000), torch.randn(100_000)]
launcher.launch(plan, tensors)
launcher._lock.acquire()
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    tensors[0].fill_(float("nan"))
    launcher.launch(plan, tensors)
    os._exit(0 if torch.equal(tensors[0], 2 * tensors[1] + tensors[2]) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    run_python(code)


# ---- what is refused, and leaves everything as it was ----


@pytest.fixture
def args() -> Iterator[list[torch.Tensor]]:
    """Tensors for axpy(64), of which the output is still poisoned at the end."""
    made = tensors(64)
    yield made
    assert made[0].isnan().all(), "something ran"


def test_no_tensor_is_refused() -> None:
    with pytest.raises(LaunchError, match="axpy: a launch needs at least one tensor"):
        launch(axpy(64), [])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_wrong_number_of_tensors_is_refused(args: list[torch.Tensor], count: int) -> None:
    with pytest.raises(
        LaunchError, match=rf"takes 3 tensors and 2 scalars \(float\* out, .*int n\), got {count} tensors"
    ):
        launch(axpy(64), (args + args)[:count])


def test_a_wrong_dtype_is_refused(args: list[torch.Tensor]) -> None:
    with pytest.raises(
        LaunchError,
        match=r"argument 1 \(x\): it takes const float\*, got a tensor of torch\.float64; pass torch\.float32",
    ):
        launch(axpy(64), [args[0], args[1].double(), args[2]])


def test_tensors_on_different_devices_are_refused(args: list[torch.Tensor]) -> None:
    with pytest.raises(
        LaunchError, match=r"argument 2 \(y\): .* a tensor on meta; all must be on cpu: use \.to\('cpu'\)"
    ):
        launch(axpy(64), [args[0], args[1], args[2].to("meta")])


def test_a_lazily_negated_or_conjugated_view_is_refused(args: list[torch.Tensor]) -> None:
    negated = torch.randn(64, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    with pytest.raises(
        LaunchError, match=r"argument 1 \(x\): .* negated or conjugated lazily; use tensor\.resolve_neg"
    ):
        launch(axpy(64), [args[0], negated, args[2]])


def test_an_address_that_vector_loads_cannot_take_is_refused() -> None:
    wide = Plan("wide", KernelSource(None, "wide", text=AXPY), LaunchConfig((1, 1, 1), (1, 1, 1)), (3,))
    out, x = torch.full((5,), math.nan), torch.ones(1, dtype=torch.float64)
    with pytest.raises(
        LaunchError, match=r"argument 0 \(out\): it takes float4\*, got an address aligned to 4 bytes; it must be 16"
    ):
        launch(wide, [out[1:], x])
    assert out.isnan().all()
    launch(wide, [out, x])
    assert out[:4].tolist() == [1, 3, 0, 0]


def test_scalars_that_do_not_fit_the_signature_are_refused(args: list[torch.Tensor]) -> None:
    def with_scalars(*scalars: Any) -> Plan:
        return Plan("axpy", axpy(64).source, axpy(64).config, scalars)

    with pytest.raises(LaunchError, match=r"argument 4 \(n\): it takes int, got float 64\.0"):
        launch(with_scalars(2.0, 64.0), args)
    with pytest.raises(LaunchError, match="which is not pointers first and then the plan's 1 scalars"):
        launch(with_scalars(2.0), args)
    scalar_first = Plan("s", KernelSource(None, "scalar_first", text=AXPY), LaunchConfig((1, 1, 1), (1, 1, 1)), (1,))
    with pytest.raises(LaunchError, match="not pointers first"):
        launch(scalar_first, args[:1])


def test_limits_of_the_arch_are_checked(args: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = axpy(64, smem_bytes=120 * 1024)
    launch(plan, tensors(64))
    monkeypatch.setenv("CUDAOPS_EMULATE_ARCH", "sm_86")
    with pytest.raises(LaunchError, match=r"122880 bytes of shared memory .* sm_86 allows 101376"):
        launch(plan, args)


def test_an_unknown_arch_in_the_environment_is_refused(
    args: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDAOPS_EMULATE_ARCH", "sm_42")
    with pytest.raises(UnsupportedError, match="arch 'sm_42' is not one that NVRTC"):
        launch(axpy(64), args)


def test_a_missing_entry_is_refused(args: list[torch.Tensor]) -> None:
    plan = Plan("axpy", KernelSource(None, "axpby", text=AXPY), axpy(64).config, (2.0, 64))
    with pytest.raises(CompileError, match="no kernel 'axpby' in the source; there is: axpy, wide"):
        launch(plan, args)


def test_an_access_outside_the_tensor_is_an_error_that_names_it() -> None:
    """The extent is the tensor's own, not its allocation's."""
    memory = torch.randn(100)
    out, y = torch.full((64,), math.nan), torch.randn(64)
    with pytest.raises(EmulatorError, match=r"axpy.*reads 4 bytes at x\[60\]"):
        launch(axpy(64), [out, memory[:60], y])


def test_the_cache_folder_does_not_matter_for_the_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any
) -> None:
    from cudaops import cache

    monkeypatch.setattr(cache, "_warned", set())
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("CUDAOPS_CACHE_DIR", str(tmp_path / "file" / "cache"))
    out, x, y = tensors(77)
    text = AXPY + "// never compiled before: " + str(tmp_path)
    plan = Plan("axpy", KernelSource(None, "axpy", text=text), axpy(77).config, (2.0, 77))
    with caplog.at_level(logging.WARNING, "cudaops"):
        launch(plan, [out, x, y])
    assert torch.equal(out, 2 * x + y)
    assert sum("cannot be written" in record.getMessage() for record in caplog.records) == 1
