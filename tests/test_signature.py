"""What is read from PTX, from declarations and from C++ names."""

from __future__ import annotations

from typing import Any

import pytest

from cudaops.signature import Entry, Param, base_name, demangle, entries_of, with_declarations

PTX = """
.version 9.0
.target sm_80
.address_size 64
	// .globl	k   (a comment with .entry fake( .param .u64 x ))
.visible .entry k(
	.param .u64 k_param_0,
	.param .u64 .ptr .global .align 16 k_param_1,
	.param .u32 k_param_2,
	.param .f64 k_param_3,
	.param .align 8 .b8 k_param_4[16],
	.param .u8 k_param_5,
	.param .align 2 .b8 k_param_6[2],
	.param .f32 k_param_7
)
.maxntid 256, 1, 1
.minnctapersm 2
{
	ret;
}
.weak .entry _Z2tkIfEvPT_j(
	.param .u64 _Z2tkIfEvPT_j_param_0,
	.param .u32 _Z2tkIfEvPT_j_param_1
)
.reqntid 8, 4
{
	ret;
}
.entry nothing()
{
	ret;
}
.visible .entry bare
{
	ret;
}
.func (.param .b32 retval) helper(.param .b32 a) { ret; }
"""


def test_parameters_and_bounds_come_from_the_ptx() -> None:
    entries = entries_of(PTX)
    assert list(entries) == ["k", "_Z2tkIfEvPT_j", "nothing", "bare"]
    k = entries["k"]
    assert [(p.offset, p.size, p.align, p.kind) for p in k.params] == [
        (0, 8, 8, "word"),
        (8, 8, 8, "pointer"),
        (16, 4, 4, "int"),
        (24, 8, 8, "float"),
        (32, 16, 8, "struct"),
        (48, 1, 1, "int"),
        (50, 2, 2, "struct"),
        (52, 4, 4, "float"),
    ]
    assert (k.max_threads, k.required_block, k.arguments_bytes) == (256, None, 56)
    assert entries["_Z2tkIfEvPT_j"].required_block == (8, 4, 1)
    assert entries["_Z2tkIfEvPT_j"].max_threads == 32
    assert entries["nothing"].params == entries["bare"].params == ()
    assert entries["nothing"].arguments_bytes == 0


def read(
    declaration: str, *, params: str = "w", defines: dict[str, str] | None = None, title: str = "k"
) -> list[Param]:
    """The parameters of `k` once `declaration` was read; `params` gives what the PTX says, a letter each."""
    shapes: dict[str, tuple[int, str]] = {
        "w": (8, "word"),
        "i": (4, "int"),
        "h": (2, "int"),
        "b": (1, "int"),
        "f": (4, "float"),
        "d": (8, "float"),
        "s": (16, "struct"),
    }
    made = tuple(Param(f"p{n}", 0, size, size, kind) for n, (size, kind) in enumerate(shapes[c] for c in params))
    return list(with_declarations(Entry("k", made, title=title), declaration, defines or {}).params)


@pytest.mark.parametrize(
    ("ctype", "letter", "kind", "pointee", "signed"),
    [
        ("float*", "w", "pointer", "float", None),
        ("const float * __restrict__", "w", "pointer", "float", None),
        ("float const*", "w", "pointer", "float", None),
        ("volatile double*", "w", "pointer", "double", None),
        ("void*", "w", "pointer", "void", None),
        ("unsigned*", "w", "pointer", "unsigned int", None),
        ("unsigned long long int*", "w", "pointer", "unsigned long long", None),
        ("int64_t*", "w", "pointer", "long", None),
        ("std::uint8_t*", "w", "pointer", "unsigned char", None),
        ("half*", "w", "pointer", "__half", None),
        ("nv_bfloat16*", "w", "pointer", "__nv_bfloat16", None),
        ("float4*", "w", "pointer", "float4", None),
        ("float**", "w", "pointer", "float *", None),
        ("struct Thing*", "w", "pointer", "Thing", None),
        ("long long", "w", "int", None, True),
        ("size_t", "w", "int", None, False),
        ("long int", "w", "int", None, True),
        ("int", "i", "int", None, True),
        ("const int", "i", "int", None, True),
        ("unsigned", "i", "int", None, False),
        ("uint32_t", "i", "int", None, False),
        ("short int", "h", "int", None, True),
        ("unsigned short", "h", "int", None, False),
        ("bool", "b", "int", None, False),
        ("char", "b", "int", None, True),
        ("unsigned char", "b", "int", None, False),
        ("float", "f", "float", None, None),
        ("double", "d", "float", None, None),
    ],
)
def test_a_declared_type_is_read(ctype: str, letter: str, kind: str, pointee: str | None, signed: bool | None) -> None:
    (param,) = read(f'extern "C" __global__ void k({ctype} x) {{}}', params=letter)
    assert (param.name, param.kind, param.pointee, param.signed) == ("x", kind, pointee, signed)
    assert param.ctype == " ".join(ctype.split())


@pytest.mark.parametrize(
    ("ctype", "const"),
    [
        ("const float*", True),
        ("float const*", True),
        ("float*", False),
        ("float* const", False),
        ("const float**", False),
    ],
)
def test_only_a_pointer_to_const_is_not_written_through(ctype: str, const: bool) -> None:
    assert read(f"__global__ void k({ctype} x)")[0].const is const


@pytest.mark.parametrize(
    "declaration",
    [
        "__global__ void __launch_bounds__(256, 2) k(float* x) {}",
        "__global__ __launch_bounds__(BM * 2) void k(float* x) {}",
        'extern "C" {\n__global__ void\nk(\n  float*\n  x // the output, not int\n)\n{ }\n}',
        'extern "C" __global__ static inline void k(/* int */ float* x) {}',
        "#define REAL float\n__global__ void k(REAL* x) {}",
        "using real = float;\n__global__ void k(real* x) {}",
        "typedef float real;\n__global__ void k(real* x) {}",
        "#define A B\n#define B float\n__global__ void k(A* x) {}",
        "using P = float*;\n__global__ void k(P x) {}",
        "__device__ void k(int x); void f() { k(3); }\n__global__ void k(float* x) {}",
        'const char* s = "__global__ void k(int x)";\n__global__ void k(float* x) {}',
        "// __global__ void k(int x)\n__global__ void k(float* x) {}",
        "__global__ void k(float* x);\n__global__ void k(float* x) {}",
        "__global__ void other(int y) {}\n__global__ void k(float* x) {}",
        "__global__ void k(float* __restrict__ x) {}",
        "__global__ void k(float *x) {}",
    ],
)
def test_declarations_are_found_as_they_are_written(declaration: str) -> None:
    (param,) = read(declaration)
    assert (param.name, param.kind, param.pointee) == ("x", "pointer", "float")


def test_defines_of_the_command_line_are_followed() -> None:
    declaration = "__global__ void k(ELEMENT* x, INDEX n)"
    found = read(declaration, params="wi", defines={"ELEMENT": "const double", "INDEX": "unsigned int"})
    assert (found[0].pointee, found[0].const, found[1].signed) == ("double", True, False)


@pytest.mark.parametrize(
    "declaration",
    [
        "",
        "__device__ void k(float* x)",
        "DECLARE(k, float)",
        "template <typename REAL> __global__ void k(REAL* x)",
        "#if A\n#define REAL float\n#else\n#define REAL double\n#endif\n__global__ void k(REAL* x)",
        "#if A\n__global__ void k(float* x)\n#else\n__global__ void k(double* x)\n#endif",
        "__global__ void k(cuda::std::complex<float>* x)",
        "#define LOOP LOOP2\n#define LOOP2 LOOP\n__global__ void k(LOOP* x, int, int)",
        "__global__ void k(float* x, int y)",
        "__global__ void k(void (*x)(int))",
        "__global__ void k(float& x)",
    ],
)
def test_what_cannot_be_read_stays_open(declaration: str) -> None:
    (param,) = read(declaration)
    assert (param.kind, param.pointee, param.signed) == ("word", None, None)


@pytest.mark.parametrize(
    ("ctype", "letter"),
    [("float", "i"), ("int", "f"), ("int", "w"), ("double", "f"), ("float*", "i"), ("bool", "i"), ("int", "s")],
)
def test_a_declaration_that_contradicts_the_ptx_is_not_believed(ctype: str, letter: str) -> None:
    before = read("", params=letter)[0]
    after = read(f"__global__ void k({ctype} x)", params=letter)[0]
    assert (after.kind, after.ctype, after.pointee, after.signed) == (before.kind, None, None, None)


def test_a_structs_name_is_kept() -> None:
    (param,) = read("__global__ void k(const __grid_constant__ Geometry x)", params="s")
    assert (param.kind, param.ctype) == ("struct", "const __grid_constant__ Geometry")


def test_an_argument_with_a_default_has_its_name_and_type() -> None:
    (param,) = read("__global__ void k(int x = 3)", params="i")
    assert (param.name, param.signed) == ("x", True)


def test_the_name_of_a_cpp_entry_gives_its_types() -> None:
    title = demangle("_Z2tkIfEvPT_jPKfmPKPKi")
    assert title == "void tk<float>(float*, unsigned int, float const*, unsigned long, int const* const*)"
    found = read("", params="wiwww", title=title)
    assert [(p.kind, p.pointee, p.signed, p.const) for p in found] == [
        ("pointer", "float", None, False),
        ("int", None, False, False),
        ("pointer", "float", None, True),
        ("int", None, False, False),
        ("pointer", "int *", None, False),
    ]


@pytest.mark.parametrize(
    ("title", "base"),
    [
        ("k", "k"),
        ("plain(float*)", "plain"),
        ("void tk<float>(float*, unsigned int)", "tk"),
        ("void a::b::tk<float, std::pair<int, int> >(float*)", "tk"),
        ("ns::plain(void (*)(int))", "plain"),
    ],
)
def test_the_plain_name_is_found_in_a_title(title: str, base: str) -> None:
    assert base_name(title) == base


def test_names_that_are_not_mangled_stay() -> None:
    assert demangle("k") == "k"
    assert demangle("_Znonsense") == "_Znonsense"


def test_without_a_demangler_names_stay_mangled(monkeypatch: pytest.MonkeyPatch) -> None:
    from cudaops import signature

    def missing(name: str) -> Any:
        raise OSError("no libstdc++")

    monkeypatch.setattr(signature.ctypes, "CDLL", missing)
    signature._demangler.cache_clear()
    try:
        assert demangle("_Z5plainPf") == "_Z5plainPf"
    finally:
        monkeypatch.undo()
        signature._demangler.cache_clear()
    assert demangle("_Z5plainPf") == "plain(float*)"
