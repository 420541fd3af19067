"""`convert` and `restore`: what changes, what must not, and what survives."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune

import cudaops
from cudaops import launch
from tests.nn.layers import Net, net_and_input, whole, wholly


def rows(model: nn.Module) -> dict[str, Any]:
    return {row.name: row for row in cudaops.report(model)}


# ---- results ----


def test_a_converted_model_gives_torchs_result_and_launches_for_it() -> None:
    model, x = net_and_input()
    expected = model(x)
    before = launch.total_launches()
    assert cudaops.convert(model) is model
    assert torch.equal(model(x), expected)
    assert launch.total_launches() - before >= 3  # the convolution, and the linear layer twice


def test_gradients_of_a_converted_model_are_torchs() -> None:
    model, x = net_and_input()
    theirs = copy.deepcopy(model)
    cudaops.convert(model)
    x.requires_grad_()
    y = x.detach().clone().requires_grad_()
    seed = whole(2, 48)
    model(x).backward(seed)
    theirs(y).backward(seed)
    assert torch.equal(x.grad, y.grad)
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(ours.grad, other.grad)
        assert ours.grad.stride() == ours.stride()


def test_no_convolution_or_product_of_a_converted_model_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = net_and_input()
    expected = model(x)
    cudaops.convert(model)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("torch's own was called")

    for owner, name in (
        (functional, "linear"),
        (functional, "conv2d"),
        (torch, "conv2d"),
        (torch, "matmul"),
        (torch, "mm"),
        (torch, "addmm"),
    ):
        monkeypatch.setattr(owner, name, refuse)
    model(x).sum().backward()
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [(1, 2), 0, "same"])
def test_conv2d_pads_as_torch_does(padding_mode: str, padding: Any) -> None:
    layer = wholly(nn.Conv2d(2, 4, (2, 3), padding=padding, dilation=(2, 1), groups=2, padding_mode=padding_mode))
    x = whole(2, 2, 6, 7)
    expected = layer(x)
    assert torch.equal(cudaops.convert(layer)(x), expected)
    assert rows(layer)[""].calls == 1


def test_an_unbatched_image_and_a_vector_are_taken_as_torch_takes_them() -> None:
    conv, x = wholly(nn.Conv2d(2, 3, 3, stride=2, bias=False)), whole(2, 5, 6)
    fc, v = wholly(nn.Linear(5, 4)), whole(5)
    expected = conv(x), fc(v)
    assert torch.equal(cudaops.convert(conv)(x), expected[0])
    assert torch.equal(cudaops.convert(fc)(v), expected[1])


# ---- in place, and back ----


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 2), lambda: nn.Conv2d(3, 2, 1)], ids=["Linear", "Conv2d"])
def test_the_root_module_itself_is_converted_and_restored(make: Callable[[], nn.Module]) -> None:
    layer = make()
    cudaops.convert(layer)
    assert rows(layer)[""].kernel
    assert cudaops.restore(layer) is layer
    assert layer.forward.__func__ is type(layer).forward
    assert vars(layer).keys() == vars(make()).keys()


def test_twice_is_harmless() -> None:
    model, x = net_and_input()
    cudaops.convert(model)
    model(x)
    forward = model.fc.forward
    cudaops.convert(model)
    assert model.fc.forward is forward
    assert rows(model)["fc"].calls == 2
    cudaops.restore(cudaops.restore(model))
    assert model.fc.forward.__func__ is nn.Linear.forward


def test_parameters_keys_types_and_modes_stay_the_very_same() -> None:
    model, _ = net_and_input()
    model.conv.eval()
    model.fc.bias.requires_grad_(False)

    def seen() -> list[Any]:
        return [
            [(name, id(parameter), parameter.requires_grad) for name, parameter in model.named_parameters()],
            [(name, id(module), type(module), module.training) for name, module in model.named_modules()],
            list(model.state_dict()),
        ]

    before = seen()
    cudaops.convert(model)
    assert seen() == before
    assert isinstance(model.fc, nn.Linear)
    assert isinstance(model.conv, nn.Conv2d)
    cudaops.restore(model)
    assert seen() == before


def test_no_other_instance_and_no_class_is_touched() -> None:
    model, x = net_and_input()
    other = copy.deepcopy(model)
    before = {cls: dict(vars(cls)) for cls in (nn.Module, nn.Linear, nn.Conv2d)}
    functions = dict(vars(functional))
    cudaops.convert(model)
    model(x)
    assert {cls: dict(vars(cls)) for cls in before} == before
    assert dict(vars(functional)) == functions
    assert all(row.kernel is None for row in cudaops.report(other))


def test_a_patched_forward_is_left_and_restore_does_not_touch_it() -> None:
    model, _x = net_and_input()
    patched = functools.partial(nn.Linear.forward, model.fc)
    model.fc.forward = patched  # type: ignore[method-assign]
    cudaops.convert(model)
    assert model.fc.forward is patched
    assert "patched" in rows(model)["fc"].reason
    cudaops.restore(model)
    assert model.fc.forward is patched


def test_a_forward_bound_over_ours_stays_with_restore() -> None:
    layer, x = wholly(nn.Linear(3, 2)), whole(4, 3)
    expected = layer(x) + 1
    ours = cudaops.convert(layer).forward
    layer.forward = lambda x: ours(x) + 1  # type: ignore[method-assign]
    theirs = layer.forward
    assert "patched" in rows(layer)[""].reason
    cudaops.restore(layer)
    assert layer.forward is theirs
    assert torch.equal(layer(x), expected)


# ---- survives ----


def test_a_deepcopy_runs_our_kernel_on_its_own_weights() -> None:
    model, x = net_and_input()
    cudaops.convert(model)
    expected = model(x)
    twin = copy.deepcopy(model)
    assert rows(twin)["fc"].calls == 0  # the copy has not run
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(twin(x), torch.zeros_like(expected))
    assert torch.equal(model(x), expected)
    assert (rows(twin)["conv"].calls, rows(model)["conv"].calls) == (1, 2)


def test_pickle_and_torch_save_bring_back_a_converted_model() -> None:
    model, x = net_and_input()
    cudaops.convert(model)
    expected = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert torch.equal(twin(x), expected)
        assert rows(twin)["fc"].calls == 2
        assert twin.fc is twin.same_fc
        cudaops.restore(twin)
        assert torch.equal(twin(x), expected)


def test_a_saved_model_is_loaded_by_a_process_that_never_imported_cudaops(
    tmp_path: Path, run_python: Callable[..., str]
) -> None:
    layer, x = wholly(nn.Linear(3, 2)), whole(4, 3)
    torch.save((cudaops.convert(layer), x, layer(x)), tmp_path / "saved.pt")
    output = run_python(
        f"import torch\n"
        f"layer, x, expected = torch.load({str(tmp_path / 'saved.pt')!r}, weights_only=False)\n"
        f"assert torch.equal(layer(x), expected)\n"
        f"import cudaops\n"
        f"print([(row.kernel, row.calls) for row in cudaops.report(layer)])"
    )
    assert "[('matmul', 1)]" in output


def test_a_shallow_copy_is_reported_and_converting_it_again_heals_it() -> None:
    layer, x = wholly(nn.Linear(3, 2)), whole(4, 3)
    cudaops.convert(layer)
    twin = copy.copy(layer)
    assert "shallow copy" in rows(twin)[""].reason
    cudaops.convert(twin)
    twin._parameters = {"weight": nn.Parameter(torch.zeros(2, 3)), "bias": nn.Parameter(torch.ones(2))}
    assert torch.equal(twin(x), torch.ones(4, 2))


def test_a_state_dict_loads_into_a_converted_model() -> None:
    model, x = net_and_input()
    other = wholly(Net())
    cudaops.convert(model).load_state_dict(other.state_dict())
    assert torch.equal(model(x), other(x))


def test_weights_assigned_later_and_a_change_of_dtype_are_seen() -> None:
    layer, x = wholly(nn.Linear(3, 2)), whole(4, 3)
    cudaops.convert(layer)
    layer.weight = nn.Parameter(whole(2, 3))
    assert torch.equal(layer(x), functional.linear(x, layer.weight, layer.bias))
    layer.double()
    assert torch.equal(layer(x.double()), functional.linear(x.double(), layer.weight, layer.bias))
    layer.half()
    assert torch.equal(layer(x.half()), functional.linear(x.half(), layer.weight, layer.bias))
    layer.to(torch.float8_e4m3fn)
    assert "float8_e4m3fn" in rows(layer)[""].reason
    with pytest.raises(cudaops.UnsupportedError, match="float8_e4m3fn"):
        layer(x.to(torch.float8_e4m3fn))


def test_channels_last_weights_and_images_keep_their_result() -> None:
    layer, x = wholly(nn.Conv2d(3, 4, 3)), whole(2, 3, 5, 6)
    expected = layer(x)
    layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    ours = cudaops.convert(layer)(x.to(memory_format=torch.channels_last))
    assert torch.equal(ours, expected)
    assert ours.is_contiguous(memory_format=torch.channels_last)


def test_hooks_run_once_each_and_see_what_torch_would_show_them() -> None:
    layer, x = wholly(nn.Linear(3, 2)), whole(4, 3).requires_grad_()
    seen: list[Any] = []
    layer.register_forward_pre_hook(lambda module, args: seen.append(("pre", module, args[0].shape)))
    cudaops.convert(layer)
    layer.register_forward_hook(lambda module, args, output: seen.append(("post", module, output.shape)))
    layer.register_full_backward_hook(
        lambda module, into, out: seen.append(("back", module, into[0].shape, out[0].shape))
    )
    layer(x).sum().backward()
    assert seen == [("pre", layer, (4, 3)), ("post", layer, (4, 2)), ("back", layer, (4, 3), (4, 2))]


@pytest.mark.parametrize("first", ["convert", "optimizer"])
def test_an_optimizer_made_before_or_after_trains_the_same_parameters(first: str) -> None:
    model, x = net_and_input()
    if first == "convert":
        cudaops.convert(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    if first == "optimizer":
        cudaops.convert(model)
    before = model.fc.weight.detach().clone()
    model(x).sum().backward()
    gradient = model.fc.weight.grad.clone()
    optimizer.step()
    assert gradient.abs().sum() > 0
    assert torch.equal(model.fc.weight, before - 0.5 * gradient)


def test_tied_parameters_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    wholly(model)
    theirs = copy.deepcopy(model)
    cudaops.convert(model)
    assert model[1].weight is model[0].weight
    x = whole(2, 3)
    model(x).sum().backward()
    theirs(x).sum().backward()
    assert torch.equal(model[0].weight.grad, theirs[0].weight.grad)


def test_a_module_under_two_names_is_one_row_and_either_name_means_it() -> None:
    model, x = net_and_input()
    cudaops.convert(model, include="same_fc")
    assert [row.name for row in cudaops.report(model)] == ["conv", "fc"]
    assert rows(model)["fc"].kernel
    assert rows(model)["fc"].names == ("fc", "same_fc")
    assert rows(model)["conv"].kernel is None
    model(x)
    assert rows(model)["fc"].calls == 2


def test_a_module_that_holds_its_parent_ends_the_walk() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_module("up", model)
    cudaops.convert(model)
    assert [row.name for row in cudaops.report(model)] == ["0"]


# ---- weights that are computed ----


def test_pruning_and_weight_norm_by_hook_are_read_at_each_call() -> None:
    layer, x = wholly(nn.Linear(4, 3)), whole(5, 4)
    prune.l1_unstructured(layer, "weight", amount=4)
    cudaops.convert(layer)
    assert torch.equal(layer(x), functional.linear(x, layer.weight_orig * layer.weight_mask, layer.bias))
    assert rows(layer)[""].calls == 1
    with torch.no_grad():
        layer.weight_orig.zero_()
    assert torch.equal(layer(x), layer.bias.expand(5, 3))


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_weight_norm_of_the_older_kind_is_followed() -> None:
    layer, x = nn.Linear(2, 2, bias=False), whole(5, 2)
    layer.weight.data = torch.tensor([[3.0, 4.0], [4.0, 3.0]])  # rows of length 5
    torch.nn.utils.weight_norm(layer)
    cudaops.convert(layer, strict=True)
    with torch.no_grad():
        layer.weight_g.copy_(torch.tensor([[5.0], [10.0]]))
    assert torch.equal(layer(x), x @ torch.tensor([[3.0, 4.0], [8.0, 6.0]]).t())
    assert rows(layer)[""].calls == 1


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def test_a_parametrization_registered_after_convert_is_followed() -> None:
    layer, x = wholly(nn.Linear(4, 3)), whole(5, 4)
    cudaops.convert(layer)
    weight = layer.weight.detach().clone()
    parametrize.register_parametrization(layer, "weight", Doubled())
    assert torch.equal(layer(x), functional.linear(x, weight * 2, layer.bias))
    assert rows(layer)[""].calls == 1


# ---- selection ----


def chosen(model: nn.Module, **rules: Any) -> list[str]:
    cudaops.convert(model, **rules)
    return [row.name for row in cudaops.report(model) if row.kernel]


def nested() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 1, 1), nn.Sequential(nn.Linear(1, 1), nn.Conv2d(1, 1, 1)), nn.Linear(1, 1))


def test_include_and_exclude_take_patterns_types_and_predicates() -> None:
    assert chosen(nested()) == ["0", "1.0", "1.1", "2"]
    assert chosen(nested(), include="1.*") == ["1.0", "1.1"]
    assert chosen(nested(), include=nn.Linear) == ["1.0", "2"]
    assert chosen(nested(), include=["0", lambda module, name: name.endswith(".0")]) == ["0", "1.0"]
    assert chosen(nested(), exclude="1.?") == ["0", "2"]
    assert chosen(nested(), exclude=(nn.Conv2d, "2")) == ["1.0"]
    assert chosen(nested(), include=nn.Linear, exclude=lambda module, name: name == "2") == ["1.0"]


@pytest.mark.parametrize("rules", [{"include": 3}, {"exclude": ["0", 3]}, {"include": [None]}])
def test_another_form_of_rule_is_a_type_error_that_says_the_forms(rules: Any) -> None:
    model = nested()
    with pytest.raises(TypeError, match=r"name pattern.*module type.*predicate"):
        cudaops.convert(model, **rules)
    assert all(row.kernel is None for row in cudaops.report(model))


def test_what_is_no_module_is_a_type_error() -> None:
    for call in (cudaops.convert, cudaops.restore, cudaops.report, cudaops.cuda, cudaops.cpu, cudaops.CudaModule):
        with pytest.raises(TypeError, match=r"torch\.nn\.Module, got dict"):
            call({})  # type: ignore[arg-type]


def test_tune_is_not_there_yet_and_says_so() -> None:
    with pytest.raises(cudaops.UnsupportedError, match="tune"):
        cudaops.convert(nested(), tune=(torch.zeros(1),))


def test_swapping_nothing_warns_and_changes_nothing() -> None:
    with pytest.warns(UserWarning, match="swapped nothing: no convolution or linear-like module matches"):
        cudaops.convert(nested(), include="layr1.*")
    with pytest.warns(UserWarning, match="swapped nothing: none of"):
        cudaops.convert(nn.Conv1d(1, 1, 1))
    with pytest.warns(UserWarning, match="swapped nothing: no convolution or linear-like module in it"):
        cudaops.convert(nn.ReLU())


def test_strict_names_every_module_it_cannot_take_and_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Conv1d(1, 1, 1), nn.LSTM(2, 2))
    with pytest.raises(cudaops.UnsupportedError, match=r"(?s)2 of the modules.*\n  1 \(Conv1d\): .*\n  2 \(LSTM\): "):
        cudaops.convert(model, strict=True)
    assert "forward" not in vars(model[0])
    with pytest.raises(cudaops.UnsupportedError, match="matches include / exclude"):
        cudaops.convert(model, include="9", strict=True)
    cudaops.convert(model, exclude=["1", nn.LSTM], strict=True)
    assert rows(model)["0"].kernel


# ---- counting ----


def test_calls_from_many_threads_are_all_counted() -> None:
    layer, x = nn.Linear(2, 2), torch.zeros(1, 2)
    cudaops.convert(layer)
    workers = [threading.Thread(target=lambda: [layer(x) for _ in range(25)]) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert rows(layer)[""].calls == 200


def test_a_call_that_raises_is_not_counted() -> None:
    layer = cudaops.convert(nn.Linear(2, 2))
    with pytest.raises(RuntimeError):
        layer(torch.zeros(1, 3))
    assert rows(layer)[""].calls == 0


def test_a_compiled_model_is_one_graph_compiled_once_and_its_calls_are_not_counted() -> None:
    from torch._dynamo.testing import CompileCounter

    model, x = net_and_input()
    expected = model(x)
    cudaops.convert(model)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(5):
        assert torch.equal(compiled(x), expected)
    assert counter.frame_count == 1
    assert [row.calls for row in cudaops.report(model)] == [0, 0]
    model(x)
    assert torch.equal(compiled(x), expected)
    assert counter.frame_count == 1
    assert [row.calls for row in cudaops.report(model)] == [1, 2]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_jit_script_is_refused_with_the_way_out() -> None:
    model, _ = net_and_input()
    cudaops.convert(model)
    with pytest.raises(cudaops.UnsupportedError, match=r"cudaops\.restore\(model\)"):
        torch.jit.script(model)


def test_weight_norm_as_a_parametrization_is_left_and_says_what_to_do() -> None:
    layer = parametrizations.weight_norm(nn.Linear(3, 2))
    with pytest.warns(UserWarning, match="swapped nothing"):
        cudaops.convert(layer)
    assert "convert first" in rows(layer)[""].reason
