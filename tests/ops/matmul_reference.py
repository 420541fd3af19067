"""An independent matrix product for the tests, and the rounding bound that holds for any order of summation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy
import torch
from torch.nn import functional

# What the reference is formed in: integers wrap as the tested kernels' do, floats are wider than what is tested.
_WIDE = {
    torch.float16: numpy.float64,
    torch.bfloat16: numpy.float64,
    torch.float32: numpy.float64,
    torch.float64: numpy.longdouble,
    torch.complex64: numpy.complex128,
    torch.complex128: numpy.clongdouble,
    torch.int8: numpy.int8,
    torch.uint8: numpy.uint8,
    torch.int16: numpy.int16,
    torch.int32: numpy.int32,
    torch.int64: numpy.int64,
}


def random(shape: tuple[int, ...], dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    """Normal numbers, or integers from the whole range, so that their products wrap."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=rng, dtype=dtype)
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max, shape, generator=rng, dtype=dtype)


def matrix(rows: int, columns: int, dtype: torch.dtype, rng: torch.Generator, layout: str = "rows") -> torch.Tensor:
    """A random matrix: `'rows'` or `'columns'` contiguous, or `'strided'` along both."""
    if layout == "columns":
        return random((columns, rows), dtype, rng).t()
    if layout == "strided":
        return random((rows, 2, columns, 3), dtype, rng)[:, 1, :, 2]
    return random((rows, columns), dtype, rng)


def wide(x: torch.Tensor) -> numpy.ndarray:
    """As the type that the reference is formed in."""
    plain = x.detach().resolve_conj().resolve_neg()
    return (plain.double() if x.dtype == torch.bfloat16 else plain).numpy().astype(_WIDE[x.dtype])


# In float64, and the most that each makes of an error in what goes in.
ACTIVATIONS: dict[str | None, tuple[Callable[[torch.Tensor], torch.Tensor], float]] = {
    None: (lambda x: x, 1.0),
    "relu": (torch.relu, 1.0),
    "gelu": (functional.gelu, 1.13),
    "gelu_tanh": (partial(functional.gelu, approximate="tanh"), 1.13),
    "silu": (functional.silu, 1.1),
    "sigmoid": (torch.sigmoid, 0.25),
    "tanh": (torch.tanh, 1.0),
}
_ACTIVATION_ULP = 4  # of the input or 1: erff 2, tanhf 2, expf 2, and a division (CUDA C++ Programming Guide, appendix)


def as_tf32(x: torch.Tensor) -> torch.Tensor:
    """What the tensor cores read of float32: the top 19 bits."""
    return (x.contiguous().view(torch.int32) & -0x2000).view(torch.float32)


def check(
    out: torch.Tensor,
    input: torch.Tensor,
    other: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    alpha: float = 1,
    beta: float = 1,
) -> None:
    """`out` is `activation(alpha input @ other + beta residual + bias)`: integers exactly; floats, for K products and
    what is added, within gamma_(K + 4) (|alpha| |input| @ |other| + |beta| |residual| + |bias|), gamma_k =
    k u / (1 - k u) (Higham, "Accuracy and Stability of Numerical Algorithms", 3.1: for every order of summation), that
    times what the activation makes of it and its own error, and the rounding of halves, which are computed in float32.

    A complex product is four real ones, two of which make each part: its bound is that of 2 K products.
    """
    floating = out.dtype.is_floating_point or out.dtype.is_complex
    a, b, c = (wide(x) if floating else wide(x).astype(_WIDE[out.dtype]) for x in (input, other, out))
    with numpy.errstate(over="ignore"):
        expected = numpy.asarray(numpy.matmul(a, b))
        size = abs(alpha) * numpy.matmul(abs(a), abs(b)) if floating else 0
        expected = expected if alpha == 1 else expected * numpy.asarray(alpha).astype(expected.dtype)
        for extra, factor in ((residual, beta), (bias, 1)):
            if extra is not None:
                added = wide(extra)
                expected = expected + (added if factor == 1 else added * numpy.asarray(factor).astype(added.dtype))
                size = size + abs(factor * added) if floating else 0
    assert c.shape == expected.shape
    if not floating:
        numpy.testing.assert_array_equal(c, numpy.maximum(expected, 0) if activation == "relu" else expected)
        return
    info = torch.finfo(out.dtype)
    half = out.dtype.itemsize == 2
    eps = 2.0**-23 if half else info.eps
    terms = (input.shape[-1] * (2 if out.dtype.is_complex else 1) + 4) * eps / 2
    bound = terms / (1 - terms) * size * (2**0.5 if out.dtype.is_complex else 1)
    if activation is not None:
        activate, lipschitz = ACTIVATIONS[activation]
        before = expected
        expected = activate(torch.from_numpy(numpy.asarray(before, numpy.float64))).numpy()
        bound = lipschitz * bound
        if activation != "relu":
            bound = bound + _ACTIVATION_ULP * eps * (abs(before) + 1)
    if half:
        bound = bound + info.eps / 2 * (abs(expected) + bound) + info.smallest_normal * info.eps / 2
    wrong = ~(abs(c - expected) <= bound)
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} outside the bound, first at {tuple(numpy.argwhere(wrong)[0])}: "
        f"got {c[wrong][0]}, expected {expected[wrong][0]} +- {bound[wrong][0]}"
    )


def check_special(out: torch.Tensor, expected: torch.Tensor) -> None:
    """NaN and the infinities are where they are in `expected`, and nowhere else."""
    for part, ours, theirs in (
        ("real", out, expected),
        *([("imaginary", out.imag, expected.imag)] if out.is_complex() else []),
    ):
        ours, theirs = (x.real if part == "real" and x.is_complex() else x for x in (ours, theirs))
        special = ~theirs.isfinite()
        assert special.any(), "nothing special here"
        assert torch.equal(special, ~ours.isfinite()), part
        assert torch.equal(ours[special].nan_to_num(nan=7.0), theirs[special].nan_to_num(nan=7.0)), part
