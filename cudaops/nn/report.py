"""`report`: what runs on our kernels, what does not and why, and what was swapped but never ran."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from cudaops.nn.forwards import binding_of
from cudaops.nn.module import CudaModule
from cudaops.nn.select import Site, is_product, type_name, walk
from cudaops.nn.swap import _check_module, reason_left, unsupported_dtype

if TYPE_CHECKING:
    from rich.table import Table

NEVER_CALLED = "never called so far (calls inside torch.compile are not counted)"

REACHED = "not swapped: its function runs on our kernels inside CudaModule"


@dataclass(frozen=True, slots=True)
class Row:
    """One convolution or linear-like module.

    Arguments:
        name: its dotted name, the first if there are several; `''` is the model itself.
        type: its class's name.
        kernel: the kernel its forward launches, or the family (matmul_*) its plan chooses from; None where the
            forward is torch's (or someone else's).
        reason: why it was not swapped, or what to know of a swapped one; else `''`.
        calls: how often its forward ran on our kernel, when the report was made.
        names: all its names.
    """

    name: str
    type: str
    kernel: str | None
    reason: str
    calls: int
    names: tuple[str, ...]


class Report:
    """The rows of `report(model)`: iterate over it, take its length, or print it as a table."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def summary(self) -> str:
        """One line: how many are swapped, and how many of those never ran."""
        if not self._rows:
            return "no convolution or linear-like module in this model"
        swapped = [row for row in self._rows if row.kernel]
        idle = sum(row.calls == 0 for row in swapped)
        text = f"{len(swapped)} of {len(self._rows)} convolution and linear-like modules on cudaops kernels"
        return text + (f", {idle} of them never called" if idle else "")

    def _cells(self) -> Iterator[tuple[str, str, str, str, str]]:
        for row in self._rows:
            name = row.name or "(the model itself)"
            if len(row.names) > 1:
                name += f" (= {', '.join(row.names[1:])})"
            yield name, row.type, row.kernel or "-", str(row.calls) if row.kernel else "-", row.reason

    def __rich__(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(title="cudaops report", caption=self.summary, title_justify="left", caption_justify="left")
        for header in _HEADERS:
            table.add_column(header, overflow="fold", justify="right" if header == "calls" else "left")
        for cells in self._cells():
            table.add_row(*(Text(cell) for cell in cells))  # Text: a module named '[0]' is not markup
        return table

    def __str__(self) -> str:
        try:
            from rich.console import Console
        except ModuleNotFoundError:
            return self._plain()
        console = Console(file=io.StringIO(), width=max(Console().width, 80), color_system=None)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip("\n")

    __repr__ = __str__

    def _plain(self) -> str:
        lines = [_HEADERS, *self._cells()]
        widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADERS))]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        return "\n".join([*text, self.summary])


_HEADERS = ("name", "type", "kernel", "calls", "reason")


def report(model: nn.Module) -> Report:
    """What `convert` did to a model, a row for each convolution or linear-like module, and what has run since.

    Printing it shows a table. Rows have `.name .type .kernel .reason .calls`. A module that stayed torch's has its
    reason; so has a swapped one that was never called. Calls are counted in every thread, but not while torch.compile
    traces or runs compiled code.

    Raises:
        TypeError: `model` is not a module.
    """
    _check_module(model, "report")
    sites = walk(model)
    wrappers = [site.module for site in sites if isinstance(site.module, CudaModule) and site.module.overrides]
    wrapped = {id(below.module) for wrapper in wrappers for below in walk(wrapper)}
    return Report([_row(site, id(site.module) in wrapped) for site in sites if is_product(site.module)])


def _row(site: Site, wrapped: bool) -> Row:
    binding = binding_of(site.module)
    kernel: str | None = None
    calls = 0
    if binding is None:
        reason = reason_left(site) or (REACHED if wrapped else "not converted")
    elif not binding.own:
        reason = "shallow copy of a swapped module: its forward uses the original's weights; convert it"
    else:
        kernel, calls = binding.swap.kernel, binding.calls.total
        reason = unsupported_dtype(site.module) or ("" if calls else reason_left(site) or NEVER_CALLED)
    return Row(site.name, type_name(site.module), kernel, reason, calls, tuple(site.names))
