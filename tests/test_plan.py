"""Plans and geometry are plain, checked, hashable values."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch

from cudaops.errors import LaunchError, UnsupportedError
from cudaops.plan import (
    ARCH_LIMITS,
    DTYPES,
    KernelSource,
    LaunchConfig,
    Plan,
    TensorSpec,
    check_limits,
    dim3,
    limits_of,
    threads_by_registers,
)
from cudaops.signature import Entry

SOURCE = KernelSource("some.cu", "some", (("BM", "64"),))
CONFIG = LaunchConfig((4, 2, 1), (128, 1, 1), 1024)


# ---- geometry ----


def test_a_config_is_a_hashable_printable_value() -> None:
    assert LaunchConfig((4, 2, 1), (128, 1, 1), 1024) == CONFIG
    assert hash(CONFIG) == hash(LaunchConfig((4, 2, 1), (128, 1, 1), 1024))
    assert str(CONFIG) == "grid (4, 2, 1) x block (128, 1, 1), 1024 B dynamic shared"
    assert (CONFIG.threads, CONFIG.blocks) == (128, 8)
    with pytest.raises(FrozenInstanceError):
        CONFIG.grid = (1, 1, 1)  # type: ignore[misc]


@pytest.mark.parametrize(("given", "read"), [(5, (5, 1, 1)), ((5,), (5, 1, 1)), ([5, 6], (5, 6, 1)), ((5, 6, 7),) * 2])
def test_dim3_fills_up_with_ones(given: Any, read: tuple[int, int, int]) -> None:
    assert dim3(given, "grid") == read


@pytest.mark.parametrize("given", [(), (1, 2, 3, 4), 1.0, (1.0,), "12", None, b"1"])
def test_dim3_refuses_what_is_no_size(given: Any) -> None:
    with pytest.raises(LaunchError, match="grid must be one to three whole numbers"):
        dim3(given, "grid")


@pytest.mark.parametrize(
    ("grid", "block", "smem_bytes", "message"),
    [
        ((0, 1, 1), (32, 1, 1), 0, r"grid\.x is 0 .* 1 to 2147483647.*return early"),
        ((1, -1, 1), (32, 1, 1), 0, r"grid\.y is -1"),
        ((2**31, 1, 1), (32, 1, 1), 0, r"grid\.x is 2147483648"),
        ((1, 65_536, 1), (32, 1, 1), 0, r"grid\.y is 65536 .* 1 to 65535.*long axis on x"),
        ((1, 1, 65_536), (32, 1, 1), 0, r"grid\.z is 65536"),
        ((1, 1, 1), (0, 1, 1), 0, r"block\.x is 0"),
        ((1, 1, 1), (1025, 1, 1), 0, r"block\.x is 1025 .* 1 to 1024"),
        ((1, 1, 1), (1, 1025, 1), 0, r"block\.y is 1025"),
        ((1, 1, 1), (1, 1, 65), 0, r"block\.z is 65 .* 1 to 64"),
        ((1, 1, 1), (33, 32, 1), 0, r"has 1056 threads; a block has at most 1024"),
        ((1, 1, 1), (32, 1, 1), -1, r"shared memory must be a whole number of bytes from 0, got -1"),
        ((1, 1, 1), (32, 1, 1), 1.5, r"shared memory .* got 1\.5"),
    ],
)
def test_a_config_refuses_what_no_device_launches(grid: Any, block: Any, smem_bytes: Any, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        LaunchConfig(grid, block, smem_bytes)


def test_a_config_takes_the_limits_themselves() -> None:
    LaunchConfig((2**31 - 1, 65_535, 65_535), (1024, 1, 1))
    LaunchConfig((1, 1, 1), (4, 4, 64))
    LaunchConfig((1, 1, 1), (1, 1024, 1))


# ---- plans ----


def test_plans_are_equal_by_what_they_launch() -> None:
    plan = Plan("op", SOURCE, CONFIG, (1, 0.5, b"xy"), "why")
    twin = Plan("op", SOURCE, CONFIG, (1, 0.5, b"xy"), "why")
    assert plan == twin
    assert hash(plan) == hash(twin)
    assert plan != Plan("op", SOURCE, CONFIG, (2, 0.5, b"xy"), "why")
    assert plan != "op"
    assert pickle.loads(pickle.dumps(plan)) == plan


@pytest.mark.parametrize(("a", "b"), [(0.0, -0.0), (1, 1.0), (1, True), (b"\0", 0)])
def test_scalars_that_compare_equal_but_pack_differently_make_different_plans(a: Any, b: Any) -> None:
    assert Plan("op", SOURCE, CONFIG, (a,)) != Plan("op", SOURCE, CONFIG, (b,))


def test_a_plan_with_a_nan_equals_itself() -> None:
    assert Plan("op", SOURCE, CONFIG, (float("nan"),)) == Plan("op", SOURCE, CONFIG, (float("nan"),))


def test_specs_and_sources_are_hashable() -> None:
    spec = TensorSpec((2, 3), (3, 1), "float32", 16)
    assert {spec: 1, SOURCE: 2}[replace(spec)] == 1


def test_the_element_types_have_their_sizes_in_c() -> None:
    """By name: (bytes of an element and of what it is computed in, its type, that of its factor)."""
    sizes = {"float": 4, "double": 8, "__half": 2, "__nv_bfloat16": 2, "float2": 8, "double2": 16}
    sizes |= {"signed char": 1, "unsigned char": 1, "short": 2, "int": 4, "long long": 8}
    for name, dtype in DTYPES.items():
        assert dtype.itemsize == sizes[dtype.ctype] == getattr(torch, name).itemsize
        assert dtype.computed == max(4, dtype.itemsize)
        assert dtype.scalar == ("long long" if "int" in name else "double" if dtype.ctype[:6] == "double" else "float")


# ---- limits ----


def entry(**resources: Any) -> Entry:
    return Entry(name="some", params=(), **resources)


@pytest.mark.parametrize("arch", ARCH_LIMITS)
def test_shared_memory_is_limited_static_and_dynamic_together(arch: str) -> None:
    limit = ARCH_LIMITS[arch].smem_per_block
    check_limits(LaunchConfig((1, 1, 1), (32, 1, 1), limit - 256), entry(smem_bytes=256), arch)
    message = (
        rf"{limit + 1} bytes of shared memory a block \(257 static \+ {limit - 256} dynamic\); {arch} allows {limit}"
    )
    with pytest.raises(LaunchError, match=message):
        check_limits(LaunchConfig((1, 1, 1), (32, 1, 1), limit - 256), entry(smem_bytes=257), arch)


def test_a_block_is_limited_by_the_launch_bounds() -> None:
    check_limits(LaunchConfig((1, 1, 1), (128, 1, 1)), entry(max_threads=128), "sm_80")
    with pytest.raises(LaunchError, match="has 160 threads, the kernel allows 128"):
        check_limits(LaunchConfig((1, 1, 1), (160, 1, 1)), entry(max_threads=128), "sm_80")


def test_a_block_is_what_the_kernel_requires() -> None:
    required = entry(max_threads=64, required_block=(64, 1, 1))
    check_limits(LaunchConfig((1, 1, 1), (64, 1, 1)), required, "sm_80")
    with pytest.raises(LaunchError, match=r"compiled for exactly \(64, 1, 1\)"):
        check_limits(LaunchConfig((1, 1, 1), (32, 2, 1)), required, "sm_80")


@pytest.mark.parametrize(
    ("registers", "threads"), [(0, 1024), (32, 1024), (64, 1024), (65, 896), (128, 512), (168, 384), (255, 256)]
)
def test_a_block_is_limited_by_its_registers(registers: int, threads: int) -> None:
    """168 registers give 3 blocks of 128: 65536 / (168 * 32, up to a multiple of 256) = 12 warps."""
    assert threads_by_registers(registers) == threads
    check_limits(LaunchConfig((1, 1, 1), (threads, 1, 1)), entry(registers=registers), "sm_80")
    if threads < 1024:
        with pytest.raises(LaunchError, match=f"at {registers} registers a thread sm_80 holds {threads}"):
            check_limits(LaunchConfig((1, 1, 1), (threads + 32, 1, 1)), entry(registers=registers), "sm_80")


def test_the_family_suffix_does_not_change_the_limits() -> None:
    assert limits_of("sm_90a") is limits_of("sm_90")
    assert limits_of("sm_100f") is limits_of("sm_100")


def test_an_unknown_arch_is_named_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match=r"'sm_42' are not known; known: sm_75, sm_80"):
        limits_of("sm_42")
