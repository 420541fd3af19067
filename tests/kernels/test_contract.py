"""The contract that opens each kernel file, compared with what the compiler made of it and what the host plans."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from cudaops.compile import CompiledKernel, compile_kernel
from cudaops.ops.conv import plan_conv2d, plan_conv2d_input, plan_conv2d_weight
from cudaops.ops.linear import plan_linear
from cudaops.ops.matmul import plan_matmul
from cudaops.ops.matmul_configs import MATMUL_CONFIGS, MMA_CONFIGS, MMA_MULTIPLY, is_legal
from cudaops.ops.matmul_plan import plan_product
from cudaops.plan import DTYPES, Plan, TensorSpec
from cudaops.sources import kernels_dir

ARCH = "sm_80"
ROOT = Path(__file__).resolve().parent.parent.parent
SECTIONS = ("Entry", "Shapes", "Types", "Defines", "Launch", "Shared", "Needs", "Sum", "Host")
C_SIZES = {"int": 4, "unsigned": 4, "long long": 8, "float": 4, "double": 8}


# ---- reading it ----


@dataclass(frozen=True)
class Argument:
    """One parameter as the contract has it, without its const."""

    ctype: str
    name: str


@dataclass(frozen=True)
class Contract:
    """The comment at the top of a kernel file."""

    title: str
    sections: Mapping[str, str]

    @property
    def entry(self) -> str:
        return self.sections["Entry"].partition("(")[0].strip()

    @property
    def arguments(self) -> list[Argument]:
        inside = re.match(r"\w+\((.*?)\)", self.sections["Entry"])
        assert inside, "Entry: name(type name, ...)"
        pairs = (part.strip().rpartition(" ") for part in inside[1].split(","))
        return [Argument(ctype.removeprefix("const "), name) for ctype, _, name in pairs]

    @property
    def defines(self) -> set[str]:
        return set(re.findall(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*\b", self.sections["Defines"]))


def read(file: Path) -> Contract:
    """The contract of a kernel file: `// title`, then sections `// Name:  text`, continued on indented lines."""
    title, sections, current = "", {}, ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("//"):
            break
        text = line[2:].rstrip()
        match = re.match(r" ([A-Z][a-z]+):\s+(.*)", text)
        if match and match[1] in SECTIONS:
            current = match[1]
            sections[current] = match[2]
        elif current and text.startswith("    "):
            sections[current] += " " + text.strip()
        elif not sections:
            title += text
        else:
            current = ""
    return Contract(title.strip(), sections)


def size_of(name: str, names: Mapping[str, int]) -> int:
    """Bytes of the type that `name` stands for; COMPUTED is what an ELEMENT is computed in."""
    if name == "COMPUTED":
        return next(dtype.computed for dtype in DTYPES.values() if dtype.ctype == str(names["ELEMENT"]))
    return C_SIZES[str(names[name])]


def value_of(expression: str, names: Mapping[str, int]) -> int | None:
    """The value of an integer expression of C; None where it names what is not known here."""
    text = re.sub(r"sizeof\((\w+)\)", lambda m: str(size_of(m[1], names)), expression)
    text = re.sub(r"\bceil\((\w+) / ", r"ceil(\1, ", text).replace("/", "//")
    functions = {"ceil": lambda n, d: -(-n // d)}
    if set(re.findall(r"[A-Za-z_]\w*", text)) - set(names) - set(functions):
        return None
    return int(eval(text, {"__builtins__": {}}, {**names, **functions}))


# ---- what the host plans ----


def spec(*shape: int, dtype: str = "float32", transposed: bool = False) -> TensorSpec:
    strides = [1] * len(shape)
    for dim in reversed(range(len(shape) - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    if transposed:
        strides[-2:] = [1, shape[-2]]
    return TensorSpec(shape, tuple(strides), dtype, 16)


def matmul_plans() -> Iterator[Plan]:
    for config in MATMUL_CONFIGS:
        yield plan_matmul(spec(500, 64), spec(64, 300), arch=ARCH, config=config.name)
        yield plan_linear(spec(7, 64), spec(300, 64), spec(300), arch=ARCH, activation="relu", config=config.name)
    for dtype, described in DTYPES.items():
        config = next(config for config in MATMUL_CONFIGS if is_legal(config, described.computed))
        left, right = spec(3, 70, 30, dtype=dtype, transposed=True), spec(3, 30, 33, dtype=dtype)
        yield plan_matmul(left, right, arch=ARCH, config=config.name)
    yield plan_linear(spec(3000, 8), spec(5, 8), spec(5), arch=ARCH)  # with its operands exchanged


def skinny_plans() -> Iterator[Plan]:
    for dtype in DTYPES:
        yield plan_matmul(spec(1, 64, dtype=dtype), spec(64, 90, dtype=dtype), arch=ARCH)
        yield plan_linear(
            spec(3 if DTYPES[dtype].computed < 16 else 1, 64, dtype=dtype),
            spec(90, 64, dtype=dtype),
            spec(90, dtype=dtype),
            spec(90, dtype=dtype),
            arch=ARCH,
            activation=None if dtype.startswith("complex") else "relu",
        )
    yield plan_linear(spec(5000, 64), spec(2, 64), spec(2), arch=ARCH)  # with its operands exchanged
    yield plan_matmul(spec(8, 4000), spec(4000, 90, transposed=True), arch=ARCH)  # with warps that share k


def mma_plans() -> Iterator[Plan]:
    for config in MMA_CONFIGS:
        half = partial(spec, dtype="bfloat16")
        yield plan_matmul(half(500, 64), half(64, 300), arch=ARCH, config=config.name)
    for dtype in MMA_MULTIPLY:
        left, right = spec(3, 70, 36, dtype=dtype, transposed=True), spec(3, 36, 77, dtype=dtype)
        yield plan_matmul(left, right, arch=ARCH, tf32=True, config=MMA_CONFIGS[-1].name)
    for dtype in ("int8", "uint8"):
        yield plan_matmul(spec(70, 64, dtype=dtype), spec(64, 80, dtype=dtype), arch=ARCH, out="int32")
    operands = (spec(*shape, dtype="float16") for shape in ((70, 64), (300, 64), (300,), (70, 300)))
    yield plan_linear(*operands, arch=ARCH, activation="gelu")


def conv_plans() -> Iterator[Plan]:
    for dtype, channels, groups in (("float32", 8, 1), ("float64", 8, 2), ("int64", 4, 4)):
        image, weight = spec(2, channels, 9, 11, dtype=dtype), spec(16, channels // groups, 3, 3, dtype=dtype)
        grad, geometry = spec(2, 16, 9, 11, dtype=dtype), ((1, 1), (1, 1, 1, 1), (1, 1), groups)
        yield from plan_conv2d(image, weight, True, *geometry, "relu", ARCH).launches
        if dtype != "int64":
            yield from plan_conv2d_input(grad, weight, image.shape, *geometry, ARCH).launches
            yield from plan_conv2d_weight(grad, image, weight, *geometry, ARCH).launches
    deep = spec(1, 512, 7, 7), spec(512, 512, 3, 3)
    yield from plan_conv2d(*deep, False, (1, 1), (1, 1, 1, 1), (1, 1), 1, "", ARCH).launches


def batched_plans() -> Iterator[Plan]:
    for dtype in DTYPES:
        yield plan_matmul(spec(20, 4, 8, dtype=dtype), spec(20, 8, 12, dtype=dtype), arch=ARCH, config="batched")
    yield plan_matmul(spec(50, 60, 7), spec(50, 7, 64, transposed=True), arch=ARCH)


def split_sum_plans() -> Iterator[Plan]:
    for dtype in DTYPES:
        left, right = spec(2, 30, 4000, dtype=dtype), spec(2, 4000, 40, dtype=dtype)
        yield plan_product(left, right, arch=ARCH).launches[1]
    extras = spec(40), spec(30, 40)
    yield plan_product(spec(30, 4000), spec(4000, 40), *extras, arch=ARCH, activation="relu", beta=2).launches[1]


PLANS: dict[str, Callable[[], Iterator[Plan]]] = {
    "matmul_simt.cu": matmul_plans,
    "matmul_mma.cu": mma_plans,
    "matmul_skinny.cu": skinny_plans,
    "matmul_split_sum.cu": split_sum_plans,
    "matmul_batched.cu": batched_plans,
    "conv_implicit_gemm.cu": lambda: (plan for plan in conv_plans() if plan.source.file == "conv_implicit_gemm.cu"),
    "conv_split_sum.cu": lambda: (plan for plan in conv_plans() if plan.source.file == "conv_split_sum.cu"),
}
FILES = sorted(kernels_dir().glob("*.cu"))


@pytest.fixture(scope="module")
def compiled() -> Callable[[str], list[tuple[Plan, CompiledKernel]]]:
    made: dict[str, list[tuple[Plan, CompiledKernel]]] = {}

    def of(file: str) -> list[tuple[Plan, CompiledKernel]]:
        if file not in made:
            plans = {plan.source: plan for plan in PLANS[file]()}.values()
            made[file] = [(plan, compile_kernel(plan.source, ARCH)) for plan in plans]
        return made[file]

    return of


Compiled = Callable[[str], list[tuple[Plan, CompiledKernel]]]


def names_of(plan: Plan) -> dict[str, int]:
    """Everything an expression in a contract may name: the plan's defines, and scalars by their argument's name."""
    contract = read(kernels_dir() / str(plan.source.file))
    defines = {name: int(value) if value.isdigit() else value for name, value in plan.source.defines}
    scalars = contract.arguments[len(contract.arguments) - len(plan.scalars) :]
    return defines | {  # type: ignore[return-value]
        argument.name: scalar for argument, scalar in zip(scalars, plan.scalars, strict=True) if isinstance(scalar, int)
    }


# ---- comparing ----


def test_every_kernel_file_is_compared() -> None:
    assert {file.name for file in FILES} == set(PLANS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_contract_is_whole(file: Path) -> None:
    contract = read(file)
    assert list(contract.sections) == list(SECTIONS)
    assert contract.entry == file.stem
    assert contract.title.startswith(f"{file.stem}: ")
    for host in re.findall(r"cudaops/[\w/]+\.py", contract.sections["Host"]):
        assert (ROOT / host).is_file()
    for function in re.findall(r"\bplan_\w+", contract.sections["Host"]):
        assert any(f"def {function}(" in path.read_text() for path in (ROOT / "cudaops" / "ops").glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_contract_entry_is_the_compiled_one(file: Path, compiled: Compiled) -> None:
    contract = read(file)
    for plan, kernel in compiled(file.name):
        assert plan.source.entry == contract.entry == kernel.name
        assert set(kernel.entries) == {contract.entry}
        names = names_of(plan)
        params = kernel.entry.params
        assert [param.name for param in params] == [argument.name for argument in contract.arguments]
        for param, argument in zip(params, contract.arguments, strict=True):
            base = argument.ctype.rstrip("*").strip()
            base = str(names.get(base, base))
            if argument.ctype.endswith("*"):
                assert (param.kind, param.pointee) == ("pointer", base), argument
            elif base in C_SIZES:
                assert (param.size, param.kind == "float") == (C_SIZES[base], base in ("float", "double")), argument
            else:
                assert (param.kind, param.ctype) == ("struct", f"const {base}"), argument


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_contract_names_every_define(file: Path, compiled: Compiled) -> None:
    contract = read(file)
    for plan, _ in compiled(file.name):
        assert {name for name, _ in plan.source.defines} <= contract.defines
        ctype = dict(plan.source.defines)["ELEMENT"]
        assert re.search(rf"ELEMENT = [\w, ]*\b{ctype}\b", contract.sections["Types"])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_contract_launch_is_the_planned_one(file: Path, compiled: Compiled) -> None:
    launch = read(file).sections["Launch"]
    block, grid = re.search(r"\bblock ([^,;.]+)", launch), re.search(r"\bgrid ([^,;.]+)", launch)
    assert block
    assert grid
    for plan, kernel in compiled(file.name):
        assert plan.config.block[1:] == (1, 1)
        if block[1] != "any":
            threads = value_of(block[1], names_of(plan))
            assert threads == plan.config.threads == kernel.entry.max_threads
        blocks = value_of(grid[1], names_of(plan)) if not grid[1].startswith("(") else None
        assert blocks in (None, plan.config.blocks)
        if file.name.startswith("matmul"):
            assert blocks is not None


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_contract_shared_memory_is_the_compiled(file: Path, compiled: Compiled) -> None:
    shared = read(file).sections["Shared"]
    for plan, kernel in compiled(file.name):
        static, dynamic = kernel.entry.smem_bytes, plan.config.smem_bytes
        if shared == "none":
            assert (static, dynamic) == (0, 0)
        elif shared.startswith("dynamic"):
            expression = re.match(r"dynamic, ([^;]*)", shared)
            value = expression and value_of(expression[1], names_of(plan))
            assert static == 0
            assert (value or dynamic) == dynamic > 0
            assert value or not file.name.startswith("matmul")
        else:
            expression = re.match(r"static, (.*)", shared)
            assert expression
            assert (static, dynamic) == (value_of(expression[1], names_of(plan)), 0)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_kernels_neither_spill_nor_use_a_stack(file: Path, compiled: Compiled) -> None:
    for plan, kernel in compiled(file.name):
        assert (kernel.entry.spill_bytes, kernel.entry.stack_bytes) == (0, 0), plan.reason


# ---- the comparison can fail ----


def test_reader_sees_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "scale.cu"
    file.write_text(
        "// scale: multiplies.\n//\n// Entry:    scale(float* out, const float* bias,\n"
        "//                 const INDEX n); no more\n// Defines:  INDEX int;\n//           BIAS 0 or 1\n"
        "// Launch:   grid ceil(n / 4), block 2 * BIAS\n\n// Sum:   no\n"
    )
    contract = read(file)
    assert list(contract.sections) == ["Entry", "Defines", "Launch"]
    assert contract.arguments == [
        Argument("float*", "out"),
        Argument("float*", "bias"),
        Argument("INDEX", "n"),
    ]
    assert contract.defines == {"INDEX", "BIAS"}
    assert value_of("ceil(n / 4) * 3", {"n": 9}) == 9
    assert value_of("2 * sizeof(ELEMENT) * (N < 32)", {"ELEMENT": "double", "N": 16}) == 16  # type: ignore[dict-item]
    assert value_of("2 * unknown", {"n": 9}) is None
