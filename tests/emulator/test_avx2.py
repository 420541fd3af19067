"""Code for CPUs with AVX2 and no AVX-512, on whatever this machine is: other registers, masks and calling conventions.

The tests run in a process of its own, where LLVM is told of such a CPU from the start. Nothing that other tests have
compiled is used there, and what it compiles is never found by them: the CPU is part of every key of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cudaops.emulator import native

ROOT = Path(__file__).resolve().parents[2]
HASWELL = ("haswell", "+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+popcnt")
TESTS = [
    "tests/emulator/test_control.py::test_divergent_flow_is_what_each_thread_alone_does",
    "tests/emulator/test_control.py::test_registers_of_every_kind_live_across_barriers",
    "tests/emulator/test_programs.py::test_stream_compaction_with_ballots",
    "tests/emulator/test_memory.py::test_loads[shared-backwards-True]",
    "tests/emulator/test_memory.py::test_stores[global-scattered-True]",
    "tests/emulator/test_programs.py::test_saxpy",  # an array that ends within a warp
    "tests/emulator/test_programs.py::test_bitonic_sort",
    "tests/emulator/test_programs.py::test_histogram_with_shared_atomics",
    "tests/emulator/test_tensor.py::test_mma_bf16",
    "tests/emulator/test_tensor.py::test_mma_f64",
    "tests/emulator/test_tensor.py::test_mma_integers_are_exact[m16n8k32-s8-u8]",
    "tests/emulator/test_tensor.py::test_ldmatrix_by_what_is_known_of_the_address",
    "tests/emulator/test_tensor.py::test_stmatrix",
    "tests/emulator/test_wmma.py::test_f16_accumulators[m16n16k16-f16-f32]",
    "tests/emulator/test_programs.py::test_softmax_of_rows",
    "tests/emulator/test_programs.py::test_integer_matrix_product_in_tiles",
    "tests/ops/test_matmul.py::test_matmul_of_the_issue",
]


def test_these_tests_pass_with_code_for_avx2(run_python: Callable[..., str]) -> None:
    if native.vector_extension() == "SSE":
        return  # it would not run here
    code = f"""
import sys
from cudaops.emulator import native
native.host = lambda: {HASWELL!r}
assert native.vector_extension() == "AVX2"
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *{[str(ROOT / test) for test in TESTS]!r}]))
"""
    assert "passed" in run_python(code)
