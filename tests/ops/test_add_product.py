from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from cudaops.errors import UnsupportedError
from cudaops.launch import launch_counts, total_launches
from cudaops.ops.add_product import add_product
from cudaops.ops.int_product import int_product
from tests.ops.matmul_reference import check, random
from tests.ops.test_matmul import DTYPE, NON_LEAF, TORCH_SCRIPT, poisoned  # noqa: F401  (a fixture)

OP = torch.ops.cudaops.add_product.default
Product = Callable[..., torch.Tensor]

# shapes of residual, input and other; beta and alpha
CASES = {
    "matrices": ((5, 6), (5, 7), (7, 6), 1, 1),
    "a residual of a row, with factors": ((6,), (5, 7), (7, 6), 2, -3),
    "a residual of a column": ((5, 1), (5, 7), (7, 6), -1, 2),
    "one number": ((), (5, 7), (7, 6), 3, 1),
    "a matrix and a vector": ((5,), (5, 7), (7,), 2, 2),
    "batches": ((2, 5, 6), (2, 5, 7), (2, 7, 6), 1, 2),
    "a residual of a batch": ((2, 1, 6), (2, 5, 7), (2, 7, 6), 1, 2),
    "one residual for all batches": ((5, 6), (2, 5, 7), (2, 7, 6), 1, 1),
    "rows folded": ((2, 5, 6), (2, 5, 7), (7, 6), 2, 1),
    "rows not folded: the residual does not follow": ((2, 1, 6), (2, 5, 7), (7, 6), 2, 1),
    "few rows": ((1, 60), (1, 70), (70, 60), 2, 3),
    "few columns": ((60, 2), (60, 70), (70, 2), 2, 3),
    "without the residual": ((5, 6), (5, 7), (7, 6), 0, 2),
    "without the product": ((5, 6), (5, 7), (7, 6), 2, 0),
    "nothing to add up": ((5, 6), (5, 0), (0, 6), 2, 1),
    "no rows": ((0, 6), (0, 7), (7, 6), 2, 1),
}


def operands(name: str, dtype: torch.dtype, rng: torch.Generator) -> list[torch.Tensor]:
    return [random(shape, dtype, rng) for shape in CASES[name][:3]]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for first, dtype in enumerate(DTYPE) for name in (list(CASES)[first % 8 :: 8] if first else CASES)],
    ids=str,
)
def test_add_product_matches_reference(name: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    (residual, input, other), (beta, alpha) = operands(name, dtype, rng), CASES[name][3:]
    before = total_launches()
    out = add_product(residual, input, other, beta=beta, alpha=alpha)
    assert total_launches() == before + (out.numel() > 0 and input.shape[-1] > 0 and alpha != 0)
    assert out.is_contiguous()
    check(out, input, other, None, residual, alpha=alpha, beta=beta)


@pytest.mark.parametrize("beta", [0, 0.0])
def test_add_product_does_not_read_a_residual_of_no_weight(beta: float, rng: torch.Generator) -> None:
    input, other = random((5, 7), torch.float32, rng), random((7, 6), torch.float32, rng)
    check(add_product(torch.full((6,), torch.nan), input, other, beta=beta), input, other)
    assert torch.equal(add_product(torch.full((6,), torch.nan), input, other, beta=0, alpha=0), torch.zeros(5, 6))


@pytest.mark.parametrize("factors", [{}, {"beta": 0.5, "alpha": -1.5}, {"beta": 0, "alpha": 2}])
@pytest.mark.parametrize("name", CASES)
def test_add_product_gradients_to_second_order(name: str, factors: dict[str, float], rng: torch.Generator) -> None:
    arguments = [x.requires_grad_() for x in operands(name, torch.float64, rng)]
    assert gradcheck(lambda *x: add_product(*x, **factors), arguments, fast_mode=True)
    assert gradgradcheck(lambda *x: add_product(*x, **factors), arguments, fast_mode=True)


def test_add_product_of_complex_numbers_and_factors(rng: torch.Generator) -> None:
    arguments = [x.requires_grad_() for x in operands("a residual of a row, with factors", torch.complex128, rng)]
    for factors in ({"beta": 2.0, "alpha": -1}, {"beta": 1 - 2j, "alpha": 0.5j}):
        torch.testing.assert_close(add_product(*arguments, **factors), torch.addmm(*arguments, **factors))
        assert gradcheck(lambda *x, f=factors: add_product(*x, **f), arguments, fast_mode=True)
        assert gradgradcheck(lambda *x, f=factors: add_product(*x, **f), arguments, fast_mode=True)


@NON_LEAF
@TORCH_SCRIPT
@pytest.mark.parametrize("name", ["matrices", "a residual of a column", "batches", "nothing to add up"])
def test_add_product_passes_opcheck(name: str, rng: torch.Generator) -> None:
    for wanted in (False, True):
        arguments = [x.requires_grad_(wanted) for x in operands(name, torch.float32, rng)]
        torch.library.opcheck(OP, tuple(arguments), {"beta": 0.5, "alpha": 2})


@pytest.mark.parametrize("product", [add_product, OP], ids=("function", "op"))
def test_add_product_under_autocast_and_torch_compile(product: Product, rng: torch.Generator) -> None:
    arguments = operands("a residual of a row, with factors", torch.float32, rng)
    with torch.autocast("cpu", torch.bfloat16):
        out = product(*arguments, beta=2, alpha=0.5)
    residual, input, other = (x.bfloat16() for x in arguments)
    check(out, input, other, None, residual, beta=2, alpha=0.5)
    compiled = torch.compile(lambda *x: product(*x, beta=2, alpha=0.5).sin(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), product(*arguments, beta=2, alpha=0.5).sin())


@pytest.mark.parametrize("in_dims", [(0, None, None), (None, 0, None), (None, None, 1), (1, 0, 0)])
@pytest.mark.parametrize("product", [add_product, OP], ids=("function", "op"))
def test_add_product_under_vmap(product: Product, in_dims: tuple[int | None, ...], rng: torch.Generator) -> None:
    for shapes in (((5, 6), (5, 7), (7, 6)), ((5, 1), (5, 7), (7, 6)), ((5,), (5, 7), (7,))):
        arguments = [
            random(shape if dim is None else (*shape[:dim], 4, *shape[dim:]), torch.float64, rng)
            for dim, shape in zip(in_dims, shapes, strict=True)
        ]
        expected = torch.func.vmap(lambda r, x, y: 2 * r - 3 * (x @ y), in_dims)(*arguments)
        ours = torch.func.vmap(lambda *x: product(*x, beta=2, alpha=-3), in_dims)(*arguments)
        torch.testing.assert_close(ours, expected)


def test_add_product_refuses() -> None:
    x = torch.ones(3, 3)
    with pytest.raises(TypeError, match=r"argument 'residual' \(position 1\) must be Tensor, not int"):
        add_product(3, x, x)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"\(4, 3\) cannot be broadcast to the result, which is \(3, 3\)"):
        add_product(torch.ones(4, 3), x, x)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        add_product(x, x, torch.ones(4, 3))
    with pytest.raises(RuntimeError, match="same dtype"):
        add_product(x.double(), x, x)
    for name in ("alpha", "beta"):
        with pytest.raises(RuntimeError, match=r"cannot be converted to torch\.float32 without overflow"):
            add_product(x, x, x, **{name: 1j})
        with pytest.raises(RuntimeError, match="without overflow"):
            torch.addmm(x, x, x, **{name: 1j})


def test_add_product_factors_of_integers_are_cut_as_torchs_are() -> None:
    x = torch.ones(3, 3, dtype=torch.int32)
    for beta, alpha in ((0.5, 1), (1, 2.7), (-1.5, 2.0)):
        assert torch.equal(add_product(x, x, x, beta=beta, alpha=alpha), torch.addmm(x, x, x, beta=beta, alpha=alpha))


# ---- int32 of bytes ----


@pytest.mark.parametrize(
    "shapes", [((20, 24), (24, 32)), ((3, 5), (5, 2)), ((2, 20, 8), (8, 16)), ((4,), (4,)), ((3, 0), (0, 2))]
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_int_product_is_exact(
    dtype: torch.dtype, shapes: tuple[tuple[int, ...], tuple[int, ...]], rng: torch.Generator
) -> None:
    input, other = (random(shape, dtype, rng) for shape in shapes)
    out = int_product(input, other)
    assert out.dtype == torch.int32
    assert torch.equal(out, torch.matmul(input.int(), other.int()))


def test_int_product_without_tensor_cores(monkeypatch: pytest.MonkeyPatch, rng: torch.Generator) -> None:
    monkeypatch.setenv("CUDAOPS_EMULATE_ARCH", "sm_75")
    input, other = random((20, 24), torch.int8, rng), random((24, 32), torch.int8, rng)
    before = launch_counts()["matmul_simt"]
    assert torch.equal(int_product(input, other), torch.matmul(input.int(), other.int()))
    assert launch_counts()["matmul_simt"] == before + 1


@TORCH_SCRIPT
def test_int_product_in_torchs_machinery(rng: torch.Generator) -> None:
    input, other = random((2, 20, 24), torch.int8, rng), random((24, 32), torch.int8, rng)
    torch.library.opcheck(torch.ops.cudaops.int_product.default, (input, other))
    ours = torch.func.vmap(int_product, (0, None))(input, other)
    assert torch.equal(ours, torch.matmul(input.int(), other.int()))
    with pytest.raises(
        UnsupportedError, match=r"int_product: no kernel for torch\.int16; there is one for int8, uint8"
    ):
        int_product(input.short(), other.short())
    with pytest.raises(TypeError, match="must be Tensor"):
        int_product(input, 3)  # type: ignore[arg-type]
