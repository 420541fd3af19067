"""Torch's own functions on our kernels, for the code inside a `with`: what `CudaModule` runs a forward under.

The functions: matmul (also `@` and `linalg.matmul`), mm, bmm, mv, dot, addmm, addmv, addbmm, baddbmm, `_int_mm`,
einsum, tensordot, `linalg.multi_dot`, chain_matmul, `F.linear`, `F.conv2d`; Tensor methods too.
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

# A parameter's name in torch, for functions and for methods; some have several.
_SELF = ("input", "self")
_OTHER = ("other", "tensor2", "mat2", "vec", "vec2", "tensor")


def _bound(
    func: Callable[..., Any], args: Args, kwargs: Kwargs, *names: Sequence[str], options: Sequence[str] = ()
) -> tuple[list[Any], dict[str, Any]]:
    """The operands, given by position or by whichever name torch has for them, and the options."""
    named = dict(kwargs)
    given = list(args)
    for position, alternatives in enumerate(names):
        if len(given) == position:
            given += [named.pop(name) for name in alternatives if name in named]
    chosen = {name: named.pop(name) for name in options if name in named}
    if named.get("out", True) is None:
        del named["out"]
    if len(given) == len(names) and named:
        raise UnsupportedError(
            f"{func.__name__}({', '.join(named)}=...) cannot run on our kernels yet; "  # 'out' among them
            "leave the argument out, or call it outside of the override"
        )
    if len(given) != len(names):
        func(*args, **kwargs)  # torch raises its own error
        raise TypeError(f"{func.__name__} takes {len(names)} tensors, got {len(given)}")
    return given, chosen


def _refused(func: Callable[..., Any], args: Args, kwargs: Kwargs, shapes: Sequence[torch.Size]) -> RuntimeError:
    """Torch refuses these shapes in its own words; else there is an error of ours."""
    func(*args, **kwargs)
    return RuntimeError(f"{func.__name__} does not take tensors of {', '.join(str(tuple(shape)) for shape in shapes)}")


def _matmul(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    return ops.matmul(*_bound(func, args, kwargs, _SELF, _OTHER)[0])


def _rmatmul(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    (other, first), _ = _bound(func, args, kwargs, _SELF, _OTHER)
    return ops.matmul(first, other)


def _product(*dims: int, product: Callable[..., Any] = ops.matmul) -> Handler:
    """matmul for these numbers of dimensions alone: mm, bmm, mv, dot."""

    def handler(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        (first, second), _ = _bound(func, args, kwargs, _SELF, _OTHER)
        if (first.dim(), second.dim()) != dims or (dims == (3, 3) and first.shape[0] != second.shape[0]):
            raise _refused(func, args, kwargs, (first.shape, second.shape))
        return product(first, second)

    return handler


def _added(first_name: str, second_name: str, *dims: int, batch_summed: bool = False) -> Handler:
    """beta input + alpha first second for these numbers of dimensions alone: addmm, addmv, baddbmm, addbmm."""

    def handler(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        names = (_SELF, (first_name,), (second_name,))
        (residual, first, second), options = _bound(func, args, kwargs, *names, options=("beta", "alpha"))
        fits = (first.dim(), second.dim()) == dims and (dims != (3, 3) or first.shape[0] == second.shape[0])
        if not fits:
            raise _refused(func, args, kwargs, (residual.shape, first.shape, second.shape))
        if batch_summed:  # one long sum over the batch and k
            first, second = first.transpose(0, 1).flatten(1), second.flatten(0, 1)
        return ops.add_product(residual, first, second, **options)

    return handler


def _multi_dot(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    (tensors,), _ = _bound(func, args, kwargs, ("tensors",))
    dims = [x.dim() for x in tensors]
    if len(dims) < 2 or any(dim != 2 for dim in dims[1:-1]) or {dims[0], dims[-1]} - {1, 2}:
        raise _refused(func, args, kwargs, [x.shape for x in tensors])
    return ops.multi_dot(tensors)


def _chain_matmul(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    if kwargs.get("out") is not None or len(args) < 2 or any(x.dim() != 2 for x in args):
        raise _refused(func, args, kwargs, [x.shape for x in args])
    return ops.multi_dot(args)


def _tensordot(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    named = dict(kwargs)
    dims = named.pop("dims", args[2] if len(args) > 2 else 2)
    (first, second), _ = _bound(func, args[:2], named, ("a",), ("b",))
    if isinstance(dims, torch.Tensor):
        dims = dims.tolist()
    return ops.tensordot(first, second, dims)


def _einsum(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    # torch has made an equation of lists of labels before it comes here
    operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    return ops.einsum(args[0], *operands) if len(operands) > 1 else func(*args, **kwargs)  # of one: no product


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
    torch.addmm: ("addmm", _added("mat1", "mat2", 2, 2)),
    torch.Tensor.addmm: ("addmm", _added("mat1", "mat2", 2, 2)),
    torch.addmv: ("addmv", _added("mat", "vec", 2, 1)),
    torch.Tensor.addmv: ("addmv", _added("mat", "vec", 2, 1)),
    torch.addbmm: ("addbmm", _added("batch1", "batch2", 3, 3, batch_summed=True)),
    torch.Tensor.addbmm: ("addbmm", _added("batch1", "batch2", 3, 3, batch_summed=True)),
    torch.baddbmm: ("baddbmm", _added("batch1", "batch2", 3, 3)),
    torch.Tensor.baddbmm: ("baddbmm", _added("batch1", "batch2", 3, 3)),
    torch._int_mm: ("_int_mm", _product(2, 2, product=ops.int_product)),
    torch.einsum: ("einsum", _einsum),
    torch.tensordot: ("tensordot", _tensordot),
    torch.linalg.multi_dot: ("multi_dot", _multi_dot),
    torch.chain_matmul: ("chain_matmul", _chain_matmul),
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
