"""CUDA C to PTX and cubin, in one NVRTC compile that needs no driver, kept in memory and on disk.

The compiler is given a real arch (`sm_80`), so it returns the machine code a GPU loads and the PTX the emulator runs,
from the same source at the same time; its ptxas log gives registers and spills.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import struct
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cudaops import cache as disk
from cudaops import sources
from cudaops.errors import CompileError
from cudaops.plan import KernelSource
from cudaops.signature import Entry, Param, base_name, entries_of, with_declarations
from cudaops.toolkit import Toolkit, check_arch, toolkit

__all__ = ["CompiledKernel", "Entry", "Param", "compilations", "compile_kernel"]

_KIND = "kernels"
_FORMAT = "2"  # of what is stored; part of the key
_logger = logging.getLogger("cudaops")


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """What one compile gave.

    Arguments:
        key: SHA-256 in hex of everything that went in.
        name: the PTX name of the entry that was asked for.
        arch: as given to the compiler.
        ptx, cubin: its two outputs.
        entries: every `__global__` function by PTX name.
        log: what the compiler said, ptxas included.
        lowered: the PTX name of each C++ name expression that was asked for.
    """

    key: str
    name: str
    arch: str
    ptx: str
    cubin: bytes
    entries: Mapping[str, Entry]
    log: str
    lowered: Mapping[str, str]

    @property
    def entry(self) -> Entry:
        """The entry that was asked for."""
        return self.entries[self.name]


_memory: dict[str, CompiledKernel] = {}
_in_progress: dict[str, threading.Lock] = {}
_lock = threading.Lock()
_count = 0


def compilations() -> int:
    """How many times this process ran NVRTC."""
    return _count


def compile_kernel(source: KernelSource, arch: str) -> CompiledKernel:
    """Compile `source` for `arch`, or take it from memory or disk.

    Arguments:
        source: a file of `kernels/` or a text, its entry, defines and options.
        arch: `'sm_80'`; one the loaded NVRTC knows.

    Raises:
        CompileError: NVRTC refused it (with file and line), or there is no such entry (with those there are).
        UnsupportedError: CuPy, NVRTC or the arch is missing.
    """
    return _named(compile_source(source, arch), source.entry)


def compile_source(source: KernelSource, arch: str) -> CompiledKernel:
    """As `compile_kernel`, but `source.entry` need not be there; the result's `name` is empty.

    Raises:
        CompileError, UnsupportedError: as `compile_kernel`, a missing entry aside.
    """
    for option in source.options:
        if not isinstance(option, str):
            raise CompileError(
                f"kernel {source.entry}: options must be strings, got {option!r}; pass options=('-DN=4',)"
            )
    tools = toolkit()
    check_arch(arch)
    program = sources.read(source)
    options = _options(source, arch, program)
    expression = source.entry if _is_expression(source.entry) else None
    facts = (
        f"cudaops {_package_version()} format {_FORMAT}",
        f"nvrtc {tools.version} {tools.header_versions}",
        *options,  # without the toolkit's folders: where they lie does not matter, header_versions says what is in them
        f"expression {expression}",
    )
    try:
        key = sources.digest(program, dict(source.defines), source.options, tools.include_dirs, facts)
    except sources.ComputedIncludeError as include:
        _logger.info("kernel %s: #include %s cannot be followed, so it is not cached", source.entry, include)
        return _run_nvrtc(tools, program, source, options, expression, key="", arch=arch)
    with _lock:
        mutex = _in_progress.setdefault(key, threading.Lock())
    with mutex:
        compiled = _memory.get(key)
        if compiled is None:
            compiled = _from_disk(key)
        if compiled is None:
            compiled = _run_nvrtc(tools, program, source, options, expression, key, arch)
            disk.store(_KIND, key, _pack(compiled))
        _memory[key] = compiled
    return compiled


# ---- options ----

_ARCH_OPTION = re.compile(r"--?(gpu-architecture|arch)\b")
_LINK_OPTION = re.compile(r"--?(rdc(=true)?|relocatable-device-code(=true)?|dc|device-c|dlto|dlink-time-opt)$")


def _options(source: KernelSource, arch: str, program: sources.Program) -> tuple[str, ...]:
    given = tuple(source.options)
    for option in given:
        if _ARCH_OPTION.match(option):
            raise CompileError(
                f"kernel {source.entry}: option {option!r}; the arch is that of the tensors' GPU, and without a GPU "
                "that of CUDAOPS_EMULATE_ARCH: leave the option out"
            )
        if _LINK_OPTION.match(option):
            raise CompileError(
                f"kernel {source.entry}: option {option!r} needs a linking step, which there is not: leave it out"
            )
    ours = ["-lineinfo", "--ptxas-options=-v"]
    if not any(re.match(r"--?std\b", option) for option in given):
        ours.append("--std=c++17")
    if not {"-default-device", "--device-as-default-execution-space"} & set(given):
        ours.append("-default-device")
    defines = [f"-D{name}={value}" for name, value in source.defines]
    own = [f"--include-path={Path(program.name).parent}"] if Path(program.name).is_absolute() else []
    return (f"--gpu-architecture={arch}", *ours, *defines, *own, *given)


def _is_expression(entry: str) -> bool:
    return "<" in entry or "::" in entry


def _package_version() -> str:
    return str(getattr(sys.modules.get("cudaops"), "__version__", ""))  # not imported: the package is above this layer


# ---- NVRTC ----

_TIMES = re.compile(r"^ptxas info +: Compile time = .*\n", re.M)  # they differ from run to run


def _run_nvrtc(
    tools: Toolkit,
    program: sources.Program,
    source: KernelSource,
    options: tuple[str, ...],
    expression: str | None,
    key: str,
    arch: str,
) -> CompiledKernel:
    global _count
    nvrtc = tools.nvrtc
    with _lock:
        _count += 1
    handle = nvrtc.createProgram(program.text, program.name, (), ())
    try:
        if expression is not None:
            nvrtc.addNameExpression(handle, expression)
        try:
            nvrtc.compileProgram(handle, (*options, *(f"--include-path={path}" for path in tools.include_dirs)))
        except nvrtc.NVRTCError as error:
            raise _compile_error(source, program, arch, tools, nvrtc.getProgramLog(handle) or str(error)) from None
        ptx = nvrtc.getPTX(handle).decode()
        # NVRTC puts the working folder before a name that is no path: such a text is in no folder
        ptx = ptx.replace(f'"{Path.cwd() / program.name}"', f'"{program.name}"')
        cubin = whole_cubin(nvrtc.getCUBIN(handle))
        log = _TIMES.sub("", nvrtc.getProgramLog(handle).rstrip("\0"))
        lowered = {expression: nvrtc.getLoweredName(handle, expression)} if expression is not None else {}
    finally:
        nvrtc.destroyProgram(handle)
    resources = _resources(log)
    defines = dict(source.defines) | _option_defines(source.options)
    entries = {
        name: replace(with_declarations(entry, program.text, defines), **resources.get(name, {}))
        for name, entry in entries_of(ptx).items()
    }
    key = key or "uncached-" + hashlib.sha256(arch.encode() + ptx.encode() + cubin).hexdigest()
    return CompiledKernel(key, "", arch, ptx, cubin, MappingProxyType(entries), log, MappingProxyType(lowered))


def whole_cubin(data: bytes) -> bytes:
    """`data` as NVRTC made it, checked against its own ELF header.

    CuPy's binding drops the last byte of a cubin (a NUL, as if it were a string); it is put back here.

    Raises:
        CompileError: not a cubin, or more than that byte is missing.
    """
    if data[:5] != b"\x7fELF\x02" or len(data) < 64:
        raise CompileError(
            f"NVRTC returned {len(data)} bytes that are no cubin; report this with the versions of cudaops.info()"
        )
    end = _elf_end(data)
    if len(data) == end - 1:
        data += b"\0"
    if len(data) < end:
        raise CompileError(
            f"the cubin is cut short: {len(data)} of {end} bytes; report this with the versions of cudaops.info()"
        )
    return data


def _elf_end(data: bytes) -> int:
    """Where the last thing that an ELF-64 file's headers name ends."""
    program_at, section_at = struct.unpack_from("<QQ", data, 32)
    program_size, programs, section_size, sections = struct.unpack_from("<HHHH", data, 54)
    end = max(program_at + program_size * programs, section_at + section_size * sections)
    for index in range(sections):
        at = section_at + section_size * index
        if at + section_size > len(data) + 1:
            break
        header = data[at : at + section_size].ljust(section_size, b"\0")
        kind, offset, size = struct.unpack_from("<I", header, 4)[0], *struct.unpack_from("<QQ", header, 24)
        if kind != 8:  # SHT_NOBITS takes no room in the file
            end = max(end, offset + size)
    return int(end)


_PTXAS_ENTRY = re.compile(r"Compiling entry function '([^']+)' for")
_PTXAS_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_PTXAS_USED = re.compile(r"Used (\d+) registers[^\n]*")
_PTXAS_SMEM = re.compile(r"(\d+) bytes smem")


def _resources(log: str) -> dict[str, dict[str, Any]]:
    """Registers, spills, stack and static shared memory by entry, from `ptxas -v`."""
    found: dict[str, dict[str, Any]] = {}
    parts = _PTXAS_ENTRY.split(log)
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        frame, used = _PTXAS_FRAME.search(text), _PTXAS_USED.search(text)
        smem = _PTXAS_SMEM.search(used.group()) if used else None
        found[name] = {
            "registers": int(used.group(1)) if used else 0,
            "smem_bytes": int(smem.group(1)) if smem else 0,
            "stack_bytes": int(frame.group(1)) if frame else 0,
            "spill_bytes": int(frame.group(2)) + int(frame.group(3)) if frame else 0,
        }
    return found


def _option_defines(options: Iterable[str]) -> dict[str, str]:
    found, waiting = {}, False
    for option in options:
        text = option if waiting else None
        waiting = option in ("-D", "--define-macro")
        if text is None and option.startswith("--define-macro="):
            text = option.partition("=")[2]
        elif text is None and option.startswith("-D") and not waiting:
            text = option[2:].strip()
        if text:
            name, _, value = text.partition("=")
            found[name] = value
    return found


# ---- errors ----

_MOST_LINES = 60

_AT = re.compile(r"^(?P<file>[^\s(][^\n(]*)\((?P<line>\d+)\): (?:catastrophic )?error[^\n]*", re.M)


def _compile_error(source: KernelSource, program: sources.Program, arch: str, tools: Toolkit, log: str) -> CompileError:
    version = ".".join(map(str, tools.version))
    first = _AT.search(log)
    file, line = (first["file"], int(first["line"])) if first else (program.name, 0)
    if not first and "At end of source" in log:
        line = len(program.text.splitlines())
    where = f"{file}:{line}" if line else file
    lines = log.strip().splitlines()
    shown = (
        lines if len(lines) <= _MOST_LINES else [*lines[:_MOST_LINES], f"... and {len(lines) - _MOST_LINES} lines more"]
    )
    message = "\n".join((f"kernel {source.entry}: NVRTC {version} refused {where} for {arch}", *shown))
    if line and file == program.name:
        message += "\n" + _excerpt(program, line)
    if file.startswith("__nv_nvrtc"):
        names = sorted(dict(source.defines) | _option_defines(source.options))
        message += f"\nThat is NVRTC's own header: one of the defines {names} is a name it uses; choose a longer name"
    if "open source file" in log:
        folders = ", ".join(map(str, (*program.include_dirs, *tools.include_dirs))) or "none"
        message += (
            f"\nFolders it was looked for in: {folders}. CUDA's own headers of version {version} come with "
            f"pip install 'cuda-toolkit[nvrtc,cudart,cccl,crt]=={version}.*'"
        )
    return CompileError(message)


def _excerpt(program: sources.Program, line: int) -> str:
    lines = program.text.splitlines()
    near = range(max(1, line - 2), min(len(lines), line + 2) + 1)
    return "\n".join(f"{'>' if n == line else ' '} {n:5d} | {lines[n - 1]}" for n in near)


# ---- entries ----


def _named(compiled: CompiledKernel, entry: str) -> CompiledKernel:
    """`compiled` with `entry` found in it: by PTX name, name expression, or the plain name of one C++ function."""
    name = entry if entry in compiled.entries else compiled.lowered.get(entry)
    if name is None:
        alike = [each.name for each in compiled.entries.values() if base_name(each.title) == entry]
        if len(alike) > 1:
            raise CompileError(
                f"kernel {entry!r} stands for several: {_listed(compiled, alike)}; use one of these names"
            )
        if not alike:
            raise CompileError(
                f"there is no kernel {entry!r} in the source; there is: {_listed(compiled, compiled.entries)}"
            )
        name = alike[0]
    return replace(compiled, name=name)


def _listed(compiled: CompiledKernel, names: Iterable[str]) -> str:
    titles = [(name, compiled.entries[name].title) for name in names]
    return ", ".join(name if title == name else f"{name} = {title}" for name, title in titles) or (
        "none: a kernel is a __global__ function; a template needs its arguments in the name, as in 'scale<float>'"
    )


# ---- stored form ----


def _pack(compiled: CompiledKernel) -> bytes:
    head = {
        "key": compiled.key,
        "arch": compiled.arch,
        "ptx_bytes": len(compiled.ptx.encode()),
        "entries": [asdict(entry) for entry in compiled.entries.values()],
        "log": compiled.log,
        "lowered": dict(compiled.lowered),
    }
    text = json.dumps(head).encode()
    return struct.pack("<I", len(text)) + text + compiled.ptx.encode() + compiled.cubin


def _from_disk(key: str) -> CompiledKernel | None:
    data = disk.load(_KIND, key)
    if data is None:
        return None
    try:
        start = 4 + struct.unpack_from("<I", data)[0]
        head = json.loads(data[4:start])
        middle = start + head["ptx_bytes"]
        if head["key"] != key:
            return None  # another kernel's entry under this name
        entries = {entry.name: entry for entry in map(_entry, head["entries"])}
        return CompiledKernel(
            key,
            "",
            head["arch"],
            data[start:middle].decode(),
            whole_cubin(data[middle:]),
            MappingProxyType(entries),
            head["log"],
            MappingProxyType(head["lowered"]),
        )
    except (ValueError, KeyError, TypeError, struct.error, CompileError):
        return None  # written by something else: a miss


def _entry(fields: dict[str, object]) -> Entry:
    params = tuple(Param(**param) for param in fields.pop("params"))  # type: ignore[attr-defined]
    block = fields.pop("required_block")
    return Entry(params=params, required_block=tuple(block) if block else None, **fields)  # type: ignore[arg-type]


def _after_fork() -> None:
    """Locks that other threads held at the fork would never be released in the child."""
    global _lock
    _lock = threading.Lock()
    _in_progress.clear()


os.register_at_fork(after_in_child=_after_fork)
