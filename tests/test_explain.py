"""`explain` says what would be launched, for any arch, and launches nothing."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

import cudaops
from cudaops.errors import UnsupportedError
from cudaops.launch import total_launches
from cudaops.plan import ARCH_LIMITS, limits_of


def test_explain_a_product_on_tensor_cores() -> None:
    before = total_launches()
    found = cudaops.explain("matmul", (1024, 512), (512, 2048), dtype="bfloat16", arch="sm_90")
    assert total_launches() == before
    assert (found.kernel, found.result, found.arch) == ("matmul_mma", (1024, 2048), "sm_90")
    assert "128x128 tile in bf16" in found.reason
    assert found.blocks == 8 * 16
    assert found.waves == found.blocks / (132 * found.blocks_per_sm)
    assert found.blocks_per_sm >= 2
    assert 0 < found.occupancy <= 1
    assert 0 < found.registers <= 255
    assert found.spill_bytes == 0
    assert 0 < found.smem_bytes <= limits_of("sm_90").smem_per_block
    assert found.operations == 2 * 1024 * 512 * 2048
    assert found.bytes == 2 * (1024 * 512 + 512 * 2048 + 1024 * 2048)


def test_explain_prints_the_plan_in_words() -> None:
    found = cudaops.explain("matmul", (4096, 4096), (4096, 4096), arch="sm_80")
    text = str(found)
    for word in ("matmul 4096x4096 4096x4096 in float32, on sm_80", "matmul_simt", "grid", "waves", "occupancy",
                 "registers", "shared memory", "bound", "arithmetic", "ms"):  # fmt: skip
        assert word in text
    assert repr(found) == text
    console = Console(width=100, record=True)
    console.print(found)
    assert "matmul_simt" in console.export_text()
    assert json.loads(json.dumps(found.as_dict()))["kernel"] == "matmul_simt"


def test_explain_says_what_bounds_the_time() -> None:
    for arch in ("sm_80", "sm_90", "sm_120"):
        assert cudaops.explain("linear", (1, 4096), (4096, 4096), (4096,), arch=arch).bound == "memory"
        assert cudaops.explain("matmul", (4096, 4096), (4096, 4096), arch=arch).bound == "arithmetic"


@pytest.mark.parametrize("arch", ARCH_LIMITS)
def test_explain_every_arch(arch: str) -> None:
    found = cudaops.explain("matmul", (300, 64), (64, 200), dtype="float16", arch=arch)
    assert found.kernel == ("matmul_simt" if arch == "sm_75" else "matmul_mma")
    assert found.blocks_per_sm > 0


@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [("tf32", "matmul_mma"), ("int8", "matmul_mma"), ("int64", "matmul_simt"), ("float64", "matmul_simt"),
     ("complex64", "matmul_simt"), ("torch.float32", "matmul_simt")],
)  # fmt: skip
def test_explain_every_kind_of_arithmetic(dtype: str, kernel: str) -> None:
    found = cudaops.explain("matmul", (64, 64), (64, 64), dtype=dtype, arch="sm_80")
    assert found.kernel == kernel
    assert found.arithmetic_us > 0


def test_explain_linear_with_all_it_adds() -> None:
    found = cudaops.explain("linear", (2, 30, 64), (80, 64), (80,), (2, 30, 80), arch="sm_80")
    assert found.result == (2, 30, 80)
    assert found.bytes == 4 * (60 * 64 + 80 * 64 + 80 + 2 * 60 * 80)


def test_explain_without_an_arch_is_the_emulators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDAOPS_EMULATE_ARCH", "sm_89")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cudaops.explain("matmul", (8, 8), (8, 8)).arch == "sm_89"


@pytest.mark.parametrize("shapes", [((0, 3), (3, 4)), ((2, 0), (0, 4))])
def test_explain_where_there_is_nothing_to_launch(shapes: tuple[tuple[int, int], tuple[int, int]]) -> None:
    found = cudaops.explain("matmul", *shapes, arch="sm_80")
    assert found.kernel is None
    assert found.blocks == 0
    assert "nothing to launch" in str(found)


def test_explain_refuses() -> None:
    with pytest.raises(ValueError, match="no op 'conv9d'; there are matmul, linear"):
        cudaops.explain("conv9d", (2, 2))
    with pytest.raises(ValueError, match="matmul takes the shapes of input other, got 1"):
        cudaops.explain("matmul", (2, 2))
    with pytest.raises(RuntimeError, match=r"cannot be multiplied \(3x4 and 5x6\)"):
        cudaops.explain("matmul", (3, 4), (5, 6))
    with pytest.raises(RuntimeError, match=r"a bias is \(out_features\), here \(6,\), got \(3, 6\)"):
        cudaops.explain("linear", (3, 4), (6, 4), (3, 6))
    with pytest.raises(UnsupportedError, match="no kernel for bool; there is one for float32"):
        cudaops.explain("matmul", (3, 4), (4, 6), dtype="bool")
    with pytest.raises(UnsupportedError, match="limits of arch 'sm_42' are not known"):
        cudaops.explain("matmul", (3, 4), (4, 6), arch="sm_42")
