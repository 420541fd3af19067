"""The errors of this package. Each message says what, what was got, the limit, and the next step."""

from __future__ import annotations

from collections.abc import Sequence


class CudaopsError(RuntimeError):
    """Base of every error this package raises for itself (shape and type errors of the ops are torch's own kinds)."""


class CompileError(CudaopsError):
    """NVRTC refused the source, or the entry asked for is not in it."""


class LaunchError(CudaopsError):
    """A launch was refused before anything ran: geometry, shared memory, or an argument."""


class EmulatorError(CudaopsError):
    """An emulated launch met an instruction it does not know, or a kernel left its buffers."""


class SanitizerError(CudaopsError):
    """A checked launch had findings; `.findings` lists them (`cudaops.emulator.Finding`)."""

    def __init__(self, message: str, findings: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.findings = list(findings)


class UnsupportedError(CudaopsError):
    """Something this machine or installation lacks, with the command that brings it."""
