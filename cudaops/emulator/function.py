"""Support functions of the sanitizer as LLVM IR text, written line by line."""

from __future__ import annotations

from collections.abc import Iterable

from cudaops.emulator.layout import WORKER
from cudaops.emulator.text import Text

V32 = "<32 x i32>"
V64 = "<32 x i64>"
BOOLS = "<32 x i1>"


class Function(Text):
    """One function; `ctx` is its first argument."""

    def __init__(self, head: str) -> None:
        super().__init__()
        self.head = head

    def text(self) -> str:
        return "\n".join([f"define {self.head} #0 {{", "entry:", *self.lines, "}"])

    # -- memory -------------------------------------------------------------------------------------------------------
    def field(self, name: str, ty: str = "i64") -> str:
        return self.at(name, WORKER, "%ctx", ty)

    def at(self, name: str, offsets: dict[str, int], base: str, ty: str = "i64") -> str:
        return self.load(ty, self.past(base, offsets[name]), 8)

    def keep(self, name: str, value: str) -> None:
        self.line(f"store i64 {value}, ptr {self.past('%ctx', WORKER[name])}, align 8")

    def past(self, base: str, nbytes: int | str) -> str:
        return self.emit(f"getelementptr i8, ptr {base}, i64 {nbytes}")

    def element(self, ty: str, base: str, index: str) -> str:
        return self.emit(f"getelementptr {ty}, ptr {base}, i64 {index}")

    def load(self, ty: str, pointer: str, align: int) -> str:
        return self.emit(f"load {ty}, ptr {pointer}, align {align}")

    def gather(self, ty: str, base: str, index: str, mask: str) -> str:
        pointers = self.emit(f"getelementptr {ty}, ptr {base}, {V64} {index}")
        vector = f"<32 x {ty}>"
        name = self.declare(f"llvm.masked.gather.v32{ty}.v32p0", vector, f"<32 x ptr>, i32, {BOOLS}, {vector}")
        return self.emit(
            f"call {vector} @{name}(<32 x ptr> {pointers}, i32 1, {BOOLS} {mask}, {vector} zeroinitializer)"
        )

    def scatter(self, ty: str, base: str, index: str, value: str, mask: str) -> None:
        """Where lanes name the same place, the highest one's value is what stays."""
        pointers = self.emit(f"getelementptr {ty}, ptr {base}, {V64} {index}")
        vector = f"<32 x {ty}>"
        name = self.declare(f"llvm.masked.scatter.v32{ty}.v32p0", "void", f"{vector}, <32 x ptr>, i32, {BOOLS}")
        self.line(f"call void @{name}({vector} {value}, <32 x ptr> {pointers}, i32 1, {BOOLS} {mask})")

    # -- values -------------------------------------------------------------------------------------------------------
    def test(self, condition: str, ty: str, a: str, b: str) -> str:
        return self.emit(f"icmp {condition} {ty} {a}, {b}")

    def splat(self, ty: str, value: str, lanes: int = 32) -> str:
        first = self.emit(f"insertelement <{lanes} x {ty}> poison, {ty} {value}, i32 0")
        return self.emit(
            f"shufflevector <{lanes} x {ty}> {first}, <{lanes} x {ty}> poison, <{lanes} x i32> zeroinitializer"
        )

    def where(self, test: str, yes: str, no: str, ty: str = V32) -> str:
        lanes = ty[: ty.index("x") + 1]
        return self.emit(f"select {lanes} i1> {test}, {ty} {yes}, {ty} {no}")

    def all_of(self, ty: str, *tests: str) -> str:
        found = tests[0]
        for test in tests[1:]:
            found = self.binary("and", ty, found, test)
        return found

    def invert(self, ty: str, test: str) -> str:
        return self.binary("xor", ty, test, "true" if ty == "i1" else "splat (i1 true)")

    def bits(self, mask: str) -> str:
        return self.emit(f"bitcast {BOOLS} {mask} to i32")

    def lanes(self, bits: str) -> str:
        return self.emit(f"bitcast i32 {bits} to {BOOLS}")

    def trunc(self, value: str) -> str:
        return self.emit(f"trunc i64 {value} to i32")

    def extend(self, value: str) -> str:
        return self.emit(f"zext i32 {value} to i64")

    # -- control ------------------------------------------------------------------------------------------------------
    def branch(self, test: str, yes: str, no: str) -> None:
        self.line(f"br i1 {test}, label %{yes}, label %{no}")

    def jump(self, label: str) -> None:
        self.line(f"br label %{label}")

    def some(self, bits: str, then: str, go_on: str) -> None:
        """Go to `then` if any of the bits is set, which is rare."""
        self.line(f"br i1 {self.test('ne', 'i32', bits, '0')}, label %{then}, label %{go_on}, !prof !1")


def assembled(functions: Iterable[Function]) -> str:
    """The functions, and once each what they declare."""
    declarations: dict[str, str] = {}
    texts = []
    for function in functions:
        declarations |= function.declarations
        texts.append(function.text())
    return "\n".join([*declarations.values(), *texts, ""])


LANE_NUMBERS = "<" + ", ".join(f"i32 {n}" for n in range(32)) + ">"
