"""Random integer expressions in CUDA C, with their exact value in Python.

Signed overflow, which C leaves undefined, cannot happen: sums, products and left shifts are unsigned, and signed values
come from casts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.emulator import harness
from tests.emulator.reference import signed

Environment = dict[str, Any]  # tid, bid, a, b, c, j, table
WIDTH = {"u32": 32, "i32": 32, "u64": 64, "i64": 64, "u16": 16, "i16": 16, "u8": 8, "i8": 8}
EXPRESSIONS = 5  # of a kernel


@dataclass(frozen=True)
class Expression:
    type: str
    text: str
    value: Callable[[Environment], int]

    def __repr__(self) -> str:
        return self.text


def wrapped(value: int, type_: str) -> int:
    width = WIDTH[type_]
    return signed(value, width) if type_[0] == "i" else value & ((1 << width) - 1)


def cast(e: Expression, type_: str) -> Expression:
    return e if e.type == type_ else Expression(type_, f"({type_})({e.text})", lambda env: wrapped(e.value(env), type_))


def binary(op: str, x: Expression, y: Expression) -> Expression:
    """Both operands as unsigned of the wider width."""
    type_ = "u64" if "64" in x.type + y.type else "u32"
    x, y = cast(x, type_), cast(y, type_)
    act: dict[str, Callable[[int, int], int]] = {
        "+": lambda p, q: p + q,
        "-": lambda p, q: p - q,
        "*": lambda p, q: p * q,
        "&": lambda p, q: p & q,
        "|": lambda p, q: p | q,
        "^": lambda p, q: p ^ q,
    }
    return Expression(
        type_, f"({x.text} {op} {y.text})", lambda env: wrapped(act[op](x.value(env), y.value(env)), type_)
    )


def divide(op: str, x: Expression, y: Expression, signs: bool) -> Expression:
    """By a divisor that is never 0 (nor -1): its low bits are set, its sign bit is not."""
    type_ = ("i" if signs else "u") + ("64" if "64" in x.type + y.type else "32")
    x = cast(x, type_)
    y = binary("|", binary("&", y, _number(0x7FFFFFFF)), _number(3))
    y = cast(y, type_)

    def value(env: Environment) -> int:
        p, q = x.value(env), y.value(env)
        quotient = abs(p) // q * (-1 if p < 0 else 1)
        return quotient if op == "/" else p - quotient * q

    return Expression(type_, f"({x.text} {op} {y.text})", value)


def shift(op: str, x: Expression, count: int, signs: bool) -> Expression:
    type_ = ("i" if signs and op == ">>" else "u") + ("64" if "64" in x.type else "32")
    x = cast(x, type_)
    count %= WIDTH[type_]

    def value(env: Environment) -> int:
        return wrapped(x.value(env) << count if op == "<<" else x.value(env) >> count, type_)

    return Expression(type_, f"({x.text} {op} {count})", value)


def choose(test: str, x: Expression, y: Expression, p: Expression, q: Expression, signs: bool) -> Expression:
    type_ = ("i" if signs else "u") + ("64" if "64" in x.type + y.type else "32")
    x, y = cast(x, type_), cast(y, type_)
    result = "u64" if "64" in p.type + q.type else "u32"
    p, q = cast(p, result), cast(q, result)
    act: dict[str, Callable[[int, int], bool]] = {
        "<": lambda m, n: m < n,
        "<=": lambda m, n: m <= n,
        "==": lambda m, n: m == n,
    }
    return Expression(
        result,
        f"({x.text} {test} {y.text} ? {p.text} : {q.text})",
        lambda env: p.value(env) if act[test](x.value(env), y.value(env)) else q.value(env),
    )


def look_up(x: Expression) -> Expression:
    index = cast(x, "u32")
    return Expression("u32", f"table[{index.text} & 63]", lambda env: env["table"][index.value(env) & 63])


def _number(n: int) -> Expression:
    return Expression("u32", f"{n}u", lambda env: n)


def _leaf(name: str, type_: str) -> Expression:
    return Expression(type_, name, lambda env: wrapped(env[name], type_))


LEAVES = [
    *(_leaf(name, "u32") for name in ("tid", "tid", "tid", "bid", "a", "b", "j")), _leaf("c", "u64"),
    *map(_number, (0, 1, 2, 3, 4, 7, 8, 31, 32, 63, 100, 255, 0x7FFFFFFF, 0x80000000, 0xFFFFFFF0, 0xFFFFFFFF)),
]  # fmt: skip


def expressions() -> st.SearchStrategy[Expression]:
    def extend(inner: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
        return st.one_of(
            st.builds(binary, st.sampled_from("+-*&|^"), inner, inner),
            st.builds(binary, st.sampled_from("+*"), inner, inner),
            st.builds(shift, st.sampled_from(("<<", ">>")), inner, st.integers(0, 63), st.booleans()),
            st.builds(cast, inner, st.sampled_from(sorted(WIDTH))),
            st.builds(divide, st.sampled_from("/%"), inner, inner, st.booleans()),
            st.builds(choose, st.sampled_from(("<", "<=", "==")), inner, inner, inner, inner, st.booleans()),
            st.builds(look_up, inner),
        )

    return st.recursive(st.sampled_from(LEAVES), extend, max_leaves=9)


@dataclass(frozen=True)
class CKernel:
    """Each thread stores every expression, and the sum of the last one over a loop whose length is the thread's own."""

    stored: tuple[Expression, ...]
    turns: Expression

    @property
    def text(self) -> str:
        lines = [
            "__global__ void k(u64* out, const u32* table, u32 a, u32 b, u64 c) {",
            "u32 tid = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x, bid = blockIdx.x, j = 0;",
            f"out += (bid * (blockDim.x * blockDim.y * blockDim.z) + tid) * {len(self.stored) + 1};",
            *(f"out[{n}] = (u64)({e.text});" for n, e in enumerate(self.stored)),
            f"u64 sum = 0; for (; j < ({cast(self.turns, 'u32').text} & 7); j++) sum = sum * 3 + (u64)({self.stored[-1].text});",
            f"out[{len(self.stored)}] = sum; }}",
        ]
        return "\n".join(lines)

    def check(self, block: tuple[int, int, int], a: int, b: int, c: int, table: np.ndarray) -> None:
        kernel = harness.cuda(self.text)
        threads, grid = block[0] * block[1] * block[2], 2
        out = np.zeros((grid * threads, len(self.stored) + 1), np.uint64)
        harness.run(kernel, grid, block, out, table, a, b, c)
        words = [int(w) for w in table]
        for t in range(grid * threads):
            env = {"tid": t % threads, "bid": t // threads, "a": a, "b": b, "c": c, "j": 0, "table": words}
            expected = [e.value(env) & (2**64 - 1) for e in self.stored]
            total = 0
            # C evaluates `turns` in each test of the loop, where j counts.
            while env["j"] < cast(self.turns, "u32").value(env) & 7:
                total = (total * 3 + self.stored[-1].value(env)) & (2**64 - 1)
                env["j"] += 1
            got = [int(v) for v in out[t]]
            assert got == [*expected, total], f"thread {t}: {got}, not {[*expected, total]}\n{self.text}"


def kernels() -> st.SearchStrategy[CKernel]:
    several = st.lists(expressions(), min_size=EXPRESSIONS, max_size=EXPRESSIONS).map(tuple)
    return st.builds(CKernel, several, expressions())
