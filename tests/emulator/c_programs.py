"""Random programs in CUDA C whose text is also C: integers and floats, loops, switches, arrays, calls, early returns.

What a program computes, a host compiler says: `c_programs.h` gives both the same functions. A function returns one word,
made of all its variables; nothing in it is undefined, and every loop ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from hypothesis import strategies as st

from tests.emulator import c_expressions
from tests.emulator.c_expressions import Expression

# What a function begins with: name -> type, value.
VARIABLES = {
    "p0": ("i32", "(i32)(tid * 5u + a)"), "p1": ("u32", "table[tid & 63]"), "p2": ("i64", "(i64)c"),
    "p3": ("u64", "c * tid"), "p4": ("u8", "(u8)(b + tx)"), "p5": ("i16", "(i16)(a - ty)"),
    "x1": ("float", "floats[tid & 31]"), "x2": ("float", "(float)(i32)tx"), "y1": ("double", "doubles[(tid + a) & 31]"),
}  # fmt: skip
INTEGERS = tuple(name for name, (type_, _) in VARIABLES.items() if type_[0] in "iu")
FLOATS = tuple(name for name in VARIABLES if name not in INTEGERS)
LOCALS = 8  # words of the array w
ROUNDINGS = ("rn", "rz", "ru", "rd")
TESTS = ("<", "<=", "==", "!=", ">", ">=")
T = TypeVar("T")
DEPTH = 3  # of statements in statements


class Choices:
    """Decisions read from bytes, the first of the options where they have ended: fewer and smaller bytes are a simpler
    program, which is what Hypothesis shrinks to."""

    def __init__(self, data: bytes) -> None:
        self._bytes = iter(data)

    def below(self, n: int) -> int:
        return next(self._bytes, 0) % n

    def of(self, options: tuple[T, ...]) -> T:
        return options[self.below(len(options))]


def _never(_: object) -> int:
    raise AssertionError("what these mean, the host compiler says")


def _e(type_: str, text: str) -> Expression:
    return Expression(type_, text, _never)


def as_type(e: Expression, type_: str) -> str:
    return e.text if e.type == type_ else f"({type_})({e.text})"


def _call(type_: str, name: str, types: tuple[str, ...], *operands: Expression) -> Expression:
    """A call with each operand as its parameter's type."""
    return _e(type_, f"{name}({', '.join(as_type(o, t) for o, t in zip(operands, types, strict=True))})")


def _wider(*operands: Expression) -> str:
    return "double" if "double" in (o.type for o in operands) else "float"


Inner = Callable[[], Expression]


# -- floats ---------------------------------------------------------------------------------------------------------------
_FLOAT_LEAVES = (
    *(_e(VARIABLES[name][0], name) for name in (*FLOATS, *FLOATS)),
    *(_e("float", t) for t in ("x0", "0.0f", "1.0f", "-3.5f", "1e-40f", "16777215.0f", "0.1f")),
    *(_e("double", t) for t in ("y0", "0.0", "0.5", "-1e300", "5e-324", "0.1")),
)
_FROM_INTEGER = (("int", "i32", "float"), ("uint", "u32", "float"), ("ll", "i64", "float"), ("ll", "i64", "double"))


def _float_leaf(c: Choices) -> Expression:
    kind = c.below(8)
    if kind < 4:
        return c.of(_FLOAT_LEAVES)
    if kind < 6:
        type_ = ("float", "double")[kind - 4]
        return _e(type_, f"{type_}s[({as_type(_integer_leaf(c), 'u32')}) & 31]")
    if kind == 6:
        type_ = c.of(("float", "double"))
        return _e(type_, f"({type_})({_integer_leaf(c).text})")
    name, source, result = c.of(_FROM_INTEGER)
    return _call(result, f"__{name}2{result}_{c.of(ROUNDINGS)}", (source,), _integer_leaf(c))


def _arithmetic(c: Choices, inner: Inner) -> Expression:
    x, y = inner(), inner()
    type_ = _wider(x, y)
    return _e(type_, f"(({as_type(x, type_)}) {c.of(tuple('+-*/'))} ({as_type(y, type_)}))")


def _rounded(c: Choices, inner: Inner) -> Expression:
    op, count = c.of((("add", 2), ("mul", 2), ("div", 2), ("sqrt", 1), ("fma", 3)))
    operands = [inner() for _ in range(count)]
    type_ = _wider(*operands)
    name = ("__fmaf_" if type_ == "float" else "__fma_") if op == "fma" else f"__{type_[0]}{op}_"
    return _call(type_, name + c.of(ROUNDINGS), (type_,) * count, *operands)


def _function(c: Choices, inner: Inner) -> Expression:
    name, count = c.of(
        (("sqrt", 1), ("fabs", 1), ("floor", 1), ("ceil", 1), ("trunc", 1), ("rint", 1), ("fma", 3), ("least", 2), ("greatest", 2))
    )  # fmt: skip
    operands = [inner() for _ in range(count)]
    type_ = _wider(*operands)
    name = f"{name}_{type_}" if name in ("least", "greatest") else name + "f" * (type_ == "float")
    return _call(type_, name, (type_,) * count, *operands)


def _negated(c: Choices, inner: Inner) -> Expression:
    x = inner()
    return _e(x.type, f"(-({x.text}))")


def _converted(c: Choices, inner: Inner) -> Expression:
    x = inner()
    if c.below(2):
        return _call("float", f"__double2float_{c.of(ROUNDINGS)}", ("double",), x)
    type_ = c.of(("float", "double"))
    return _e(type_, f"({type_})({x.text})")


def _chosen_float(c: Choices, inner: Inner) -> Expression:
    x, y, p, q = inner(), inner(), inner(), inner()
    type_ = _wider(p, q)
    return _e(type_, f"({_compared(c, x, y).text} ? ({as_type(p, type_)}) : ({as_type(q, type_)}))")


_FLOAT_OPERATIONS = (_arithmetic, _rounded, _function, _negated, _converted, _chosen_float)


def number(c: Choices, depth: int = 3) -> Expression:
    """A float or double."""
    if depth == 0 or c.below(4) == 0:
        return _float_leaf(c)
    return c.of(_FLOAT_OPERATIONS)(c, lambda: number(c, depth - 1))


def _compared(c: Choices, x: Expression, y: Expression) -> Expression:
    type_ = _wider(x, y)
    return _e("i32", f"({as_type(x, type_)} {c.of(TESTS)} {as_type(y, type_)})")


# -- integers -------------------------------------------------------------------------------------------------------------
_INTEGER_LEAVES = (
    *(_e(VARIABLES[name][0], name) for name in INTEGERS), *c_expressions.LEAVES,
    _e("u32", "tx"), _e("u32", "ty"), _e("u32", "w[(tid + j) & 7]"),
)  # fmt: skip
_FUNCTIONS = (
    ("i32", "__clz", ("u32",)), ("i32", "__popc", ("u32",)), ("u32", "__brev", ("u32",)), ("i32", "__ffs", ("i32",)),
    ("i32", "__clzll", ("u64",)), ("i32", "__popcll", ("u64",)), ("u64", "__brevll", ("u64",)), ("i32", "__ffsll", ("i64",)),
    ("u32", "__umulhi", ("u32",) * 2), ("i32", "__mulhi", ("i32",) * 2), ("u64", "__umul64hi", ("u64",) * 2),
    ("i64", "__mul64hi", ("i64",) * 2), *(("u32", f"__funnelshift_{f}", ("u32",) * 3) for f in ("l", "r", "lc", "rc")),
    ("u32", "__byte_perm", ("u32",) * 3), ("u32", "__usad", ("u32",) * 3),
    *((t, f"{f}_{t}", (t, t)) for f in ("quotient", "remainder", "least", "greatest") for t in ("i32", "u32", "i64", "u64")),
)  # fmt: skip


def _integer_leaf(c: Choices) -> Expression:
    return c.of(_INTEGER_LEAVES)


def _binary(c: Choices, inner: Inner) -> Expression:
    return c_expressions.binary(c.of(tuple("+-*&|^")), inner(), inner())


def _shift(c: Choices, inner: Inner) -> Expression:
    return c_expressions.shift(c.of(("<<", ">>")), inner(), c.below(64), bool(c.below(2)))


def _shift_by(c: Choices, inner: Inner) -> Expression:
    type_ = c.of(("u32", "u64", "i32", "i64"))
    op = c.of((">>", "<<")) if type_[0] == "u" else ">>"
    return _e(
        type_, f"({as_type(inner(), type_)} {op} ({as_type(inner(), 'u32')} & {c_expressions.WIDTH[type_] - 1}u))"
    )


def _cast(c: Choices, inner: Inner) -> Expression:
    return c_expressions.cast(inner(), c.of(tuple(sorted(c_expressions.WIDTH))))


def _choose(c: Choices, inner: Inner) -> Expression:
    return c_expressions.choose(c.of(("<", "<=", "==")), inner(), inner(), inner(), inner(), bool(c.below(2)))


def _divide(c: Choices, inner: Inner) -> Expression:
    return c_expressions.divide(c.of(("/", "%")), inner(), inner(), bool(c.below(2)))


def _look_up(c: Choices, inner: Inner) -> Expression:
    return _e("u32", f"w[{as_type(inner(), 'u32')} & 7]") if c.below(2) else c_expressions.look_up(inner())


def _intrinsic(c: Choices, inner: Inner) -> Expression:
    type_, name, types = c.of(_FUNCTIONS)
    return _call(type_, name, types, *(inner() for _ in types))


def _logic(c: Choices, inner: Inner) -> Expression:
    op = c.of(("&&", "||", "!"))
    return _e("i32", f"(!({inner().text}))" if op == "!" else f"({inner().text} {op} {inner().text})")


def _from_float(c: Choices, inner: Inner) -> Expression:
    x = number(c, 1)
    type_, name = c.of((("i32", "int"), ("i64", "ll")))
    return _e(type_, f"__{x.type}2{name}_{c.of(ROUNDINGS)}({x.text})")


def _compared_floats(c: Choices, inner: Inner) -> Expression:
    return _compared(c, number(c, 1), number(c, 1))


def _helped(c: Choices, inner: Inner) -> Expression:
    x = number(c, 0)
    return _e(
        "u64", f"HELPER(SAME, {as_type(inner(), 'u32')}, b, {as_type(inner(), 'u64')}, {as_type(x, 'float')}, y1)"
    )


_INTEGER_OPERATIONS = (
    _binary, _binary, _shift, _cast, _look_up, _choose, _shift_by, _divide, _intrinsic, _intrinsic, _logic, _from_float,
    _compared_floats,
)  # fmt: skip


def integer(c: Choices, helper: bool, depth: int = 3) -> Expression:
    """Of any width; `helper`: there is a function to call."""
    if depth == 0 or c.below(4) == 0:
        return _integer_leaf(c)
    operations = (*_INTEGER_OPERATIONS, _helped) if helper else _INTEGER_OPERATIONS
    return c.of(operations)(c, lambda: integer(c, helper, depth - 1))


# -- statements -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Place:
    """Where statements stand."""

    depth: int = DEPTH  # how many more may nest
    loop: bool = False  # there is one around
    helper: bool = True  # there is a function to call


def statement(c: Choices, at: Place) -> str:
    """One, on lines of its own."""

    def some() -> Expression:
        return integer(c, at.helper)

    def inside(loop: bool = at.loop) -> str:
        inner = Place(at.depth - 1, loop, at.helper)
        return "{\n" + "".join(f"{statement(c, inner)}\n" for _ in range(c.below(3))) + "}"

    kind = c.below(13 if at.depth else 5)
    if kind < 2:
        name = c.of(INTEGERS)
        return f"{name} = {as_type(some(), VARIABLES[name][0])};"
    if kind < 4:
        name = c.of(FLOATS)
        return f"{name} = {as_type(number(c), VARIABLES[name][0])};"
    if kind == 4:
        return f"w[{as_type(some(), 'u32')} & 7] = {as_type(some(), 'u32')};"
    if kind == 5:
        return f"if ({some().text}) {inside()}"
    if kind == 6:
        return f"if ({some().text}) {inside()} else {inside()}"
    if kind == 7:
        return f"for (u32 j = 0; j < (({some().text}) & {c.of((3, 7))}); j++) {inside(True)}"
    if kind == 8:
        start, limit = as_type(some(), "u32"), 1 + c.below(5)
        return f"for (u32 n = 0, j = {start}; n < {limit} && ({some().text}); n++, j += 3u) {inside(True)}"
    if kind == 9:
        return f"{{ u32 n = 0; do {inside(True)} while (++n < {1 + c.below(4)} && ({some().text})); }}"
    if kind == 10:
        return _switch(c, some().text, inside)
    if kind == 11 and at.loop:
        return f"if ({some().text}) {c.of(('break;', 'continue;'))}"
    return f"if ({some().text}) return (u64)({some().text});"


def _switch(c: Choices, on: str, inside: Callable[[], str]) -> str:
    """Some cases fall through; the default is anywhere."""
    labels = sorted({c.below(8) for _ in range(1 + c.below(8))})
    lines = [f"case {n}: {inside()}{' break;' * c.below(2)}" for n in labels]
    lines.insert(c.below(len(lines) + 1), f"default: {inside()}")
    return "\n".join([f"switch (({on}) & 7) {{", *lines, "}"])


@dataclass(frozen=True)
class Program:
    """A function, and another one that it may call."""

    body: str
    helper: str
    apart: bool  # the helper is not inlined

    def text(self, name: str) -> str:
        before = "\n".join(f"{type_} {v} = {value};" for v, (type_, value) in VARIABLES.items())
        before += f"\nu32 j = 0, w[{LOCALS}] = {{a, b, tid, 0, tx, 7, ~0u, bid}};"
        words = [f"bits_{t}({v})" if v in FLOATS else f"(u64){v}" for v, (t, _) in VARIABLES.items()]
        after = "u64 r = 0;\n" + "\n".join(f"r = r * 0x9E3779B97F4A7C15ull + {word};" for word in words)
        after += f"\nfor (j = 0; j < {LOCALS}; j++) r = r * 31u + w[j];\nreturn r;"
        parameters = "(THREAD, u32 a, u32 b, u64 c, float x0, double y0)"
        functions = [f"DEVICE u64 {name}{parameters} {{\n{before}\n{self.body}\n{after}\n}}"]
        if "HELPER(" in self.body:
            kind = "APART" if self.apart else "DEVICE"
            functions.insert(0, f"{kind} u64 HELPER{parameters} {{\n{before}\n{self.helper}\n{after}\n}}")
        return "\n".join(functions).replace("HELPER(", f"{name}_helper(")


def _program(body: list[bytes], helper: list[bytes], apart: bool) -> Program:
    inner = Place(depth=1, helper=False)
    return Program(
        "\n".join(statement(Choices(data), Place()) for data in body),
        "\n".join(statement(Choices(data), inner) for data in helper),
        apart,
    )


programs = st.builds(
    _program,
    st.lists(st.binary(min_size=20, max_size=120), min_size=1, max_size=5),
    st.lists(st.binary(min_size=10, max_size=40), max_size=2),
    st.booleans(),
)
