"""Options of emulated launches, for the code inside a `with cudaops.emulation(...)`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Options:
    bounds: bool = True
    max_steps: int | None = None
    buffers: tuple[torch.Tensor, ...] = ()


_DEFAULT = Options()
_current: ContextVar[Options] = ContextVar("cudaops emulation", default=_DEFAULT)


def current() -> Options:
    return _current.get()


@contextmanager
def emulation(
    *, bounds: bool = True, max_steps: int | None = None, buffers: Sequence[torch.Tensor] = ()
) -> Iterator[None]:
    """Options of the emulated launches inside.

    Arguments:
        bounds: check every access against the launch's buffers before it is made. Without it a bad index can crash the
            process; it saves a few percent.
        max_steps: raise EmulatorError when the warps of one block have gone round loops more often than this. The
            default is no limit; Ctrl-C ends a launch in any case.
        buffers: CPU tensors that the kernels reach only through pointers in memory, so that no argument names them.

    Raises:
        ValueError: `max_steps` below 1.
        TypeError: an element of `buffers` is no CPU tensor.
    """
    if max_steps is not None and max_steps < 1:
        raise ValueError(f"max_steps must be at least 1, got {max_steps}; leave it out for no limit")
    for buffer in buffers:
        if not getattr(buffer, "is_cpu", False):
            raise TypeError(f"buffers takes CPU tensors, got {type(buffer).__name__}; move it with .cpu()")
    token = _current.set(Options(bounds, max_steps, tuple(buffers)))
    try:
        yield
    finally:
        _current.reset(token)
