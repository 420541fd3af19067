"""Launching generated code: object cache, memory of the workers, blocks shared out over threads, faults reported."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from cudaops import cache
from cudaops.emulator import layout, native, options, printf, sanitizer, support
from cudaops.emulator.access import Site
from cudaops.emulator.codegen import Codegen, Generated
from cudaops.emulator.faults import Buffer, Place
from cudaops.emulator.inline import inline
from cudaops.emulator.isa import TABLE, lookup
from cudaops.emulator.lanes import WARP, Geometry
from cudaops.emulator.options import Checks
from cudaops.emulator.ptx import MALFORMED, Module, parse
from cudaops.emulator.sanitizer import Record
from cudaops.emulator.shadow import Shadow
from cudaops.errors import EmulatorError, SanitizerError
from cudaops.plan import LaunchConfig

SECOND_THREAD_SECONDS = 200e-6  # less work than this is not worth waking another thread for
T = TypeVar("T")
_NO_EXTENT = -(1 << 62)  # length of an empty slot: nothing fits into it
_LAUNCH_FIELDS = ctypes.c_int64 * len(layout.LAUNCH)
_ANYWHERE = (1 << 63) - 1  # length of a slot when nothing is checked


@functools.lru_cache(maxsize=64)
def _module(key: str, ptx: str) -> Module:
    return parse(ptx)


# -- code -------------------------------------------------------------------------------------------------------------
_SUPPORT_SYMBOLS = [
    f"cudaops_{kind}{bits}" for kind in ("load", "store", "cold_load", "cold_store") for bits in (8, 16, 32, 64)
] + [
    f"cudaops_{name}"
    for name in (
        "wide8",
        "wide16",
        "wide_store8",
        "wide_store16",
        "cold_wide16",
        "fault",
        "copy",
        "copy_commit",
        "copy_wait",
        "mbarrier",
        "aligned",
        "inactive",
        "misaligned",
        "members",
        "tick_warp",
        "watch",
    )
]
_SUPPORT_SYMBOLS += [
    f"cudaops_watch_{memory}_{kind}" for memory in ("shared", "global", "local") for kind in ("load", "store")
]


@functools.cache
def _support() -> tuple[Any, dict[str, int]]:
    """(run, addresses of what generated code calls)"""
    symbols = [
        "cudaops_run",
        "cudaops_hull",
        "cudaops_allowed",
        "cudaops_poll",
        "cudaops_printf",
        *_SUPPORT_SYMBOLS,
    ]
    found = _cached(
        "support", lambda: (native.machine_code(support.ir()), {}), lambda code, _: native.load(code, symbols)
    )
    addresses = dict(zip(symbols, found, strict=True))
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(addresses["cudaops_run"]), addresses


def _cached(
    what: str, make: Callable[[], tuple[bytes, dict[str, Any]]], use: Callable[[bytes, dict[str, Any]], T]
) -> T:
    """What `use` says to machine code and notes from the disk cache, or made and stored there; a damaged entry is made
    afresh."""
    key = hashlib.sha256(f"{what}\0{native.identity()}".encode()).hexdigest()
    found = cache.load("emulator", key)
    if found is not None:
        size = int.from_bytes(found[:8], "little")
        try:
            return use(found[8 + size :], json.loads(found[8 : 8 + size]))
        except (ValueError, KeyError, TypeError, EmulatorError):
            pass
    code, notes = make()
    text = json.dumps(notes).encode()
    cache.store("emulator", key, len(text).to_bytes(8, "little") + text + code)
    return use(code, notes)


@dataclass(frozen=True)
class _Code:
    address: int
    info: Generated


_codes: dict[tuple[object, ...], _Code] = {}
_codes_lock = threading.Lock()
compilations = 0  # kernels that LLVM compiled in this process


def _code(ptx: str, key: str, entry: str, geometry: Geometry, dynamic_shared: int, checks: Checks) -> _Code:
    what = (key, entry, geometry, dynamic_shared, checks)
    found = _codes.get(what)
    if found is not None:
        return found
    with _codes_lock:
        found = _codes.get(what)
        if found is None:
            found = _cached(repr(what), lambda: _compile(ptx, key, entry, geometry, dynamic_shared, checks), _loaded)
            _codes[what] = found
    return found


def _loaded(code: bytes, notes: dict[str, Any]) -> _Code:
    sites = tuple(Site(**site) for site in notes["sites"])
    info = Generated(**(notes | {"ir": "", "sites": sites, "globals_used": tuple(notes["globals_used"])}))
    (address,) = native.load(code, [info.symbol])
    return _Code(address, info)


def _compile(
    ptx: str, key: str, entry: str, geometry: Geometry, dynamic_shared: int, checks: Checks
) -> tuple[bytes, dict[str, Any]]:
    global compilations
    compilations += 1
    info = generate(ptx, key, entry, geometry, dynamic_shared, checks)
    notes = asdict(info)
    del notes["ir"]
    return native.machine_code(info.ir), notes


def generate(
    ptx: str, key: str, entry: str, geometry: Geometry, dynamic_shared: int, checks: Checks = Checks.BOUNDS
) -> Generated:
    """The LLVM IR of an entry."""
    module = _module(key, ptx)
    function = module.functions.get(entry)
    if function is None or not function.entry:
        known = ", ".join(f.name for f in module.functions.values() if f.entry) or "none"
        raise EmulatorError(f"no kernel {entry} in this PTX; kernels there: {known}")
    try:
        return Codegen(module, inline(module, function), geometry, dynamic_shared, checks).generate("cudaops_kernel")
    except MALFORMED as error:
        for ins in (i for block in function.blocks for i in block.instructions):
            if ins.base in TABLE:
                lookup(ins)  # raises where it is an instruction that is wrong, and names it
        raise EmulatorError(
            f"kernel {entry}: its PTX is damaged, or of a form that the emulator does not know: {error!r}"
        ) from error


# -- module globals ---------------------------------------------------------------------------------------------------
class _Globals:
    """The __device__ and __constant__ variables of a module; they live as long as the process."""

    def __init__(self, module: Module) -> None:
        self.memory: dict[str, np.ndarray[Any, Any]] = {}
        chosen = [v for v in module.variables.values() if v.space in ("global", "const")]
        for v in chosen:
            self.memory[v.name] = _aligned(max(v.size, 1))
            self.memory[v.name][: len(v.data)] = np.frombuffer(v.data, dtype=np.uint8)
        for v in chosen:
            for offset, symbol, addend in v.pointers:
                if symbol in self.memory:
                    address = self.memory[symbol].ctypes.data + addend
                elif symbol in module.functions:
                    address = module.function_address(symbol)
                else:
                    raise EmulatorError(f"{v.name} holds the address of {symbol}, which this PTX does not define")
                self.memory[v.name][offset : offset + 8] = np.frombuffer(address.to_bytes(8, "little"), dtype=np.uint8)
        self.sizes = {v.name: v.size for v in chosen}

    def buffers(self) -> list[Buffer]:
        return [Buffer(memory.ctypes.data, self.sizes[name], name) for name, memory in self.memory.items()]


_globals: dict[str, _Globals] = {}


def _globals_of(key: str, ptx: str) -> _Globals:
    found = _globals.get(key)
    if found is None:
        with _codes_lock:
            found = _globals.setdefault(key, _Globals(_module(key, ptx)))
    return found


def _aligned(size: int) -> np.ndarray[Any, Any]:
    """Zeroed bytes at a multiple of 64."""
    raw = np.zeros(size + 64, dtype=np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


# -- threads ----------------------------------------------------------------------------------------------------------
_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()


def _workers() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        with _pool_lock:
            if _pool is None:
                _pool = ThreadPoolExecutor(max_workers=os.cpu_count() or 1, thread_name_prefix="cudaops")
    return _pool


def _after_fork() -> None:
    """The child has none of the parent's threads, and perhaps a lock that one of them held."""
    global _pool, _pool_lock, _codes_lock
    _pool = None
    _idle_workers.clear()
    _pool_lock = threading.Lock()
    _codes_lock = threading.Lock()
    native._lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


class _Worker:
    """What one thread needs to run blocks: its structure, frames, shared and local memory, extent slots.

    Workers belong to no kernel: a launch takes them from a list and puts them back; they grow as kernels need.
    """

    def __init__(self) -> None:
        self.fields = (ctypes.c_int64 * len(layout.WORKER))()
        self.address = ctypes.addressof(self.fields)
        self.memory = {name: _aligned(64) for name in ("frames", "shared", "locals", "slots", "barriers", "copies")}
        self.filled: tuple[bytes, bytes] = b"", b""  # a kernel's template, and what became of it here

    def reserve(self, name: str, size: int) -> int:
        """The address of at least `size` bytes."""
        if len(self.memory[name]) < size:
            self.memory[name] = _aligned(size)
        return int(self.memory[name].ctypes.data)

    def ready(self, template: bytes, sizes: _Sizes, launch: int, arguments: int) -> None:
        """Fill the structure for a launch."""
        if self.filled[0] is not template:  # the kernel before was another one
            ctypes.memmove(self.address, template, len(template))
            for name, size in (
                ("slots", len(sizes.empty_slots)), ("frames", sizes.frames), ("shared", sizes.shared),
                ("locals", sizes.locals), ("barriers", layout.BARRIERS_BYTES), ("copies", sizes.copies),
            ):  # fmt: skip
                self.set(name, self.reserve(name, size))
            self.filled = template, bytes(self.fields)
        ctypes.memmove(self.address, self.filled[1], len(template))
        ctypes.memmove(self.get("slots"), sizes.empty_slots, len(sizes.empty_slots))
        self.set("launch", launch)
        self.set("arguments", arguments)

    def get(self, name: str) -> int:
        return int(self.fields[layout.WORKER[name] // 8])

    def set(self, name: str, value: int) -> None:
        self.fields[layout.WORKER[name] // 8] = value

    def standing(self, frame: int) -> tuple[int, int]:
        """(where a warp stands: its pc, the number of the place in the source)"""
        words = self.memory["frames"][frame : frame + 8].view(np.int32)
        return int(words[layout.FRAME["pc"] // 4]), int(words[layout.FRAME["site"] // 4])


@dataclass(frozen=True)
class _Sizes:
    """Bytes that a kernel needs in each worker."""

    frames: int
    shared: int
    locals: int
    copies: int
    empty_slots: bytes


_idle_workers: list[_Worker] = []


def _take_worker() -> _Worker:
    try:
        return _idle_workers.pop()
    except IndexError:
        return _Worker()


# What native code calls now and then on the thread that launched, so that Ctrl-C works: take the GIL, run the signal
# handlers, take over what they raise. A Python callback would not do: handlers run before its first instruction.
_PYTHON = (ctypes.c_void_p * 5)(
    *(
        ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value
        for name in (
            "PyGILState_Ensure", "PyErr_CheckSignals", "PyErr_Fetch", "PyErr_NormalizeException", "PyGILState_Release",
        )
    )
)  # fmt: skip


def _raised(worker: _Worker) -> BaseException | None:
    """What a signal handler raised while the worker ran."""
    found = None
    for field in ("raised_type", "raised_value", "raised_trace"):
        address = worker.get(field)
        if address:
            reference = ctypes.cast(address, ctypes.py_object)
            if field == "raised_value":
                found = reference.value
            ctypes.pythonapi.Py_DecRef(reference)
            worker.set(field, 0)
    return found


def _wait_for_all(waiting: list[Future[None]], launch: ctypes.Array[ctypes.c_int64]) -> None:
    """Return, or raise, only when no thread uses the launch's memory any more: an interrupt makes them stop early."""
    interrupt: KeyboardInterrupt | None = None
    while waiting:
        try:
            waiting[-1].result()
            waiting.pop()
        except KeyboardInterrupt as error:
            launch[layout.LAUNCH["abort"] // 8] = 1
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _structure(offsets: dict[str, int], **values: int) -> bytes:
    fields = array("q", [0] * len(offsets))
    for name, value in values.items():
        fields[offsets[name] // 8] = value
    return fields.tobytes()


def _string_at(address: int, extents: Sequence[Buffer]) -> str:
    """The C string at an address, as far as its extent goes."""
    for extent in extents:
        if extent.address <= address < extent.address + extent.nbytes:
            data = ctypes.string_at(address, extent.address + extent.nbytes - address)
            return data.split(b"\0")[0].decode(errors="replace")
    return f"(no string at {address:#x})"


class Prepared:
    """An entry compiled for a block shape, ready to be launched with any arguments."""

    def __init__(self, ptx: str, key: str, entry: str, config: LaunchConfig, name: str, checks: Checks) -> None:
        self.config, self.name, self.checks = config, name or entry, checks
        self.again = functools.partial(prepare, ptx, key, entry, config, name)  # with the options in force
        self.geometry = Geometry(config.block, config.grid[0] <= 65536)
        self.code = _code(ptx, key, entry, self.geometry, config.smem_bytes, checks)
        info = self.code.info
        self.shared_bytes = info.static_shared_bytes + config.smem_bytes
        self.global_buffers = _globals_of(key, ptx).buffers()
        memory = _globals_of(key, ptx).memory
        used = [memory[name].ctypes.data for name in info.globals_used]
        self.globals_table = np.array([*used, 0], dtype=np.int64)
        self.block_seconds: float | None = None  # measured, a running mean
        self.run, addresses = _support()
        warps, (gx, gy, gz) = self.geometry.warps, config.grid
        self.blocks = gx * gy * gz
        local_bytes = info.local_bytes * WARP * warps
        empty = np.tile(
            np.array([0, _ANYWHERE if checks is Checks.NONE else _NO_EXTENT, 0, 0], dtype=np.int64), info.slots
        ).tobytes()
        copies = layout.COPIES_BYTES * warps if info.copies else 0
        self.sizes = _Sizes(warps * info.frame_bytes, self.shared_bytes, local_bytes, copies, empty)
        self.worker_template = _structure(
            layout.WORKER,
            nctaid_xy=gx | gy << 32, nctaid_z=gz, shared_bytes=self.shared_bytes, locals_bytes=local_bytes,
            hull=addresses["cudaops_hull"], allowed=addresses["cudaops_allowed"], poll=addresses["cudaops_poll"],
            budget=layout.POLL_EVERY, budget_start=layout.POLL_EVERY, printf=addresses["cudaops_printf"],
            globals=self.globals_table.ctypes.data,
            **{name.removeprefix("cudaops_"): addresses[name] for name in _SUPPORT_SYMBOLS},
        )  # fmt: skip
        self.launch_template = _structure(
            layout.LAUNCH,
            warp_function=self.code.address, blocks=self.blocks, grid_x=gx, grid_y=gy, grid_z=gz, warps=warps,
            frame_bytes=info.frame_bytes, shared_bytes=self.shared_bytes, local_bytes=info.local_bytes,
            copies=int(info.copies),
        )  # fmt: skip

    def __call__(self, arguments: bytes, buffers: Sequence[Buffer], threads: int = 1) -> None:
        """Run all blocks. Raises EmulatorError for the first fault, after every thread has stopped."""
        chosen = options.current()
        if chosen.checks is not self.checks:  # prepared under other options than it is launched under
            return self.again()(arguments, buffers, threads)
        parameters = array("B", arguments + bytes(16))
        own = Buffer(parameters.buffer_info()[0], len(arguments), "the kernel's parameters")
        extents = [*buffers, *self.global_buffers, own]
        extents += [
            Buffer(t.data_ptr(), t.untyped_storage().nbytes(), "a tensor of emulation()") for t in chosen.buffers
        ]
        table = array("q", [n for e in extents for n in (e.address, e.nbytes)])
        checked = self.checks is Checks.SANITIZER
        count = 1 if checked else self._threads(threads)
        launch = _LAUNCH_FIELDS.from_buffer_copy(self.launch_template)
        launch[layout.LAUNCH["chunk"] // 8] = max(1, self.blocks // (count * 16))
        launch[layout.LAUNCH["workers"] // 8] = count
        launch[layout.LAUNCH["buffer_count"] // 8] = len(extents)
        launch[layout.LAUNCH["buffers"] // 8] = table.buffer_info()[0]
        log = ctypes.create_string_buffer(layout.LOG_BYTES + 8) if self.code.info.prints else None
        if log is not None:
            launch[layout.LAUNCH["log"] // 8] = ctypes.addressof(log)
        workers = [_take_worker() for _ in range(count)]
        for worker in workers:
            worker.ready(self.worker_template, self.sizes, ctypes.addressof(launch), own.address)
            if chosen.max_steps is not None:
                worker.set("steps_limit", chosen.max_steps)
                worker.set("budget", min(chosen.max_steps, layout.POLL_EVERY))
                worker.set("budget_start", min(chosen.max_steps, layout.POLL_EVERY))
        findings = ctypes.create_string_buffer(sanitizer.FINDINGS_BYTES if checked else 1)
        remembered: Shadow | None = None
        if checked:
            info, shared = self.code.info, (workers[0].get("shared"), self.shared_bytes)
            remembered = Shadow(
                info.sites, shared, info.local_bytes, self.geometry.warps, self.blocks, extents, chosen.uninitialised
            )
            remembered.attach(launch, workers[0].fields)
            launch[layout.LAUNCH["findings"] // 8] = ctypes.addressof(findings)
        workers[0].set("python", ctypes.addressof(_PYTHON))
        start = time.perf_counter()
        waiting = [_workers().submit(self.run, worker.address) for worker in workers[1:]]
        try:
            self.run(workers[0].address)
        finally:
            _wait_for_all(waiting, launch)
        if workers[0].get("raised_type") and (raised := _raised(workers[0])) is not None:
            raise raised
        seconds = (time.perf_counter() - start) * count / max(self.blocks, 1)
        self.block_seconds = seconds if self.block_seconds is None else 0.7 * self.block_seconds + 0.3 * seconds
        if log is not None:
            sys.stdout.write("".join(printf.lines(log.raw, lambda address: _string_at(address, extents))))
        faulty = [worker for worker in workers if worker.get("error_kind")]
        try:
            if remembered is not None:
                remembered.give_back()
                place = self._place(workers[0], extents, chosen.max_steps)
                _raise_findings(place, memoryview(findings), [_fault(worker) for worker in faulty])
            elif faulty:
                first = min(faulty, key=lambda worker: worker.get("error_block"))
                raise EmulatorError(self._place(first, extents, chosen.max_steps).finding(_fault(first)).message)
        finally:
            _idle_workers.extend(workers)

    def _threads(self, threads: int) -> int:
        """At most `threads`: fewer if the work is short, unless blocks may wait for each other."""
        count = min(threads, self.blocks)
        if count > 1 and self.block_seconds is not None and not self.code.info.waits:
            count = min(count, 1 + int(self.block_seconds * self.blocks / SECOND_THREAD_SECONDS))
        return max(count, 1)

    def _place(self, worker: _Worker, extents: Sequence[Buffer], max_steps: int | None) -> Place:
        shared = (worker.get("shared"), self.shared_bytes)
        info, config = self.code.info, self.config
        warps = [worker.standing(w * info.frame_bytes) for w in range(self.geometry.warps)]
        return Place(self.name, info.sites, config.grid, config.block, extents, shared, max_steps, warps)


def _fault(worker: _Worker) -> Record:
    """The first fault of a worker."""
    names = ("kind", "site", "warp", "lane", "block", "address")
    kind, site, warp, lane, block, address = (worker.get(f"error_{name}") for name in names)
    return Record(kind, site, -1, warp, lane, block, address, 0)


def _raise_findings(place: Place, log: memoryview, faults: Sequence[Record]) -> None:
    """Raise what the sanitizer found in a launch, if anything."""
    found = sanitizer.first_of_each([*sanitizer.records(log), *faults])
    if not found:
        return
    findings = list({f.message: f for f in map(place.finding, found)}.values())  # copies of one line are one
    shown = "\n".join("  " + f"{f.check}: {f.message}".removeprefix(": ") for f in findings[:10])
    more = f"\n  and {len(findings) - 10} more in .findings" if len(findings) > 10 else ""
    raise SanitizerError(f"{place.kernel}: {len(findings)} findings of the sanitizer\n{shown}{more}", findings)


_prepared: dict[tuple[object, ...], Prepared] = {}


def prepare(ptx: str, key: str, entry: str, config: LaunchConfig, name: str = "") -> Prepared:
    """Compile (or fetch) `entry` for a launch geometry.

    Arguments:
        ptx, key: PTX text, and a string that identifies it (its hash).
        name: what to call the kernel in messages; default the entry.
    """
    checks = options.current().checks
    what = (key, entry, config, name, checks)
    found = _prepared.get(what)
    if found is None:
        found = _prepared.setdefault(what, Prepared(ptx, key, entry, config, name, checks))
    return found


def execute(
    ptx: str, key: str, entry: str, config: LaunchConfig, arguments: bytes, buffers: Sequence[Buffer],
    *, threads: int = 1, kernel_name: str = "",
) -> None:  # fmt: skip
    """Run a kernel on host memory.

    Arguments:
        arguments: the packed parameter block, each parameter at its natural alignment; pointers are host addresses.
        buffers: the extents that the kernel may access.
        threads: CPU threads to use at most.

    Raises EmulatorError for an unknown instruction, and for an access outside the buffers (after the launch stopped).
    """
    prepare(ptx, key, entry, config, kernel_name)(arguments, buffers, threads)


def describe() -> str:
    """What emulated kernels run on, such as 'AVX-512 (icelake-server)'."""
    return f"{native.vector_extension()} ({native.host()[0]})"
