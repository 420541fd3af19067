"""What a demo claims, checked and shown at its end."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cudaops.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Check:
    """One claim: what was found, what is needed, and whether it holds."""

    claim: str
    found: str
    needed: str
    holds: bool


def verdict(console: Console, checks: list[Check]) -> bool:
    """Show the checks; True if all hold."""
    table = Table("check", "found", "needed", "", title="checks", title_justify="left")
    for check in checks:
        mark = Text("ok", style="green") if check.holds else Text("MISSED", style="bold red")
        table.add_row(Text(check.claim), Text(check.found), Text(check.needed), mark)
    console.print(table)
    return all(check.holds for check in checks)


def progress(console: Console) -> Progress:
    """A progress bar that says what is going on."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


def needed(module: str, package: str) -> ModuleType:
    """Import what a demo needs beyond the package's own dependencies.

    Raises:
        UnsupportedError: it is not installed; with the pip command.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UnsupportedError(f"this demo needs {package}: pip install {package}") from error
