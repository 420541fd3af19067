"""The `cudaops` operator library: where every op is registered, and what the registrations share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad

from cudaops.errors import UnsupportedError
from cudaops.plan import DTYPES

NAMESPACE = "cudaops"

# Owned for the life of the process: registrations vanish with the object.
LIBRARY = torch.library.Library(NAMESPACE, "DEF")

# Inductor must hand over the strides that the fake kernel saw: plans are made from strides.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def define(
    schema: str,
    *,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    autograd: Callable[..., Any],
    vmap: Callable[..., Any] | None = None,
    autocast: bool = False,
    views: bool = False,
) -> Any:
    """Register one op and return its overload, `torch.ops.cudaops.<name>.default`.

    Arguments:
        schema: name and signature, in torch's schema language.
        kernel: the implementation for CPU and CUDA tensors alike; where the tensors are decides where it runs.
        fake: shapes, strides and dtypes of the results, and every error about them; also serves meta tensors.
        autograd: the implementation at the Autograd key; see `needs_autograd`.
        vmap: the batching rule, as torch.library.register_vmap takes it; it calls ops, not functions.
        autocast: under torch.autocast its floating tensors are cast, as those of torch's products are.
        views: `kernel` takes conj and neg views; else torch resolves them first, by a copy.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=_TAGS)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    LIBRARY.impl(name, autograd, "Autograd")
    if vmap is not None:
        torch.library.register_vmap(f"{NAMESPACE}::{name}", vmap, lib=LIBRARY)
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    if autocast:
        for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
            LIBRARY.impl(name, _autocast(op, device, key), key)
    if views:
        for key in ("Conjugate", "Negative"):
            LIBRARY.impl(name, torch.library.fallthrough_kernel, key)
    return op


def _autocast(op: Any, device: str, key: str) -> Callable[..., Any]:
    below = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(x: Any) -> Any:
        eligible = isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64
        return x.to(torch.get_autocast_dtype(device)) if eligible else x

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(below):
            return op(*map(cast, args), **{name: cast(x) for name, x in kwargs.items()})

    return run


def reads_tf32(tensor: torch.Tensor) -> bool:
    """Whether torch lets products of this tensor be made in tf32: only on a GPU, by the flags of its CUDA backend."""
    if not tensor.is_cuda or tensor.dtype != torch.float32:
        return False
    flags = torch.backends.cuda.matmul
    precision = getattr(flags, "fp32_precision", None)  # to read both ways of asking is an error
    return flags.allow_tf32 if precision is None else precision == "tf32"


def needs_autograd(*tensors: torch.Tensor | None) -> bool:
    """Whether a call must go through its autograd.Function.

    Also inside a forward-mode level: the Function has no jvp, so torch raises there; without it tangents would be lost
    silently.
    """
    if forward_ad._current_level >= 0:
        return True
    if not torch.is_grad_enabled():
        return False
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def plain(*tensors: torch.Tensor | None) -> bool:
    """Whether a call may go to its kernel directly, because nothing that the dispatcher does is wanted: no gradient, no
    subclass, mode, transform, cast, trace, or view to resolve.

    The dispatcher takes more time than all else that is done before a launch.
    """
    if (
        torch.compiler.is_compiling()  # first: what traces this does not look at the rest
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._is_any_autocast_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.profiler._is_profiler_enabled
        or needs_autograd(*tensors)
    ):
        return False
    return all(
        type(x) in _PLAIN and (x.is_cpu or x.is_cuda) and not (x.is_conj() or x.is_neg())
        for x in tensors
        if x is not None
    )


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All that a plan and an output depend on, quick to make and to look up."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() & 15


def below_autograd() -> Any:
    """A context in which an op's call skips the Autograd key."""
    return torch._C._AutoDispatchBelowAutograd()


def transforms_active() -> bool:
    """Whether a torch.func transform (grad, vmap, jvp, ...) is running; while torch.compile traces, it handles them."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def check_tensors(op: str, **arguments: object) -> None:
    """Refuse an argument that is no tensor, in torch's words.

    Raises:
        TypeError: as torch's own functions.
    """
    for position, (name, value) in enumerate(arguments.items(), start=1):
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{op}(): argument '{name}' (position {position}) must be Tensor, not {type(value).__name__}"
            )


def check_together(op: str, *tensors: torch.Tensor, dtypes: Iterable[str] = DTYPES) -> None:
    """Refuse tensors on different devices, of different dtypes, or of a dtype that is not in `dtypes`.

    Raises:
        RuntimeError: devices or dtypes differ.
        UnsupportedError: no kernel for the dtype.
    """
    first = tensors[0]
    for tensor in tensors[1:]:
        if tensor.device != first.device:
            raise RuntimeError(
                f"{op}: expected all tensors to be on the same device, but found at least two devices, {first.device} "
                f"and {tensor.device}; move one with .to('{first.device}')"
            )
        if tensor.dtype != first.dtype:
            raise RuntimeError(
                f"{op}: expected all tensors to have the same dtype, but got {first.dtype} and {tensor.dtype}; "
                f"convert one with .to({first.dtype})"
            )
    if str(first.dtype).removeprefix("torch.") not in dtypes:
        raise UnsupportedError(
            f"{op}: no kernel for {first.dtype}; there is one for {', '.join(dtypes)}: convert with .to()"
        )
