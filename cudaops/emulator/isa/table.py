"""Registration and look-up of instruction rules. What is not in the table raises, naming the .cu file and line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cudaops.emulator.ptx import Instruction
from cudaops.errors import EmulatorError

if TYPE_CHECKING:
    from cudaops.emulator.codegen import Codegen

Emit = Callable[["Codegen", Instruction], None]


@dataclass(frozen=True)
class Rule:
    base: str
    types: frozenset[str]
    modifiers: frozenset[str]
    emit: Emit
    needs: frozenset[str] = frozenset()  # modifiers that must be present: they choose among rules of one opcode


TABLE: dict[str, list[Rule]] = {}


def rule(bases: str, types: str, modifiers: str = "", needs: str = "") -> Callable[[Emit], Emit]:
    """Register `emit` for each opcode in `bases`; every further part of an instruction must be a type or modifier."""

    def register(emit: Emit) -> Emit:
        for base in bases.split():
            allowed = frozenset(modifiers.split()) | frozenset(needs.split())
            TABLE.setdefault(base, []).append(
                Rule(base, frozenset(types.split()), allowed, emit, frozenset(needs.split()))
            )
        return emit

    return register


# How many operands an instruction has, its result counted; opcodes that are not here look at theirs themselves.
_COUNTS = {
    (2,): "abs neg not cnot rcp sqrt rsqrt ex2 lg2 sin cos tanh clz popc brev bfind testp mov cvta",
    (3,): "add sub mul mul24 div rem min max and or xor shl shr bmsk copysign",
    (4,): "mad mad24 fma sad selp slct shf bfe prmt dp4a dp2a",
    (5,): "bfi lop3",
    (2, 3): "cvt ld st vote",
    (3, 4): "setp set",
    (4, 5): "shfl",
}
OPERANDS = {base: counts for counts, bases in _COUNTS.items() for base in bases.split()}


LATER = {
    "wgmma": "the Hopper instructions",
    "setmaxnreg": "the Hopper instructions",
    "multimem": "the Hopper instructions",
    "tcgen05": "the Blackwell instructions",
    "clusterlaunchcontrol": "the Blackwell instructions",
}


def lookup(ins: Instruction) -> Rule:
    """The rule for an instruction. Raises EmulatorError for an unknown opcode, modifier or type."""
    rules = TABLE.get(ins.base)
    where = f"{ins.file}:{ins.line}"
    if rules is None:
        why = f"{LATER[ins.base]} are not emulated yet" if ins.base in LATER else "the emulator does not know it"
        raise EmulatorError(f"{where}: PTX instruction `{ins}`: {why}; run this kernel on a GPU, or avoid it")
    parts = ins.parts[1:]
    for candidate in rules:
        if candidate.needs <= set(parts) and all(p in candidate.types or p in candidate.modifiers for p in parts):
            counts = OPERANDS.get(ins.base, ())
            if counts and "cc" not in parts and len(ins.operands) not in counts:
                raise EmulatorError(
                    f"{where}: PTX instruction `{ins}` has {len(ins.operands)} operands; the emulator knows {ins.base} "
                    f"with {' or '.join(map(str, counts))}"
                )
            return candidate
    known = sorted(set().union(*(r.types | r.modifiers for r in rules)))
    odd = [p for p in parts if p not in known] or list(parts)
    raise EmulatorError(
        f"{where}: PTX instruction `{ins}`: the emulator does not know .{' .'.join(odd)} of {ins.base}; "
        f"it knows .{' .'.join(known)}"
    )
