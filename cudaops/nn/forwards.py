"""The forwards that `convert` binds to a module, one for each type of module it takes.

A forward is bound as `functools.partial(<function of this file>, module, Calls())` in the module's own `__dict__`. A
partial of a module-level function goes through deepcopy, pickle and torch.save, and the copy's forward then holds the
copy; a closure would keep using the original's weights, a bound method would come back as the class's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import functional

from cudaops import ops
from cudaops.errors import UnsupportedError


class Calls:
    """How often a forward ran, counted without a lock.

    Every thread adds under its own key, so no two threads write one entry, and a fork cannot leave a lock held. A copy
    or an unpickled one starts at zero: it belongs to a module that has not run yet.
    """

    __slots__ = ("_by_thread",)

    def __init__(self) -> None:
        self._by_thread: dict[int, int] = {}

    def add(self, count: int = 1) -> None:
        thread = get_ident()
        self._by_thread[thread] = self._by_thread.get(thread, 0) + count

    @property
    def total(self) -> int:
        return sum(list(self._by_thread.values()))

    def __reduce__(self) -> tuple[type[Calls], tuple[()]]:
        return Calls, ()


def linear_forward(module: nn.Linear, calls: Calls, input: torch.Tensor) -> torch.Tensor:
    """`nn.Linear.forward` by our kernel. The weight is read at each call: a hook or parametrization may compute it."""
    output = ops.linear(input, module.weight, module.bias)
    # Not while a compiler traces: a count is a Python side effect, which would recompile at every call.
    if not torch.compiler.is_compiling():
        calls.add()
    return output


def conv2d_forward(module: nn.Conv2d, calls: Calls, input: torch.Tensor) -> torch.Tensor:
    """`nn.Conv2d.forward` by our kernel; as torch does, a padding mode other than zeros pads first."""
    padding: Any = module.padding
    if module.padding_mode != "zeros":
        input = functional.pad(input, module._reversed_padding_repeated_twice, mode=module.padding_mode)
        padding = 0
    output = ops.conv2d(input, module.weight, module.bias, module.stride, padding, module.dilation, module.groups)
    if not torch.compiler.is_compiling():
        calls.add()
    return output


def refuse_script() -> NoReturn:
    """TorchScript's hook `__prepare_scriptable__` of a swapped module: it cannot compile a rebound forward."""
    raise UnsupportedError(
        "torch.jit.script cannot take a module whose forward cudaops replaced; call cudaops.restore(model) first"
    )


@dataclass(frozen=True, slots=True)
class Swap:
    """What a type of module becomes: its forward here, and the kernel (or family of kernels) that forward launches."""

    forward: Callable[..., torch.Tensor]
    kernel: str


SWAPS: dict[type[nn.Module], Swap] = {
    nn.Linear: Swap(linear_forward, "matmul"),
    nn.Conv2d: Swap(conv2d_forward, "conv_implicit_gemm"),
}

# The two entries in a swapped module's __dict__. The second is TorchScript's own protocol (torch/jit/_script.py).
_FORWARD = "forward"
_PREPARE = "__prepare_scriptable__"


@dataclass(frozen=True, slots=True)
class Binding:
    """A swapped module as found: what it became, its count, and whether the forward holds this very module."""

    swap: Swap
    calls: Calls
    own: bool


def binding_of(module: nn.Module) -> Binding | None:
    """The binding in `module`, or None where its forward is not one of ours.

    `own` is False in a shallow copy (`copy.copy`), whose forward still holds the original.
    """
    forward = module.__dict__.get(_FORWARD)
    if type(forward) is not functools.partial:
        return None
    swap = next((swap for swap in SWAPS.values() if swap.forward is forward.func), None)
    if swap is None:
        return None
    bound, calls = forward.args
    return Binding(swap, calls, bound is module)


def bind(module: nn.Module) -> None:
    """Make `module`, of a type in `SWAPS`, run our kernel. Only its `__dict__` changes."""
    module.__dict__[_FORWARD] = functools.partial(SWAPS[type(module)].forward, module, Calls())
    module.__dict__[_PREPARE] = refuse_script


def unbind(module: nn.Module) -> None:
    """Undo `bind`: the class's own forward is seen again."""
    if binding_of(module) is not None:
        del module.__dict__[_FORWARD]
        module.__dict__.pop(_PREPARE, None)
