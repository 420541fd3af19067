"""`matmul`: every shape torch.matmul takes, on kernels/matmul_simt.cu."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from cudaops.errors import LaunchError, UnsupportedError
from cudaops.launch import arch_of, launch, spec_of
from cudaops.ops import library
from cudaops.ops.matmul_configs import MATMUL_CONFIGS, PACK_BYTES, MatmulConfig, is_legal
from cudaops.plan import DTYPES, MAX_GRID, KernelSource, LaunchConfig, Plan, TensorSpec

__all__ = ["MATMUL_CONFIGS", "matmul", "plan_matmul"]


def matmul(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The matrix product, as `torch.matmul`.

    Arguments:
        input: `(K)`, `(M, K)` or `(*, M, K)`, any strides.
        other: `(K)`, `(K, N)` or `(*, K, N)`; leading dimensions broadcast, and a 1-d side adds no dimension to the
            result. Both of one dtype (float32, float64, int32, int64), on one device.

    Returns:
        A new contiguous tensor. Each element is the sum of its products in order of K, each added by one fused
        multiply-add; integers wrap.

    Raises:
        TypeError: an argument is no tensor.
        RuntimeError: shapes, dtypes or devices do not fit together.
        UnsupportedError: no kernel for the dtype or the device.
    """
    if not (isinstance(input, torch.Tensor) and isinstance(other, torch.Tensor)):
        library.check_tensors("matmul", input=input, other=other)
    if library.transforms_active():
        return _TransformedMatmul.apply(input, other)  # type: ignore[no-any-return]
    return _op(input, other)  # type: ignore[no-any-return]


# ---- shapes ----


def result_shape(input: Sequence[Any], other: Sequence[Any], op: str = "matmul") -> tuple[Any, ...]:
    """The shape of the product; sizes may be symbolic.

    Raises:
        RuntimeError: they cannot be multiplied.
    """
    if not input or not other:
        raise RuntimeError(
            f"both arguments to {op} need to be at least 1D, but they are {len(input)}D and {len(other)}D; "
            "multiply by a scalar with torch.mul"
        )
    inner = other[-2] if len(other) > 1 else other[0]
    if input[-1] != inner:
        rows = input[-2] if len(input) > 1 else 1
        columns = other[-1] if len(other) > 1 else 1
        raise RuntimeError(
            f"{op}: mat1 and mat2 shapes cannot be multiplied ({rows}x{input[-1]} and {inner}x{columns}), from "
            f"{tuple(input)} and {tuple(other)}: the last size of the first must be the "
            f"{'second to last' if len(other) > 1 else 'only'} size of the second"
        )
    batch = _broadcast(input[:-2], other[:-2], op)
    return (*batch, *input[-2:-1], *(other[-1:] if len(other) > 1 else ()))


def _broadcast(left: Sequence[Any], right: Sequence[Any], op: str) -> tuple[Any, ...]:
    rank = max(len(left), len(right))
    left, right = (1,) * (rank - len(left)) + tuple(left), (1,) * (rank - len(right)) + tuple(right)
    for dim, (a, b) in enumerate(zip(left, right, strict=True)):
        if a != b and a != 1 and b != 1:
            raise RuntimeError(
                f"{op}: the size of tensor a ({a}) must match the size of tensor b ({b}) at non-singleton batch "
                f"dimension {dim}; batch dimensions are equal, or one of them is 1"
            )
    return tuple(b if a == 1 else a for a, b in zip(left, right, strict=True))


# ---- plan ----

_INT_MAX = 2**31 - 1 - 1024  # leaves room for a tile beyond the end
_MAX_BATCH_DIMS = 3
_RASTER_ROWS = 8  # tile rows that neighbouring blocks share, as in the kernel

# SMs of the largest common GPU of an arch. Only the choice of tile depends on them, never a result.
_SM_COUNTS = {
    "sm_75": 72,
    "sm_80": 108,
    "sm_86": 84,
    "sm_89": 128,
    "sm_90": 132,
    "sm_100": 148,
    "sm_103": 148,
    "sm_120": 170,
}


@dataclass(frozen=True, slots=True)
class _Operand:
    """One matrix of the product: `outer` is M or N. Strides in elements, 0 where the size is 1 or broadcast."""

    outer: int
    outer_stride: int
    k_stride: int
    batch: tuple[int, ...]
    alignment: int


@dataclass(frozen=True, slots=True)
class _Load:
    """How a tile of an operand is read: along which dimension, how many elements at once, whether its stride is 1."""

    k_fast: bool
    width: int
    unit: bool

    def __str__(self) -> str:
        way = "k" if self.k_fast else "rows"
        return f"along {way} by {self.width}" + ("" if self.unit else ", strided")


@dataclass(frozen=True, slots=True)
class _Problem:
    """A product with its batch dimensions merged as far as strides allow."""

    a: _Operand
    b: _Operand
    k: int
    sizes: tuple[int, ...]  # of the batch dimensions
    c_m: int
    c_n: int

    @property
    def batches(self) -> int:
        return math.prod(self.sizes)

    def swapped(self) -> _Problem:
        """The transposed product, c^T = b^T a^T."""
        return _Problem(self.b, self.a, self.k, self.sizes, self.c_n, self.c_m)


def plan_matmul(
    input: TensorSpec,
    other: TensorSpec,
    bias: TensorSpec | None = None,
    *,
    arch: str,
    activation: str | None = None,
    config: str | None = None,
    op: str = "matmul",
) -> Plan:
    """Plan one launch of matmul_simt: tensors (out, input, other, bias), out contiguous; without a bias any in its place.

    Arguments:
        input, other: as `matmul` takes them; the product must not be empty (K may be 0).
        bias: `(N)` or one element, added to every row.
        arch: `'sm_80'`.
        activation: None or `'relu'`.
        config: the name of one of MATMUL_CONFIGS; None chooses.
        op: the name the plan goes by.

    Raises:
        RuntimeError: shapes do not fit together.
        UnsupportedError: no kernel for the dtype or activation.
        LaunchError: `config` is unknown or cannot be had for this dtype; more batch dimensions than the kernel takes.
    """
    if input.dtype not in DTYPES:
        raise UnsupportedError(f"{op}: no kernel for {input.dtype}; there is one for {', '.join(DTYPES)}")
    itemsize, ctype = DTYPES[input.dtype]
    activations = {None: 0, "relu": 1}
    if activation not in activations:
        raise UnsupportedError(f"{op}: activation {activation!r} is not in the kernel; it has None and 'relu'")
    problem = _problem(input, other, op)
    if len(problem.sizes) > _MAX_BATCH_DIMS:
        raise LaunchError(
            f"{op}: {len(problem.sizes)} batch dimensions that cannot be merged, the kernel takes {_MAX_BATCH_DIMS}; "
            "make the operands contiguous"
        )
    chosen, swap = _choose(problem, itemsize, arch, config, op)
    if swap:
        problem = problem.swapped()
    a, b = problem.a, problem.b
    pack = PACK_BYTES // itemsize
    load_a, load_b = _load(a, problem.k, pack), _load(b, problem.k, pack)
    run = chosen.run(itemsize)
    store_width = run if problem.c_n == 1 and b.outer % run == 0 else 1
    blocks = _blocks(chosen, problem)
    bias_stride = bias.strides[-1] if bias is not None and bias.shape and bias.shape[-1] > 1 else 0
    sizes = (1,) * (_MAX_BATCH_DIMS - len(problem.sizes)) + problem.sizes
    small = (
        a.outer,
        b.outer,
        problem.k,
        a.outer_stride,
        a.k_stride,
        b.k_stride,
        b.outer_stride,
        problem.c_m,
        problem.c_n,
    )
    fits = max(*small, bias_stride, blocks * _RASTER_ROWS, problem.batches) <= _INT_MAX
    grid_y = -(-blocks // MAX_GRID[0])
    defines = {
        "ELEMENT": ctype,
        "INDEX": "int" if fits else "long long",
        "BM": chosen.bm,
        "BN": chosen.bn,
        "BK": chosen.bk_at(itemsize),
        "TM": chosen.tm,
        "TN": chosen.tn,
        "LANES_N": chosen.lanes_n,
        "MIN_BLOCKS": chosen.blocks_per_sm_at(itemsize),
        "A_K_FAST": int(load_a.k_fast),
        "A_WIDTH": load_a.width,
        "A_UNIT": int(load_a.unit),
        "B_K_FAST": int(load_b.k_fast),
        "B_WIDTH": load_b.width,
        "B_UNIT": int(load_b.unit),
        "C_WIDTH": store_width,
        "BIAS": 0 if bias is None else 2 if swap else 1,
        "ACTIVATION": activations[activation],
        "SWAP": int(swap),
    }
    fill = (0,) * (_MAX_BATCH_DIMS - len(problem.sizes))
    scalars = (
        *(a.outer_stride, a.k_stride, b.k_stride, b.outer_stride, problem.c_m, problem.c_n, bias_stride),
        *fill,
        *a.batch,
        *fill,
        *b.batch,
        a.outer * b.outer,
        *sizes[1:],
        problem.batches,
        *(a.outer, b.outer, problem.k),
    )
    reason = (
        f"{chosen.name} tile{' of the transposed product' if swap else ''}, {chosen.tm}x{chosen.tn} a thread: "
        f"{blocks} blocks for {_sm_count(arch)} SMs; a {load_a}, b {load_b}, c by {store_width}"
    )
    return Plan(
        op=op,
        source=KernelSource(
            "matmul_simt.cu", "matmul_simt", tuple((name, str(value)) for name, value in defines.items())
        ),
        config=LaunchConfig((-(-blocks // grid_y), grid_y, 1), (chosen.threads, 1, 1)),
        scalars=scalars,
        reason=reason,
    )


def _problem(input: TensorSpec, other: TensorSpec, op: str) -> _Problem:
    result_shape(input.shape, other.shape, op)
    a_shape, a_strides = (
        ((1, *input.shape), (0, *input.strides)) if len(input.shape) == 1 else (input.shape, input.strides)
    )
    b_shape, b_strides = (
        ((*other.shape, 1), (*other.strides, 0)) if len(other.shape) == 1 else (other.shape, other.strides)
    )
    sizes = _broadcast(a_shape[:-2], b_shape[:-2], op)
    batch = [
        dim
        for dim in zip(
            sizes,
            _batch_strides(a_shape[:-2], a_strides[:-2], len(sizes)),
            _batch_strides(b_shape[:-2], b_strides[:-2], len(sizes)),
            strict=True,
        )
        if dim[0] != 1
    ]
    (m, k), n = a_shape[-2:], b_shape[-1]
    a_m = a_strides[-2] if m > 1 else 0
    # Batches that share b and continue a's rows are more rows: one larger product, with b read once.
    while batch and batch[-1][2] == 0 and (m == 1 or batch[-1][1] == m * a_m):
        size, a_batch, _ = batch.pop()
        a_m = a_m if m > 1 else a_batch
        m *= size
    merged: list[tuple[int, int, int]] = []
    for size, a_stride, b_stride in reversed(batch):
        if merged:
            inner_size, inner_a, inner_b = merged[-1]
            if a_stride == inner_size * inner_a and b_stride == inner_size * inner_b:
                merged[-1] = (size * inner_size, inner_a, inner_b)
                continue
        merged.append((size, a_stride, b_stride))
    merged.reverse()
    return _Problem(
        _Operand(m, a_m, a_strides[-1] if k > 1 else 0, tuple(dim[1] for dim in merged), input.alignment),
        _Operand(
            n,
            b_strides[-1] if n > 1 else 0,
            b_strides[-2] if k > 1 else 0,
            tuple(dim[2] for dim in merged),
            other.alignment,
        ),
        k,
        tuple(dim[0] for dim in merged),
        n,
        1,
    )


def _batch_strides(shape: tuple[int, ...], strides: tuple[int, ...], rank: int) -> tuple[int, ...]:
    own = tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))
    return (0,) * (rank - len(own)) + own


def _load(operand: _Operand, k: int, pack: int) -> _Load:
    if operand.k_stride == 1:
        k_fast, extent, slow_stride = True, k, operand.outer_stride
    elif operand.outer_stride == 1:
        k_fast, extent, slow_stride = False, operand.outer, operand.k_stride
    else:
        outer = operand.outer_stride or math.inf  # 0: nothing to run along
        return _Load((operand.k_stride or math.inf) < outer, 1, False)
    aligned = operand.alignment >= PACK_BYTES and not any(n % pack for n in (extent, slow_stride, *operand.batch))
    return _Load(k_fast, pack if aligned else 1, True)


def _choose(problem: _Problem, itemsize: int, arch: str, name: str | None, op: str) -> tuple[MatmulConfig, bool]:
    legal = [config for config in MATMUL_CONFIGS if is_legal(config, itemsize)]
    if name is not None:
        legal = [config for config in legal if config.name == name]
        if not legal:
            known = ", ".join(config.name for config in MATMUL_CONFIGS if is_legal(config, itemsize))
            raise LaunchError(f"{op}: no configuration {name!r} for elements of {itemsize} bytes; there is {known}")
    # of equals: the least work, then as given, then the larger tile
    return min(
        ((config, swap) for swap in (False, True) for config in legal),
        key=lambda choice: _cost(choice[0], problem.swapped() if choice[1] else problem, arch),
    )


def _blocks(config: MatmulConfig, problem: _Problem) -> int:
    return -(-problem.a.outer // config.bm) * -(-problem.b.outer // config.bn) * problem.batches


def _cost(config: MatmulConfig, problem: _Problem, arch: str) -> tuple[float, int]:
    """Time of the busiest SM, which gets its share of the blocks, rounded up; then the work of all. Both in outputs."""
    blocks = _blocks(config, problem)
    rounds = -(-blocks // _sm_count(arch))
    return rounds * config.bm * config.bn / config.speed, blocks * config.bm * config.bn


def _sm_count(arch: str) -> int:
    return _SM_COUNTS.get(arch.rstrip("af"), _SM_COUNTS["sm_80"])


# ---- run ----


@lru_cache(maxsize=4096)
def _prepared(input: TensorSpec, other: TensorSpec, arch: str) -> tuple[tuple[int, ...], Plan | None]:
    """The result's shape, and the plan unless there is nothing to add up."""
    shape = result_shape(input.shape, other.shape)
    if 0 in shape or input.shape[-1] == 0:
        return shape, None
    return shape, plan_matmul(input, other, arch=arch)


def _kernel(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    library.check_together("matmul", input, other)
    input, other = few_batch_dims(input, other)
    shape, plan = _prepared(spec_of(input), spec_of(other), arch_of(input.device))
    out = input.new_empty(shape)
    if plan is None:
        return out.zero_()
    launch(plan, (out, input, other, input))
    return out


def few_batch_dims(input: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The operands, copied where they broadcast in more dimensions than the kernel's addressing has."""
    if max(input.dim(), other.dim()) - 2 <= _MAX_BATCH_DIMS or input.dim() < 3 or other.dim() < 3:
        return input, other
    if (
        0 in input.shape
        or 0 in other.shape
        or len(_problem(spec_of(input), spec_of(other), "matmul").sizes) <= _MAX_BATCH_DIMS
    ):
        return input, other
    batch = torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])
    return (
        input.expand(*batch, *input.shape[-2:]).contiguous(),
        other.expand(*batch, *other.shape[-2:]).contiguous(),
    )


# ---- fake ----


def _fake(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    library.check_together("matmul", input, other)
    return input.new_empty(result_shape(input.shape, other.shape))


# ---- autograd ----


class _Matmul(torch.autograd.Function):
    """The product at the Autograd key."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input, other)
        with library.below_autograd():
            return _op(input, other)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return _gradients(ctx, grad)


class _TransformedMatmul(torch.autograd.Function):
    """The product under torch.func transforms, which want the context set up apart, and a rule for vmap.

    There is no jvp, so forward-mode AD raises.
    """

    @staticmethod
    def forward(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return _op(input, other)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return _gradients(ctx, grad)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, int | None], input: torch.Tensor, other: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        return matmul_batched(matmul, in_dims, input, other), 0


def _autograd(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if library.needs_autograd(input, other):
        return _Matmul.apply(input, other)  # type: ignore[no-any-return]
    with library.below_autograd():
        return _op(input, other)  # type: ignore[no-any-return]


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    input, other = ctx.saved_tensors
    return (
        gradient_of_left(grad, input, other) if ctx.needs_input_grad[0] else None,
        gradient_of_right(grad, input, other) if ctx.needs_input_grad[1] else None,
    )


def gradient_of_left(grad: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The gradient of a product's left operand, in its shape, and in its strides where that is a transposed matrix."""
    grad, left_2d, right_2d = _as_matrices(grad, left, right)
    return _reduced(grad, right_2d.mT, left_2d, columns_first=_is_transposed(left)).reshape(left.shape)


def gradient_of_right(grad: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The gradient of a product's right operand, likewise."""
    grad, left_2d, right_2d = _as_matrices(grad, left, right)
    return _reduced(left_2d.mT, grad, right_2d, columns_first=_is_transposed(right)).reshape(right.shape)


def _as_matrices(
    grad: torch.Tensor, left: torch.Tensor, right: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if right.dim() == 1:
        grad, right = grad.unsqueeze(-1), right.unsqueeze(-1)
    if left.dim() == 1:
        grad, left = grad.unsqueeze(-2), left.unsqueeze(-2)
    return grad, left, right


def _is_transposed(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 2 and tensor.stride(0) == 1 and tensor.stride(1) != 1


def _reduced(a: torch.Tensor, b: torch.Tensor, like: torch.Tensor, columns_first: bool) -> torch.Tensor:
    """`a @ b` summed over the batch dimensions that `like` was broadcast along.

    Where `like` is one matrix the sum is part of the product: (batch, k) is one long k.
    """
    if like.dim() == 2 and max(a.dim(), b.dim()) > 2:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        rows, columns = a.shape[-2], b.shape[-1]
        a = a.expand(*batch, *a.shape[-2:]).movedim(-2, 0).reshape(rows, -1)
        b = b.expand(*batch, *b.shape[-2:]).reshape(-1, columns)
    if columns_first:
        return matmul(b.mT, a.mT).mT
    product = matmul(a, b)
    return product if product.shape == like.shape else product.sum_to_size(like.shape)


def matmul_batched(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    in_dims: tuple[int | None, int | None],
    input: torch.Tensor,
    other: torch.Tensor,
) -> torch.Tensor:
    """The product under vmap, whose dimension comes first in the result.

    It is one more batch dimension, broadcast where a side has none.
    """
    vector_left = input.dim() - (in_dims[0] is not None) == 1
    vector_right = other.dim() - (in_dims[1] is not None) == 1
    input = input.movedim(in_dims[0], 0) if in_dims[0] is not None else input.unsqueeze(0)
    other = other.movedim(in_dims[1], 0) if in_dims[1] is not None else other.unsqueeze(0)
    input = input.unsqueeze(-2) if vector_left else input
    other = other.unsqueeze(-1) if vector_right else other
    rank = max(input.dim(), other.dim())
    input = input.reshape(input.shape[0], *(1,) * (rank - input.dim()), *input.shape[1:])
    other = other.reshape(other.shape[0], *(1,) * (rank - other.dim()), *other.shape[1:])
    out = product(input, other)
    out = out.squeeze(-1) if vector_right else out
    return out.squeeze(-1 if vector_right else -2) if vector_left else out


def _vmap(
    info: Any, in_dims: tuple[int | None, int | None], input: torch.Tensor, other: torch.Tensor
) -> tuple[torch.Tensor, int]:
    return matmul_batched(_op, in_dims, input, other), 0


_op = library.define(
    "matmul(Tensor input, Tensor other) -> Tensor", kernel=_kernel, fake=_fake, autograd=_autograd, vmap=_vmap
)
