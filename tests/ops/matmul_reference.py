"""An independent matrix product for the tests, and the rounding bound that holds for any order of summation."""

from __future__ import annotations

import numpy
import torch

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


def check(
    out: torch.Tensor,
    input: torch.Tensor,
    other: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    relu: bool = False,
) -> None:
    """`out` is `input @ other (+ bias)`: integers exactly; floats, for K products and a bias, within
    gamma_(K + 1) (|input| @ |other| + |bias|), gamma_k = k u / (1 - k u) (Higham, "Accuracy and Stability of Numerical
    Algorithms", 3.1: for every order of summation), and the rounding of halves, which are added up in float32.

    A complex product is four real ones, two of which make each part: its bound is that of 2 K products.
    """
    a, b, c = wide(input), wide(other), wide(out)
    add = 0 if bias is None else wide(bias)
    with numpy.errstate(over="ignore"):
        expected = numpy.matmul(a, b) + add
    if relu:
        expected = numpy.maximum(expected, 0)
    assert c.shape == expected.shape
    assert out.dtype == input.dtype
    if not (out.dtype.is_floating_point or out.dtype.is_complex):
        numpy.testing.assert_array_equal(c, expected)
        return
    info = torch.finfo(out.dtype)
    half = out.dtype.itemsize == 2
    terms = (input.shape[-1] * (2 if out.dtype.is_complex else 1) + 1) * (2.0**-23 if half else info.eps) / 2
    bound = terms / (1 - terms) * (numpy.matmul(abs(a), abs(b)) + abs(add)) * (2**0.5 if out.dtype.is_complex else 1)
    if half:
        bound = bound + info.eps / 2 * (abs(expected) + bound) + info.smallest_normal * info.eps / 2
    wrong = ~(abs(c - expected) <= bound)
    assert not wrong.any(), (
        f"{wrong.sum()} of {wrong.size} outside the bound, first at {tuple(numpy.argwhere(wrong)[0])}: "
        f"got {c[wrong][0]}, expected {expected[wrong][0]} +- {bound[wrong][0]}"
    )
