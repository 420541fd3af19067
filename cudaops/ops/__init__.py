"""Operators: one file a family, each with its schema, checks, plan, fake kernel and gradients."""

from cudaops.ops.add_product import add_product
from cudaops.ops.contract import einsum, multi_dot, tensordot
from cudaops.ops.conv import conv2d
from cudaops.ops.int_product import int_product
from cudaops.ops.linear import linear
from cudaops.ops.matmul import matmul

__all__ = ["add_product", "conv2d", "einsum", "int_product", "linear", "matmul", "multi_dot", "tensordot"]
