"""Products of several tensors, or over several dimensions, made of `matmul`: einsum, tensordot, multi_dot."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from functools import cache

import torch

from cudaops.ops.matmul import matmul

__all__ = ["einsum", "multi_dot", "tensordot"]


def multi_dot(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The product of a chain, as `torch.linalg.multi_dot`, in the order with the fewest multiplications.

    The first and the last may be 1-d. torch has checked the shapes.
    """
    sizes = [1 if tensors[0].dim() == 1 else tensors[0].shape[0], *(x.shape[0] for x in tensors[1:])]
    sizes.append(1 if tensors[-1].dim() == 1 else tensors[-1].shape[1])

    @cache
    def best(first: int, last: int) -> tuple[int, int]:
        """(multiplications of tensors first to last, the last one of the left part)"""
        if first == last:
            return 0, first
        return min(
            (best(first, cut)[0] + best(cut + 1, last)[0] + sizes[first] * sizes[cut + 1] * sizes[last + 1], cut)
            for cut in range(first, last)
        )

    def product(first: int, last: int) -> torch.Tensor:
        if first == last:
            return tensors[first]
        cut = best(first, last)[1]
        return matmul(product(first, cut), product(cut + 1, last))

    return product(0, len(tensors) - 1)


def tensordot(a: torch.Tensor, b: torch.Tensor, dims: int | Sequence[Sequence[int]] = 2) -> torch.Tensor:
    """The sum over the dimensions `dims` of a and b, or the last of a and the first of b, as `torch.tensordot`.

    Raises:
        RuntimeError: they do not match.
    """
    if isinstance(dims, int):
        of_a, of_b = list(range(a.dim() - dims, a.dim())), list(range(dims))
    else:
        of_a, of_b = ([dim % max(x.dim(), 1) for dim in each] for x, each in zip((a, b), dims, strict=True))
    if len(of_a) != len(of_b) or min([0, *of_a]) < 0 or len(of_b) > b.dim():
        raise RuntimeError(f"tensordot: dims {dims!r} do not fit tensors of {a.dim()} and {b.dim()} dimensions")
    for n, (i, j) in enumerate(zip(of_a, of_b, strict=True)):
        if a.shape[i] != b.shape[j]:
            raise RuntimeError(
                f"contracted dimensions need to match, but first has size {a.shape[i]} in dim {i} and second has size "
                f"{b.shape[j]} in dim {j} (pair {n})"
            )
    left = [dim for dim in range(a.dim()) if dim not in of_a]
    right = [dim for dim in range(b.dim()) if dim not in of_b]
    rows, columns = [a.shape[dim] for dim in left], [b.shape[dim] for dim in right]
    k = math.prod(a.shape[dim] for dim in of_a)
    a = a.permute(*left, *of_a).reshape(math.prod(rows), k)
    b = b.permute(*of_b, *right).reshape(k, math.prod(columns))
    return matmul(a, b).reshape(*rows, *columns)


def einsum(equation: str, *operands: torch.Tensor) -> torch.Tensor:
    """As `torch.einsum`, with two operands or more, taken from left to right.

    Raises:
        RuntimeError: the equation does not fit the operands.
    """
    inputs, output = _labels(equation, [x.dim() for x in operands])
    result, labels = operands[0], inputs[0]
    for n in range(1, len(operands)):
        later = set("".join(inputs[n + 1 :])) | set(output)
        result, labels = _pair(*_diagonal(result, labels), *_diagonal(operands[n], inputs[n]), later)
    if set(labels) != set(output):
        raise RuntimeError(f"einsum: the output of {equation!r} has a label that no operand has")
    return result.permute([labels.index(label) for label in output])


def _labels(equation: str, ranks: list[int]) -> tuple[list[str], str]:
    """One label a dimension, of each operand and of the output; an ellipsis gets labels of its own."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise RuntimeError(f"einsum: {equation!r} has {len(terms)} operands, got {len(ranks)}")
    free = [label for label in string.ascii_letters + "".join(map(chr, range(192, 256))) if label not in equation]
    most = max((rank - len(term) + 3 for term, rank in zip(terms, ranks, strict=True) if "..." in term), default=0)
    inputs = []
    for term, rank in zip(terms, ranks, strict=True):
        if "..." in term:
            own = rank - len(term) + 3
            term = term.replace("...", "".join(free[most - own : most]))
        if len(term) != rank or "." in term:
            raise RuntimeError(f"einsum: {equation!r} gives {len(term)} labels to an operand of {rank} dimensions")
        inputs.append(term)
    if not arrow:
        once = sorted(label for label in set(left) - set(",.") if left.count(label) == 1)
        right = "..." * (most > 0) + "".join(once)
    return inputs, right.replace("...", "".join(free[:most]))


def _diagonal(x: torch.Tensor, labels: str) -> tuple[torch.Tensor, str]:
    """`x` with one dimension for each label: the diagonal along those that share one."""
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            first = labels.index(label)
            second = labels.index(label, first + 1)
            if x.shape[first] != x.shape[second]:
                raise RuntimeError(f"einsum: label {label} has sizes {x.shape[first]} and {x.shape[second]}")
            x = x.diagonal(dim1=first, dim2=second)  # which comes last
            labels = labels[:first] + labels[first + 1 : second] + labels[second + 1 :] + label
    return x, labels


def _pair(a: torch.Tensor, of_a: str, b: torch.Tensor, of_b: str, later: set[str]) -> tuple[torch.Tensor, str]:
    """The product of two, summed over the labels that come no more: batch, rows and columns by matmul."""
    sizes: dict[str, int] = {}
    for x, labels in ((a, of_a), (b, of_b)):
        for label, size in zip(labels, x.shape, strict=True):
            known = sizes.setdefault(label, size)
            if known != size and 1 not in (known, size):
                raise RuntimeError(f"einsum: label {label} has sizes {known} and {size}")
            sizes[label] = size if known == 1 else known
    a, of_a = _reduced(a, of_a, of_b, sizes, later)
    b, of_b = _reduced(b, of_b, of_a, sizes, later)
    batch = [label for label in of_a if label in of_b and label in later]
    summed = [label for label in of_a if label in of_b and label not in later]
    rows = [label for label in of_a if label not in of_b]
    columns = [label for label in of_b if label not in of_a]

    def matrix(x: torch.Tensor, labels: str, *groups: list[str]) -> torch.Tensor:
        x = x.permute([labels.index(label) for group in groups for label in group])
        return x.reshape([math.prod(sizes[label] for label in group) for group in groups])

    product = matmul(matrix(a, of_a, batch, rows, summed), matrix(b, of_b, batch, summed, columns))
    left = "".join([*batch, *rows, *columns])
    return product.reshape([sizes[label] for label in left]), left


def _reduced(
    x: torch.Tensor, labels: str, others: str, sizes: dict[str, int], later: set[str]
) -> tuple[torch.Tensor, str]:
    """Without the dimensions that are broadcast, and summed over those that only this operand has and nobody wants."""
    for dim in reversed(range(len(labels))):
        label = labels[dim]
        if label in others and x.shape[dim] == 1 and sizes[label] > 1:
            x = x.squeeze(dim)
        elif label not in others and label not in later:
            x = x.sum(dim, dtype=x.dtype)
        else:
            continue
        labels = labels[:dim] + labels[dim + 1 :]
    return x, labels
