"""A kernel's text and everything it includes, and the hash of all of it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cudaops.errors import CompileError, UnsupportedError
from cudaops.plan import KernelSource


@cache
def kernels_dir() -> Path:
    """The folder of our CUDA C: inside the package in a wheel, beside it in a source tree.

    Raises:
        UnsupportedError: neither is there, an incomplete installation.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "kernels", package.parent / "kernels"):
        if folder.is_dir():
            return folder
    raise UnsupportedError(
        f"the CUDA C sources are missing: no kernels/ in {package} or beside it; install cudaops again"
    )


@dataclass(frozen=True, slots=True)
class Program:
    """Source text ready for the compiler.

    Arguments:
        name: the file the compiler's messages name.
        text: the source.
        include_dirs: where headers are looked for, those of the CUDA toolkit aside.
    """

    name: str
    text: str
    include_dirs: tuple[Path, ...]


def read(source: KernelSource) -> Program:
    """The text of `source`.

    Raises:
        CompileError: its file cannot be read.
    """
    users = tuple(_include_options(source.options))
    if source.text is not None:
        name = source.file or _text_name(source.entry)
        beside = (Path(name).parent,) if Path(name).is_absolute() else ()
        return Program(name, source.text, (*beside, *users))
    if source.file is None:
        raise CompileError(f"kernel {source.entry}: neither a file nor text was given; pass one of them")
    path = kernels_dir() / source.file
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        there = ", ".join(sorted(p.name for p in kernels_dir().glob("*.cu")))
        raise CompileError(f"kernel {source.entry}: cannot read {path} ({error}); files there: {there}") from error
    return Program(str(path), text, (path.parent, *users))


def _text_name(entry: str) -> str:
    return (re.sub(r"\W+", "_", entry).strip("_") or "kernel") + ".cu"


def _include_options(options: Sequence[str]) -> Iterator[Path]:
    waiting = False
    for option in options:
        if waiting:
            yield Path(option)
            waiting = False
        elif option in ("-I", "--include-path"):
            waiting = True
        elif option.startswith("--include-path="):
            yield Path(option.partition("=")[2])
        elif option.startswith("-I"):
            yield Path(option[2:].strip())


def _forced_headers(options: Sequence[str]) -> Iterator[str]:
    waiting = False
    for option in options:
        if waiting:
            yield option
            waiting = False
        elif option in ("-include", "--pre-include"):
            waiting = True
        elif option.startswith(("-include=", "--pre-include=")):
            yield option.partition("=")[2]


_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include(?:_next)?\b[ \t]*(?P<what>[^\n]*)", re.M)
_HAS_INCLUDE = re.compile(r"__has_include(?:_next)?\s*\(\s*(?P<what>[^)\n]*)\)")
_NAME = re.compile(r'"(?P<quoted>[^"\n]+)"|<(?P<angled>[^>\n]+)>')
_CONTINUED = re.compile(r"\\\r?\n")


class ComputedIncludeError(Exception):
    """An #include whose name is made by a macro that cannot be followed: what it reads is not known."""


def digest(
    program: Program,
    defines: Mapping[str, str],
    options: Sequence[str],
    toolkit_dirs: Sequence[Path],
    facts: Sequence[str],
) -> str:
    """SHA-256 in hex of the text, of every header it can reach, and of `facts`.

    Headers are followed through the program's own folders, whether or not an #if would take them; a name that is not
    found there counts as such, so that a header that appears later is seen. The toolkit's are in `facts`, by version.

    Raises:
        ComputedIncludeError: there is a header that cannot be followed.
    """
    hasher = hashlib.sha256()

    def add(tag: str, value: str) -> None:
        data = value.encode("utf-8", "surrogateescape")
        hasher.update(f"{tag}:{len(data)}:".encode() + data)

    for fact in facts:
        add("fact", fact)
    add("name", program.name)
    add("text", program.text)
    seen: set[Path] = set()
    base = Path(program.name).parent if Path(program.name).is_absolute() else None
    waiting: list[tuple[str, Path | None]] = [(program.text, base)]
    forced = "\n".join(f'#include "{name}"' for name in _forced_headers(options))
    if forced:
        waiting.append((forced, Path.cwd()))
    macros = dict(defines)
    while waiting:
        text, beside = waiting.pop()
        text = _CONTINUED.sub(" ", text)
        macros |= dict(re.findall(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+([^\n]+)$", text, re.M))
        for name, quoted in _included(text, macros):
            folders = ([beside] if quoted and beside else []) + list(program.include_dirs)
            path = next((each for folder in folders if (each := folder / name).is_file()), None)
            if path is None:
                add("elsewhere", name)
                continue
            path = path.resolve()
            if path in seen or any(path.is_relative_to(folder) for folder in toolkit_dirs):
                continue
            seen.add(path)
            header = path.read_text(encoding="utf-8", errors="surrogateescape")
            add("header", name)
            add("text", header)
            waiting.append((header, path.parent))
    return hasher.hexdigest()


def _included(text: str, macros: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    for match in (*_INCLUDE.finditer(text), *_HAS_INCLUDE.finditer(text)):
        what = match["what"].strip()
        for _ in range(8):
            found = _NAME.match(what)
            if found is not None:
                yield found["quoted"] or found["angled"], found["quoted"] is not None
                break
            word = re.match(r"\w+", what)
            if word is None or word.group() not in macros:
                raise ComputedIncludeError(what)
            what = macros[word.group()].strip()
        else:
            raise ComputedIncludeError(what)
