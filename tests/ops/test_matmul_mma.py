"""matmul_mma.cu: every way an operand can lie, every configuration, every instruction."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

import cudaops
from cudaops.errors import UnsupportedError
from cudaops.launch import launch, spec_of
from cudaops.ops.matmul import matmul, plan_matmul
from cudaops.ops.matmul_configs import MMA_CONFIGS, MMA_MULTIPLY
from cudaops.plan import Plan
from tests.ops.matmul_reference import ACTIVATIONS, as_tf32, check, check_special, random
from tests.ops.test_matmul import define, poisoned, redefined  # noqa: F401  (a fixture)

DTYPES = {name: getattr(torch, name) for name in MMA_MULTIPLY}
CONFIGS = {config.name: config for config in MMA_CONFIGS}
SMALLEST = MMA_CONFIGS[-1].name

# How an operand lies: which dimension's elements are neighbours, and the bytes that its first element and its lines are
# aligned to (0: to an element's size).
LAYOUTS = {
    f"{fast} by {f'{aligned} bytes' if aligned else 'element'}": (fast, aligned)
    for fast, aligned in itertools.product(("k", "outer"), (16, 8, 4, 0))
} | {"strided": ("neither", 0)}


def operand(outer: int, k: int, layout: str, dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    """A random outer x k matrix that lies so; its odd parts are wherever the alignment leaves them."""
    fast, aligned = LAYOUTS[layout]
    if fast == "neither":
        return random((outer, 2, k, 3), dtype, rng)[:, 1, :, 2]
    lines, line = (outer, k) if fast == "k" else (k, outer)
    size = dtype.itemsize
    unit = max(aligned // size, 1)
    pitch = -(-(line + 1) // unit) * unit
    while aligned < 16 and size < 16 and pitch * size % (2 * max(aligned, size)) == 0:
        pitch += unit  # aligned to no more than that
    start = 0 if aligned == 16 else unit
    found = random((lines * pitch + start,), dtype, rng)[start:].as_strided((lines, line), (pitch, 1))
    return found if fast == "k" else found.t()


def divisor(layout: str, dtype: torch.dtype) -> int:
    """What a size along the fast dimension is a multiple of, so that copies can be as wide as the layout allows."""
    return max(LAYOUTS[layout][1] // dtype.itemsize, 1)


def run(plan: Plan, out: torch.Tensor, input: torch.Tensor, other: torch.Tensor, *extras: torch.Tensor | None) -> None:
    launch(plan, (out, input, other, *(out if extra is None else extra for extra in (*extras, None, None)[:2])))


def compare(config: str, dtype_name: str, left: str, right: str, rng: torch.Generator) -> Plan:
    """One ragged product under the sanitizer, against the reference."""
    dtype, tile = DTYPES[dtype_name], CONFIGS[config]
    m, n, k = tile.bm + 3, tile.bn + 5, 64 * 3 // dtype.itemsize + 1  # a bit of a second tile, and of a fourth step
    sizes = {"k": k, "m": m, "n": n}
    for layout, outer in ((left, "m"), (right, "n")):
        along = "k" if LAYOUTS[layout][0] == "k" else outer
        unit = divisor(layout, dtype)
        sizes[along] = -(-sizes[along] // unit) * unit
    a = operand(sizes["m"], sizes["k"], left, dtype, rng)
    b = operand(sizes["n"], sizes["k"], right, dtype, rng).t()
    plan = plan_matmul(spec_of(a), spec_of(b), arch="sm_80", tf32=True, config=config)
    assert plan.source.entry == "matmul_mma"
    out = torch.empty(sizes["m"], sizes["n"], dtype=dtype)
    with cudaops.sanitize(uninitialised=[out]):
        run(plan, out, a, b)
    check(out, *((as_tf32(x) for x in (a, b)) if dtype_name == "float32" else (a, b)))
    return plan


def cases(whole: bool) -> Iterator[tuple[str, str, str, str]]:
    """(configuration, dtype, layout of the left, of the right): each layout on both sides.

    In full, each layout with each configuration for bfloat16, and with every third for the other sizes of elements.
    """
    names, configs = list(LAYOUTS), list(CONFIGS)
    if not whole:
        dtypes = ("bfloat16", "float32", "float16", "bfloat16", "int8", "float32", "bfloat16", "uint8", "float32")
        for n, (left, dtype) in enumerate(zip(names, dtypes, strict=True)):
            yield configs[n % len(configs)], dtype, left, names[(n * 2 + 1) % len(names)]
        return
    every = {"bfloat16": 1, "float16": 6, "float32": 2, "int8": 3, "uint8": 6}
    for dtype, step in every.items():
        for n, config in enumerate(configs):
            for m, left in enumerate(names):
                if (m + n) % step == 0:
                    yield config, dtype, left, names[(m * 2 + n) % len(names)]


@pytest.mark.parametrize(
    ("config", "dtype", "left", "right"),
    [
        *cases(False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in cases(True) if case not in set(cases(False))),
    ],
)
def test_mma_every_way_an_operand_lies(config: str, dtype: str, left: str, right: str, rng: torch.Generator) -> None:
    compare(config, dtype, left, right, rng)


def test_mma_copies_are_as_wide_as_the_layout_allows(rng: torch.Generator) -> None:
    """(k is the fast dimension, bytes at once) by layout; halves go as they lie, words and bytes are turned."""
    widths = {
        "bfloat16": {"k": (16, 8, 4, 0), "outer": (16, 8, 4, 0)},
        "float32": {"k": (16, 8, 4, 4), "outer": (16, 0, 0, 0)},
        "int8": {"k": (16, 8, 4, 0), "outer": (4, 4, 4, 0)},
    }
    for dtype, by_side in widths.items():
        for side, expected in by_side.items():
            found = []
            for layout, (fast, _) in LAYOUTS.items():
                if fast == side:
                    a = operand(64, 64, layout, DTYPES[dtype], rng)
                    plan = plan_matmul(spec_of(a), spec_of(a.t()), arch="sm_80", tf32=True, config=SMALLEST)
                    assert define(plan, "A_K_FAST") == define(plan, "B_K_FAST") == str(int(side == "k"))
                    assert define(plan, "A_WIDTH") == define(plan, "B_WIDTH")
                    found.append(int(define(plan, "A_WIDTH")))
            assert tuple(found) == expected, (dtype, side)


# ---- what is made of the sum ----

# (configuration, dtype, columns, activation, alpha, beta, shape of the bias, of the residual), each with its reason
FINISHED = {
    "stores of 16 bytes": (SMALLEST, "bfloat16", 72, "gelu", 0.5, -2.0, (72,), (70, 72)),
    "stores of one element": (SMALLEST, "float16", 67, "silu", 1, 1, (67,), (67,)),
    "a residual of a column": ("mma 128x64", "float32", 68, "tanh", 1, 0.25, None, (70, 1)),
    "integers": (SMALLEST, "int8", 80, "relu", 3, -2, (80,), (70, 80)),
    "one bias for all": ("mma 64x128", "float16", 131, "relu", -1, 1, (1,), None),
    **{
        f"all of {activation}": (SMALLEST, "bfloat16", 72, activation, 2.0, 3.0, (72,), (70, 72))
        for activation in ACTIVATIONS
    },
}


@pytest.mark.parametrize(
    ("config", "dtype_name", "n", "activation", "alpha", "beta", "bias", "residual"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] * name.startswith("all of"))
        for name, case in FINISHED.items()
    ],
)
def test_mma_finishes_the_sum(
    config: str,
    dtype_name: str,
    n: int,
    activation: str | None,
    alpha: float,
    beta: float,
    bias: tuple[int, ...] | None,
    residual: tuple[int, ...] | None,
    rng: torch.Generator,
) -> None:
    dtype = DTYPES[dtype_name]
    input, other = random((70, 48), dtype, rng), random((n, 48), dtype, rng).t()
    extras = [None if shape is None else random(shape, dtype, rng) for shape in (bias, residual)]
    plan = plan_matmul(
        *(spec_of(x) for x in (input, other)),
        *(None if x is None else spec_of(x) for x in extras),
        arch="sm_80",
        tf32=True,
        config=config,
        activation=activation,
        alpha=alpha,
        beta=beta,
    )
    out = torch.empty(70, n, dtype=dtype)
    with cudaops.sanitize(uninitialised=[out]):
        run(plan, out, input, other, *extras)
    if dtype_name == "float32":
        input, other = as_tf32(input), as_tf32(other)
    check(out, input, other, *extras, activation=activation, alpha=alpha, beta=beta)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_mma_of_bytes_gives_int32_where_that_is_wanted(dtype: str, rng: torch.Generator) -> None:
    few = random((3, 4), DTYPES[dtype], rng)
    assert plan_matmul(spec_of(few), spec_of(few.t()), arch="sm_80", out="int32").source.entry == "matmul_mma"
    with pytest.raises(UnsupportedError, match=f"no kernel gives int32 for {dtype} on sm_75; int32 is for int8 and"):
        plan_matmul(spec_of(few), spec_of(few.t()), arch="sm_75", out="int32")
    with pytest.raises(UnsupportedError, match="no kernel gives int32 for float32"):
        plan_matmul(spec_of(few.float()), spec_of(few.float().t()), arch="sm_80", tf32=True, out="int32")
    input, other = random((70, 96), DTYPES[dtype], rng), random((96, 80), DTYPES[dtype], rng)
    plan = plan_matmul(spec_of(input), spec_of(other), arch="sm_80", out="int32")
    assert define(plan, "OUTPUT") == "int"
    out = torch.empty(70, 80, dtype=torch.int32)
    run(plan, out, input, other)
    assert torch.equal(out, torch.matmul(input.int(), other.int()))


# ---- through the op ----


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_mma_keeps_the_low_bits_as_torch_does(dtype: torch.dtype, rng: torch.Generator) -> None:
    input, other = random((40, 64), dtype, rng), random((64, 48), dtype, rng)
    assert plan_matmul(spec_of(input), spec_of(other), arch="sm_80").source.entry == "matmul_mma"
    assert torch.equal(matmul(input, other), torch.matmul(input, other))


def test_mma_of_batches_that_broadcast(rng: torch.Generator) -> None:
    input = random((2, 1, 40, 32), torch.bfloat16, rng)
    other = random((1, 3, 32, 72), torch.bfloat16, rng)
    check(matmul(input, other), input, other)
    every_other = random((2, 3, 80, 32), torch.bfloat16, rng)[:, :, ::2]
    check(matmul(every_other, other.expand(2, 3, 32, 72)), every_other, other)


def test_mma_with_sizes_of_64_bits(rng: torch.Generator) -> None:
    input, other = random((2, 70, 40), torch.bfloat16, rng), random((2, 40, 72), torch.bfloat16, rng)
    plan = redefined(plan_matmul(spec_of(input), spec_of(other), arch="sm_80"), INDEX="long long")
    out = torch.empty(2, 70, 72, dtype=torch.bfloat16)
    run(plan, out, input, other)
    check(out, input, other)


def test_mma_keeps_nan_and_infinity_where_they_belong(rng: torch.Generator) -> None:
    input, other = random((40, 64), torch.bfloat16, rng), random((64, 72), torch.bfloat16, rng)
    input[3, 10], input[5, 2], other[0, 7], other[10, 39] = torch.inf, torch.nan, -torch.inf, torch.nan
    check_special(matmul(input, other), torch.matmul(input, other))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mma_of_badly_scaled_and_of_whole_numbers(dtype: torch.dtype, rng: torch.Generator) -> None:
    """A row, a column and a k may each be far larger than the next; small whole numbers come out exactly."""
    spread = 6 if dtype == torch.float16 else 30
    scales = [torch.randint(-spread, spread // 2, shape, generator=rng) for shape in ((40, 1), (1, 64), (1, 72))]
    input = (torch.randn(40, 64, generator=rng) * 2.0 ** scales[0] * 2.0 ** scales[1] * 2.0**-3).to(dtype)
    other = (torch.randn(64, 72, generator=rng) * 2.0 ** -scales[1].t() * 2.0 ** scales[2]).to(dtype)
    check(matmul(input, other), input, other)
    input, other = (torch.randint(-3, 4, shape, generator=rng).to(dtype) for shape in ((40, 24), (24, 72)))
    assert torch.equal(matmul(input, other).double(), torch.matmul(input.double(), other.double()))
