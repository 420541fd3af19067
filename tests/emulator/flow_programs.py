"""Random control-flow graphs in PTX, irreducible ones too, with the path every thread must take.

Each block changes a few registers and jumps, by a condition on one of them, to any block of the graph. Backward jumps
burn fuel, so that every thread ends. Some registers are the same in all lanes until the lanes part, some never.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from tests.emulator import harness

REGISTERS = ("u", "w", "a", "v", "x")  # uniform twice, affine, varying twice
FUEL = 12
MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Change:
    """register = register op operand; operand a register's name or a number."""

    target: str
    op: str
    operand: str | int


@dataclass(frozen=True)
class Node:
    changes: tuple[Change, ...]
    test: tuple[str, int, int] | None  # (register, mask, value): jump to `there` if register & mask == value
    there: int
    otherwise: int
    guarded: tuple[Change, tuple[str, int, int]] | None  # an instruction with a predicate of its own
    leaves: bool  # @test ret instead of a jump


OPS = {
    "add": ("add.s32", lambda p, q: p + q),
    "sub": ("sub.s32", lambda p, q: p - q),
    "xor": ("xor.b32", lambda p, q: p ^ q),
    "mul": ("mul.lo.s32", lambda p, q: p * q),
    "mov": ("", lambda p, q: q),
}


def random_graph(source: random.Random, size: int, forward: float = 0.7) -> list[Node]:
    """`size` blocks; block `size` is the end."""

    def change() -> Change:
        operand: str | int = (
            source.choice(REGISTERS) if source.random() < 0.5 else source.choice((1, 3, 5, 0x10, 0x7FFFFFFF))
        )
        return Change(source.choice(REGISTERS), source.choice(list(OPS)), operand)

    def test() -> tuple[str, int, int]:
        mask = source.choice((1, 2, 3, 4, 6))
        return source.choice(REGISTERS), mask, source.randrange(8) & mask

    def jump(b: int) -> int:
        if source.random() < forward:
            return source.randint(b + 1, min(size, b + 4))
        return source.randrange(size + 1)

    nodes = []
    for b in range(size):
        nodes.append(
            Node(
                tuple(change() for _ in range(source.randint(0, 3))),
                test() if source.random() < 0.85 else None,
                jump(b),
                jump(b) if source.random() < 0.5 else b + 1,
                (change(), test()) if source.random() < 0.2 else None,
                source.random() < 0.08,
            )
        )
    return nodes


def ptx_of(nodes: list[Node], one_temporary: bool = True) -> str:
    """`one_temporary`: what is compared is always in one register, whichever lanes it has that time."""
    lines = [
        ".reg .b32 %u, %w, %a, %v, %x, %fuel, %t, %t<99>, %steps; .reg .pred %p, %q; .reg .b64 %in, %out, %at, %o;",
        "ld.param.u64 %in, [in]; ld.param.u64 %out, [out]; ld.param.u32 %u, [seed];",
        "cvta.to.global.u64 %in, %in; cvta.to.global.u64 %out, %out;",
        "mov.u32 %t, %tid.x; mov.u32 %a, %ctaid.x; mov.u32 %w, %ntid.x; mad.lo.s32 %a, %a, %w, %t;",
        "mul.wide.u32 %at, %a, 4; add.s64 %in, %in, %at; ld.global.u32 %v, [%in];",
        "mul.wide.u32 %at, %a, 24; add.s64 %o, %out, %at;",
        f"mul.lo.s32 %x, %v, 77; mov.u32 %fuel, {FUEL}; mov.u32 %steps, 0;",
    ]
    end = len(nodes)
    for b, node in enumerate(nodes):
        lines.append(f"B{b}: add.s32 %steps, %steps, 1;")
        lines += [_shown(c) for c in node.changes]
        if node.guarded is not None:
            change, test = node.guarded
            lines += [_test(test, "q", "t" if one_temporary else f"t{2 * b}"), f"@%q {_shown(change)}"]
        if node.test is not None:
            lines.append(_test(node.test, "p", "t" if one_temporary else f"t{2 * b + 1}"))
            if node.leaves:
                lines += ["st.global.u32 [%o+20], %steps;", "@%p ret;"]
            else:
                lines.append(f"@%p bra {_label(b, node.there, 't')};")
        lines.append(f"bra {_label(b, node.otherwise, 'o')};")
        for to, kind in ((node.there, "t"), (node.otherwise, "o")):
            if to <= b:
                lines += [
                    f"{_label(b, to, kind)}: sub.s32 %fuel, %fuel, 1; setp.le.s32 %q, %fuel, 0;",
                    f"@%q bra B{end}; bra B{to};",
                ]
    lines.append(f"B{end}:")
    lines += [f"st.global.u32 [%o+{4 * n}], %{r};" for n, r in enumerate(REGISTERS)]
    lines += ["st.global.u32 [%o+20], %steps;", "ret;"]
    return "\n".join(lines)


def _label(b: int, to: int, kind: str) -> str:
    return f"B{to}" if to > b else f"T{b}{kind}"


def _shown(change: Change) -> str:
    operand = f"%{change.operand}" if isinstance(change.operand, str) else str(change.operand)
    if change.op == "mov":
        return f"mov.u32 %{change.target}, {operand};"
    return f"{OPS[change.op][0]} %{change.target}, %{change.target}, {operand};"


def _test(test: tuple[str, int, int], into: str, temporary: str) -> str:
    register, mask, value = test
    return f"and.b32 %{temporary}, %{register}, {mask}; setp.eq.s32 %{into}, %{temporary}, {value};"


def walk(nodes: list[Node], thread: int, word: int, seed: int) -> list[int]:
    """What one thread stores: the registers and the number of blocks it ran; -1 where it stores nothing."""
    values = {"u": seed, "w": 0, "a": thread, "v": word, "x": word * 77 & MASK}
    values["w"] = walk.block  # type: ignore[attr-defined]
    b, fuel, steps = 0, FUEL, 0
    stored = [-1] * 6

    def apply(change: Change) -> None:
        operand = values[change.operand] if isinstance(change.operand, str) else change.operand
        values[change.target] = OPS[change.op][1](values[change.target], operand) & MASK

    def holds(test: tuple[str, int, int]) -> bool:
        register, mask, value = test
        return values[register] & mask == value

    while b < len(nodes):
        node = nodes[b]
        steps += 1
        for change in node.changes:
            apply(change)
        if node.guarded is not None and holds(node.guarded[1]):
            apply(node.guarded[0])
        to = node.otherwise
        if node.test is not None:
            if node.leaves:
                stored[5] = steps
            if holds(node.test):
                if node.leaves:
                    return stored
                to = node.there
        if to <= b:
            fuel -= 1
            if fuel <= 0:
                break
        b = to
    return [*(values[r] for r in REGISTERS), steps]


def check(nodes: list[Node], block: int, grid: int, seed: int, words: np.ndarray, one_temporary: bool = True) -> None:
    text = ptx_of(nodes, one_temporary)
    kernel = harness.ptx(text, ".param .u64 out, .param .u64 in, .param .u32 seed")
    threads = block * grid
    out = np.full((threads, 6), MASK, dtype=np.uint32)
    harness.run(kernel, grid, block, out, words[:threads].copy(), seed)
    walk.block = block  # type: ignore[attr-defined]
    for thread in range(threads):
        expected = [MASK if v == -1 else v for v in walk(nodes, thread, int(words[thread]), seed)]
        got = [int(v) for v in out[thread]]
        assert got == expected, f"thread {thread} of block {block}: {got}, not {expected}; seed {seed}\n{text}"
