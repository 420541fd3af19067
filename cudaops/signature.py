"""What a compiled entry takes: widths from its PTX, meaning from its declaration.

PTX says how wide each parameter is and whether it is an integer or a float, but a pointer looks like a 64-bit integer
and signedness is lost. Those come from the declaration in the source, or from the demangled name of a C++ entry. A type
that cannot be read there (a macro, an unknown typedef) stays unknown, and then either reading is accepted at launch.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache

from cudaops.plan import Dim3

MAX_THREADS = 1024


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of an entry.

    Arguments:
        name: as declared, or PTX's name.
        offset, size, align: in bytes, in the packed parameter block.
        kind: 'pointer', 'int', 'float', 'struct', or 'word': eight bytes that may be a pointer or an integer.
        ctype: the C type as declared, or None where it could not be read.
        pointee: what a pointer points to, by its plain C name ('float', 'unsigned int'), or None where unknown.
        signed: of an integer; None where unknown.
        const: the kernel declares that it does not write through this pointer.
    """

    name: str
    offset: int
    size: int
    align: int
    kind: str
    ctype: str | None = None
    pointee: str | None = None
    signed: bool | None = None
    const: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """One `__global__` function as compiled: what it takes and what it uses; sizes in bytes."""

    name: str
    params: tuple[Param, ...]
    max_threads: int = MAX_THREADS
    registers: int = 0
    spill_bytes: int = 0
    stack_bytes: int = 0
    smem_bytes: int = 0
    required_block: Dim3 | None = None
    title: str = ""  # the demangled name

    @property
    def arguments_bytes(self) -> int:
        """The size of the packed parameter block."""
        return self.params[-1].offset + self.params[-1].size if self.params else 0


# ---- PTX ----

_ENTRY = re.compile(r"^\s*(?:\.(?:visible|weak|extern)\s+)*\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?([^{;]*)([{;])", re.M)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>[a-z]\d+)\s+"
    r"(?P<ptr>(?:\.ptr\s+)?(?:\.(?:global|const|shared|local)\s+)?(?:\.align\s+\d+\s+)?)(?P<name>[\w$]+)"
    r"(?:\[(?P<count>\d+)\])?"
)
_PTX_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


def entries_of(ptx: str) -> dict[str, Entry]:
    """Every entry of a PTX module by name: parameters and launch bounds."""
    found = {}
    for name, params, directives, end in _ENTRY.findall(_PTX_COMMENT.sub("", ptx)):
        if end == ";":
            continue  # a forward declaration
        bound = re.search(r"\.maxntid\s+([\d,\s]+)", directives)
        required = re.search(r"\.reqntid\s+([\d,\s]+)", directives)
        block = _dim3(required.group(1)) if required else None
        most = _dim3(bound.group(1)) if bound else block
        found[name] = Entry(
            name=name,
            params=tuple(_params(params)),
            max_threads=min(MAX_THREADS, most[0] * most[1] * most[2]) if most else MAX_THREADS,
            required_block=block,
            title=demangle(name),
        )
    return found


def _dim3(text: str) -> Dim3:
    sizes = [int(n) for n in text.replace(" ", "").strip().split(",") if n]
    x, y, z = [*sizes, 1, 1, 1][:3]
    return x, y, z


def _params(text: str) -> Iterable[Param]:
    offset = 0
    for match in _PARAM.finditer(text):
        letter, width = match["type"][0], int(match["type"][1:]) // 8
        count = int(match["count"]) if match["count"] else None
        size = width * (count or 1)
        align = int(match["align"] or width)
        offset = -(-offset // align) * align
        if count is not None:
            kind = "struct"
        elif match["ptr"]:
            kind = "pointer"
        elif letter == "f":
            kind = "float"
        else:
            kind = "word" if size == 8 else "int"
        yield Param(match["name"], offset, size, align, kind)
        offset += size


# ---- C declarations ----

# plain C name -> (size in bytes, signed; None: not an integer). The ABI is the device's on Linux: LP64, char is signed.
_C_TYPES: dict[str, tuple[int, bool | None]] = {
    "bool": (1, False),
    "char": (1, True),
    "signed char": (1, True),
    "unsigned char": (1, False),
    "short": (2, True),
    "unsigned short": (2, False),
    "int": (4, True),
    "unsigned int": (4, False),
    "long": (8, True),
    "unsigned long": (8, False),
    "long long": (8, True),
    "unsigned long long": (8, False),
    "float": (4, None),
    "double": (8, None),
}

_ALIASES = {
    "signed": "int",
    "unsigned": "unsigned int",
    "uint": "unsigned int",
    "uchar": "unsigned char",
    "ushort": "unsigned short",
    "ulong": "unsigned long",
    "int8_t": "signed char",
    "uint8_t": "unsigned char",
    "int16_t": "short",
    "uint16_t": "unsigned short",
    "int32_t": "int",
    "uint32_t": "unsigned int",
    "int64_t": "long",
    "uint64_t": "unsigned long",
    "size_t": "unsigned long",
    "ptrdiff_t": "long",
    "intptr_t": "long",
    "uintptr_t": "unsigned long",
    "half": "__half",
    "half2": "__half2",
    "nv_bfloat16": "__nv_bfloat16",
    "nv_bfloat162": "__nv_bfloat162",
}

_SPECIFIERS = {"const", "volatile", "restrict", "__restrict__", "__restrict", "__grid_constant__", "struct", "typename"}
_COMMENT_OR_STRING = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.S)


@dataclass(frozen=True, slots=True)
class _CType:
    text: str
    base: str  # plain name of the type, or of what the pointer points to
    pointers: int
    const: bool  # of what is pointed to


def with_declarations(entry: Entry, source: str, defines: Mapping[str, str]) -> Entry:
    """`entry` with the types its declaration gives, as far as they can be read and agree with the PTX."""
    declared = _from_title(entry.title)
    names: list[str | None] = [None] * len(entry.params)
    if declared is None:
        declared, names = _from_source(base_name(entry.title), source, defines, len(entry.params))
    if declared is None or len(declared) != len(entry.params):
        return entry
    params = (_typed(*each) for each in zip(entry.params, declared, names, strict=True))
    return replace(entry, params=tuple(params))


def _typed(param: Param, ctype: _CType | None, name: str | None) -> Param:
    if name:
        param = replace(param, name=name)
    if ctype is None:
        return param
    if ctype.pointers:
        if param.size != 8 or param.kind not in ("word", "pointer"):
            return param  # the declaration was misread: believe the PTX
        pointee = ctype.base if ctype.pointers == 1 else ctype.base + " *" * (ctype.pointers - 1)
        return replace(param, kind="pointer", ctype=ctype.text, pointee=pointee, const=ctype.const)
    known = _C_TYPES.get(ctype.base)
    if param.kind == "struct":
        return param if known else replace(param, ctype=ctype.text)
    if known is None or known[0] != param.size or (known[1] is None) != (param.kind == "float"):
        return param
    kind = "float" if known[1] is None else "int"
    return replace(param, kind=kind, ctype=ctype.text, signed=known[1])


def _from_title(title: str) -> list[_CType | None] | None:
    """The parameter types in a demangled name; None for a C entry, whose name says nothing."""
    if not title.endswith(")"):
        return None
    _, _, inside = _split_call(title)
    return [_ctype(part, {}) for part in _split(inside)]


def base_name(title: str) -> str:
    """`scale` of `void ns::scale<float>(float*)`, and of `scale`."""
    head = _split_call(title)[1] if title.endswith(")") else title
    while "<" in head:
        shorter = re.sub(r"<[^<>]*>", "", head)
        if shorter == head:
            break
        head = shorter
    return head.split()[-1].split("::")[-1] if head.split() else title


def _split_call(title: str) -> tuple[str, str, str]:
    """(return type and name, name, parameters) of a demangled function."""
    depth = 0
    for at in range(len(title) - 1, -1, -1):
        depth += (title[at] == ")") - (title[at] == "(")
        if depth == 0 and title[at] == "(":
            return title[:at], title[:at], title[at + 1 : -1]
    return title, title, ""


def _split(text: str) -> list[str]:
    """Split at the commas outside every bracket."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "(<[{") - (char in ")>]}")
        if char == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    parts.append(text[start:])
    return [part.strip() for part in parts] if text.strip() not in ("", "void") else []


def _from_source(
    name: str, source: str, defines: Mapping[str, str], count: int
) -> tuple[list[_CType | None] | None, list[str | None]]:
    """The types and names in the declaration of `name`; where several declarations disagree, the type is unknown."""
    text = _COMMENT_OR_STRING.sub(lambda m: '""' if m.group().startswith('"') else " ", source)
    meanings = _names(text, defines)
    seen: list[list[tuple[_CType | None, str | None]]] = []
    for match in re.finditer(rf"\b{re.escape(name)}\s*\(", text):
        before = text[: match.start()]
        at = before.rfind("__global__")
        if at < 0 or re.search(r"[;{}]", re.sub(r'extern\s*""\s*\{', "", before[at:])):
            continue  # a call or another function, not the declaration
        parts = _split(_inside(text, match.end()))
        if len(parts) == count:
            seen.append([_declared(part, meanings) for part in parts])
    if not seen:
        return None, []
    merged = [each[0] if all(e == each[0] for e in each) else (None, each[0][1]) for each in zip(*seen, strict=True)]
    return [ctype for ctype, _ in merged], [label for _, label in merged]


def _inside(text: str, start: int) -> str:
    depth = 1
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return text[start:at]
    return ""


def _declared(part: str, meanings: Mapping[str, str | None]) -> tuple[_CType | None, str | None]:
    """Type and name of one parameter as written."""
    match = re.fullmatch(r"(?s)(.*?[\s*&])(\w+)\s*(=.*)?", part)
    if match is None:
        return _ctype(part, meanings), None
    return _ctype(match[1], meanings), match[2]


def _ctype(text: str, meanings: Mapping[str, str | None]) -> _CType | None:
    """Read a C type; None where part of it has no plain meaning here."""
    text = " ".join(text.split())
    if any(char in text for char in "()[&"):
        return None
    words = re.findall(r"<[^<>]*>|[\w:]+|\*", _expand(text, meanings))
    if "?" in words or not words or any(word.startswith("<") for word in words):
        return None
    pointers = words.count("*")
    before_star = words[: words.index("*")] if pointers else words
    const = pointers == 1 and "const" in before_star
    base = _plain([word for word in before_star if word not in _SPECIFIERS])
    return _CType(text, base, pointers, const) if base else None


def _plain(words: list[str]) -> str:
    """One spelling for each C type: `unsigned` and `unsigned int`, `long long int` and `long long`."""
    if len(words) == 1:
        word = words[0].removeprefix("std::").removeprefix("::").removeprefix("cuda::std::")
        return _ALIASES.get(word, word)
    if not words or any(w not in ("signed", "unsigned", "char", "short", "int", "long") for w in words):
        return ""
    unsigned = "unsigned" in words
    if "char" in words:
        return "unsigned char" if unsigned else "signed char" if "signed" in words else "char"
    size = "short" if "short" in words else " ".join(["long"] * words.count("long")) or "int"
    return f"unsigned {size}" if unsigned else size


def _names(text: str, defines: Mapping[str, str]) -> dict[str, str | None]:
    """What names stand for, from -D, #define, using and typedef; None for one defined in two ways."""
    meanings: dict[str, str | None] = {}

    def learn(name: str, value: str) -> None:
        value = " ".join(value.split())
        known = meanings.get(name, value)
        meanings[name] = value if known == value else None

    for name, value in re.findall(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+([^\n]+)$", text, re.M):
        learn(name, value)
    for name, value in re.findall(r"\busing\s+(\w+)\s*=\s*([^;]+);", text):
        learn(name, value)
    for value, name in re.findall(r"\btypedef\s+([\w\s:*]+?)\s+(\w+)\s*;", text):
        learn(name, value)
    for parameters in re.findall(r"\btemplate\s*<([^<>]*)>", text):
        for name in re.findall(r"\b(?:typename|class)\s+(\w+)", parameters):
            meanings[name] = None
    meanings.update(defines)
    return meanings


def _expand(text: str, meanings: Mapping[str, str | None], depth: int = 8) -> str:
    """Replace names by what they stand for; `?` where that is not known."""
    if depth == 0:
        return "?"

    def meaning(match: re.Match[str]) -> str:
        name = match.group()
        if name not in meanings:
            return name
        value = meanings[name]
        if value is None:
            return "?"
        rest = {key: each for key, each in meanings.items() if key != name}
        return _expand(value, rest, depth - 1)

    return re.sub(r"\b[A-Za-z_]\w*\b", meaning, text)


# ---- names ----


@cache
def _demangler() -> ctypes._NamedFuncPointer | None:
    try:
        function = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    return function


def demangle(name: str) -> str:
    """`void scale<float>(float*)` for `_Z5scaleIfEvPT_`; a C name is returned as it is."""
    function = _demangler() if name.startswith("_Z") else None
    if function is None:
        return name
    status = ctypes.c_int()
    address = function(name.encode(), None, None, ctypes.byref(status))
    if status.value != 0 or not address:
        return name
    text = ctypes.string_at(address).decode()
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free(address)
    return text
