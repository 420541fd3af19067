"""PTX text -> frozen Module / Function / Instruction.

Written for what NVRTC emits (PTX ISA 6.x to 9.x) and for inline assembly in CUDA C: nested scopes that redeclare
registers, labels out of order, several statements on a line, operand lists with and without spaces.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from cudaops.errors import EmulatorError

FUNCTION_ADDRESSES = 0x0FFF_0000_0000_0000  # no address of memory

TYPE_BITS = {
    "pred": 1,
    "b8": 8, "u8": 8, "s8": 8,
    "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16,
    "b32": 32, "u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "tf32": 32,
    "b64": 64, "u64": 64, "s64": 64, "f64": 64,
    "b128": 128,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reg:
    """A register, named uniquely within its function (a scope that redeclares a name gets a suffix)."""

    name: str
    type: str
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Imm:
    """A literal: an int, or a float given with the bits of its 32- or 64-bit form."""

    value: int
    float_bits: int = 0  # 0: an integer literal; 32 / 64: `value` holds that many bits of a float


@dataclass(frozen=True, slots=True)
class Sym:
    """A variable, function or label by name."""

    name: str


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as %tid.x."""

    name: str


@dataclass(frozen=True, slots=True)
class Mem:
    """[base + offset]"""

    base: Reg | Sym | Imm
    offset: int


@dataclass(frozen=True, slots=True)
class Vec:
    """{a, b, ...}"""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """d|p, the two results of shfl and some setp."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Group:
    """(a, b, ...), the argument or result list of a call."""

    items: tuple[Operand, ...]


Operand = Reg | Imm | Sym | Special | Mem | Vec | Pair | Group


@dataclass(frozen=True, slots=True)
class Instruction:
    opcode: str
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    file: str
    line: int
    guard: Reg | None = None  # only branches keep one; other guarded instructions become a branch around themselves

    @property
    def base(self) -> str:
        return self.parts[0]

    @property
    def type(self) -> str:
        return self.parts[-1]

    def __str__(self) -> str:
        return f"{self.opcode} {', '.join(show(operand) for operand in self.operands)}"


def show(operand: Operand) -> str:
    match operand:
        case Reg(name, _, negated):
            return ("!" if negated else "") + name
        case Imm(value, 0):
            return str(value)
        case Imm(value, bits):
            return f"0{'f' if bits == 32 else 'd'}{value:0{bits // 4}X}"
        case Mem(base, offset):
            return f"[{show(base)}{offset:+d}]" if offset else f"[{show(base)}]"
        case Vec(items):
            return "{" + ", ".join(map(show, items)) + "}"
        case Group(items):
            return "(" + ", ".join(map(show, items)) + ")"
        case Pair(first, second):
            return f"{show(first)}|{show(second)}"
        case _:
            return operand.name


@dataclass(frozen=True, slots=True)
class Variable:
    name: str
    space: str  # global, const, shared, local, param
    type: str
    align: int
    size: int  # bytes; 0 for `extern ... []`
    data: bytes = b""  # initial bytes; shorter than size: the rest is zero
    pointers: tuple[tuple[int, str, int], ...] = ()  # (offset, symbol, addend) inside data
    extern: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    label: str
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    entry: bool
    params: tuple[Variable, ...]
    results: tuple[Variable, ...]
    registers: dict[str, str]
    variables: tuple[Variable, ...]
    blocks: tuple[Block, ...]
    max_threads: int | None
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Module:
    version: str
    target: str
    variables: dict[str, Variable]
    functions: dict[str, Function]

    def function_address(self, name: str) -> int:
        """What a pointer to a function holds: no host address, only a number of its own."""
        return FUNCTION_ADDRESSES + 16 * list(self.functions).index(name)

    def addressed(self) -> list[str]:
        """The functions whose address is taken, by an initial value or by a mov."""
        found = {symbol for v in self.variables.values() for _, symbol, _ in v.pointers}
        for function in self.functions.values():
            for block in function.blocks:
                for ins in block.instructions:
                    if ins.base == "mov":
                        found.update(o.name for o in ins.operands[1:] if isinstance(o, Sym))
        return [name for name in self.functions if name in found]


def _of_toolkit(path: str) -> bool:
    """Whether a header lies in a folder of CUDA's own."""
    return any((folder / "cuda_fp16.h").exists() for folder in Path(path).parents if folder.is_absolute())


def parse(text: str) -> Module:
    """Read a PTX module. Raises EmulatorError naming the PTX line that it cannot read."""
    parser = _Parser(text)
    try:
        return parser.module()
    except MALFORMED as error:
        line = text.split("\n")[parser.line - 1].strip()
        raise EmulatorError(
            f"PTX line {parser.line} cannot be read: {line[:120]!r}; the text is damaged, or of a newer PTX ISA"
        ) from error


# What reading text that is no PTX runs into.
MALFORMED = (LookupError, ValueError, TypeError, AttributeError, AssertionError, RecursionError)

_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:.*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?")
_LABEL = re.compile(r"([\w$%]+)\s*:(?!:)")
_REG = re.compile(r"\.reg\s*\.(\w+)\s+(.*)", re.S)
_HEAD = re.compile(r"(?:\.(?:visible|weak|extern|common)\s+)*\.(entry|func)\b(.*)", re.S)
_VARIABLE = re.compile(
    r"((?:\.(?:visible|weak|extern|common|managed)\s+)*)\.(global|const|shared|local|param)\s+"
    r"(?:\.align\s+(\d+)\s+)?(?:\.attribute\(\.managed\)\s+)?(?:\.v[248]\s+)?\.(\w+)\s+(?:\.ptr\s*(?:\.\w+\s*)*?(?:\.align\s+\d+\s+)?)?"
    r"([\w$%]+)((?:\[[^\]]*\])*)\s*(?:=\s*(.*))?",
    re.S,
)
_OPERAND = re.compile(r"\s*([{}()\[\],|!]|[^\s{}()\[\],|!]+)")
_SPECIAL = re.compile(
    r"%(?:n?tid|n?ctaid|laneid|warpid|nwarpid|smid|nsmid|gridid|lanemask_\w+|clock\w*|globaltimer\w*|dynamic_smem_size"
    r"|total_smem_size|aggr_smem_size|current_graph_exec|cluster\w*|is_explicit_cluster|pm\d|envreg\d+|reserved_smem\w*)"
    r"(?:\.[xyzw])?$"
)


@dataclass
class _Body:
    """A function while it is being read."""

    registers: dict[str, str] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    blocks: list[tuple[str, list[Instruction]]] = field(default_factory=list)
    fresh: int = 0
    branch_tables: dict[str, list[str]] = field(default_factory=dict)


class _Parser:
    def __init__(self, text: str) -> None:
        # Inline assembly may hold C comments; NVRTC itself writes // alone.
        self.text = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n") or " ", text, flags=re.S)
        self.files: dict[str, str] = dict(_FILE.findall(text))
        self.toolkit = {n for n, path in self.files.items() if _of_toolkit(path)}
        self.callers: dict[tuple[str, ...], tuple[str, ...]] = {}  # place in the source -> what it is inlined at
        self.line = 1  # of the text
        self.where = ("", 0)
        self.scopes: list[dict[str, str]] = []
        self.scope_names: list[str] = []
        self.scope_variables: list[dict[str, str]] = []

    def module(self) -> Module:
        version, target = "", ""
        variables: dict[str, Variable] = {}
        functions: dict[str, Function] = {}
        statements = self._statements()
        for kind, body in statements:
            if kind == "directive":
                if body.startswith(".version"):
                    version = body.split()[1]
                elif body.startswith(".target"):
                    target = body.split(None, 1)[1].split(",")[0].strip()
            elif kind == "statement":
                if (match := _HEAD.match(body)) is not None:  # a declaration without a body
                    function = self._head(match, None)
                    functions.setdefault(function.name, function)
                elif (variable := self._variable(body)) is not None:
                    variables[variable.name] = variable
                elif not body.startswith((".alias", ".pragma")):
                    raise EmulatorError(f"PTX that the emulator cannot read: {body[:120]!r}")
            elif kind == "head":
                match = _HEAD.match(body)
                if match is None:
                    self._skip(statements)
                    continue
                function = self._head(match, self._body(statements))
                functions[function.name] = function
        if not version:
            raise EmulatorError("not PTX: there is no .version directive; the text is damaged or empty")
        return Module(version, target, variables, functions)

    # -- statements ---------------------------------------------------------------------------------------------
    def _statements(self) -> Iterator[tuple[str, str]]:
        """(kind, text): statement `...;`, head `... {` outside functions, open, close, label, loc, directive."""
        depth = 0
        pending = ""
        in_section = False
        for number, raw in enumerate(self.text.split("\n"), 1):
            self.line, line = number, raw.strip()
            if line.startswith("//") or not line:
                continue
            if "//" in line and '"' not in line:
                line = line.split("//", 1)[0].rstrip()
            while line:
                if in_section:
                    _, brace, line = line.partition("}")
                    in_section = not brace
                    continue
                if not pending:
                    if line.startswith((".loc ", ".loc\t")):
                        yield "loc", line
                        break
                    if line.startswith((".version", ".target", ".address_size", ".file")):
                        yield "directive", line
                        break
                    if line.startswith(".section"):  # debug data: lines without `;` up to its brace
                        in_section = True
                        line = line[len(".section") :]
                        continue
                    if depth and line[0] == "{":
                        depth += 1
                        yield "open", ""
                        line = line[1:].lstrip()
                        continue
                    if line[0] == "}":
                        depth -= 1
                        yield "close", ""
                        line = line[1:].lstrip()
                        continue
                    if depth and (match := _LABEL.match(line)) is not None:
                        yield "label", match[1]
                        line = line[match.end() :].lstrip()
                        continue
                    if line[0] == ";":
                        line = line[1:].lstrip()
                        continue
                if depth == 0 and "{" in line and "=" not in pending + line.split("{")[0]:
                    before, line = line.split("{", 1)
                    depth += 1
                    yield "head", (pending + before).strip()
                    pending = ""
                elif ";" in line:
                    before, line = line.split(";", 1)
                    yield "statement", (pending + before).strip()
                    pending = ""
                    line = line.lstrip()
                else:
                    pending += line + " "
                    break
        if depth or pending or in_section:
            raise EmulatorError("the PTX ends in the middle of a function or statement: it is truncated")

    def _skip(self, statements: Iterator[tuple[str, str]]) -> None:
        depth = 1
        for kind, _ in statements:
            depth += (kind == "open") - (kind == "close")
            if depth == 0:
                return

    def _user_line(self, loc: re.Match[str]) -> tuple[str, int]:
        """(file, line) of a .loc; for code of the toolkit's headers, where the user's code calls it."""
        place, caller = loc.group(1, 2, 3), loc.group(4, 5, 6)
        if caller[0] is None:
            self.callers.pop(place, None)
        elif caller != place:
            self.callers[place] = caller
        for _ in range(len(self.callers)):
            if place[0] not in self.toolkit or place not in self.callers:
                break
            place = self.callers[place]
        return self.files.get(place[0], "?"), int(place[1])

    # -- declarations -------------------------------------------------------------------------------------------
    def _variable(self, text: str) -> Variable | None:
        match = _VARIABLE.match(text)
        if match is None:
            return None
        linkage, space, align, type_, name, dims, init = match.groups()
        if type_ in ("texref", "samplerref", "surfref"):
            raise EmulatorError(f"{name}: texture and surface references are not supported; use plain pointers")
        width = TYPE_BITS[type_] // 8
        count = 1
        for dim in re.findall(r"\[([^\]]*)\]", dims):
            count *= int(dim, 0) if dim.strip() else 0
        data = b""
        pointers: list[tuple[int, str, int]] = []
        if init:
            parts = []
            for item in re.findall(r"[^\s{},]+(?:\([^)]*\))?(?:\+\d+)?", init):
                if item[0].isdigit() or item[0] in "-+":
                    parts.append(_literal_bytes(item, type_))
                else:
                    symbol = re.fullmatch(r"(?:generic\()?([\w$]+)\)?(?:\+(\d+))?", item)
                    if symbol is None:
                        raise EmulatorError(f"{name}: initial value {item!r} that the emulator cannot read")
                    pointers.append((len(parts) * width, symbol[1], int(symbol[2] or 0)))
                    parts.append(bytes(width))
            data = b"".join(parts)
            count = max(count, len(parts)) if "[" in dims else count
        return Variable(
            name, space, type_, int(align or width), count * width, data, tuple(pointers), ".extern" in linkage
        )

    def _head(self, match: re.Match[str], body: _Body | None) -> Function:
        kind, rest = match.groups()
        file, line = self.where
        results: tuple[Variable, ...] = ()
        rest = rest.strip()
        if rest.startswith("("):
            inner, rest = rest[1:].split(")", 1)
            results = self._params(inner)
        found = re.match(r"\s*([\w$]+)\s*(?:\(([^)]*)\))?(.*)", rest, re.S)
        if found is None:
            raise EmulatorError(f"PTX function head that the emulator cannot read: {rest[:120]!r}")
        name, params, tail = found.groups()
        limit = re.search(r"\.(?:maxntid|reqntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", tail)
        threads = None
        if limit is not None:
            threads = int(limit[1]) * int(limit[2] or 1) * int(limit[3] or 1)
        blocks: tuple[Block, ...] = ()
        if body is not None:
            blocks = tuple(Block(label, tuple(code)) for label, code in body.blocks)
            file, line = next(((i.file, i.line) for b in blocks for i in b.instructions), (file, line))
        return Function(
            name, kind == "entry", self._params(params or ""), results, body.registers if body else {},
            tuple(body.variables) if body else (), blocks, threads, file, line,
        )  # fmt: skip

    def _params(self, text: str) -> tuple[Variable, ...]:
        found = []
        for item in filter(None, (part.strip() for part in text.split(","))):
            variable = self._variable(item)
            if variable is None and (match := _REG.match(item)) is not None:  # ABI-less functions
                name = match[2].strip()
                variable = Variable(name, "reg", match[1], 4, TYPE_BITS[match[1]] // 8)
            if variable is None:
                raise EmulatorError(f"PTX parameter that the emulator cannot read: {item!r}")
            found.append(variable)
        return tuple(found)

    # -- bodies -------------------------------------------------------------------------------------------------
    def _body(self, statements: Iterator[tuple[str, str]]) -> _Body:
        body = _Body()
        body.blocks.append(("$entry", []))
        self.scopes, self.scope_names, self.scope_variables = [{}], [""], [{}]
        for kind, text in statements:
            if kind == "loc":
                match = _LOC.match(text)
                if match is not None and match[2] != "0":  # line 0: code of the compiler's own, it stays where it was
                    self.where = self._user_line(match)
            elif kind == "open":
                self.scopes.append({})
                self.scope_variables.append({})
                body.fresh += 1
                self.scope_names.append(f"@{body.fresh}")
            elif kind == "close":
                self.scopes.pop()
                self.scope_variables.pop()
                self.scope_names.pop()
                if not self.scopes:
                    break
            elif kind == "label":
                body.blocks.append((self._label(text), []))
            elif kind == "statement":
                self._statement(text, body)
        self._resolve(body)
        return body

    def _label(self, name: str) -> str:
        """Labels of inline assembly are scoped to their braces; NVRTC's own are unique."""
        return name if len(self.scopes) == 1 else name + self.scope_names[-1]

    def _resolve(self, body: _Body) -> None:
        """Branches inside braces may name a label of that scope or of one around it."""
        known = {label for label, _ in body.blocks}
        for _, code in body.blocks:
            for n, ins in enumerate(code):
                if ins.base == "bra":
                    target = ins.operands[-1]
                    if isinstance(target, Sym) and target.name not in known:
                        bare = target.name.split("@")[0]
                        if bare not in known:
                            continue
                        code[n] = Instruction(
                            ins.opcode, ins.parts, (*ins.operands[:-1], Sym(bare)), ins.file, ins.line, ins.guard
                        )

    def _statement(self, text: str, body: _Body) -> None:
        if text.startswith(".reg"):
            match = _REG.match(text)
            if match is None:
                raise EmulatorError(f"PTX register declaration that the emulator cannot read: {text!r}")
            for item in match[2].split(","):
                item = item.strip()
                ranged = re.fullmatch(r"([\w$%]+)<(\d+)>", item)
                names = [f"{ranged[1]}{i}" for i in range(int(ranged[2]))] if ranged else [item]
                for name in names:
                    unique = name + self.scope_names[-1]
                    self.scopes[-1][name] = unique
                    body.registers[unique] = match[1]
            return
        if text.startswith("."):
            if text.startswith((".pragma", ".maxnctapersm", ".minnctapersm")):
                return
            if text.startswith(".branchtargets"):  # the label in front of it names the table
                labels = text[len(".branchtargets") :].split(",")
                body.branch_tables[body.blocks[-1][0]] = [self._label(label.strip()) for label in labels]
                return
            if text.startswith((".calltargets", ".callprototype")):
                return  # whom a call through a pointer may reach is found by the addresses taken
            variable = self._variable(text)
            if variable is None:
                raise EmulatorError(f"PTX that the emulator cannot read: {text[:120]!r}")
            if variable.space == "param":  # every call has its own, named alike
                unique = variable.name + self.scope_names[-1]
                self.scope_variables[-1][variable.name] = unique
                variable = replace(variable, name=unique)
            body.variables.append(variable)
            return
        guard: Reg | None = None
        if text.startswith("@"):
            found = re.match(r"@(!?)([\w$%]+)\s*(.*)", text, re.S)
            assert found is not None
            guard = Reg(self._name(found[2]), "pred", found[1] == "!")
            text = found[3]
        head, _, rest = text.partition(" ") if " " in text else text.partition("\t")
        head = head.strip()
        if "\t" in head:
            head, _, more = head.partition("\t")
            rest = more + " " + rest
        operands = _with_carry(head, self._operands(rest, body, head), body)
        file, line = self.where

        def make(opcode: str, operands: tuple[Operand, ...], guard: Reg | None) -> Instruction:
            return Instruction(opcode, tuple(opcode.split(".")), operands, file, line, guard)

        if guard is not None and head.split(".")[0] not in ("bra",):
            # A guarded instruction is a branch around it: one mechanism for divergence serves all.
            body.fresh += 1
            skip = f"$skip{body.fresh}"
            around = Reg(guard.name, "pred", not guard.negated)
            body.blocks[-1][1].append(make("bra", (Sym(skip),), around))
            body.blocks.append((f"$do{body.fresh}", [make(head, operands, None)]))
            body.blocks.append((skip, []))
            return
        if head.startswith("brx"):
            self._branch_by_table(operands, body, make)
            return
        body.blocks[-1][1].append(make(head, operands, guard))
        if head.split(".")[0] in ("bra", "ret", "exit", "trap"):
            body.fresh += 1
            body.blocks.append((f"$next{body.fresh}", []))

    def _branch_by_table(self, operands: tuple[Operand, ...], body: _Body, make: Callable[..., Instruction]) -> None:
        """brx.idx index, table: one comparison after the other; the index is known to be inside the table."""
        index, table = operands
        assert isinstance(table, Sym)
        targets = body.branch_tables.get(self._label(table.name)) or body.branch_tables.get(table.name)
        if targets is None:
            raise EmulatorError(f"brx.idx by {table.name}, a table that is not defined before it")
        body.fresh += 1
        p = Reg(f"%brx{body.fresh}", "pred")
        body.registers[p.name] = "pred"
        for n, target in enumerate(targets[:-1]):
            body.blocks[-1][1].append(make("setp.eq.u32", (p, index, Imm(n)), None))
            body.blocks[-1][1].append(make("bra", (Sym(target),), p))
            body.blocks.append((f"$table{body.fresh}.{n}", []))
        body.blocks[-1][1].append(make("bra", (Sym(targets[-1]),), None))
        body.blocks.append((f"$table{body.fresh}.end", []))

    def _name(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        raise EmulatorError(f"PTX register {name} is not declared")

    def _operands(self, text: str, body: _Body, head: str) -> tuple[Operand, ...]:
        tokens = [m[1] for m in _OPERAND.finditer(text)]
        position = 0

        def peek() -> str:
            return tokens[position] if position < len(tokens) else ""

        def sequence(close: str) -> tuple[Operand, ...]:
            nonlocal position
            items = []
            while peek() != close:
                if position >= len(tokens):
                    raise EmulatorError(f"PTX operands that the emulator cannot read: {head} {text}")
                items.append(one())
                if peek() == ",":
                    position += 1
            position += 1
            return tuple(items)

        def one() -> Operand:
            nonlocal position
            token = peek()
            position += 1
            item: Operand
            if token == "{":
                item = Vec(sequence("}"))
            elif token == "(":
                item = Group(sequence(")"))
            elif token == "[":
                inner = ""
                while peek() != "]":
                    inner += peek()
                    position += 1
                    if position > len(tokens):
                        raise EmulatorError(f"PTX address that the emulator cannot read: {head} {text}")
                position += 1
                base, offset = _split_address(inner)
                item = Mem(self._atom(base, body), offset)  # type: ignore[arg-type]
            elif token == "!":
                register = one()
                if not isinstance(register, Reg):
                    raise EmulatorError(f"PTX operand after ! is no predicate: {head} {text}")
                item = Reg(register.name, register.type, True)
            else:
                item = self._atom(token, body)
            if peek() == "|":
                position += 1
                item = Pair(item, one())
            return item

        items: list[Operand] = []
        while position < len(tokens):
            items.append(one())
            if peek() == ",":
                position += 1
        if head.split(".")[0] == "bra" and items and isinstance(items[-1], Sym) and len(self.scopes) > 1:
            items[-1] = Sym(items[-1].name + self.scope_names[-1])
        return tuple(items)

    def _atom(self, token: str, body: _Body) -> Operand:
        first = token[0]
        if first == "%" or first == "_" or first.isalpha() or first == "$":
            for scope in reversed(self.scopes):
                unique = scope.get(token)
                if unique is not None:
                    return Reg(unique, body.registers[unique])
            if first == "%":
                if _SPECIAL.match(token):
                    return Special(token)
                raise EmulatorError(f"PTX register {token} is not declared")
            if token == "WARP_SZ":
                return Imm(32)
            for variables in reversed(self.scope_variables):
                if token in variables:
                    return Sym(variables[token])
            return Sym(token)
        return _literal(token)


def _split_address(text: str) -> tuple[str, int]:
    match = re.fullmatch(r"(.+?)([+-](?:0x[0-9a-fA-F]+|\d+)|\+-\d+)", text)
    if match is None or re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", text):
        return text, 0
    return match[1], int(match[2].replace("+-", "-"), 0)


def _literal(token: str) -> Imm:
    lower = token.lower()
    if lower.startswith("0f"):
        return Imm(int(lower[2:], 16), 32)
    if lower.startswith("0d"):
        return Imm(int(lower[2:], 16), 64)
    try:
        return Imm(int(token.rstrip("U"), 0))
    except ValueError:
        pass
    try:
        if re.fullmatch(r"-?0[0-7]+U?", token):
            return Imm(int(token.rstrip("U"), 8))
        return Imm(struct.unpack("<Q", struct.pack("<d", float(token)))[0], 64)
    except ValueError:
        raise EmulatorError(f"PTX literal that the emulator cannot read: {token!r}") from None


def _literal_bytes(token: str, type_: str) -> bytes:
    literal = _literal(token)
    width = TYPE_BITS[type_] // 8
    if literal.float_bits == 64 and width == 4:
        value = struct.unpack("<d", literal.value.to_bytes(8, "little"))[0]
        return struct.pack("<f", value)
    return (literal.value & ((1 << (8 * width)) - 1)).to_bytes(width, "little")


def _with_carry(head: str, operands: tuple[Operand, ...], body: _Body) -> tuple[Operand, ...]:
    """The condition code of add.cc, addc and their like as one more register, written beside the result, read last."""
    base, *parts = head.split(".")
    writes, reads = "cc" in parts, base in ("addc", "subc", "madc")
    if not writes and not reads:
        return operands
    carry = Reg("%cc", "pred")
    body.registers[carry.name] = "pred"
    target = Pair(operands[0], carry) if writes else operands[0]
    return (target, *operands[1:], *([carry] if reads else []))
