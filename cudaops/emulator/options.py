"""Options of emulated launches, for the code inside a `with cudaops.emulation(...)`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from cudaops.environment import variable

if TYPE_CHECKING:
    import torch


class Checks(Enum):
    """How accesses are checked."""

    NONE = "none"
    BOUNDS = "bounds"  # inside the launch's buffers, before it is made
    SANITIZER = "sanitizer"  # every check of sanitizer.py


@dataclass(frozen=True, slots=True)
class Options:
    checks: Checks = Checks.BOUNDS
    max_steps: int | None = None
    buffers: tuple[torch.Tensor, ...] = ()
    uninitialised: tuple[torch.Tensor, ...] = ()


_DEFAULT = Options()
_SANITIZED = Options(Checks.SANITIZER)
_current: ContextVar[Options | None] = ContextVar("cudaops emulation", default=None)


def current() -> Options:
    """The options in force; `CUDAOPS_SANITIZE=1` turns the sanitizer on where nothing else is said."""
    found = _current.get()
    if found is not None:
        return found
    return _SANITIZED if variable(b"CUDAOPS_SANITIZE") == b"1" else _DEFAULT


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
    checks = current().checks
    if checks is not Checks.SANITIZER:
        checks = Checks.BOUNDS if bounds else Checks.NONE
    with _set(replace(current(), checks=checks, max_steps=max_steps, buffers=tuple(buffers))):
        yield


@contextmanager
def sanitize(*, uninitialised: Sequence[torch.Tensor] = ()) -> Iterator[None]:
    """Check every emulated launch inside for bad accesses, races, uninitialised reads and missing barriers.

    A launch with findings raises SanitizerError when it has ended; its `.findings` is a list. Launches on CUDA tensors
    are not checked.

    Arguments:
        uninitialised: CPU tensors that count as not written yet; a kernel that reads them first is a finding.

    Raises:
        TypeError: an element of `uninitialised` is no CPU tensor.
    """
    for tensor in uninitialised:
        if not getattr(tensor, "is_cpu", False):
            raise TypeError(f"uninitialised takes CPU tensors, got {type(tensor).__name__}; move it with .cpu()")
    with _set(replace(current(), checks=Checks.SANITIZER, uninitialised=tuple(uninitialised))):
        yield


@contextmanager
def _set(options: Options) -> Iterator[None]:
    token = _current.set(options)
    try:
        yield
    finally:
        _current.reset(token)
