"""The optimizers are torch optimizers: groups, schedules, hooks, closures, saved state, scaling, copies."""

from __future__ import annotations

import copy
import io
import math
import os
from typing import Any

import pytest
import torch
from torch import nn

from hydra_ext import _C
from hydra_ext.errors import InvalidOptimizer
from hydra_ext.optim import SGD, Adam, AdamW
from support.updates import gradient_like, parameter, same_bits

PAIRS = {
    "adamw": (AdamW, torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adam": (Adam, torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": (SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1}),
}


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for step in steps:
        for ordinal, each in enumerate(parameters):
            each.grad = gradient_like(each, 100 * step + ordinal)
        optimizer.step()


def pair(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [parameter((13, 7), dtype, 1), parameter((5,), dtype, 2)]


@pytest.mark.parametrize("name", PAIRS)
def test_saved_state_goes_to_torch_and_back_and_training_goes_on_exactly(name: str) -> None:
    ours, torchs, options = PAIRS[name]
    straight, through = pair(), pair()
    first, second = ours(straight, **options), ours(through, **options)
    train(first, range(3))
    train(second, range(3))
    middle = torchs(through, **options)
    middle.load_state_dict(second.state_dict())
    end = ours(through, lr=99.0)
    end.load_state_dict(middle.state_dict())
    train(first, range(3, 6))
    train(end, range(3, 6))
    assert end.param_groups[0]["lr"] == options["lr"]
    assert all(same_bits(a, b) for a, b in zip(straight, through, strict=True))


@pytest.mark.parametrize("name", PAIRS)
def test_training_goes_on_from_torchs_state_and_in_torch_from_ours(name: str) -> None:
    ours, torchs, options = PAIRS[name]
    mixed, plain = pair(), pair()
    reference = torchs(plain, **options)
    train(reference, range(9))
    optimizer = torchs(mixed, **options)
    for start, kind in ((0, torchs), (3, ours), (6, torchs)):
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = kind(mixed, **options)
        optimizer.load_state_dict(saved)
        train(optimizer, range(start, start + 3))
    for a, b in zip(mixed, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    if name != "sgd":  # torch's does not count
        assert optimizer.state[mixed[0]]["step"] == 9


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("master", ["split", "fp32"])
def test_a_bf16_model_goes_on_exactly_from_a_saved_file(master: str, moments: torch.dtype) -> None:
    options: dict[str, Any] = {"lr": 1e-3, "master": master, "moments": moments}
    straight = pair(torch.bfloat16)
    first = AdamW(straight, **options)
    train(first, range(3))
    saved = io.BytesIO()
    torch.save({"optimizer": first.state_dict(), "weights": straight}, saved)
    train(first, range(3, 6))
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    again = loaded["weights"]
    second = AdamW(again, **options)
    second.load_state_dict(loaded["optimizer"])
    train(second, range(3, 6))
    for a, b in zip(straight, again, strict=True):
        assert same_bits(a, b)
        assert same_bits(first.master(a), second.master(b))


@pytest.mark.parametrize(("before", "after"), [("split", "fp32"), ("fp32", "split")])
def test_state_changes_from_one_kind_of_master_to_the_other_exactly(before: str, after: str) -> None:
    straight, through = pair(torch.bfloat16), pair(torch.bfloat16)
    first, second = AdamW(straight, master=before), AdamW(through, master=before)
    train(first, range(3))
    train(second, range(3))
    state = second.state_dict()
    for group in state["param_groups"]:
        group["master"] = after
    third = AdamW(through, master=after)
    third.load_state_dict(state)
    train(first, range(3, 6))
    train(third, range(3, 6))
    assert ("master_lower" in third.state[through[0]]) == (after == "split")
    assert all(same_bits(a, b) for a, b in zip(straight, through, strict=True))


def test_torchs_bf16_state_is_taken_over() -> None:
    weights = pair(torch.bfloat16)
    theirs = torch.optim.AdamW(weights)
    train(theirs, range(3))
    ours = AdamW(weights)
    ours.load_state_dict(theirs.state_dict())
    assert ours.state[weights[0]]["exp_avg"].dtype == torch.float32
    assert torch.equal(ours.state[weights[0]]["exp_avg"], theirs.state[weights[0]]["exp_avg"].float())
    train(ours, range(3, 4))
    assert ours.state[weights[0]]["step"] == 4


def test_fp32_state_is_not_cut_to_the_type_of_the_weights_when_loaded() -> None:
    weights = pair(torch.bfloat16)
    optimizer = AdamW(weights)
    train(optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    for name, value in saved["state"][0].items():
        assert torch.equal(optimizer.state[weights[0]][name], value), name


def test_hooks_round_loading_see_what_torch_would_show_them() -> None:
    weights = pair()
    optimizer = AdamW(weights)
    train(optimizer, range(1))
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(type(state["state"][0]["exp_avg"])))
    optimizer.register_load_state_dict_post_hook(lambda it: seen.append(type(it.state[weights[0]]["exp_avg"])))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [torch.Tensor, torch.Tensor]


@pytest.mark.parametrize("saved", [torch.optim.AdamW([parameter((5,))], amsgrad=True), SGD([parameter((5,))])])
def test_state_of_another_rule_is_refused_and_nothing_changed(saved: torch.optim.Optimizer) -> None:
    weights = parameter((5,))
    optimizer = AdamW([weights], lr=0.5)
    train(optimizer, range(1))
    with pytest.raises(InvalidOptimizer):
        optimizer.load_state_dict(saved.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.state[weights]["step"] == 1
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.every_case
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_without_decay_leaves_infinite_weights(momentum: float) -> None:
    """As torch's: a decay of 0 is no term, which would be 0 times infinity."""
    values = torch.tensor([-math.inf, math.inf, 1.0, 0.0, -2.0] * 7)
    gradient = torch.tensor([0.5, 0.0, 1.0, 0.0, 0.0] * 7)
    ours, theirs = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    mine, others = SGD([ours], lr=0.1, momentum=momentum), torch.optim.SGD([theirs], lr=0.1, momentum=momentum)
    for _ in range(3):
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        others.step()
    assert not ours.isnan().any()
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=0)


def test_groups_have_their_own_options() -> None:
    first, second, third = parameter((5,)), parameter((5,)), parameter((5,), torch.bfloat16)
    optimizer = AdamW([{"params": [first]}, {"params": [second], "lr": 0.0, "weight_decay": 0.0}], lr=1e-2)
    optimizer.add_param_group({"params": [third], "moments": torch.bfloat16})
    before = second.detach().clone()
    train(optimizer, range(2))
    assert torch.equal(second, before)
    assert optimizer.state[third]["exp_avg"].dtype == torch.bfloat16
    assert optimizer.state[first]["exp_avg"].dtype == torch.float32


def test_a_parameter_without_gradient_is_left_alone() -> None:
    first, second = pair()
    optimizer = AdamW([first, second])
    first.grad = torch.ones_like(first)
    before = second.detach().clone()
    optimizer.step()
    assert torch.equal(second, before)
    assert list(optimizer.state) == [first]


def test_schedulers_change_the_rate() -> None:
    weights, twin = parameter((50,)), parameter((50,))
    ours, theirs = AdamW([weights], lr=0.1), torch.optim.AdamW([twin], lr=0.1)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 10) for each in (ours, theirs)]
    for step in range(10):
        for each, schedule in zip((ours, theirs), schedules, strict=True):
            train(each, range(step, step + 1))
            schedule.step()
    torch.testing.assert_close(weights, twin, rtol=1e-5, atol=1e-6)
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"] != 0.1


def test_a_tensor_as_rate_is_read() -> None:
    weights, twin = parameter((50,)), parameter((50,))
    train(AdamW([weights], lr=torch.tensor(0.25)), range(2))
    train(AdamW([twin], lr=0.25), range(2))
    assert same_bits(weights, twin)


def test_a_closure_is_called_with_gradients_on_and_its_loss_returned() -> None:
    weights = parameter((5,))
    optimizer = AdamW([weights])

    def closure() -> float:
        optimizer.zero_grad()
        loss = (weights**2).sum()
        loss.backward()
        return loss

    expected = (weights**2).sum().item()
    assert optimizer.step(closure).item() == expected
    assert optimizer.step() is None


def test_step_hooks_and_the_profiler_see_the_step() -> None:
    weights = parameter((5,))
    optimizer = AdamW([weights])
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    with torch.profiler.profile() as profile:
        train(optimizer, range(1))
    assert called == ["before", "after"]
    assert any(event.key == "Optimizer.step#AdamW.step" for event in profile.key_averages())


def test_a_step_counts_as_a_write_in_place() -> None:
    weights = parameter((5,))
    optimizer = AdamW([weights])
    loss = (weights**2).sum()
    version = weights._version
    train(optimizer, range(1))
    assert weights._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_grad_scaler_unscales_and_leaves_out_steps() -> None:
    weights, twin = parameter((50,)), parameter((50,))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer, reference = AdamW([weights]), AdamW([twin])
    for step, scale in enumerate((1024.0, 1024.0, 512.0)):
        assert scaler.get_scale() == scale
        gradient = gradient_like(weights, step)
        scaler.scale((weights * gradient).sum()).backward()
        if step == 1:
            weights.grad[3] = torch.inf
        else:
            twin.grad = gradient
            reference.step()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert optimizer.state[weights]["step"] == 2
    assert same_bits(weights, twin)


def test_a_copied_optimizer_goes_on_by_itself() -> None:
    weights = pair(torch.bfloat16)
    optimizer = AdamW(weights, threads=1)
    train(optimizer, range(2))
    twin = copy.deepcopy(optimizer)
    assert twin._threads == 1
    train(optimizer, range(2, 4))
    train(twin, range(2, 4))
    copies = twin.param_groups[0]["params"]
    assert all(a is not b and same_bits(a, b) for a, b in zip(weights, copies, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_from_the_third_step_on_no_tensor_memory_is_asked_for(dtype: torch.dtype) -> None:
    weights = [parameter((256, 256), dtype, seed) for seed in range(3)]
    optimizer = AdamW(weights)
    train(optimizer, range(2))
    meter = _C.testing.Meter()
    meter.begin()
    try:
        optimizer.step()
    finally:
        meter.end()
    assert meter.ledger.peak <= 64  # torch makes a tensor of the 1 that is added to a step's count


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_matter(threads: int) -> None:
    many, one = parameter((300_007,), torch.bfloat16), parameter((300_007,), torch.bfloat16)
    train(AdamW([many], threads=threads, moments=torch.bfloat16), range(2))
    train(AdamW([one], threads=1, moments=torch.bfloat16), range(2))
    assert same_bits(many, one)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_steps_with_threads_of_its_own() -> None:
    weights, twin = parameter((200_000,)), parameter((200_000,))
    optimizer, reference = AdamW([weights], threads=3), AdamW([twin], threads=1)
    gradients = [gradient_like(weights, step) for step in range(2)]  # made here: torch's threads do not survive a fork
    weights.grad, twin.grad = gradients[0], gradients[0]
    optimizer.step()
    reference.step()
    weights.grad, twin.grad = gradients[1], gradients[1]
    reference.step()
    child = os.fork()
    if child == 0:
        same = False
        try:
            optimizer.step()
            same = weights.detach().numpy().tobytes() == twin.detach().numpy().tobytes()
        finally:
            os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    optimizer.step()
    assert same_bits(weights, twin)


@pytest.mark.parametrize("name", PAIRS)
def test_state_is_loaded_as_the_parameter_lies(name: str) -> None:
    """Of a model in another memory format: the native loops go through memory in order."""
    ours, _, options = PAIRS[name]
    shape = (4, 3, 2, 2)
    whole, first, second = (parameter(shape) for _ in range(3))
    first.data = first.data.to(memory_format=torch.channels_last)
    straight, before, after = (ours([each], **options) for each in (whole, first, second))
    train(straight, range(4))
    train(before, range(2))
    assert not first.is_contiguous()
    second.data.copy_(first)
    after.load_state_dict(before.state_dict())
    train(after, range(2, 4))
    assert second.is_contiguous()
    assert same_bits(second, whole)
