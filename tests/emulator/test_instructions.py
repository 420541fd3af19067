"""Every instruction of the table, by its bits: corner cases written down, and the product of corner values.

Instructions whose results the PTX ISA bounds instead of defining are held to those bounds.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cudaops.emulator.isa import TABLE
from cudaops.errors import EmulatorError
from tests.emulator import approximations, harness, test_memory, test_warp
from tests.emulator.instructions import (
    FORMS,
    exact_opcodes,
    expected,
    operand_rows,
    run,
    same,
    signature,
)
from tests.emulator.reference import BITS, NAN

CONFORMANCE = Path(__file__).with_name("conformance.txt")
OPCODES_AT_ONCE = 40


def written_cases() -> dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """instruction -> (operands, results) of its lines."""
    found: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = defaultdict(list)
    for line in CONFORMANCE.read_text().splitlines():
        if line and not line.startswith("#"):
            opcode, operands, results = (part.strip() for part in line.split("|"))
            values = tuple(int(v, 16) for v in operands.split())
            wanted = tuple(NAN if v == "nan" else int(v, 16) for v in re.split("[ :]", results))
            found[opcode].append((values, wanted))
    return dict(found)


def chunks(opcodes: list[str]) -> list[list[str]]:
    """Opcodes of one base together, not too many: a kernel for each."""
    by_base: dict[str, list[str]] = defaultdict(list)
    for opcode in opcodes:
        by_base[opcode.split(".")[0]].append(opcode)
    small = [group for group in by_base.values() if len(group) < OPCODES_AT_ONCE]
    found = [g[n : n + OPCODES_AT_ONCE] for g in by_base.values() if len(g) >= OPCODES_AT_ONCE for n in range(0, len(g), OPCODES_AT_ONCE)]  # fmt: skip
    together: list[str] = []
    for group in small:
        if len(together) + len(group) > OPCODES_AT_ONCE:
            found.append(together)
            together = []
        together = together + group
    return [*found, together]


def title(opcodes: list[str]) -> str:
    bases = list(dict.fromkeys(opcode.split(".")[0] for opcode in opcodes))
    return "-".join(bases) if len(bases) > 1 else f"{opcodes[0]}..{opcodes[-1]}"


def shown(values: tuple[int, ...]) -> str:
    return " ".join("nan" if v == NAN else f"{v:x}" for v in values)


WRITTEN = written_cases()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("opcodes", chunks(list(WRITTEN)), ids=title)
def test_conformance(opcodes: list[str], form: str) -> None:
    found = run(opcodes, [[operands for operands, _ in WRITTEN[opcode]] for opcode in opcodes], form)
    wrong = [
        f"{opcode} | {shown(operands)} | {shown(wanted)}: got {shown(got)}"
        for opcode, results in zip(opcodes, found, strict=True)
        for (operands, wanted), got in zip(WRITTEN[opcode], results, strict=True)
        if not same(opcode, got, wanted)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_written_cases_are_what_the_reference_says() -> None:
    """Two sources for what is right: they hold each other."""
    for opcode, cases in WRITTEN.items():
        for operands, wanted in cases:
            assert expected(opcode, operands) == wanted, f"{opcode} | {shown(operands)}"


EXACT = chunks(list(dict.fromkeys(exact_opcodes())))


def _check_corners(opcodes: list[str], source: np.random.Generator, most: int) -> None:
    rows = [operand_rows(opcode, source, most) for opcode in opcodes]
    wanted = [[expected(opcode, r) for r in mine] for opcode, mine in zip(opcodes, rows, strict=True)]
    wrong = []
    for form in FORMS:
        for n, results in enumerate(run(opcodes, rows, form)):
            wrong += [
                f"{opcodes[n]} ({form}) | {shown(r)} | {shown(w)}: got {shown(got)}"
                for r, w, got in zip(rows[n], wanted[n], results, strict=True)
                if not same(opcodes[n], got, w)
            ]
    assert not wrong, "\n".join(wrong[:30])


@pytest.mark.parametrize("opcodes", EXACT, ids=title)
def test_corner_values_against_the_reference(opcodes: list[str], seed: int) -> None:
    _check_corners(opcodes, np.random.default_rng(seed), 24)


@pytest.mark.slow
@pytest.mark.parametrize("opcodes", EXACT, ids=title)
def test_many_corner_values(opcodes: list[str], seed: int) -> None:
    _check_corners(opcodes, np.random.default_rng(seed), 400)


# -- approximations -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("form", FORMS)
def test_approximations_keep_their_bounds(form: str, seed: int) -> None:
    source = np.random.default_rng(seed)
    those = approximations.ONE_OPERAND
    values = [approximations.operands(a, source, 300 if form == "vector" else 40) for a in those]
    packed = [a.opcode.endswith("x2") for a in those]
    rows = [
        [(v | other << 16,) for v, other in zip(mine, mine[1:] + mine[:1], strict=True)]
        if pair
        else [(v,) for v in mine]
        for mine, pair in zip(values, packed, strict=True)
    ]
    wrong = []
    for n, (a, results) in enumerate(zip(those, run([a.opcode for a in those], rows, form), strict=True)):
        for (operand,), (got,) in zip(rows[n], results, strict=True):
            pairs = [(operand & 0xFFFF, got & 0xFFFF), (operand >> 16, got >> 16)] if packed[n] else [(operand, got)]
            wrong += [text for x, y in pairs if (text := approximations.wrong(a, x, y))]
    assert not wrong, "\n".join(wrong[:30])


def test_sine_and_cosine_of_anything_finite_lie_within_one() -> None:
    rows = [[(b,) for b in range(0x40C90FDB, 0x7F800000, 0x12345)] for _ in range(2)]
    for results in run(["sin.approx.f32", "cos.approx.f32"], rows, "vector"):
        assert all(got & 0x7FFFFFFF <= 0x3F800001 for (got,) in results)


@pytest.mark.parametrize("form", FORMS)
def test_approximate_quotients(form: str, seed: int) -> None:
    source = np.random.default_rng(seed)
    opcodes = approximations.QUOTIENTS
    rows = [operand_rows(opcode, source, 300 if form == "vector" else 60) for opcode in opcodes]
    wrong = [
        text
        for opcode, mine, results in zip(opcodes, rows, run(opcodes, rows, form), strict=True)
        for (a, b), (got,) in zip(mine, results, strict=True)
        if (text := approximations.wrong_quotient(opcode, a, b, got))
    ]
    assert not wrong, "\n".join(wrong[:30])


# -- the table ------------------------------------------------------------------------------------------------------------
def every_opcode() -> Iterator[str]:
    yield from WRITTEN
    yield from (opcode for group in EXACT for opcode in group)
    yield from approximations.OPCODES
    yield from test_memory.OPCODES
    yield from test_warp.OPCODES


# Opcodes whose cases are in a test module of their own.
ELSEWHERE = {
    **dict.fromkeys(("atom", "red"), "test_atomics.py"),
    **dict.fromkeys(("addc", "subc", "madc", "add", "sub", "mad"), "test_carry.py"),
    **dict.fromkeys(("mma", "ldmatrix", "stmatrix", "movmatrix", "cp"), "test_tensor.py"),
    "mbarrier": "test_async.py",
    "wmma": "test_wmma.py",
    **dict.fromkeys(("redux", "match", "vote", "activemask", "elect"), "test_tensor.py"),
    **dict.fromkeys(("bar", "barrier", "barrier_result"), "test_barriers.py"),
    "vprintf": "test_calls.py",
}


@pytest.mark.parametrize("base", sorted(TABLE))
def test_every_entry_of_the_table_has_a_case(base: str, request: pytest.FixtureRequest) -> None:
    """Each type and each modifier that an opcode may have is in an instruction that these tests run."""
    opcodes = {*every_opcode()}
    if base in ELSEWHERE:
        if ELSEWHERE[base] not in {item.path.name for item in request.session.items}:
            return  # a run of a few files only
        opcodes |= harness.OPCODES_RUN
    have = {p for opcode in opcodes if (parts := opcode.split(" ")[0].split("."))[0] == base for p in parts}
    assert base in have, f"{base} has no case"
    for entry in TABLE[base]:
        missing = (entry.types | entry.modifiers) - have
        assert not missing, f"{base} has no case with {sorted(missing)}"


def test_an_unknown_instruction_names_itself_and_its_line() -> None:
    for text, message in (
        ("frobnicate.b32 %r1, %r2;", r"test\.cu:77: .*frobnicate\.b32.*does not know"),
        ("add.q31 %r1, %r2, %r3;", r"test\.cu:77: .*add\.q31.*\.q31 of add"),
        ("add.rn.s32 %r1, %r2, %r3;", r"test\.cu:77: .*add\.rn\.s32"),
        ("wgmma.fence.sync.aligned;", r"test\.cu:77: .*Hopper"),
        ("mov.u32 %r1, %clusterid.x;", r"clusterid"),
    ):
        kernel = harness.ptx(f".reg .b32 %r<9>;\n.loc 1 77 3\n{text}\nret;")
        with pytest.raises(EmulatorError, match=message):
            kernel(1, 32, np.zeros(1, np.int32))


def test_signatures_cover_every_type() -> None:
    for group in EXACT:
        for opcode in group:
            assert all(t in BITS for t in (*signature(opcode).results, *signature(opcode).operands)), opcode
