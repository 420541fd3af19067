"""What is printed as a name and a value a line: a table where rich prints, aligned text elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


class Listing(ABC):
    """Prints as its `_lines`."""

    __slots__ = ()

    @abstractmethod
    def _lines(self) -> list[tuple[str, str]]:
        """(name, value) of each line."""

    def __rich__(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in self._lines():
            table.add_row(name, Text(value))
        return table

    def __str__(self) -> str:
        lines = self._lines()
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name.ljust(width)}  {value}" for name, value in lines)

    __repr__ = __str__
