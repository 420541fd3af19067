"""A block in another order, with loads repeated, computes and stores the same."""

from __future__ import annotations

import random

import pytest

from cudaops.emulator.ptx import Imm, Instruction, Mem, Operand, Reg
from cudaops.emulator.schedule import WORTH_IT, schedule

REGISTERS = [Reg(f"%r{n}", "b32") for n in range(14)]
ADDRESSES = [Reg(f"%a{n}", "b64") for n in range(3)]


def instruction(opcode: str, *operands: Operand) -> Instruction:
    return Instruction(opcode, tuple(opcode.split(".")), operands, "test.cu", 1)


def random_block(source: random.Random, size: int, stores: float) -> list[Instruction]:
    """Few registers and addresses, written again and again, some results never read."""
    code = []
    for _ in range(size):
        kind, register = source.random(), source.choice
        if kind < stores:
            code.append(
                instruction("st.shared.b32", Mem(register(ADDRESSES), 4 * source.randrange(3)), register(REGISTERS))
            )
        elif kind < 0.3:
            space = register(("shared", "global"))
            code.append(
                instruction(f"ld.{space}.b32", register(REGISTERS), Mem(register(ADDRESSES), 4 * source.randrange(3)))
            )
        elif kind < 0.4:
            code.append(instruction("add.s64", register(ADDRESSES), register(ADDRESSES), Imm(4)))
        elif kind < 0.42:
            code.append(instruction("bar.warp.sync", Imm(-1)))
        else:
            code.append(instruction("fma.rn.f32", register(REGISTERS), *(register(REGISTERS) for _ in range(3))))
    return code


def effect(code: list[Instruction]) -> tuple[dict[str, object], list[object]]:
    """Every register as the expression it holds, and the stores in order; memory is what the stores so far made it."""
    values: dict[str, object] = {}
    stores: list[object] = []

    def of(operand: Operand) -> object:
        match operand:
            case Reg(name):
                return values.get(name, name)
            case Mem(base, offset):
                return ("at", of(base), offset)
            case Imm(value):
                return value
        raise AssertionError(operand)

    for ins in code:
        if ins.base == "st":
            stores.append((of(ins.operands[0]), of(ins.operands[1])))
        elif ins.base == "bar":
            stores.append("bar")
        else:
            target = ins.operands[0]
            assert isinstance(target, Reg)
            epoch = len(stores) if ins.base == "ld" else 0
            values[target.name] = (ins.opcode, epoch, *(hash(of(o)) for o in ins.operands[1:]))
    return values, stores


@pytest.mark.parametrize("stores", [0.0, 0.01, 0.1])
def test_the_order_changes_no_result(stores: float) -> None:
    for _ in range(60):
        source = random.Random(random.getrandbits(32))
        code = random_block(source, source.randint(WORTH_IT // 2, 4 * WORTH_IT), stores)
        live = frozenset(r.name for r in (*REGISTERS, *ADDRESSES) if source.random() < 0.5)
        for results_at_once in (1, 3, 8):
            again = schedule(code, live, results_at_once)
            wanted, given = effect(code), effect(again)
            assert given[1] == wanted[1]
            assert {name: given[0].get(name) for name in live} == {name: wanted[0].get(name) for name in live}
            assert {id(ins) for ins in again} == {id(ins) for ins in code}


def test_a_tile_of_sums_is_done_a_few_at_a_time() -> None:
    """64 products of 8 by 8 loaded values: the results come in groups, and a group loads what it needs again."""
    base = ADDRESSES[0]
    a, b = ([Reg(f"%{x}{n}", "f32") for n in range(8)] for x in "ab")
    code = [instruction("ld.shared.f32", r, Mem(base, 4 * n)) for n, r in enumerate((*a, *b))]
    sums = [Reg(f"%s{m}_{n}", "f32") for m in range(8) for n in range(8)]
    code += [instruction("fma.rn.f32", s, a[k // 8], b[k % 8], s) for k, s in enumerate(sums)]
    order = schedule(code, frozenset(s.name for s in sums), 8)
    done, most, since = 0, 0, 0
    for ins in order:
        if ins.base == "ld":
            most, since = max(most, since), 0
        else:
            done, since = done + 1, since + 1
    assert done == 64
    assert max(most, since) <= 16
    assert sum(ins.base == "ld" for ins in order) > 16
