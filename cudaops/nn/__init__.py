"""Models on our kernels: layers swapped in place, or a whole forward under an override."""

from cudaops.nn.module import CudaModule
from cudaops.nn.placement import cpu, cuda
from cudaops.nn.report import Report, Row, report
from cudaops.nn.swap import convert, restore

__all__ = ["CudaModule", "Report", "Row", "convert", "cpu", "cuda", "report", "restore"]
