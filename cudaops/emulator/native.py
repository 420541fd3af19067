"""LLVM: IR text -> machine code for this CPU -> callable addresses. No process-global LLVM option is touched."""

from __future__ import annotations

import functools
import hashlib
import sys
import threading
from pathlib import Path
from typing import Any

from cudaops.errors import EmulatorError, UnsupportedError

_lock = threading.RLock()  # LLVM's C bindings are used by one thread at a time
_engines: list[Any] = []  # code stays loaded as long as the process lives


@functools.cache
def _binding() -> Any:
    try:
        import llvmlite.binding as binding
    except ImportError as error:
        raise UnsupportedError(
            "running a kernel on CPU tensors needs llvmlite, which is not installed; `pip install llvmlite`"
        ) from error
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding


@functools.cache
def host() -> tuple[str, str]:
    """(CPU name, feature string) of this machine, as LLVM knows them."""
    binding = _binding()
    features = binding.get_host_cpu_features()
    # The preference for 256-bit vectors of some server CPUs is about mixed code; warps are long vectors throughout.
    text = ",".join(f for f in features.flatten().split(",") if "prefer-256-bit" not in f)
    return binding.get_host_cpu_name(), text


def vector_extension() -> str:
    """'AVX-512', 'AVX2' or 'SSE': what a warp's 32 lanes are packed into."""
    features = set(host()[1].split(","))
    return "AVX-512" if "+avx512f" in features else "AVX2" if "+avx2" in features else "SSE"


@functools.cache
def identity() -> str:
    """What machine code in the cache depends on beside the kernel: CPU, LLVM, and this emulator's own source."""
    digest = hashlib.sha256()
    digest.update(repr((host(), _binding().llvm_version_info)).encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def machine_code(ir: str, cpu: tuple[str, str] | None = None) -> bytes:
    """An object file for `cpu` (default: this one)."""
    binding = _binding()
    name, features = cpu or host()
    # LLVM puts vzeroupper at the end of functions that promise (preserve_allcc) to keep all registers, which clears the
    # upper halves of their callers'; the scheduler does it once, when all is done.
    features += ",-vzeroupper"
    with _lock:
        target = binding.Target.from_default_triple()
        machine = target.create_target_machine(cpu=name, features=features, opt=2, reloc="pic", codemodel="jitdefault")
        try:
            module = binding.parse_assembly(ir)
            module.triple = machine.triple
            module.verify()
        except RuntimeError as error:
            raise EmulatorError(f"internal: LLVM refuses the code made for this kernel: {error}") from error
        passes = binding.create_new_module_pass_manager()
        passes.add_sroa_pass()
        passes.add_simplify_cfg_pass()
        passes.run(module, binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(2)))
        return bytes(machine.emit_object(module))


def load(code: bytes, symbols: list[str]) -> list[int]:
    """The addresses of `symbols` in an object file, loaded for the life of the process."""
    binding = _binding()
    if not _is_object(code):
        raise EmulatorError("machine code in the cache is damaged: it is no object file for this CPU")
    with _lock:
        name, features = host()
        target = binding.Target.from_default_triple()
        machine = target.create_target_machine(cpu=name, features=features, opt=2, reloc="pic", codemodel="jitdefault")
        engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
        try:
            engine.add_object_file(binding.ObjectFileRef.from_data(code))
            engine.finalize_object()
        except RuntimeError as error:
            raise EmulatorError(f"machine code in the cache is damaged: {error}") from error
        addresses = [engine.get_function_address(symbol) for symbol in symbols]
        if not all(addresses):
            raise EmulatorError(f"machine code in the cache lacks {symbols}: it is damaged")
        _engines.append(engine)
        return addresses


def _is_object(code: bytes) -> bool:
    """Whether the headers are those of an ELF object with all its sections: LLVM crashes on what is none."""
    if not sys.platform.startswith("linux"):
        return True  # another format
    if len(code) < 64 or not code.startswith(b"\x7fELF\x02\x01"):
        return False
    kind, sections_at, entry_size, count = (
        int.from_bytes(code[at : at + n], "little") for at, n in ((16, 2), (40, 8), (58, 2), (60, 2))
    )
    return kind == 1 and entry_size == 64 and count > 0 and sections_at + 64 * count <= len(code)
