"""An independent convolution for the tests: NumPy windows, sums wider than what is tested, and the rounding bound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch
from numpy.lib.stride_tricks import sliding_window_view

# What sums are formed in: products of integers wrap as the tested kernels' do, floats have 11 more bits than float64.
_WIDE = {
    torch.float32: numpy.longdouble,
    torch.float64: numpy.longdouble,
    torch.int32: numpy.int64,
    torch.int64: numpy.int64,
}


@dataclass(frozen=True)
class Case:
    """One convolution. `padding` is (top, left, bottom, right)."""

    batch: int = 1
    channels: int = 1
    image: tuple[int, int] = (1, 1)
    filters: int = 1
    taps: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.channels, *self.image)

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        return (self.filters, self.channels // self.groups, *self.taps)

    @property
    def geometry(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
        """As the registered ops take it."""
        return self.stride, self.padding, self.dilation, self.groups

    @property
    def valid(self) -> bool:
        top, left, bottom, right = self.padding
        window = [d * (t - 1) + 1 for d, t in zip(self.dilation, self.taps, strict=True)]
        return self.image[0] + top + bottom >= window[0] and self.image[1] + left + right >= window[1]


def _wide(tensor: torch.Tensor) -> numpy.ndarray:
    return tensor.detach().cpu().numpy().astype(_WIDE[tensor.dtype])


def _windows(case: Case, x: numpy.ndarray) -> numpy.ndarray:
    """`(N, groups, C / groups, P, Q, R, S)`, a view."""
    top, left, bottom, right = case.padding
    x = numpy.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)))
    spans = tuple(d * (t - 1) + 1 for d, t in zip(case.dilation, case.taps, strict=True))
    windows = sliding_window_view(x, spans, axis=(2, 3))
    windows = windows[:, :, :: case.stride[0], :: case.stride[1], :: case.dilation[0], :: case.dilation[1]]
    return windows.reshape(x.shape[0], case.groups, x.shape[1] // case.groups, *windows.shape[2:])


def _by_group(case: Case, y: numpy.ndarray) -> numpy.ndarray:
    return y.reshape(y.shape[0], case.groups, y.shape[1] // case.groups, *y.shape[2:])


def forward(case: Case, x: numpy.ndarray, w: numpy.ndarray) -> numpy.ndarray:
    filters = w.reshape(case.groups, -1, *w.shape[1:])
    y = numpy.einsum("ngcpqrs,gkcrs->ngkpq", _windows(case, x), filters)
    return y.reshape(x.shape[0], w.shape[0], *y.shape[3:])


def weight_grad(case: Case, grad: numpy.ndarray, x: numpy.ndarray) -> numpy.ndarray:
    w = numpy.einsum("ngcpqrs,ngkpq->gkcrs", _windows(case, x), _by_group(case, grad))
    return w.reshape(case.weight_shape)


def input_grad(case: Case, grad: numpy.ndarray, w: numpy.ndarray) -> numpy.ndarray:
    """Scatters where the forward gathers, so it shares nothing with it."""
    top, left, bottom, right = case.padding
    high, wide = case.image
    padded = numpy.zeros((case.batch, case.channels, high + top + bottom, wide + left + right), grad.dtype)
    filters = w.reshape(case.groups, -1, *w.shape[1:])
    p, q = grad.shape[2:]
    for r in range(case.taps[0]):
        for s in range(case.taps[1]):
            part = numpy.einsum("ngkpq,gkc->ngcpq", _by_group(case, grad), filters[..., r, s])
            y, x = r * case.dilation[0], s * case.dilation[1]
            rows = slice(y, y + (p - 1) * case.stride[0] + 1, case.stride[0])
            columns = slice(x, x + (q - 1) * case.stride[1] + 1, case.stride[1])
            padded[:, :, rows, columns] += part.reshape(case.batch, case.channels, p, q)
    return padded[:, :, top : top + high, left : left + wide]


def gamma(terms: int, dtype: torch.dtype) -> float:
    """The constant of the rounding bound of a sum of `terms` products in any order (Higham, section 3.1)."""
    unit = torch.finfo(dtype).eps / 2
    return terms * unit / (1 - terms * unit)


def check(got: torch.Tensor, exact: numpy.ndarray, magnitude: numpy.ndarray, terms: int) -> None:
    """Integers are equal; floats differ, elementwise, by at most gamma_terms times the sum of the magnitudes."""
    assert tuple(got.shape) == exact.shape
    if not got.dtype.is_floating_point:
        expected = torch.from_numpy(exact.astype(numpy.int64)).to(got.dtype)
        assert torch.equal(got, expected)
        return
    error = numpy.abs(_wide(got) - exact)
    bound = gamma(terms, got.dtype) * magnitude
    worst = numpy.unravel_index(numpy.argmax(error - bound), error.shape) if error.size else ()
    assert bool((error <= bound).all()), f"at {worst}: error {error[worst]}, bound {bound[worst]}"


def check_forward(
    case: Case, got: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    x, w = _wide(input), _wide(weight)
    exact, magnitude = forward(case, x, w), forward(case, numpy.abs(x), numpy.abs(w))
    if bias is not None:
        exact = exact + _wide(bias)[:, None, None]
        magnitude = magnitude + numpy.abs(_wide(bias))[:, None, None]
    check(got, exact, magnitude, x.shape[1] // case.groups * case.taps[0] * case.taps[1] + 1)


def check_input_grad(case: Case, got: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor) -> None:
    g, w = _wide(grad), _wide(weight)
    terms = case.filters // case.groups * case.taps[0] * case.taps[1]
    check(got, input_grad(case, g, w), input_grad(case, numpy.abs(g), numpy.abs(w)), terms)


def check_weight_grad(case: Case, got: torch.Tensor, grad: torch.Tensor, input: torch.Tensor) -> None:
    g, x = _wide(grad), _wide(input)
    terms = max(1, g.shape[0] * g.shape[2] * g.shape[3])
    check(got, weight_grad(case, g, x), weight_grad(case, numpy.abs(g), numpy.abs(x)), terms)


def make(shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool = False) -> torch.Tensor:
    """Fresh random elements; integers over their whole range, so that sums wrap."""
    if dtype.is_floating_point:
        tensor = torch.randn(shape, dtype=torch.float64).to(dtype)
    else:
        limits = torch.iinfo(dtype)
        tensor = torch.randint(limits.min, limits.max, shape, dtype=dtype)
    return tensor.to(memory_format=torch.channels_last) if channels_last else tensor
