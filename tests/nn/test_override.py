"""Torch's products within `override`: the same results and errors, on our kernels alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cudaops.errors import UnsupportedError
from cudaops.launch import total_launches
from cudaops.nn.override import override
from cudaops.ops import einsum, multi_dot

Call = Callable[..., Any]


def operands(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


# name as it is counted: the calls, and the shapes of what they take
PRODUCTS: dict[str, tuple[list[Call], list[tuple[int, ...]]]] = {
    "addmm": (
        [torch.addmm, torch.Tensor.addmm, lambda r, a, b: torch.addmm(input=r, mat1=a, mat2=b, beta=0.5, alpha=2)],
        [(4,), (3, 5), (5, 4)],
    ),
    "addmv": (
        [torch.addmv, lambda r, a, b: r.addmv(a, vec=b, alpha=3), lambda r, a, b: torch.addmv(r, a, b, beta=0)],
        [(3,), (3, 5), (5,)],
    ),
    "baddbmm": (
        [torch.baddbmm, lambda r, a, b: r.baddbmm(a, b, beta=-1), lambda r, a, b: torch.baddbmm(r, a, batch2=b)],
        [(3, 4), (2, 3, 5), (2, 5, 4)],
    ),
    "addbmm": (
        [torch.addbmm, lambda r, a, b: r.addbmm(a, b, alpha=2), lambda r, a, b: torch.addbmm(r, batch1=a, batch2=b)],
        [(3, 4), (2, 3, 5), (2, 5, 4)],
    ),
    "multi_dot": (
        [lambda *x: torch.linalg.multi_dot(x), lambda *x: torch.linalg.multi_dot(tensors=list(x))],
        [(3, 20), (20, 4), (4, 30), (30, 2)],
    ),
    "chain_matmul": ([torch.chain_matmul], [(3, 20), (20, 4), (4, 30)]),
    "tensordot": (
        [
            torch.tensordot,
            lambda a, b: torch.tensordot(a, b, dims=([1, 2], [0, 1])),
            lambda a, b: torch.tensordot(a, b.mT, ([-1, -2], [2, 0])),
            lambda a, b: torch.tensordot(a, b, dims=0),
        ],
        [(2, 4, 3), (4, 3, 5)],
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_ours_with_its_gradients(name: str) -> None:
    calls, shapes = PRODUCTS[name]
    for call in calls:
        arguments = operands(*shapes)
        expected = call(*arguments) if name != "chain_matmul" else torch.linalg.multi_dot(arguments)
        theirs = torch.autograd.grad(expected.sin().sum(), arguments, allow_unused=True)
        before = total_launches()
        with override() as o:
            out = call(*arguments)
        assert o.calls == {name: 1}
        assert total_launches() > before
        torch.testing.assert_close(out, expected)
        ours = torch.autograd.grad(out.sin().sum(), arguments, allow_unused=True)
        for mine, other in zip(ours, theirs, strict=True):
            assert mine is None or torch.allclose(mine, torch.zeros_like(mine) if other is None else other)


def test_int_mm_is_ours() -> None:
    a, b = torch.randint(-128, 128, (20, 24), dtype=torch.int8), torch.randint(-128, 128, (24, 32), dtype=torch.int8)
    with override() as o:
        out = torch._int_mm(a, b)
    assert o.calls == {"_int_mm": 1}
    assert torch.equal(out, torch._int_mm(a, b))


EINSUMS = [
    ("ij,jk->ik", (3, 4), (4, 5)),
    ("ij,kj", (3, 4), (5, 4)),
    ("bij,bjk->bik", (2, 3, 4), (2, 4, 5)),
    ("bij,bjk->kbi", (2, 3, 4), (2, 4, 5)),
    ("i,j->ij", (3,), (4,)),
    ("i,i->", (3,), (3,)),
    ("ij,ij->ij", (3, 4), (3, 4)),
    ("ij,ij", (3, 4), (3, 4)),
    ("ii,ij->j", (3, 3), (3, 4)),
    ("ij,jk->", (3, 4), (4, 5)),
    ("ijm,jk->ik", (3, 4, 2), (4, 5)),
    ("...ij,...jk->...ik", (2, 1, 3, 4), (5, 4, 6)),
    ("b...d,dk->b...k", (2, 3, 4, 5), (5, 6)),
    ("...i,...i", (2, 3, 4), (3, 4)),
    ("ij,jk->ik", (3, 1), (4, 5)),
    ("bhqd, bhkd -> bhqk", (2, 2, 3, 4), (2, 2, 5, 4)),
    ("ab,bc,cd->ad", (2, 3), (3, 4), (4, 5)),
    ("ab,bc,ad->dc", (2, 3), (3, 4), (2, 5)),
    ("ab,ac,ad->abcd", (2, 3), (2, 4), (2, 5)),
]


@pytest.mark.parametrize(("equation", "shapes"), [(equation, shapes) for equation, *shapes in EINSUMS], ids=str)
def test_einsum_is_ours_with_its_gradients(equation: str, shapes: list[tuple[int, ...]]) -> None:
    arguments = operands(*shapes)
    expected = torch.einsum(equation, *arguments)
    theirs = torch.autograd.grad(expected.sin().sum(), arguments)
    before = total_launches()
    with override() as o:
        out = torch.einsum(equation, *arguments)
        assert torch.equal(torch.einsum(equation, arguments), out)
    assert o.calls == {"einsum": 2}
    assert total_launches() >= before + 2 * (len(shapes) - 1)
    torch.testing.assert_close(out, expected)
    for mine, other in zip(torch.autograd.grad(out.sin().sum(), arguments), theirs, strict=True):
        torch.testing.assert_close(mine, other)


def test_einsum_by_lists_of_labels() -> None:
    a, b = operands((3, 4), (4, 5))
    with override() as o:
        torch.testing.assert_close(torch.einsum(a, [0, 1], b, [1, 2], [2, 0]), (a @ b).T)
    assert o.calls["einsum"] == 1


def test_einsum_of_one_operand_stays_torchs() -> None:
    x = torch.randn(3, 3)
    with override():
        assert torch.equal(torch.einsum("ii->i", x), x.diagonal())


def test_multi_dot_takes_the_order_with_the_fewest_multiplications(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[torch.Size, torch.Size]] = []
    chain = [torch.ones(100, 2), torch.ones(2, 100), torch.ones(100, 3)]

    def noted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        made.append((a.shape, b.shape))
        return a @ b

    monkeypatch.setattr("cudaops.ops.contract.matmul", noted)
    multi_dot(chain)
    assert made == [((2, 100), (100, 3)), ((100, 2), (2, 3))]
    vector = torch.ones(3)
    assert torch.equal(multi_dot([torch.ones(2), torch.ones(2, 3), vector]), torch.tensor(6.0))


WRONG: list[tuple[Call, list[tuple[int, ...]]]] = [
    (torch.addmm, [(3, 4), (3, 5), (6, 4)]),
    (torch.addmm, [(3, 4), (2, 3, 5), (5, 4)]),
    (torch.addmm, [(2, 4), (3, 5), (5, 4)]),
    (torch.addmv, [(3,), (3, 5), (5, 4)]),
    (torch.baddbmm, [(3, 4), (2, 3, 5), (3, 5, 4)]),
    (torch.addbmm, [(3, 4), (3, 5), (5, 4)]),
    (torch.tensordot, [(3, 4), (5, 4)]),
    (lambda a, b: torch.tensordot(a, b, 5), [(3, 4), (3, 4)]),
    (lambda *x: torch.linalg.multi_dot(x), [(3, 4), (3, 4, 5), (5, 2)]),
    (lambda *x: torch.linalg.multi_dot(x), [(3, 4), (5, 2)]),
    (lambda *x: torch.einsum("ij,jk->ik", *x), [(3, 4), (5, 4)]),
    (lambda *x: torch.einsum("ij,jk->ik", *x), [(3, 4, 5), (5, 4)]),
    (lambda *x: torch.einsum("ij,jk->iz", *x), [(3, 4), (4, 5)]),
    (lambda *x: torch.einsum("ij,jk,kl->il", *x), [(3, 4), (4, 5)]),
]


@pytest.mark.parametrize(("call", "shapes"), WRONG)
def test_what_torch_refuses_is_refused(call: Call, shapes: list[tuple[int, ...]]) -> None:
    arguments = operands(*shapes)
    with pytest.raises((RuntimeError, IndexError)) as theirs:
        call(*arguments)
    with override(), pytest.raises(type(theirs.value)):
        call(*arguments)


def test_an_argument_we_do_not_have_is_named() -> None:
    x = torch.ones(3, 3)
    for call in (
        lambda: torch.addmm(x, x, x, out=x.clone()),
        lambda: torch.linalg.multi_dot([x, x], out=x.clone()),
    ):
        with override(), pytest.raises(UnsupportedError, match="on our kernels yet"):
            call()
    with pytest.raises(RuntimeError, match="has a label that no operand has"):
        einsum("ij,jk->iz", x, x)
