"""A kernel's hash covers its text and every header it can reach."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cudaops import sources
from cudaops.errors import CompileError, UnsupportedError
from cudaops.plan import KernelSource


def digest(
    program: sources.Program,
    *,
    defines: dict[str, str] | None = None,
    options: tuple[str, ...] = (),
    toolkit: tuple[Path, ...] = (),
    facts: tuple[str, ...] = (),
) -> str:
    return sources.digest(program, defines or {}, options, toolkit, facts)


def program(text: str, *folders: Path, name: str = "k.cu") -> sources.Program:
    return sources.Program(name, text, folders)


def test_text_name_and_facts_count() -> None:
    first = digest(program("int a;"))
    assert digest(program("int a;")) == first
    assert digest(program("int b;")) != first
    assert digest(program("int a;", name="other.cu")) != first  # it is in the line table of the result
    assert digest(program("int a;"), facts=("x",)) != first
    assert digest(program("int a;"), facts=("x", "y")) != digest(program("int a;"), facts=("xy",))


@pytest.mark.parametrize(
    "include", ['#include "a.cuh"', "#include <a.cuh>", '  #  include\t"a.cuh" // why', '#include \\\n "a.cuh"']
)
def test_a_changed_header_is_seen(tmp_path: Path, include: str) -> None:
    (tmp_path / "a.cuh").write_text("int a;")
    before = digest(program(include, tmp_path))
    (tmp_path / "a.cuh").write_text("int b;")
    assert digest(program(include, tmp_path)) != before


def test_headers_are_followed_through_headers(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "a.cuh").write_text('#pragma once\n#include "inner/b.cuh"')
    (inner / "b.cuh").write_text('#include "c.cuh"\n#include "../a.cuh"')  # beside itself, and round in a circle
    (inner / "c.cuh").write_text("int c;")
    before = digest(program('#include "a.cuh"', tmp_path))
    (inner / "c.cuh").write_text("int d;")
    assert digest(program('#include "a.cuh"', tmp_path)) != before


def test_a_header_that_appears_first_on_the_path_is_seen(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir(), second.mkdir()
    (second / "a.cuh").write_text("int a;")
    before = digest(program("#include <a.cuh>", first, second))
    (first / "a.cuh").write_text("int other;")
    assert digest(program("#include <a.cuh>", first, second)) != before


def test_a_header_that_was_missing_and_appears_is_seen(tmp_path: Path) -> None:
    text = '#if __has_include("maybe.cuh")\n#include "maybe.cuh"\n#endif'
    before = digest(program(text, tmp_path))
    (tmp_path / "maybe.cuh").write_text("")
    assert digest(program(text, tmp_path)) != before


def test_a_header_under_an_if_counts_whether_or_not_it_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a.cuh").write_text("int a;")
    before = digest(program("#if 0\n#include <a.cuh>\n#endif", tmp_path))
    (tmp_path / "a.cuh").write_text("int b;")
    assert digest(program("#if 0\n#include <a.cuh>\n#endif", tmp_path)) != before


def test_a_header_named_by_a_define_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a.cuh").write_text("int a;")
    cases: list[tuple[str, dict[str, str]]] = [
        ("#include HEADER", {"HEADER": "<a.cuh>"}),
        ('#define HEADER "a.cuh"\n#include HEADER', {}),
        ("#define OTHER <a.cuh>\n#define HEADER OTHER\n#include HEADER", {}),
    ]
    before = [digest(program(text, tmp_path), defines=defines) for text, defines in cases]
    (tmp_path / "a.cuh").write_text("int b;")
    after = [digest(program(text, tmp_path), defines=defines) for text, defines in cases]
    assert all(a != b for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("text", ["#include HEADER", "#include MAKE(a)", "#define A A\n#include A"])
def test_a_header_that_cannot_be_followed_is_said(text: str) -> None:
    with pytest.raises(sources.ComputedIncludeError):
        digest(program(text))


def test_headers_of_the_toolkit_are_not_read(tmp_path: Path) -> None:
    """They stand in the key by their version; there are thousands."""
    (tmp_path / "cuda_fp16.h").write_text("int a;")
    before = digest(program("#include <cuda_fp16.h>", tmp_path), toolkit=(tmp_path,))
    (tmp_path / "cuda_fp16.h").write_text("#include IMPOSSIBLE")
    assert digest(program("#include <cuda_fp16.h>", tmp_path), toolkit=(tmp_path,)) == before


@pytest.mark.parametrize(
    "style", [("-include={}",), ("--pre-include={}",), ("-include", "{}"), ("--pre-include", "{}")]
)
def test_a_header_forced_by_an_option_counts(tmp_path: Path, style: tuple[str, ...]) -> None:
    header = tmp_path / "forced.cuh"
    header.write_text("int a;")
    options = tuple(part.format(header) for part in style)
    before = digest(program(""), options=options)
    header.write_text("int b;")
    assert digest(program(""), options=options) != before


@pytest.mark.parametrize("style", [("-I{}",), ("-I", "{}"), ("--include-path={}",), ("--include-path", "{}")])
def test_folders_in_the_options_are_searched(tmp_path: Path, style: tuple[str, ...]) -> None:
    options = tuple(part.format(tmp_path) for part in style)
    read = sources.read(KernelSource(None, "k", text='#include "a.cuh"', options=options))
    assert read.include_dirs == (tmp_path,)


def test_bytes_that_are_no_utf8_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "a.cuh").write_bytes(b"// caf\xe9")
    before = digest(program("#include <a.cuh>", tmp_path))
    (tmp_path / "a.cuh").write_bytes(b"// caf\xe8")
    assert digest(program("#include <a.cuh>", tmp_path)) != before


def test_our_kernels_are_beside_the_package() -> None:
    folder = sources.kernels_dir()
    assert folder.name == "kernels"
    assert list(folder.glob("*.cu"))


def test_missing_kernels_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "site-packages" / "cudaops" / "sources.py"))
    sources.kernels_dir.cache_clear()
    try:
        with pytest.raises(UnsupportedError, match=r"no kernels/ in .* install cudaops again"):
            sources.kernels_dir()
    finally:
        sources.kernels_dir.cache_clear()


def test_a_file_of_ours_has_its_real_path_as_name() -> None:
    file = sorted(sources.kernels_dir().glob("*.cu"))[0]
    read = sources.read(KernelSource(file.name, "k"))
    assert read == sources.Program(str(file), file.read_text(), (file.parent,))


def test_a_file_that_is_not_there_is_said_with_those_that_are() -> None:
    there = sorted(path.name for path in sources.kernels_dir().glob("*.cu"))[0]
    with pytest.raises(CompileError, match=rf"cannot read .*nothing\.cu .* files there: .*{there}"):
        sources.read(KernelSource("nothing.cu", "k"))


def test_neither_file_nor_text_is_said() -> None:
    with pytest.raises(CompileError, match="neither a file nor text"):
        sources.read(KernelSource(None, "k"))


def test_a_text_is_named_after_its_kernel_or_as_it_is_told(tmp_path: Path) -> None:
    assert sources.read(KernelSource(None, "scale<float>", text="")).name == "scale_float.cu"
    assert sources.read(KernelSource(None, "<>", text="")).name == "kernel.cu"
    named = sources.read(KernelSource(str(tmp_path / "mine.cu"), "k", text=""))
    assert (named.name, named.include_dirs) == (str(tmp_path / "mine.cu"), (tmp_path,))
    assert os.path.isabs(named.name)
