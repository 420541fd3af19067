"""Torch's own functions on our kernels, for the code inside a `with`: what `CudaModule` runs a forward under.

The functions: matmul (also `@` and `linalg.matmul`), mm, bmm, mv, dot, `F.linear`, `F.conv2d`; Tensor methods too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from cudaops import ops
from cudaops.errors import UnsupportedError

Args = Sequence[Any]
Kwargs = Mapping[str, Any]
Handler = Callable[[Callable[..., Any], Args, Kwargs], Any]

_FIRST = ("input", "self")
_SECOND = ("other", "tensor2", "mat2", "vec", "vec2", "tensor")


def _operands(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> tuple[torch.Tensor, torch.Tensor]:
    """The two operands, given by position or by whichever name torch has for them."""
    named = dict(kwargs)
    given = list(args)
    for position, names in enumerate((_FIRST, _SECOND)):
        if len(given) == position:
            given += [named.pop(name) for name in names if name in named]
    if len(given) != 2 or named.get("out") is not None or set(named) - {"out"}:
        if len(given) == 2 and named:
            raise UnsupportedError(
                f"{func.__name__}({', '.join(named)}=...) cannot run on our kernels yet; "  # 'out' among them
                "leave the argument out, or call it outside of the override"
            )
        func(*args, **kwargs)  # torch raises its own error
        raise TypeError(f"{func.__name__} takes two tensors, got {len(given)}")
    return given[0], given[1]


def _matmul(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    return ops.matmul(*_operands(func, args, kwargs))


def _rmatmul(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    other, first = _operands(func, args, kwargs)
    return ops.matmul(first, other)


def _product(*dims: int) -> Handler:
    """matmul for these numbers of dimensions alone: mm, bmm, mv, dot. Torch refuses the others, in its own words."""

    def handler(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        first, second = _operands(func, args, kwargs)
        if (first.dim(), second.dim()) != dims or (dims == (3, 3) and first.shape[0] != second.shape[0]):
            func(*args, **kwargs)
            raise RuntimeError(
                f"{func.__name__} takes {dims[0]}-d and {dims[1]}-d tensors, got {first.shape}, {second.shape}"
            )
        return ops.matmul(first, second)

    return handler


def _linear(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    return ops.linear(*args, **kwargs)


def _conv2d(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    return ops.conv2d(*args, **kwargs)


_HANDLERS: dict[Callable[..., Any], tuple[str, Handler]] = {
    torch.matmul: ("matmul", _matmul),
    torch.linalg.matmul: ("matmul", _matmul),
    torch.Tensor.matmul: ("matmul", _matmul),  # `a @ b` too
    torch.Tensor.__rmatmul__: ("matmul", _rmatmul),
    torch.mm: ("mm", _product(2, 2)),
    torch.Tensor.mm: ("mm", _product(2, 2)),
    torch.bmm: ("bmm", _product(3, 3)),
    torch.Tensor.bmm: ("bmm", _product(3, 3)),
    torch.mv: ("mv", _product(2, 1)),
    torch.Tensor.mv: ("mv", _product(2, 1)),
    torch.dot: ("dot", _product(1, 1)),
    torch.Tensor.dot: ("dot", _product(1, 1)),
    functional.linear: ("linear", _linear),
    functional.conv2d: ("conv2d", _conv2d),
}


class override(TorchFunctionMode):  # noqa: N801  it reads as a statement: `with override() as o:`
    """Within it the functions of this file run on our kernels, with gradients; `o.calls` counts them by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        name, handler = _HANDLERS.get(func, (None, None))
        if handler is None or name is None:
            return func(*args, **(kwargs or {}))
        result = handler(func, args, kwargs or {})
        self.calls[name] += 1
        return result
