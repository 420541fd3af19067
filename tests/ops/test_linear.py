from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn import functional

from cudaops.errors import UnsupportedError
from cudaops.launch import launch, launch_counts, spec_of, total_launches
from cudaops.ops.linear import linear, plan_linear
from cudaops.ops.matmul_configs import MATMUL_CONFIGS, MatmulConfig
from cudaops.plan import DTYPES
from tests.ops.matmul_reference import ACTIVATIONS, check, matrix, random
from tests.ops.test_matmul import define, forbid, poisoned, thinned  # noqa: F401  (a fixture)

# torch's own: what torch.func.jvp imports, and how opcheck looks at gradients
TORCH_SCRIPT = pytest.mark.filterwarnings("ignore:`torch.jit.script`:FutureWarning")
NON_LEAF = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
DTYPE = tuple(getattr(torch, name) for name in DTYPES)
linear_module = importlib.import_module("cudaops.ops.linear")  # the package has a function of that name
OP = torch.ops.cudaops.linear.default

# (input, weight, bias), each with the reason it is here
SHAPES = {
    "vector": ((7,), (3, 7), (3,)),
    "batch of one": ((1, 40), (150, 40), (150,)),
    "rows": ((5, 7), (6, 7), (6,)),
    "rows of a sequence": ((2, 3, 8), (12, 8), (12,)),
    "few features out: transposed": ((200, 8), (3, 8), (3,)),
    "no bias": ((5, 7), (6, 7), None),
    "one weight row": ((2, 3, 7), (7,), ()),
    "one weight row, no bias": ((7,), (7,), None),
    "one bias for all": ((5, 7), (6, 7), (1,)),
    "a scalar bias": ((5, 7), (6, 7), ()),
    "a bias of a row": ((2, 5, 7), (6, 7), (1, 6)),
    "a bias of a column": ((5, 7), (6, 7), (5, 1)),
    "a bias of a matrix": ((2, 5, 7), (6, 7), (5, 6)),
    "nothing to add up": ((5, 0), (6, 0), (6,)),
    "no rows": ((0, 7), (6, 7), (6,)),
    "no features out": ((5, 7), (0, 7), (0,)),
}
Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]


def operands(
    shapes: Shapes, dtype: torch.dtype, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    input, weight, bias = shapes
    return random(input, dtype, rng), random(weight, dtype, rng), None if bias is None else random(bias, dtype, rng)


# ---- results ----


@pytest.mark.parametrize(("name", "dtype"), thinned(SHAPES), ids=str)
def test_linear_matches_reference(name: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    input, weight, bias = operands(SHAPES[name], dtype, rng)
    relu = dtype in (torch.float32, torch.int64)
    out = linear(input, weight, bias, activation="relu" if relu else None)
    check(out, input, weight.t(), bias, activation="relu" if relu else None)
    assert out.stride() == functional.linear(input, weight, bias).stride()


@pytest.mark.parametrize("config", MATMUL_CONFIGS, ids=lambda config: config.name)
def test_linear_every_configuration(config: MatmulConfig, rng: torch.Generator) -> None:
    m, n, k = config.bm + 3, config.bn + 5, config.bk + 3
    input, weight, bias = operands(((m, k), (n, k), (n,)), torch.float32, rng)
    plan = plan_linear(*map(spec_of, (input, weight, bias)), arch="sm_80", activation="relu", config=config.name)
    out = torch.empty(m, n)
    launch(plan, (out, input, weight, bias, input))
    check(out, input, weight.t(), bias, activation="relu")


@pytest.mark.parametrize("weight_layout", ["rows", "columns", "strided"])
@pytest.mark.parametrize("input_layout", ["rows", "columns", "strided"])
def test_linear_takes_any_strides(input_layout: str, weight_layout: str, rng: torch.Generator) -> None:
    input = matrix(20, 12, torch.float32, rng, input_layout)
    weight = matrix(36, 12, torch.float32, rng, weight_layout)
    bias = random((36, 3), torch.float32, rng)[:, 1]
    check(linear(input, weight, bias), input, weight.t(), bias)


def test_linear_bias_is_added_in_the_kernel(rng: torch.Generator) -> None:
    input, weight, bias = operands(SHAPES["rows"], torch.float32, rng)
    plan = plan_linear(*map(spec_of, (input, weight, bias)), arch="sm_80")
    assert plan.op == "linear"
    assert define(plan, "BIAS") == "1"
    few = plan_linear(*map(spec_of, operands(((500, 8), (3, 8), (3,)), torch.float32, rng)), arch="sm_80")
    assert (define(few, "SWAP"), define(few, "BIAS")) == ("1", "2")
    before = launch_counts()
    linear(input, weight, bias, activation="relu")
    assert launch_counts() - before == {"matmul_simt": 1}


def test_linear_relu_keeps_nan() -> None:
    input = torch.tensor([[float("nan")], [-1.0], [2.0]])
    out = linear(input, torch.ones(1, 1), activation="relu")
    assert out[0].isnan()
    assert out[1:].tolist() == [[0], [2]]


@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_linear_activations(activation: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    input, weight, bias = operands(SHAPES["rows"], dtype, rng)
    check(linear(input, weight, bias, activation=activation), input, weight.t(), bias, activation=activation)


RESIDUALS = {
    "of the result's shape": ((2, 3, 8), (12, 8), (12,), (2, 3, 12)),
    "of a row": ((2, 3, 8), (12, 8), None, (12,)),
    "of a column": ((2, 3, 8), (12, 8), (12,), (3, 1)),
    "of a batch": ((2, 3, 8), (12, 8), (12,), (2, 1, 1)),
    "of one element": ((2, 3, 8), (12, 8), (12,), ()),
    "beside a bias of a matrix": ((2, 5, 7), (6, 7), (5, 6), (2, 1, 6)),
    "of few rows": ((1, 40), (150, 40), (150,), (1, 150)),
    "of few features out": ((200, 8), (3, 8), (3,), (200, 3)),
    "of one weight row": ((2, 3, 7), (7,), (), (2, 3)),
    "of a vector": ((7,), (3, 7), (3,), (3,)),
    "of nothing to add up": ((5, 0), (6, 0), (6,), (5, 6)),
    "of no rows": ((0, 7), (6, 7), (6,), (0, 6)),
}


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("name", RESIDUALS)
def test_linear_adds_a_residual(name: str, activation: str | None, rng: torch.Generator) -> None:
    *shapes, added = RESIDUALS[name]
    input, weight, bias = operands(shapes, torch.float32, rng)
    residual = random(added, torch.float32, rng)
    before = total_launches()
    out = linear(input, weight, bias, activation=activation, residual=residual)
    assert total_launches() == before + (input.shape[-1] > 0 and out.numel() > 0)
    assert out.is_contiguous()
    check(out, input, weight.t(), bias, residual, activation=activation)
    turned = random((*added[:-2], *added[:-3:-1]), torch.float32, rng)
    turned = turned.mT if turned.dim() > 1 else turned
    check(linear(input, weight, bias, residual=turned), input, weight.t(), bias, turned)


# ---- bad input ----

BAD = {
    "a scalar": ((), (5, 4), None, "both arguments to linear need to be at least 1D"),
    "features": ((3, 4), (5, 3), None, r"shapes cannot be multiplied \(3x4 and 3x5\)"),
    "weight of three dimensions": ((3, 4), (2, 5, 4), None, "weight must be .out_features, in_features., got 3D"),
    "bias": ((3, 4), (5, 4), (4,), r"bias of shape \(4,\) does not match the result, which is \(3, 5\)"),
    "bias of too many dimensions": ((4,), (5, 4), (3, 5), r"bias of shape \(3, 5\) does not match the result"),
}


@pytest.mark.parametrize(("input", "weight", "bias", "message"), BAD.values(), ids=BAD)
def test_linear_refuses_as_torch_does(
    input: tuple[int, ...], weight: tuple[int, ...], bias: tuple[int, ...] | None, message: str
) -> None:
    arguments = torch.ones(input), torch.ones(weight), None if bias is None else torch.ones(bias)
    with pytest.raises(RuntimeError) as theirs:
        functional.linear(*arguments)
    before = total_launches()
    with pytest.raises(RuntimeError, match=message) as ours:
        linear(*arguments)
    assert type(ours.value) is type(theirs.value)
    assert total_launches() == before
    with pytest.raises(RuntimeError, match=message):
        linear(*(None if x is None else x.to("meta") for x in arguments))


def test_linear_refuses_a_residual_that_does_not_broadcast() -> None:
    x, weight = torch.ones(3, 4), torch.ones(5, 4)
    for shape in ((4, 5), (3, 4), (1, 3, 5)):
        for arguments in ((x, weight), (x.to("meta"), weight.to("meta"))):
            residual = torch.ones(shape, device=arguments[0].device)
            with pytest.raises(
                RuntimeError, match=r"residual of shape \(.*\) does not match the result, which is \(3, 5"
            ):
                linear(*arguments, residual=residual)
    with pytest.raises(RuntimeError, match="same dtype"):
        linear(x, weight, residual=torch.ones(3, 5).double())
    with pytest.raises(TypeError, match=r"argument 'residual' \(position 3\) must be Tensor, not int"):
        linear(x, weight, residual=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("which", range(3))
def test_linear_refuses_dtypes_and_devices_that_differ(which: int) -> None:
    good = [torch.ones(3, 4), torch.ones(5, 4), torch.ones(5)]
    wrong = [x.double() if n == which else x for n, x in enumerate(good)]
    with pytest.raises(RuntimeError, match="same dtype"):
        linear(*wrong)
    wrong = [x.to("meta") if n == which else x for n, x in enumerate(good)]
    with pytest.raises(RuntimeError, match="same device, but found at least two devices"):
        linear(*wrong)
    assert linear(*(x.to("meta") for x in good)).is_meta


def test_linear_refuses_what_is_no_tensor() -> None:
    x = torch.ones(3, 3)
    for arguments in ((3, x), (x, 3), (x, None), (x, x, 3)):
        with pytest.raises(
            TypeError, match=r"linear\(\): argument '(input|weight|bias)' \(position [123]\) must be Tensor"
        ):
            linear(*arguments)  # type: ignore[arg-type]


def test_linear_refuses_options_it_does_not_have() -> None:
    x = torch.ones(3, 3)
    with pytest.raises(ValueError, match=r"activation must be None or one of relu, gelu, .* got 'swish'"):
        linear(x, x, activation="swish")
    with pytest.raises(UnsupportedError, match=r"linear: no kernel for torch\.bool; there is one for float32"):
        linear(x.bool(), x.bool())
    for dtype, activation in ((torch.int64, "gelu"), (torch.complex64, "relu")):
        with pytest.raises(UnsupportedError, match=f"no activation '{activation}' for {str(dtype)[6:]}; there is"):
            linear(x.to(dtype), x.to(dtype), activation=activation)


# ---- gradients ----


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_linear_gradients_to_second_order(shapes: Shapes, activation: str | None, rng: torch.Generator) -> None:
    arguments = tuple(None if x is None else x.requires_grad_() for x in operands(shapes, torch.float64, rng))

    def function(*arguments: torch.Tensor) -> torch.Tensor:
        return linear(*arguments, activation=activation)

    assert gradcheck(function, arguments, fast_mode=True)
    assert gradgradcheck(function, arguments, fast_mode=True)


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_linear_weight_gradient_has_the_parameters_strides(layout: str, rng: torch.Generator) -> None:
    input, weight = random((2, 5, 7), torch.float32, rng), matrix(6, 7, torch.float32, rng, layout).requires_grad_()
    grad = random((2, 5, 6), torch.float32, rng)
    (gradient,) = torch.autograd.grad(linear(input, weight), weight, grad)
    assert gradient.stride() == weight.stride()
    check(gradient, grad.reshape(10, 6).t(), input.reshape(10, 7))


def test_linear_makes_only_the_gradients_that_are_wanted(rng: torch.Generator) -> None:
    input, weight, bias = operands(SHAPES["rows of a sequence"], torch.float32, rng)
    assert bias is not None
    out = linear(input, weight, bias.requires_grad_(), activation="relu")
    before = total_launches()
    (gradient,) = torch.autograd.grad(out.sum(), bias)
    assert total_launches() == before
    assert torch.equal(gradient, (out > 0).sum((0, 1)).float())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", ["of the result's shape", "of a column", "beside a bias of a matrix"])
def test_linear_gradients_with_a_residual(name: str, activation: str | None, rng: torch.Generator) -> None:
    *shapes, added = RESIDUALS[name]
    arguments = [
        None if x is None else x.requires_grad_()
        for x in (*operands(shapes, torch.float64, rng), random(added, torch.float64, rng))
    ]

    def function(*arguments: torch.Tensor) -> torch.Tensor:
        return linear(*arguments[:3], residual=arguments[3], activation=activation)

    assert gradcheck(function, arguments, fast_mode=True)
    assert gradgradcheck(function, arguments, fast_mode=True)


def test_linear_complex_gradients_to_second_order(rng: torch.Generator) -> None:
    arguments = [
        x.requires_grad_() for x in operands(SHAPES["rows of a sequence"], torch.complex128, rng) if x is not None
    ]
    assert gradcheck(linear, arguments, fast_mode=True)
    assert gradgradcheck(linear, arguments, fast_mode=True)


# ---- torch's machinery ----


@pytest.mark.parametrize("product", [linear, OP], ids=("function", "op"))
def test_linear_under_autocast(product: Callable[..., torch.Tensor], rng: torch.Generator) -> None:
    input, weight, bias = operands(SHAPES["rows"], torch.float32, rng)
    residual = random((5, 6), torch.float32, rng)
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = product(input, weight, bias, residual=residual, activation="gelu")
        assert product(input, weight, None).dtype == torch.bfloat16
    assert out.dtype == torch.bfloat16
    casts = [x.detach().bfloat16() for x in (input, weight.t(), bias, residual)]
    check(product(casts[0], casts[1].t(), casts[2], residual=casts[3], activation="gelu"), *casts, activation="gelu")
    (gradient,) = torch.autograd.grad(out.sum(), weight)
    assert gradient.dtype == torch.float32


@NON_LEAF
@TORCH_SCRIPT
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", ["rows of a sequence", "no bias", "one weight row", "a bias of a matrix"])
def test_linear_passes_opcheck(name: str, requires_grad: bool, rng: torch.Generator) -> None:
    arguments = operands(SHAPES[name], torch.float32, rng)
    arguments = tuple(None if x is None else x.requires_grad_(requires_grad) for x in arguments)
    torch.library.opcheck(OP, arguments, {"activation": "relu"})
    residual = random((6,) if name != "one weight row" else (3,), torch.float32, rng).requires_grad_(requires_grad)
    if name == "rows of a sequence":
        residual = random((3, 12), torch.float32, rng).requires_grad_(requires_grad)
    torch.library.opcheck(OP, (*arguments, residual), {"activation": "gelu"})


def test_linear_compiles_without_a_graph_break(rng: torch.Generator) -> None:
    def loss(*arguments: torch.Tensor) -> torch.Tensor:
        return linear(*arguments, activation="relu").pow(2).sum()

    arguments = [x for x in operands(SHAPES["rows of a sequence"], torch.float64, rng) if x is not None]
    expected = torch.func.grad(loss, argnums=(0, 1, 2))(*arguments)
    for x in arguments:
        x.requires_grad_()
    actual = torch.autograd.grad(torch.compile(loss, backend="aot_eager", fullgraph=True)(*arguments), arguments)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("in_dims", [(0, None, None), (None, 1, None), (0, 0, 0), (None, None, 0)])
@pytest.mark.parametrize("weight", [(5, 4), (4,)], ids=("matrix", "row"))
@pytest.mark.parametrize("product", [linear, OP], ids=("function", "op"))
def test_linear_under_vmap(
    product: object, weight: tuple[int, ...], in_dims: tuple[int | None, ...], rng: torch.Generator
) -> None:
    if len(weight) == 1 and in_dims[1] == 1:
        in_dims = (in_dims[0], 0, in_dims[2])
    arguments = [
        random(shape, torch.float64, rng)
        if dim is None
        else torch.stack([random(shape, torch.float64, rng) for _ in range(6)], dim)
        for dim, shape in zip(in_dims, ((3, 4), weight, weight[:-1]), strict=True)
    ]

    def reference(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.matmul(input, weight.mT if weight.dim() == 2 else weight) + bias)

    expected = torch.func.vmap(reference, in_dims)(*arguments)
    ours = torch.func.vmap(lambda *x: product(*x, activation="relu"), in_dims)(*arguments)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("added", [(3, 5), (5,), (3, 1)])
@pytest.mark.parametrize("in_dims", [(None, None, 0), (0, None, None), (0, 0, 1), (None, 1, 0)])
@pytest.mark.parametrize("product", [linear, OP], ids=("function", "op"))
def test_linear_with_a_residual_under_vmap(
    product: Callable[..., torch.Tensor],
    in_dims: tuple[int | None, ...],
    added: tuple[int, ...],
    rng: torch.Generator,
) -> None:
    arguments = [
        random(shape if dim is None else (*shape[:dim], 6, *shape[dim:]), torch.float64, rng)
        for dim, shape in zip(in_dims, ((3, 4), (5, 4), added), strict=True)
    ]
    expected = torch.func.vmap(lambda x, w, r: torch.tanh(x @ w.mT + r), in_dims)(*arguments)
    ours = torch.func.vmap(lambda x, w, r: product(x, w, None, residual=r, activation="tanh"), in_dims)
    torch.testing.assert_close(ours(*arguments), expected)


def test_linear_under_torch_func(rng: torch.Generator) -> None:
    input, weight, bias = operands(SHAPES["rows"], torch.float64, rng)
    for transform in (torch.func.grad, lambda f, argnums: torch.func.jacrev(torch.func.grad(f, argnums), argnums)):
        ours = transform(lambda *x: linear(*x, activation="gelu").pow(2).sum(), argnums=1)
        theirs = transform(lambda *x: functional.gelu(functional.linear(*x)).pow(2).sum(), argnums=1)
        torch.testing.assert_close(ours(input, weight, bias), theirs(input, weight, bias))


@TORCH_SCRIPT
@pytest.mark.parametrize("product", [linear, torch.ops.cudaops.linear], ids=("function", "op"))
def test_linear_forward_mode_raises(product: object, rng: torch.Generator) -> None:
    input, weight, bias = operands(SHAPES["rows"], torch.float32, rng)
    for n, primal in enumerate((input, weight, bias)):
        with pytest.raises(RuntimeError, match="jvp") if n < 2 or product is not linear else nullcontext():
            torch.func.jvp(
                lambda x, n=n: product(*(x if i == n else y for i, y in enumerate((input, weight, bias)))),
                (primal,),
                (primal,),
            )
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(primal, primal)
            with pytest.raises(RuntimeError, match="jvp"):
                product(*(dual if i == n else y for i, y in enumerate((input, weight, bias))))


# ---- no fallback ----


def test_linear_and_its_gradients_are_all_ours(monkeypatch: pytest.MonkeyPatch, rng: torch.Generator) -> None:
    arguments = [
        x.requires_grad_() for x in operands(SHAPES["rows of a sequence"], torch.float32, rng) if x is not None
    ]
    expected = torch.autograd.grad(functional.linear(*arguments).pow(2).sum(), arguments)
    with monkeypatch.context() as patched:
        forbid(patched)
        gradients = torch.autograd.grad(linear(*arguments).pow(2).sum(), arguments)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_linear_without_its_kernel_is_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "run", lambda *arguments: None)
    assert linear(torch.ones(3, 4), torch.ones(5, 4), torch.ones(5)).isnan().all()
    assert linear(torch.ones(3, 4), torch.ones(5, 4), torch.ones(3, 5), activation="relu").isnan().all()
