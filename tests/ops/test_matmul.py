from __future__ import annotations

import importlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import cudaops
from cudaops.compile import compilations, compile_kernel
from cudaops.errors import CudaopsError, LaunchError, UnsupportedError
from cudaops.launch import launch, launch_counts, spec_of, total_launches
from cudaops.ops.matmul import matmul, plan_matmul
from cudaops.ops.matmul_configs import MATMUL_CONFIGS, MatmulConfig, is_legal
from cudaops.plan import (
    DTYPES,
    LaunchConfig,
    Plan,
    TensorSpec,
    blocks_per_sm,
    check_limits,
)
from tests.ops.matmul_reference import check, check_special, matrix, random

# torch's own: what torch.func.jvp imports, and how opcheck looks at gradients
TORCH_SCRIPT = pytest.mark.filterwarnings("ignore:`torch.jit.script`:FutureWarning")
NON_LEAF = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
DTYPE = tuple(getattr(torch, name) for name in DTYPES)
INTEGERS = tuple(dtype for dtype in DTYPE if not (dtype.is_floating_point or dtype.is_complex))
FLOATS = (torch.float32, torch.float64)
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")
matmul_module = importlib.import_module("cudaops.ops.matmul")  # the package has a function of that name
OP = torch.ops.cudaops.matmul.default

# Each with the reason it is here.
SHAPES = {
    "dot": ((5,), (5,)),
    "vector and matrix": ((7,), (7, 3)),
    "matrix and vector": ((3, 7), (7,)),
    "one element": ((1, 1), (1, 1)),
    "one outer product": ((5, 1), (1, 6)),
    "a tile and a bit of everything": ((17, 9), (9, 130)),
    "whole tiles": ((32, 16), (16, 128)),
    "batch": ((3, 4, 5), (3, 5, 6)),
    "batch of vectors on the left": ((4,), (2, 4, 3)),
    "batch of vectors on the right": ((2, 3, 4), (4,)),
    "right is one matrix: rows are folded": ((2, 3, 4), (4, 5)),
    "left is one matrix": ((3, 4), (2, 4, 5)),
    "broadcast both ways": ((2, 1, 3, 4), (5, 4, 6)),
    "three dimensions that cannot be merged": ((2, 1, 2, 3, 4), (1, 3, 1, 4, 2)),
    "more than the kernel's": ((2, 1, 2, 1, 3, 4), (1, 3, 1, 2, 4, 2)),
    "no rows": ((0, 4), (4, 5)),
    "no columns": ((3, 4), (4, 0)),
    "nothing to add up": ((3, 0), (0, 5)),
    "no batch": ((0, 3, 4), (4, 5)),
    "no batch, broadcast": ((1, 3, 4), (0, 4, 5)),
}
# of an operand: the tensor as the kernel gets it, from a contiguous one
VIEWS = {
    "as it is": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "every second row and third column": lambda x: x.repeat_interleave(2, -2).repeat_interleave(3, -1)[..., ::2, ::3],
    "an odd row pitch": lambda x: torch.nn.functional.pad(x, (0, 1))[..., :-1],
    "a wide row pitch": lambda x: torch.nn.functional.pad(x, (4, 8))[..., 4:-8],
    "misaligned by an element": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "the same row every time": lambda x: x[..., :1, :].expand(x.shape),
    "the same column every time": lambda x: x[..., :1].expand(x.shape),
}


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Whatever torch allocates is filled with NaN or the largest integer first."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


def thinned(cases: Iterable[str]) -> list[tuple[str, torch.dtype]]:
    """Every case for float32, every eighth for each other dtype, each from another start: compiling takes time."""
    names = list(cases)
    return [(name, dtype) for first, dtype in enumerate(DTYPE) for name in (names[first % 8 :: 8] if first else names)]


def planned(input: torch.Tensor, other: torch.Tensor, config: str | None = None) -> Plan:
    return plan_matmul(spec_of(input), spec_of(other), arch="sm_80", config=config)


def define(plan: Plan, name: str) -> str:
    return dict(plan.source.defines)[name]


def redefined(plan: Plan, **defines: object) -> Plan:
    """`plan` with other values of some defines."""
    merged = dict(plan.source.defines) | {name: str(value) for name, value in defines.items()}
    return replace(plan, source=replace(plan.source, defines=tuple(merged.items())))


# ---- results ----


def test_matmul_of_the_issue() -> None:
    out = matmul(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[5, 6], [7, 8]]))
    assert out.dtype == torch.int64
    assert out.tolist() == [[19, 22], [43, 50]]


@pytest.mark.parametrize(("name", "dtype"), thinned(SHAPES), ids=str)
def test_matmul_matches_reference(name: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    input, other = (random(shape, dtype, rng) for shape in SHAPES[name])
    out = matmul(input, other)
    check(out, input, other)
    assert out.stride() == torch.matmul(input, other).stride()


@pytest.mark.parametrize("view", VIEWS)
def test_matmul_takes_any_strides(view: str, rng: torch.Generator) -> None:
    input, other = random((20, 12), torch.float32, rng), random((12, 36), torch.float32, rng)
    for left, right in ((view, "as it is"), ("as it is", view), (view, view)):
        a, b = VIEWS[left](input), VIEWS[right](other)
        check(matmul(a, b), a, b)


@pytest.mark.parametrize("view", VIEWS)
def test_matmul_takes_any_strides_in_batches(view: str, rng: torch.Generator) -> None:
    input = VIEWS[view](random((3, 20, 12), torch.float32, rng)).transpose(0, 1).contiguous().transpose(0, 1)
    other = VIEWS[view](random((3, 12, 8), torch.float32, rng))
    check(matmul(input, other), input, other)


@pytest.mark.parametrize("config", MATMUL_CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize(("left", "right"), [("rows", "columns"), ("columns", "rows")])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matmul_every_configuration(
    config: MatmulConfig, left: str, right: str, dtype: torch.dtype, rng: torch.Generator
) -> None:
    if not is_legal(config, dtype.itemsize):
        with pytest.raises(
            LaunchError, match=f"no configuration '{config.name}' for this shape and 8-byte elements; there is"
        ):
            planned(torch.ones(2, 2, dtype=dtype), torch.ones(2, 2, dtype=dtype), config.name)
        return
    # a whole tile and a ragged one each way, and whole and ragged steps; wide loads where the dtype has them
    m, n, k = config.bm + 4, config.bn + 12, 2 * config.bk + 4
    input, other = matrix(m, k, dtype, rng, left), matrix(k, n, dtype, rng, right)
    plan = planned(input, other, config.name)
    assert int(define(plan, "A_WIDTH")) == int(define(plan, "B_WIDTH")) == 16 // dtype.itemsize
    out = torch.empty(m, n, dtype=dtype)
    launch(plan, (out, input, other, input, input))
    check(out, input, other)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_matmul_every_configuration_gives_the_same_bits(dtype: torch.dtype, rng: torch.Generator) -> None:
    input, other = random((33, 50), dtype, rng), random((50, 131), dtype, rng)
    results = []
    for config in MATMUL_CONFIGS:
        if is_legal(config, dtype.itemsize):
            out = torch.empty(33, 131, dtype=dtype)
            launch(planned(input, other, config.name), (out, input, other, input, input))
            results.append(out)
    assert len(results) >= 2
    assert all(torch.equal(out, results[0]) for out in results)
    transposed = matmul(other.t(), input.t())
    assert torch.equal(transposed.t(), results[0])


def test_matmul_same_bits_for_any_number_of_threads(rng: torch.Generator) -> None:
    input, other = random((150, 70), torch.float32, rng), random((70, 260), torch.float32, rng)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(matmul(input, other))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


SKINNY = {
    # rows, columns, k, layout of the left and of the right: what the variant is there for
    "lanes along k, one row": (1, 21, 200, "rows", "columns"),
    "lanes along k, four rows": (3, 21, 200, "rows", "columns"),
    "lanes along k, eight rows": (8, 21, 200, "rows", "columns"),
    "lanes along k, less than a step": (1, 5, 40, "rows", "columns"),
    "lanes along k, one element at a time": (2, 9, 97, "rows", "columns"),
    "lanes along k, warps share it": (1, 6, 2100, "rows", "columns"),
    "lanes along k, warps share it, one element at a time": (4, 3, 1001, "rows", "columns"),
    "lanes along k, strided": (2, 9, 70, "strided", "strided"),
    "lanes along k, left across": (3, 9, 70, "columns", "columns"),
    "lanes along n, one row": (1, 70, 20, "rows", "rows"),
    "lanes along n, four rows": (2, 70, 21, "columns", "rows"),
    "lanes along n, eight rows": (7, 33, 8, "strided", "rows"),
    "lanes along n, wide": (1, 16384, 9, "rows", "rows"),
    "few columns": (90, 2, 64, "rows", "rows"),
    "few columns of a transposed": (40, 3, 50, "columns", "columns"),
}


@pytest.mark.parametrize(("name", "dtype"), thinned(SKINNY), ids=str)
def test_matmul_of_few_rows(name: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    m, n, k, left, right = SKINNY[name]
    input, other = matrix(m, k, dtype, rng, left), matrix(k, n, dtype, rng, right)
    bias = random((n,), dtype, rng)
    relu = not dtype.is_complex
    plan = plan_matmul(spec_of(input), spec_of(other), spec_of(bias), arch="sm_80", activation="relu" if relu else None)
    if min(m, n) <= {8: 4, 16: 1}.get(dtype.itemsize, 8):
        assert plan.source.entry == "matmul_skinny"
    out = torch.empty(m, n, dtype=dtype)
    launch(plan, (out, input, other, bias, input))
    check(out, input, other, bias, activation="relu" if relu else None)


@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_matmul_random_shapes_and_layouts(data: st.DataObject, rng: torch.Generator) -> None:
    m, k, n = (data.draw(st.integers(1, 150), label=name) for name in ("m", "k", "n"))
    left, right = (data.draw(st.sampled_from(("rows", "columns", "strided"))) for _ in range(2))
    input, other = matrix(m, k, torch.float32, rng, left), matrix(k, n, torch.float32, rng, right)
    check(matmul(input, other), input, other)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_matmul_integers_wrap_as_torch_does(dtype: torch.dtype, rng: torch.Generator) -> None:
    input, other = random((9, 40), dtype, rng), random((40, 11), dtype, rng)
    assert torch.equal(matmul(input, other), torch.matmul(input, other))


SPECIAL = (torch.float32, torch.float64, torch.float16, torch.complex64)


@pytest.mark.parametrize("sizes", [(20, 11, 40), (2, 40, 40)], ids=("tiles", "few rows"))
@pytest.mark.parametrize("dtype", SPECIAL, ids=str)
def test_matmul_keeps_nan_and_infinity_where_they_belong(
    dtype: torch.dtype, sizes: tuple[int, int, int], rng: torch.Generator
) -> None:
    m, k, n = sizes
    input, other = random((m, k), dtype, rng), random((k, n), dtype, rng)
    input[0, k - 1], other[0, 7], other[k - 1, n - 1] = torch.inf, torch.nan, -torch.inf
    if dtype.is_complex:  # torch's own products differ in what infinity times a complex number is
        input[0, k - 1], other[k - 1, n - 1] = torch.nan, complex(0, torch.nan)
    check_special(matmul(input, other), torch.matmul(input, other))


@pytest.mark.parametrize("sizes", [(20, 50, 40), (2, 70, 40)], ids=("tiles", "few rows"))
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPE if dtype not in INTEGERS], ids=str)
def test_matmul_of_badly_scaled_and_of_whole_numbers(
    dtype: torch.dtype, sizes: tuple[int, int, int], rng: torch.Generator
) -> None:
    """A row, a column and a k may each be far larger than the next; small whole numbers come out exactly."""
    m, k, n = sizes
    spread = {torch.float16: 4, torch.float64: 150, torch.complex128: 150}.get(dtype, 20)
    row, along, column = (
        2.0 ** torch.randint(-spread, spread // 2, shape, generator=rng).double() for shape in ((m, 1), (1, k), (1, n))
    )
    input = (random((m, k), dtype, rng) * (row * along / 8)).to(dtype)
    other = (random((k, n), dtype, rng) * (column / along.t())).to(dtype)
    check(matmul(input, other), input, other)
    input, other = (torch.randint(-3, 4, shape, generator=rng).to(dtype) for shape in ((m, k), (k, n)))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    assert torch.equal(matmul(input, other).to(wide), torch.matmul(input.to(wide), other.to(wide)))


FINISHED = {
    # m, n, k, layout of the right; activation, alpha, beta; shapes of bias and residual
    "tiles": (20, 132, 9, "rows", "gelu", 0.5, -2.0, (132,), (20, 132)),
    "tiles, a residual of a row": (20, 131, 9, "columns", None, 3.0, 1, None, (131,)),
    "tiles of the transposed product": (150, 12, 9, "rows", "relu", 1, 1, (12,), (150, 1)),
    "lanes along k": (3, 21, 70, "columns", "silu", -1.0, 1, (1,), (3, 21)),
    "lanes along n": (3, 70, 21, "rows", "tanh", 1, 0.25, (70,), (1, 70)),
    "few columns": (90, 2, 64, "rows", "sigmoid", 1, 2.0, (2,), (90, 2)),
}


@pytest.mark.parametrize(("name", "dtype"), thinned(FINISHED), ids=str)
def test_matmul_finishes_the_sum(name: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    m, n, k, layout, activation, alpha, beta, *extras = FINISHED[name]
    input, other = random((m, k), dtype, rng), matrix(k, n, dtype, rng, layout)
    bias, residual = (None if shape is None else random(shape, dtype, rng) for shape in extras)
    if dtype.is_complex or dtype in INTEGERS:
        activation = None if dtype.is_complex else "relu"
        alpha, beta = int(2 * alpha), int(2 * beta)
    plan = plan_matmul(
        spec_of(input),
        spec_of(other),
        None if bias is None else spec_of(bias),
        None if residual is None else spec_of(residual),
        arch="sm_80",
        activation=activation,
        alpha=alpha,
        beta=beta,
    )
    out = torch.empty(m, n, dtype=dtype)
    with cudaops.sanitize(uninitialised=[out]):
        launch(plan, (out, input, other, *(out if extra is None else extra for extra in (bias, residual))))
    check(out, input, other, bias, residual, activation=activation, alpha=alpha, beta=beta)


def test_matmul_writes_its_output_and_nothing_else(rng: torch.Generator) -> None:
    input, other = random((21, 9), torch.float32, rng), random((9, 37), torch.float32, rng)
    around = torch.full((21 * 37 + 64,), 7.0)
    out = around[32:-32].view(21, 37)
    launch(planned(input, other), (out, input, other, input, input))
    check(out, input, other)
    assert (around[:32] == 7).all()
    assert (around[-32:] == 7).all()


@pytest.mark.parametrize("config", [*(config.name for config in MATMUL_CONFIGS), "skinny"])
def test_matmul_has_no_finding_of_the_sanitizer(config: str, rng: torch.Generator) -> None:
    """No race, no bad or uninitialised read, no barrier missed: ragged tiles, whole and ragged steps, every layout."""
    tile = next((each for each in MATMUL_CONFIGS if each.name == config), None)
    sizes = [(tile.bm + 4, tile.bn + 4, 2 * tile.bk + 4)] if tile else [(3, 21, 97), (1, 6, 2100), (7, 33, 40)]
    for (m, n, k), (left, right) in itertools.product(sizes, (("rows", "columns"), ("columns", "rows"))):
        input, other = matrix(m, k, torch.float32, rng, left), matrix(k, n, torch.float32, rng, right)
        out = torch.empty(m, n)
        with cudaops.sanitize(uninitialised=[out]):
            launch(planned(input, other, config), (out, input, other, input, input))
        check(out, input, other)


def test_matmul_kernel_gives_the_bias_where_there_is_nothing_to_add_up(rng: torch.Generator) -> None:
    input, other, bias = torch.empty(3, 0), torch.empty(0, 5), random((5,), torch.float32, rng)
    out = torch.empty(3, 5)
    launch(planned(input, other), (out, input, other, input, input))
    assert torch.equal(out, torch.zeros(3, 5))
    launch(plan_matmul(*map(spec_of, (input, other, bias)), arch="sm_80"), (out, input, other, bias, input))
    assert torch.equal(out, bias.expand(3, 5))


def test_matmul_never_returns_its_input() -> None:
    one, x = torch.ones(1, 1), torch.ones(1, 1)
    assert matmul(x, one).data_ptr() not in (x.data_ptr(), one.data_ptr())


def handed_over(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The addresses of the tensors of each launch from here on."""
    seen: list[tuple[int, ...]] = []

    def noted(plan: Plan, tensors: tuple[torch.Tensor, ...]) -> None:
        seen.append(tuple(tensor.data_ptr() for tensor in tensors))
        launch(plan, tensors)

    monkeypatch.setattr(matmul_module, "launch", noted)
    return seen


@pytest.mark.parametrize("sizes", [(3, 4, 5), (1, 40, 5)], ids=("tiles", "few rows"))
@pytest.mark.parametrize("views", [("conj", ""), ("", "conj"), ("conj", "conj"), ("conj neg", ""), ("neg", "conj")])
def test_matmul_reads_complex_views(
    views: tuple[str, str], sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch, rng: torch.Generator
) -> None:
    """The conjugate as it lies in memory; a negative complex view is copied."""
    m, k, n = sizes
    plain = [random((m, k), torch.complex64, rng), random((k, n), torch.complex64, rng)]
    operands = [
        (torch._neg_view(x) if "neg" in view else x).conj() if "conj" in view else torch._neg_view(x) if view else x
        for x, view in zip(plain, views, strict=True)
    ]
    assert [x.is_conj() for x in operands] == ["conj" in view for view in views]
    seen = handed_over(monkeypatch)
    out = matmul(*operands)
    check(out, *operands)
    assert not out.is_conj()
    for x, view, address in zip(plain, views, seen[0][1:3], strict=True):
        assert (x.data_ptr() == address) == ("neg" not in view)
    check(matmul(operands[0].conj(), operands[1]), operands[0].conj(), operands[1])


def test_matmul_reads_negated_views(monkeypatch: pytest.MonkeyPatch, rng: torch.Generator) -> None:
    whole = torch.complex(random((3, 4), torch.float32, rng), random((3, 4), torch.float32, rng))
    lazy = whole.conj().imag
    assert lazy.is_neg()
    other = random((4, 5), torch.float32, rng)
    seen = handed_over(monkeypatch)
    check(matmul(lazy, other), lazy.resolve_neg(), other)
    assert seen[0][1] == whole.imag.data_ptr()
    check(matmul(lazy, torch._neg_view(other)), lazy.resolve_neg(), -other)


# ---- beyond 32 bits ----


def test_matmul_offsets_beyond_32_bits() -> None:
    # NumPy's zeros are virtual memory: only the few pages that are touched come into being.
    rows, pitch = 3, 2**30 + 8
    storage = torch.from_numpy(numpy.zeros((rows - 1) * pitch + 16, dtype=numpy.int32))
    input = storage.as_strided((rows, 16), (pitch, 1))
    input.copy_(torch.arange(rows * 16, dtype=torch.int32).view(rows, 16))
    other = torch.arange(16 * 5, dtype=torch.int32).view(16, 5)
    plan = planned(input, other)
    assert define(plan, "INDEX") == "int"  # each stride fits; the products are formed in 64 bits
    check(matmul(input, other), input, other)
    check(matmul(other.t(), input.t()), other.t(), input.t())
    batched, others = input.unsqueeze(1), other.expand(rows, 16, 5)
    check(matmul(batched, others.contiguous()), batched, others)


def test_matmul_index_is_64_bits_where_a_stride_does_not_fit(rng: torch.Generator) -> None:
    far = TensorSpec((2, 4), (2**31 + 4, 1), "float32", 16)
    near = TensorSpec((4, 8), (8, 1), "float32", 16)
    assert define(plan_matmul(far, near, arch="sm_80"), "INDEX") == "long long"
    # the same code, on numbers that can be had
    for shape in ((3, 70, 9), (3, 1, 9)):
        input, other = random(shape, torch.float32, rng), random((3, 9, 150), torch.float32, rng)
        plan = redefined(planned(input, other), INDEX="long long")
        out = torch.empty(*shape[:2], 150)
        launch(plan, (out, input, other, input, input))
        check(out, input, other)


def test_matmul_plan_of_more_blocks_than_a_grid_axis_takes() -> None:
    many = 3 * 2**31
    plan = plan_matmul(
        TensorSpec((many, 1, 1), (1, 1, 1), "float32", 16),
        TensorSpec((many, 1, 1), (1, 1, 1), "float32", 16),
        arch="sm_80",
        config="16x128",
    )
    assert plan.config.blocks >= many
    assert plan.config.grid[1] <= 65_535
    assert define(plan, "INDEX") == "long long"


def test_matmul_grid_of_two_axes(rng: torch.Generator) -> None:
    input, other = random((5, 20, 9), torch.float32, rng), random((5, 9, 150), torch.float32, rng)
    for rows in (20, 1):
        a = input[:, :rows]
        plan = planned(a, other)
        blocks = plan.config.blocks
        assert blocks % 3 != 0  # so that the last row of the grid is short
        out = torch.empty(5, rows, 150)
        launch(replace(plan, config=LaunchConfig((-(-blocks // 3), 3, 1), plan.config.block)), (out, a, other, a, a))
        check(out, a, other)


# ---- plans ----


def test_matmul_configurations_are_named_once_and_legal() -> None:
    assert len({config.name for config in MATMUL_CONFIGS}) == len(MATMUL_CONFIGS)
    assert all(is_legal(config, 4) for config in MATMUL_CONFIGS)
    assert any(is_legal(config, 8) for config in MATMUL_CONFIGS)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"bm": 40}, "warps do not tile the block"),
        ({"tn": 3}, "a register row is no whole number of packs"),
        ({"tm": 64, "bm": 256}, "too many accumulators"),
        ({"bk": 64}, "too much shared memory"),
        ({"bk": 6}, "a step is no whole number of packs"),
        ({"lanes_n": 5}, "no such warp"),
        ({"bm": 64 * 16, "bn": 512}, "too many threads"),
        ({"bm": 48}, "threads do not tile the lines of A"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_matmul_illegal_configurations(change: dict[str, int], why: str) -> None:
    base = MatmulConfig("base", 64, 128, 8, 16, 4, 32, 2, 1.0)
    assert is_legal(base, 4)
    assert not is_legal(replace(base, **change), 4)


@pytest.mark.parametrize("config", MATMUL_CONFIGS, ids=lambda config: config.name)
def test_matmul_main_loop(config: MatmulConfig) -> None:
    """What it is made of in PTX, within what a block may use. (Machine code: tests/kernels/test_gates.py.)"""
    arch = "sm_80"
    for dtype, left, right in itertools.product(("float32", "float64"), ("rows", "columns"), ("rows", "columns")):
        itemsize = DTYPES[dtype].itemsize
        if not is_legal(config, itemsize) or (dtype == "float64" and left != right):
            continue
        plan = plan_matmul(
            TensorSpec((512, 512), (512, 1) if left == "rows" else (1, 512), dtype, 16),
            TensorSpec((512, 512), (512, 1) if right == "rows" else (1, 512), dtype, 16),
            arch=arch,
            config=config.name,
        )
        compiled = compile_kernel(plan.source, arch)
        entry = compiled.entry
        assert entry.spill_bytes == entry.stack_bytes == 0, plan.reason
        assert entry.max_threads == config.threads
        check_limits(plan.config, entry, arch)
        assert blocks_per_sm(plan.config, entry, arch) >= config.blocks_per_sm_at(itemsize), plan.reason
        body = compiled.ptx[compiled.ptx.index(".entry") :]
        name = {"float32": "fma.rn.f32", "float64": "fma.rn.f64"}[dtype]
        steps = min(config.bk_at(itemsize), 4 if config.tm * config.tn >= 128 else 8)
        assert body.count(name) == config.tm * config.tn * steps
        loads = [line.split()[0] for line in body.splitlines() if line.strip().startswith("ld.shared")]
        # a step reads its rows of A 16 bytes at a time, of B 8
        assert len(loads) == steps * (config.tm * itemsize // 16 + config.tn * itemsize // 8)
        assert itemsize == 8 or all(load.startswith("ld.shared.v") for load in loads)


def test_matmul_largest_tile_multiplies_16_times_for_each_shared_load() -> None:
    best = max(MATMUL_CONFIGS, key=lambda config: config.speed)
    assert best.tm * best.tn / (best.tm / 4 + best.tn / 2) >= 16


@pytest.mark.parametrize("arch", ARCHS)
def test_matmul_plan_suits_the_shape(arch: str) -> None:
    def plan(m: int, n: int, k: int = 1024, batch: int = 1) -> Plan:
        return plan_matmul(
            TensorSpec((batch, m, k), (m * k, k, 1), "float32", 16),
            TensorSpec((batch, k, n), (k * n, n, 1), "float32", 16),
            arch=arch,
        )

    def tile(plan: Plan) -> int:
        return int(define(plan, "BM")) * int(define(plan, "BN"))

    assert tile(plan(8192, 8192)) == 128 * 256
    assert tile(plan(12, 12)) == min(config.bm * config.bn for config in MATMUL_CONFIGS)
    assert define(plan(4096, 12), "SWAP") == "1"  # the tile's long side along the long side
    assert define(plan(12, 4096), "SWAP") == "0"
    for rows, columns in ((1, 1000), (1000, 1), (8, 1000), (1, 1)):
        assert plan(rows, columns).source.entry == "matmul_skinny"
    assert plan(1, 1000, k=1).source.entry == "matmul_simt"
    assert plan(1, 64, batch=70_000).config.blocks >= 70_000
    assert "SMs" in plan(64, 64).reason


def test_matmul_plan_folds_and_merges_batches() -> None:
    def sizes(input: torch.Tensor, other: torch.Tensor) -> dict[str, int]:
        plan = planned(input, other)
        names = ("batch1", "batch2", "batches", "M", "N", "K")  # k_total, alpha and beta come after
        return dict(zip(names, plan.scalars[-9:-3], strict=True))  # type: ignore[arg-type]

    empty = torch.empty
    rows_folded = sizes(empty(2, 3, 5, 7), empty(7, 400))
    assert (rows_folded["batches"], rows_folded["M"]) == (1, 30)
    assert sizes(empty(2, 3, 5, 7).transpose(1, 2), empty(7, 400))["batches"] > 1  # its rows do not follow each other
    merged = sizes(empty(2, 3, 5, 7), empty(2, 3, 7, 400))
    assert (merged["batch1"], merged["batch2"], merged["batches"]) == (1, 6, 6)
    apart = sizes(empty(2, 1, 5, 7), empty(1, 3, 7, 400))
    assert (apart["batch1"], apart["batch2"], apart["batches"]) == (2, 3, 6)


def test_matmul_plan_is_made_once_and_compiled_once(rng: torch.Generator) -> None:
    input, other = random((6, 7), torch.float32, rng), random((7, 8), torch.float32, rng)
    matmul(input, other)
    before, made = compilations(), len(matmul_module._known)
    matmul(input, other)
    matmul(random((6, 7), torch.float32, rng), other)
    assert compilations() == before
    assert len(matmul_module._known) == made


def test_matmul_plan_refuses() -> None:
    good = TensorSpec((4, 4), (4, 1), "float32", 16)
    with pytest.raises(UnsupportedError, match="no kernel for bool; there is one for float32"):
        plan_matmul(replace(good, dtype="bool"), good, arch="sm_80")
    for dtype, activation in (("float32", "swish"), ("int64", "gelu"), ("complex64", "relu")):
        typed = replace(good, dtype=dtype)
        with pytest.raises(UnsupportedError, match=f"no activation '{activation}' for {dtype}; there is"):
            plan_matmul(typed, typed, arch="sm_80", activation=activation)
    with pytest.raises(
        LaunchError, match="no configuration '1x1' for this shape and 4-byte elements; there is 128x256"
    ):
        plan_matmul(good, good, arch="sm_80", config="1x1")
    deep = TensorSpec((2, 1, 2, 1, 4, 4), (32, 32, 16, 16, 4, 1), "float32", 16)
    other = TensorSpec((1, 2, 1, 2, 4, 4), (32, 32, 16, 16, 4, 1), "float32", 16)
    with pytest.raises(LaunchError, match="4 batch dimensions that cannot be merged, the kernel takes 3"):
        plan_matmul(deep, other, arch="sm_80")


# ---- bad input ----

BAD = {
    "a scalar": (torch.ones(()), torch.ones(3), "both arguments to matmul need to be at least 1D"),
    "inner sizes": (torch.ones(3, 4), torch.ones(5, 4), r"shapes cannot be multiplied \(3x4 and 5x4\)"),
    "inner sizes of vectors": (torch.ones(4), torch.ones(5), r"cannot be multiplied \(1x4 and 5x1\)"),
    "inner sizes in a batch": (torch.ones(2, 3, 4), torch.ones(2, 3, 5), r"cannot be multiplied \(3x4 and 3x5\)"),
    "batches": (
        torch.ones(2, 3, 4),
        torch.ones(3, 4, 5),
        r"size of tensor a \(2\) must match the size of tensor b \(3\)",
    ),
    "dtypes": (torch.ones(3, 4), torch.ones(4, 5).double(), "same dtype, but got torch.float32 and torch.float64"),
    "a float and an integer": (
        torch.ones(3, 4),
        torch.ones(4, 5).long(),
        "same dtype, but got torch.float32 and torch.int64",
    ),
}


@pytest.mark.parametrize(("input", "other", "message"), BAD.values(), ids=BAD)
def test_matmul_refuses_as_torch_does(input: torch.Tensor, other: torch.Tensor, message: str) -> None:
    with pytest.raises(RuntimeError) as theirs:
        torch.matmul(input, other)
    before = total_launches()
    with pytest.raises(RuntimeError, match=message) as ours:
        matmul(input, other)
    assert type(ours.value) is type(theirs.value)
    assert total_launches() == before
    with pytest.raises(RuntimeError, match=message):
        matmul(input.to("meta"), other.to("meta"))


@pytest.mark.parametrize(
    ("input", "other"), [(torch.ones(2, 2), 3), (3, torch.ones(2, 2)), (None, None), ([[1.0]], [[1.0]])]
)
def test_matmul_refuses_what_is_no_tensor(input: object, other: object) -> None:
    with pytest.raises(TypeError, match=r"matmul\(\): argument '(input|other)' \(position [12]\) must be Tensor, not"):
        matmul(input, other)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.float8_e4m3fn], ids=str)
def test_matmul_refuses_dtypes_without_a_kernel(dtype: torch.dtype) -> None:
    with pytest.raises(
        UnsupportedError, match=f"matmul: no kernel for {dtype}; there is one for float32, float64"
    ) as error:
        matmul(torch.ones(2, 2, dtype=dtype), torch.ones(2, 2, dtype=dtype))
    assert isinstance(error.value, CudaopsError)


def test_matmul_of_meta_is_meta_and_never_mixed() -> None:
    here, meta = torch.ones(3, 4), torch.ones(4, 5, device="meta")
    out = matmul(here.to("meta"), meta)
    assert out.is_meta
    assert out.shape == (3, 5)
    for pair in ((here, meta), (meta.t(), here.t())):
        with pytest.raises(
            RuntimeError, match=r"same device, but found at least two devices, (cpu and meta|meta and cpu)"
        ):
            matmul(*pair)


# ---- gradients ----

GRADIENT_SHAPES = {
    name: shapes for name, shapes in SHAPES.items() if name not in ("whole tiles", "a tile and a bit of everything")
}


@pytest.mark.parametrize("shapes", GRADIENT_SHAPES.values(), ids=GRADIENT_SHAPES)
def test_matmul_gradients_to_second_order(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], rng: torch.Generator
) -> None:
    input, other = (random(shape, torch.float64, rng).requires_grad_() for shape in shapes)
    assert gradcheck(matmul, (input, other), fast_mode=True)
    assert gradgradcheck(matmul, (input, other), fast_mode=True)


@pytest.mark.parametrize(
    "name", ["dot", "matrix and vector", "a tile and a bit of everything", "broadcast both ways", "left is one matrix"]
)
def test_matmul_complex_gradients_to_second_order(name: str, rng: torch.Generator) -> None:
    input, other = (random(shape, torch.complex128, rng).requires_grad_() for shape in SHAPES[name])
    for function in (matmul, lambda a, b: matmul(a.conj(), b), lambda a, b: matmul(a, b.conj()).conj()):
        assert gradcheck(function, (input, other), fast_mode=True)
        assert gradgradcheck(function, (input, other), fast_mode=True)


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_matmul_makes_only_the_gradients_that_are_wanted(wanted: tuple[bool, bool], rng: torch.Generator) -> None:
    input, other = random((3, 4), torch.float32, rng), random((4, 5), torch.float32, rng)
    input.requires_grad_(wanted[0])
    other.requires_grad_(wanted[1])
    before = launch_counts()["matmul_simt"]
    matmul(input, other).sum().backward()
    assert launch_counts()["matmul_simt"] == before + 2
    assert (input.grad is not None, other.grad is not None) == wanted


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_matmul_gradients_have_the_operands_strides(layout: str, rng: torch.Generator) -> None:
    input, other = matrix(6, 7, torch.float32, rng, layout), matrix(7, 8, torch.float32, rng, layout)
    grad = random((6, 8), torch.float32, rng)
    gradients = torch.autograd.grad(matmul(input.requires_grad_(), other.requires_grad_()), (input, other), grad)
    for gradient, operand in zip(gradients, (input, other), strict=True):
        assert gradient.stride() == operand.stride()
    check(gradients[0], grad, other.t())
    check(gradients[1], input.t(), grad)


def test_matmul_gradient_of_a_shared_matrix_is_one_product(rng: torch.Generator) -> None:
    input, weight = random((5, 6, 4), torch.float32, rng), random((4, 3), torch.float32, rng).requires_grad_()
    grad = random((5, 6, 3), torch.float32, rng)
    out = matmul(input, weight)
    before = total_launches()
    (gradient,) = torch.autograd.grad(out, weight, grad)
    assert total_launches() == before + 1
    check(gradient, input.reshape(30, 4).t(), grad.reshape(30, 3))


def test_matmul_integers_have_no_gradient() -> None:
    out = matmul(torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2, dtype=torch.int64))
    assert not out.requires_grad


def test_matmul_records_nothing_where_gradients_are_off(rng: torch.Generator) -> None:
    weight = random((4, 4), torch.float32, rng).requires_grad_()
    with torch.no_grad():
        assert matmul(weight, weight).grad_fn is None
    with torch.inference_mode():
        assert matmul(weight, weight).is_inference()


def test_matmul_gradient_refuses_operands_changed_in_place(rng: torch.Generator) -> None:
    weight, input = random((4, 4), torch.float32, rng).requires_grad_(), random((4, 4), torch.float32, rng)
    out = matmul(input, weight)
    input.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# ---- torch's machinery ----


@NON_LEAF
@TORCH_SCRIPT
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(
    "name", ["dot", "batch", "broadcast both ways", "nothing to add up", "right is one matrix: rows are folded"]
)
def test_matmul_passes_opcheck(name: str, requires_grad: bool, rng: torch.Generator) -> None:
    operands = tuple(random(shape, torch.float32, rng).requires_grad_(requires_grad) for shape in SHAPES[name])
    torch.library.opcheck(OP, operands)


@NON_LEAF
@TORCH_SCRIPT
@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.int8], ids=str)
def test_matmul_passes_opcheck_in_other_dtypes(dtype: torch.dtype, rng: torch.Generator) -> None:
    operands = [random(shape, dtype, rng).requires_grad_(dtype != torch.int8) for shape in SHAPES["batch"]]
    torch.library.opcheck(OP, (operands[0], operands[1]))
    if dtype.is_complex:
        torch.library.opcheck(OP, (operands[0].conj(), operands[1]))


@pytest.mark.parametrize("product", [matmul, OP], ids=("function", "op"))
def test_matmul_under_autocast(product: Callable[..., torch.Tensor], rng: torch.Generator) -> None:
    """Cast as torch's own: floats to the lower precision, but for float64; gradients in the operands' dtype."""
    for dtypes in (
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float64),
        (torch.int32, torch.int32),
        (torch.complex64, torch.complex64),
    ):
        input, other = random((3, 4), dtypes[0], rng), random((4, 5), dtypes[1], rng)
        with torch.autocast("cpu", torch.bfloat16):
            out, theirs = product(input, other), torch.matmul(input, other)
        assert out.dtype == theirs.dtype
        check(out, input.to(out.dtype), other.to(out.dtype))
    weight = random((4, 5), torch.float32, rng).requires_grad_()
    with torch.autocast("cpu", torch.float16):
        out = product(random((3, 4), torch.float32, rng), weight)
    assert out.dtype == torch.float16
    (gradient,) = torch.autograd.grad(out.sum(), weight)
    assert gradient.dtype == torch.float32


def test_matmul_compiles_without_a_graph_break(rng: torch.Generator) -> None:
    input, weight = random((3, 4), torch.float32, rng), random((4, 4), torch.float32, rng)

    def loss(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return matmul(matmul(input, weight).sin(), weight.t()).pow(2).sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    expected = torch.func.grad(loss, argnums=(0, 1))(input, weight)
    input.requires_grad_()
    weight.requires_grad_()
    actual = torch.autograd.grad(compiled(input, weight), (input, weight))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_matmul_under_torch_func(rng: torch.Generator) -> None:
    input, weight = random((6, 3, 4), torch.float64, rng), random((4, 5), torch.float64, rng)

    def ours(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return matmul(x, w).pow(3).sum()

    def theirs(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.matmul(x, w).pow(3).sum()

    for transform in (
        lambda f: torch.func.grad(f, argnums=1),
        lambda f: torch.func.vmap(torch.func.grad(f, argnums=(0, 1)), (0, None)),
        lambda f: torch.func.jacrev(torch.func.jacrev(f, argnums=1), argnums=1),
    ):
        torch.testing.assert_close(transform(ours)(input, weight), transform(theirs)(input, weight))


@pytest.mark.parametrize(
    "shapes", [((4,), (4,)), ((4,), (4, 5)), ((3, 4), (4,)), ((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((4,), (2, 4, 5))]
)
@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0), (-1, 0)])
@pytest.mark.parametrize("product", [matmul, OP], ids=("function", "op"))
def test_matmul_under_vmap(
    product: object,
    in_dims: tuple[int | None, int | None],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    rng: torch.Generator,
) -> None:
    operands = [
        random(shape, torch.float64, rng)
        if dim is None
        else torch.stack([random(shape, torch.float64, rng) for _ in range(6)], dim)
        for dim, shape in zip(in_dims, shapes, strict=True)
    ]
    expected = torch.func.vmap(torch.matmul, in_dims)(*operands)
    torch.testing.assert_close(torch.func.vmap(product, in_dims)(*operands), expected)


@TORCH_SCRIPT
@pytest.mark.parametrize("product", [matmul, torch.ops.cudaops.matmul], ids=("function", "op"))
def test_matmul_forward_mode_raises(product: object, rng: torch.Generator) -> None:
    x, weight = random((3, 4), torch.float32, rng), random((4, 5), torch.float32, rng)
    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jvp(lambda x: product(x, weight), (x,), (x,))
    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jacfwd(lambda x: product(x, weight))(x)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        product(forward_ad.make_dual(x, x), weight)
    with forward_ad.dual_level(), torch.no_grad(), pytest.raises(RuntimeError, match="jvp"):
        product(forward_ad.make_dual(x, x), weight)
    with forward_ad.dual_level():
        check(product(x, weight), x, weight)  # no tangent, nothing to lose


def test_matmul_from_many_threads(rng: torch.Generator) -> None:
    operands = [(random((40, 30), torch.float32, rng), random((30, 50), torch.float32, rng)) for _ in range(8)]
    results: list[torch.Tensor | None] = [None] * len(operands)

    def work(index: int) -> None:
        results[index] = matmul(*operands[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(operands))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for out, pair in zip(results, operands, strict=True):
        assert out is not None
        check(out, *pair)


# ---- no fallback ----


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product of torch's and NumPy's that a fallback could use raises."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a product that is not ours")

    for name in (
        "matmul",
        "mm",
        "bmm",
        "mv",
        "dot",
        "vdot",
        "inner",
        "addmm",
        "addmv",
        "addbmm",
        "baddbmm",
        "einsum",
        "tensordot",
        "chain_matmul",
    ):
        monkeypatch.setattr(torch, name, refuse)
    for name in (
        "matmul",
        "mm",
        "bmm",
        "mv",
        "dot",
        "inner",
        "addmm",
        "addmv",
        "addbmm",
        "baddbmm",
        "__matmul__",
        "__rmatmul__",
    ):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    for name in ("matmul", "dot", "inner", "einsum", "tensordot", "vdot"):
        monkeypatch.setattr(numpy, name, refuse)
    monkeypatch.setattr(torch.nn.functional, "linear", refuse)


def test_matmul_and_its_gradients_are_all_ours(monkeypatch: pytest.MonkeyPatch, rng: torch.Generator) -> None:
    input, weight = (
        random((2, 6, 7), torch.float32, rng).requires_grad_(),
        random((7, 8), torch.float32, rng).requires_grad_(),
    )
    expected = torch.autograd.grad(torch.matmul(input, weight).pow(2).sum(), (input, weight))
    with monkeypatch.context() as patched:
        forbid(patched)
        with pytest.raises(AssertionError, match="not ours"):
            _ = input @ weight
        gradients = torch.autograd.grad(matmul(input, weight).pow(2).sum(), (input, weight))
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPE, ids=str)
def test_matmul_without_its_kernel_is_poison(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_module, "launch", lambda plan, tensors: None)
    input = torch.ones(2, 3, 4, dtype=dtype)
    out = matmul(input, torch.ones(4, 5, dtype=dtype))
    assert (out.isnan() if dtype.is_floating_point or dtype.is_complex else out == torch.iinfo(dtype).max).all()
