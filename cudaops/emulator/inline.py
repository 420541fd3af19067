"""Calls of device functions, replaced by the functions' bodies; printf and assert become instructions.

A call passes its arguments through .param variables; each becomes registers where it is read as it was written, else
local memory. A call through a pointer becomes a comparison with every function whose address is taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise

from cudaops.emulator.ptx import (
    TYPE_BITS,
    Block,
    Function,
    Group,
    Imm,
    Instruction,
    Mem,
    Module,
    Operand,
    Pair,
    Reg,
    Sym,
    Variable,
    Vec,
)
from cudaops.errors import EmulatorError

DEEPEST = 24  # calls within calls


@dataclass
class _Body:
    """A function with its calls expanded."""

    blocks: list[tuple[str, list[Instruction]]] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)


def inline(module: Module, function: Function) -> Function:
    """`function` without calls. Raises EmulatorError for recursion, too deep a chain, or a body that is not there."""
    if not any(ins.base == "call" for block in function.blocks for ins in block.instructions):
        return function
    body = _Inliner(module).expand(function, ())
    _registers_for_params(body)
    blocks = tuple(Block(label, tuple(code)) for label, code in body.blocks)
    return replace(function, blocks=blocks, registers=body.registers, variables=tuple(body.variables))


class _Inliner:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.count = 0

    def expand(self, function: Function, chain: tuple[str, ...]) -> _Body:
        if function.name in chain:
            path = " -> ".join((*chain[chain.index(function.name) :], function.name))
            raise EmulatorError(f"{function.file}:{function.line}: recursion ({path}) is not emulated; use a loop")
        if len(chain) >= DEEPEST:
            raise EmulatorError(
                f"{function.file}:{function.line}: calls nest more than {DEEPEST} deep "
                f"({' -> '.join((*chain[:3], '...', function.name))}); let the compiler inline some of them"
            )
        body = _Body([], dict(function.registers), list(function.variables))
        for block in function.blocks:
            body.blocks.append((block.label, []))
            for ins in block.instructions:
                if ins.base == "call":
                    self._call(ins, body, (*chain, function.name))
                else:
                    body.blocks[-1][1].append(ins)
        return body

    def _call(self, ins: Instruction, body: _Body, chain: tuple[str, ...]) -> None:
        operands = list(ins.operands)
        outputs = _list(operands)
        target = operands.pop(0)
        inputs = _list(operands)
        self.count += 1
        after = f"$return{self.count}"
        if isinstance(target, Sym):
            callee = self.module.functions.get(target.name)
            if callee is None or not callee.blocks:
                self._extern(ins, target.name, outputs, inputs, body)
                return
            self._paste(callee, outputs, inputs, after, body, chain)
        elif isinstance(target, Reg):
            self._indirect(ins, target, outputs, inputs, after, body, chain)
        body.blocks.append((after, []))

    def _paste(
        self, callee: Function, outputs: Iterable[Operand], inputs: Iterable[Operand], after: str, body: _Body,
        chain: tuple[str, ...],
    ) -> None:  # fmt: skip
        inner = self.expand(callee, chain)
        self.count += 1
        mark = f"~{self.count}"
        names = {p.name: a for p, a in zip(callee.params, inputs, strict=True)}
        names |= {p.name: a for p, a in zip(callee.results, outputs, strict=True)}
        labels = {label for label, _ in inner.blocks}

        def moved(operand: Operand) -> Operand:
            match operand:
                case Reg(name, type_, negated):
                    return Reg(name + mark, type_, negated)
                case Sym(name):
                    if name in names:
                        return names[name]
                    return Sym(name + mark) if name in labels or name in own else operand
                case Mem(base, offset):
                    return Mem(moved(base), offset)  # type: ignore[arg-type]
                case Vec(items):
                    return Vec(tuple(map(moved, items)))
                case Group(items):
                    return Group(tuple(map(moved, items)))
                case Pair(first, second):
                    return Pair(moved(first), moved(second))
            return operand

        own = {v.name for v in inner.variables}
        body.registers |= {name + mark: type_ for name, type_ in inner.registers.items()}
        body.variables += [replace(v, name=v.name + mark) for v in inner.variables]
        for label, code in inner.blocks:
            out: list[Instruction] = []
            for ins in code:
                if ins.base == "ret":
                    out.append(Instruction("bra", ("bra",), (Sym(after),), ins.file, ins.line))
                    continue
                guard = moved(ins.guard) if ins.guard is not None else None
                assert guard is None or isinstance(guard, Reg)
                out.append(replace(ins, operands=tuple(map(moved, ins.operands)), guard=guard))
            body.blocks.append((label + mark, out))

    def _indirect(
        self, ins: Instruction, target: Reg, outputs: tuple[Operand, ...], inputs: tuple[Operand, ...], after: str,
        body: _Body, chain: tuple[str, ...],
    ) -> None:  # fmt: skip
        shape = ([self._size(body, o) for o in outputs], [self._size(body, i) for i in inputs])
        candidates = [
            f for f in map(self.module.functions.__getitem__, self.module.addressed())
            if f.blocks and ([r.size for r in f.results], [p.size for p in f.params]) == shape and f.name not in chain
        ]  # fmt: skip
        predicate = f"%call{self.count}"
        body.registers[predicate] = "pred"
        for n, callee in enumerate(candidates):
            other = f"{after}.{n}"
            address = Imm(self.module.function_address(callee.name))
            code = body.blocks[-1][1]
            p = Reg(predicate, "pred")
            code.append(Instruction("setp.ne.u64", ("setp", "ne", "u64"), (p, target, address), ins.file, ins.line))
            code.append(Instruction("bra", ("bra",), (Sym(other),), ins.file, ins.line, p))
            body.blocks.append((f"{other}.call", []))
            self._paste(callee, outputs, inputs, after, body, chain)
            body.blocks.append((other, []))
        body.blocks[-1][1].append(Instruction("call", ("trap",), (), ins.file, ins.line))

    def _size(self, body: _Body, operand: Operand) -> int:
        assert isinstance(operand, Sym)
        return next(v.size for v in body.variables if v.name == operand.name)

    def _extern(
        self, ins: Instruction, name: str, outputs: tuple[Operand, ...], inputs: tuple[Operand, ...], body: _Body
    ) -> None:
        """vprintf(format, arguments) and __assertfail(message, file, line, function, size)."""
        self.count += 1
        code = body.blocks[-1][1]

        def fetched(place: int, kind: str) -> Reg:
            source = inputs[place]
            assert isinstance(source, Sym)
            register = Reg(f"%extern{self.count}.{place}", kind)
            body.registers[register.name] = kind
            opcode = f"ld.param.{kind}"
            code.append(Instruction(opcode, tuple(opcode.split(".")), (register, Mem(source, 0)), ins.file, ins.line))
            return register

        if name == "vprintf":
            operands = (fetched(0, "b64"), fetched(1, "b64"))
            code.append(Instruction("vprintf", ("vprintf",), operands, ins.file, ins.line))
            (result,) = outputs
            assert isinstance(result, Sym)
            code.append(
                Instruction("st.param.b32", ("st", "param", "b32"), (Mem(result, 0), Imm(0)), ins.file, ins.line)
            )
        elif name == "__assertfail":
            code.append(Instruction(name, ("trap",), (), ins.file, ins.line))
            body.blocks.append((f"$after_assert{self.count}", []))
        else:
            raise EmulatorError(f"{ins.file}:{ins.line}: call of {name}, which has no body in this PTX")


def _registers_for_params(body: _Body) -> None:
    """.param variables of calls become registers, one for each offset; local memory where widths or offsets mix."""
    names = {v.name for v in body.variables if v.space == "param"}
    uses: dict[str, set[tuple[int, int]]] = {name: set() for name in names}
    odd: set[str] = set()
    for _, code in body.blocks:
        for ins in code:
            place = _param_place(ins)
            for n, operand in enumerate(ins.operands):
                name = _named(operand)
                if name not in names:
                    continue
                if n != place or not isinstance(operand, Mem) or TYPE_BITS[ins.type] < 16:
                    odd.add(name)
                    continue
                bits = TYPE_BITS[ins.type]
                for e in range(len(_items(ins.operands[1 - n]))):
                    uses[name].add((operand.offset + e * bits // 8, bits))
    for name, found in uses.items():
        ends = sorted((offset, offset + bits // 8) for offset, bits in found)
        if any(first[1] > second[0] for first, second in pairwise(ends)):
            odd.add(name)
    for n, (label, code) in enumerate(body.blocks):
        body.blocks[n] = (label, [new for ins in code for new in _without_params(ins, names, odd, body.registers)])
    kept = [replace(v, space="local") if v.name in odd else v for v in body.variables]
    body.variables = [v for v in kept if v.space != "param"]


def _list(operands: list[Operand]) -> tuple[Operand, ...]:
    """Take a parenthesised list from the front, if there is one."""
    if operands and isinstance(operands[0], Group):
        group = operands.pop(0)
        assert isinstance(group, Group)
        return group.items
    return ()


def _param_place(ins: Instruction) -> int:
    """Which operand of an st.param / ld.param is the address; -1 for other instructions."""
    if len(ins.parts) < 2 or ins.parts[1] != "param":
        return -1
    return {"st": 0, "ld": 1}.get(ins.base, -1)


def _items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vec) else (operand,)


def _named(operand: Operand) -> str | None:
    base = operand.base if isinstance(operand, Mem) else operand
    return base.name if isinstance(base, Sym) else None


def _without_params(ins: Instruction, names: set[str], odd: set[str], registers: dict[str, str]) -> list[Instruction]:
    place = _param_place(ins)
    address = ins.operands[place] if place >= 0 else None
    if not isinstance(address, Mem) or (name := _named(address)) not in names or name is None:
        return [ins]
    if name in odd:
        opcode = ins.opcode.replace(".param", ".local", 1)
        return [replace(ins, opcode=opcode, parts=tuple(opcode.split(".")))]
    bits = TYPE_BITS[ins.type]
    moves = []
    for e, item in enumerate(_items(ins.operands[1 - place])):
        register = Reg(f"%{name}+{address.offset + e * bits // 8}", f"b{bits}")
        registers[register.name] = register.type
        operands = (register, item) if place == 0 else (item, register)
        moves.append(Instruction(f"mov.b{bits}", ("mov", f"b{bits}"), operands, ins.file, ins.line))
    return moves
