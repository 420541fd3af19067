"""emulation() and sanitize(): what each option does, how they nest, and that a launch can be stopped."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
import torch

from cudaops.emulator import emulation, options, sanitize
from cudaops.emulator.options import Checks
from cudaops.errors import EmulatorError, SanitizerError
from tests.emulator import harness

SPIN = """__global__ void k(volatile int* p, int n) {
    for (unsigned x = n | 1; x != 0; x *= 3)  // odd for ever
        p[threadIdx.x % 2] = x;
    p[2] = 1;
}"""
COUNT = """__global__ void k(int* o, int n) {
    int s = threadIdx.x;
    #pragma unroll 1
    for (int i = 0; i < n; i++) s = s * 3 + i;
    o[blockIdx.x * blockDim.x + threadIdx.x] = s;
}"""


def counted(n: int) -> np.ndarray:
    s = np.arange(64, dtype=np.int64)
    for i in range(n):
        s = (s * 3 + i) & 0xFFFFFFFF
    return s.astype(np.uint32).astype(np.int32)


# -- max_steps --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("threads", [1, 2])
def test_infinite_loop_ends_with_max_steps(threads: int) -> None:
    kernel = harness.cuda(SPIN)
    with emulation(max_steps=10_000), pytest.raises(EmulatorError, match=r"^k: k\.cu:\d: .*10000 .*max_steps") as error:
        harness.run(kernel, 4, 64, np.zeros(3, np.int32), 5, threads=threads)
    assert "infinite" in str(error.value)


def test_max_steps_is_for_each_block() -> None:
    kernel = harness.cuda(COUNT)
    o = np.zeros(64 * 50, np.int32)
    with emulation(max_steps=1000):  # 50 blocks of 2 warps and 400 iterations
        harness.run(kernel, 50, 64, o, 400)
    np.testing.assert_array_equal(o.reshape(50, 64), np.tile(counted(400), (50, 1)))
    with emulation(max_steps=1000), pytest.raises(EmulatorError, match="max_steps"):
        harness.run(kernel, 50, 64, o, 1200)


def test_no_limit_without_max_steps() -> None:
    o = np.zeros(64, np.int32)
    harness.run(harness.cuda(COUNT), 1, 64, o, 200_000)
    np.testing.assert_array_equal(o[:1], _fast_count(200_000))


def _fast_count(n: int) -> list[int]:
    s = 0
    for i in range(n):
        s = (s * 3 + i) & 0xFFFFFFFF
    return [s - (1 << 32) if s >> 31 else s]


@pytest.mark.parametrize("steps", [0, -1])
def test_max_steps_below_one_is_refused(steps: int) -> None:
    with pytest.raises(ValueError, match=f"max_steps must be at least 1, got {steps}"), emulation(max_steps=steps):
        pass


def test_max_steps_with_the_sanitizer_is_raised_too() -> None:
    kernel = harness.cuda(SPIN)
    with sanitize(), emulation(max_steps=1000), pytest.raises((EmulatorError, SanitizerError), match="max_steps"):
        harness.run(kernel, 1, 64, np.zeros(3, np.int32), 5)


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("threads", [1, 2])
def test_interrupt_ends_a_launch(threads: int) -> None:
    kernel = harness.cuda(SPIN)
    with emulation(max_steps=10), pytest.raises(EmulatorError):
        harness.run(kernel, 4, 64, np.zeros(3, np.int32), 5)  # compiled beforehand
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    start = time.monotonic()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        harness.run(kernel, 4, 64, np.zeros(3, np.int32), 5, threads=threads)
    timer.join()
    assert time.monotonic() - start < 30


def test_launches_work_after_an_interrupt() -> None:
    test_interrupt_ends_a_launch(2)
    o = np.zeros(64, np.int32)
    harness.run(harness.cuda(COUNT), 1, 64, o, 20)
    np.testing.assert_array_equal(o, counted(20))


# -- bounds, buffers --------------------------------------------------------------------------------------------------
INDIRECT = "__global__ void k(float** p) { p[0][threadIdx.x] *= 2; }"


def test_memory_that_no_argument_names_is_out_of_bounds() -> None:
    hidden = torch.arange(8.0)
    table = np.array([hidden.data_ptr()], np.uint64)
    kernel = harness.cuda(INDIRECT)
    with pytest.raises(EmulatorError, match=r"block \(0, 0, 0\), thread \(0, 0, 0\) reads 4 bytes"):
        kernel(1, 8, table)
    assert hidden.tolist() == list(range(8))


def test_buffers_are_known() -> None:
    hidden = torch.arange(8.0)
    table = np.array([hidden.data_ptr()], np.uint64)
    kernel = harness.cuda(INDIRECT)
    with emulation(buffers=[hidden]):
        kernel(1, 8, table)
        with pytest.raises(EmulatorError, match=r"a tensor of emulation\(\)\[8\]"):
            kernel(1, 9, table)
    assert hidden.tolist() == [4.0 * i for i in range(8)]
    with pytest.raises(EmulatorError):
        kernel(1, 8, table)


def test_without_bounds_nothing_is_checked() -> None:
    """Reads what lies behind the array, which is memory of the test."""
    both = np.arange(20, dtype=np.int32)
    o, x = np.zeros(10, np.int32), both[:10]
    kernel = harness.cuda("__global__ void k(int* o, const int* x) { o[threadIdx.x] = x[threadIdx.x + 10]; }")
    with emulation(bounds=False):
        kernel(1, 10, o, x)
    np.testing.assert_array_equal(o, both[10:])
    with pytest.raises(EmulatorError, match=r"argument1\[10\], but argument1 has 10 elements"):
        kernel(1, 10, o, x)


@pytest.mark.parametrize("bad", [np.zeros(3), "text", torch.zeros(3, device="meta"), 5])
def test_buffers_that_are_no_cpu_tensors_are_refused(bad: object) -> None:
    with pytest.raises(TypeError, match="buffers takes CPU tensors"), emulation(buffers=[bad]):  # type: ignore[list-item]
        pass
    with pytest.raises(TypeError, match="uninitialised takes CPU tensors"), sanitize(uninitialised=[bad]):  # type: ignore[list-item]
        pass


# -- nesting ----------------------------------------------------------------------------------------------------------
def test_options_nest_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDAOPS_SANITIZE", raising=False)
    assert options.current().checks is Checks.BOUNDS
    with emulation(bounds=False):
        assert options.current().checks is Checks.NONE
        with sanitize():
            assert options.current().checks is Checks.SANITIZER
            with emulation(bounds=False, max_steps=7):  # the sanitizer stays
                assert options.current().checks is Checks.SANITIZER
                assert options.current().max_steps == 7
            assert options.current().max_steps is None
        assert options.current().checks is Checks.NONE
    assert options.current().checks is Checks.BOUNDS


def test_options_come_back_after_an_error() -> None:
    before = options.current()
    with pytest.raises(RuntimeError), sanitize(), emulation(max_steps=3):
        raise RuntimeError
    assert options.current() == before


def test_sanitize_keeps_max_steps_and_buffers() -> None:
    tensor = torch.zeros(3)
    with emulation(max_steps=5, buffers=[tensor]), sanitize():
        assert options.current().max_steps == 5
        assert options.current().buffers[0] is tensor


def test_options_are_those_of_the_thread() -> None:
    seen = []
    with emulation(bounds=False):
        thread = threading.Thread(target=lambda: seen.append(options.current().checks))
        thread.start()
        thread.join()
    assert seen == [Checks.BOUNDS]


def test_environment_variable_gives_way_to_an_explicit_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDAOPS_SANITIZE", "1")
    assert options.current().checks is Checks.SANITIZER
    with emulation(max_steps=9):
        assert options.current().checks is Checks.SANITIZER


# -- uninitialised ----------------------------------------------------------------------------------------------------
def test_uninitialised_tensors_are_watched() -> None:
    work, out = torch.zeros(64), np.zeros(64, np.float32)
    table = np.array([work.data_ptr()], np.uint64)
    source = """__global__ void k(float* o, float** p, int n) {
        int t = threadIdx.x;
        float* w = p[0];
        if (t < n) w[t] = t;
        o[t] = w[t];
    }"""
    kernel = harness.cuda(source)
    with emulation(buffers=[work]), sanitize(uninitialised=[work]):
        kernel(1, 64, out, table, 64)
        with pytest.raises(SanitizerError, match=r"initcheck: .*thread \(50, 0, 0\) reads 4 bytes .*\[50\]") as error:
            kernel(1, 64, out, table, 50)
    (finding,) = error.value.findings
    assert (finding.check, finding.line, finding.index) == ("initcheck", 5, 50)
    with emulation(buffers=[work]), sanitize():
        kernel(1, 64, out, table, 50)


def test_only_the_view_named_is_uninitialised() -> None:
    whole = torch.zeros(64)
    source = "__global__ void k(float* o, float** p) { o[threadIdx.x] = p[0][threadIdx.x]; }"
    table, out = np.array([whole.data_ptr()], np.uint64), np.zeros(64, np.float32)
    kernel = harness.cuda(source)
    with emulation(buffers=[whole]), sanitize(uninitialised=[whole[16:]]):
        kernel(1, 16, out, table)
        with pytest.raises(SanitizerError, match=r"thread \(16, 0, 0\)"):
            kernel(1, 17, out, table)
