"""Operators: one file a family, each with its schema, checks, plan, fake kernel and gradients."""

from cudaops.ops.conv import conv2d
from cudaops.ops.linear import linear
from cudaops.ops.matmul import matmul

__all__ = ["conv2d", "linear", "matmul"]
