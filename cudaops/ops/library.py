"""The `cudaops` operator library: where every op is registered, and what the registrations share."""

from __future__ import annotations

from collections.abc import Callable
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

_DTYPES = {getattr(torch, name) for name in DTYPES}


def define(
    schema: str,
    *,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    autograd: Callable[..., Any],
    vmap: Callable[..., Any] | None = None,
) -> Any:
    """Register one op and return its overload, `torch.ops.cudaops.<name>.default`.

    Arguments:
        schema: name and signature, in torch's schema language.
        kernel: the implementation for CPU and CUDA tensors alike; where the tensors are decides where it runs.
        fake: shapes, strides and dtypes of the results, and every error about them; also serves meta tensors.
        autograd: the implementation at the Autograd key; see `needs_autograd`.
        vmap: the batching rule, as torch.library.register_vmap takes it; it calls ops, not functions.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=_TAGS)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl(name, kernel, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    LIBRARY.impl(name, autograd, "Autograd")
    if vmap is not None:
        torch.library.register_vmap(f"{NAMESPACE}::{name}", vmap, lib=LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


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


def check_together(op: str, *tensors: torch.Tensor) -> None:
    """Refuse tensors on different devices, of different dtypes, or of a dtype there is no kernel for.

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
    if first.dtype not in _DTYPES:
        raise UnsupportedError(
            f"{op}: no kernel for {first.dtype}; there is one for {', '.join(DTYPES)}: convert with .to()"
        )
