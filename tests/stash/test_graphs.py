"""What users do with graphs works with a stash as without, and what they let go of goes at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hydra_ext
from hydra_ext import _C
from hydra_ext.errors import TransferError
from hydra_ext.policy import SimulatedDevice
from support.stash.stashed import assert_empty, assert_same, gradients, stashed


def net(width: int = 64, depth: int = 4) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())])


X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def test_a_tensor_saved_often_moves_once() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    stash = stashed()
    with stash:
        y = x * 2
        loss = sum((y.exp().sum(), y.sin().sum(), y.view(8, -1).cos().sum(), y.t().tan().sum()), torch.zeros(()))
    report = stash.report()
    # y is saved by sin, cos and tan, and exp and tan save what they give.
    assert report.tensors > report.intervals
    assert report.intervals == 3
    assert report.saved_bytes == 3 * y.nbytes
    loss.backward()
    expected = torch.autograd.grad((lambda y: (y.exp() + y.sin() + y.cos() + y.tan()).sum())(x * 2), [x])[0]
    torch.testing.assert_close(x.grad, expected)


def test_parts_of_a_storage_are_parts_of_one_interval() -> None:
    x = torch.randn(64, 192, requires_grad=True)
    stash = stashed()
    with stash:
        q, k, v = (x * 1).chunk(3, dim=1)
        loss = (q.sin() * k.cos() * v.exp()).sum()
    assert stash.report().intervals == 1 + 4  # the whole, and what sin, cos, exp and their product have made
    loss.backward()
    assert x.grad is not None


def test_a_narrow_part_of_something_large_moves_alone() -> None:
    large = torch.randn(1000, 1000) * 1
    weight = torch.ones(1000, requires_grad=True)
    stash = stashed()
    with stash:
        loss = (large[500] * weight).sum()
    assert stash.report().saved_bytes == 4000
    loss.backward()
    assert torch.equal(weight.grad, large[500])  # type: ignore[arg-type]


def test_memory_lies_as_it_lay() -> None:
    """Sizes, strides, and what is left over from a multiple of 64 bytes."""
    seen: list[Tensor] = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, way: Tensor) -> Tensor:
            ctx.save_for_backward(way)
            return x.clone()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
            seen.extend(ctx.saved_tensors)  # type: ignore[attr-defined]
            return gradients[0], None

    base = torch.randn(5000) * 1
    ways = [base[3:2003].view(40, 50).t(), base[7:].as_strided((30, 40), (41, 2)), base[1:2].expand(5000)]
    ways += [base[6:4006].view(torch.complex64), torch.randn(10, 8, 6, 6).to(memory_format=torch.channels_last) * 1]
    ways += [(torch.randn(5000) * 1)[3:503]]  # of something larger, of which nothing else is saved
    leads = [way.data_ptr() % 64 for way in ways]
    expected = [way.clone() for way in ways]
    strides = [way.stride() for way in ways]
    x = torch.ones(3, requires_grad=True)
    with stashed():
        result = x
        for way in ways:
            result = Looks.apply(result, way)
    del base, way, ways
    result.sum().backward()
    assert [way.data_ptr() % 64 for way in reversed(seen)] == leads
    assert [way.stride() for way in reversed(seen)] == strides
    assert_same(list(reversed(seen)), expected)


@pytest.mark.parametrize("later", [False, True])
def test_writing_to_what_was_saved_raises_as_without(later: bool) -> None:
    def message(inside: bool) -> str:
        x = torch.randn(64, 64, requires_grad=True)
        with stashed() if inside else nullcontext():
            y = x * 2
            z = y.sin()
            if later:
                y.add_(1)
        if not later:
            y.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as error:
            z.sum().backward()
        return str(error.value)

    plain, ours = message(False), message(True)
    said = "[torch.FloatTensor [64, 64]]"
    assert said in plain
    assert said in ours
    assert "is at version 1; expected version 0 instead" in ours
    assert "version 1; expected version 0 instead" in plain


def test_what_was_saved_before_a_write_is_not_taken_for_what_is_saved_after_it() -> None:
    """The first graph lives, and never goes backward."""

    def work() -> tuple[Tensor, Tensor]:
        weights = [torch.ones(64, requires_grad=True) for _ in range(2)]
        x = X * 2
        first = x * weights[0]
        x.add_(1)
        (x * weights[1]).sum().backward()
        assert weights[1].grad is not None
        return weights[1].grad, first

    expected, _ = work()
    stash = stashed()
    with stash:
        found, _ = work()
    assert stash.report().intervals == 2
    assert torch.equal(expected, found)


def test_a_saved_tensor_that_backward_writes_to_raises_in_the_next_use() -> None:
    class Spoils(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
            x.zero_()
            return gradients[0] * 2

    x = torch.randn(64, 64, requires_grad=True)
    with stashed():
        y = x * 3
        loss = Spoils.apply(y.sin() * 0 + y).sum() + y.cos().sum() * 0
        other = y.sin().sum()
    loss.backward(retain_graph=True)
    del other


def test_backward_twice() -> None:
    model = net()
    expected = gradients(model, lambda: model(X).square().sum())
    stash = stashed()
    with stash:
        loss = model(X).square().sum()
    for _ in range(3):
        loss.backward(retain_graph=True)
        assert_same([p.grad for p in model.parameters() if p.grad is not None], expected[1:])
        model.zero_grad()
    assert stash.report().to_device_bytes > stash.report().saved_bytes
    del loss
    assert_empty(stash.report())


def test_double_backward() -> None:
    def penalty(stash: hydra_ext.stash | None) -> list[Tensor]:
        model = net()
        x = X.clone().requires_grad_()
        with stash if stash is not None else nullcontext():
            (gradient,) = torch.autograd.grad(model(x).square().sum(), [x], create_graph=True)
            loss = gradient.square().sum()
        loss.backward()
        return [x.grad, *(p.grad for p in model.parameters())]  # type: ignore[list-item]

    stash = stashed()
    assert_same(penalty(stash), penalty(None))
    assert_empty(stash.report())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    model = net()
    x = X.clone().requires_grad_()

    def loss() -> Tensor:
        h = x
        for part in model:
            h = checkpoint(part, h, use_reentrant=reentrant)
        return h.square().sum()

    expected = gradients(model, loss)
    stash = stashed()
    assert_same(gradients(model, loss, stash), expected)
    assert stash.report().intervals > 0
    assert_empty(stash.report())


def test_autocast() -> None:
    model = net()

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(X).float().square().sum()

    expected = gradients(model, loss)
    assert_same(gradients(model, loss, stashed()), expected)


def test_a_compiled_block() -> None:
    model = net()
    compiled = torch.compile(model[0], backend="aot_eager")

    def loss(first: Callable[[Tensor], Tensor]) -> Tensor:
        h = first(X)
        for part in list(model)[1:]:
            h = part(h)
        return h.square().sum()

    expected = gradients(model, lambda: loss(model[0]))
    stash = stashed()
    assert_same(gradients(model, lambda: loss(compiled), stash), expected)
    assert stash.report().intervals > 0


def test_threads() -> None:
    models = [net(depth=2 + number) for number in range(4)]
    expected = [gradients(model, lambda: model(X).square().sum()) for model in models]  # noqa: B023 - called at once
    stash = stashed(budget=20_000)
    found: list[list[Tensor]] = [[] for _ in models]

    def work(number: int) -> None:
        for _ in range(5):
            model = models[number]
            with stash:
                loss = model(X).square().sum()
            loss.backward()
            found[number] = [p.grad for p in model.parameters() if p.grad is not None]
            for parameter in model.parameters():
                parameter.grad = None

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for own, wanted in zip(found, expected, strict=True):
        assert_same(own, wanted[1:])
    assert_empty(stash.report())


def test_backward_after_the_stash_has_gone() -> None:
    model = net()
    expected = gradients(model, lambda: model(X).square().sum())
    with stashed():
        loss = model(X).square().sum()
    loss.backward()
    assert_same([p.grad for p in model.parameters() if p.grad is not None], expected[1:])


def test_a_graph_that_is_dropped_gives_everything_back() -> None:
    model = net()
    stash = stashed()
    for number in range(1000):
        with stash:
            loss = model(X).square().sum()
        if number % 3 == 0:
            with pytest.raises(ValueError, match="in the midst"):
                _backward_that_fails(loss)
        del loss
    report = stash.report()
    assert report.intervals > 1000
    assert_empty(report)
    assert report.peak_held_bytes < 10 * report.saved_bytes / 1000


def _backward_that_fails(loss: Tensor) -> None:
    node = loss.grad_fn
    assert node is not None
    node = node.next_functions[0][0]
    assert node is not None

    def fail(*_: object) -> None:
        raise ValueError("in the midst")

    node.register_hook(fail)
    loss.backward()


# ---- budgets --------------------------------------------------------------------------------------------------------
def test_the_budget_holds_and_what_fits_does_not_leave() -> None:
    model = net(depth=12)
    size = X.nbytes
    stash = stashed(budget=4 * size)
    x = X.clone()
    moved = []
    for _ in range(3):
        before = stash.report().to_host_bytes
        gradients(model, lambda: model(x).square().sum(), stash)
        moved.append(stash.report().to_host_bytes - before)
        assert_empty(stash.report())
    report = stash.report()
    saved = report.saved_bytes // 3
    assert moved[0] == saved
    assert moved[1] == moved[2] == saved - 4 * size
    assert report.peak_held_bytes == 5 * size  # one more is saved before another one goes
    assert 0 < report.to_device_bytes <= 3 * (saved - 4 * size)  # x has never gone


# ---- failures -------------------------------------------------------------------------------------------------------
def test_what_cannot_leave_stays() -> None:
    faults = _C.testing.FaultScript()
    model = net()
    expected = gradients(model, lambda: model(X).square().sum())
    stash = hydra_ext.stash(device=SimulatedDevice(faults=faults))
    faults.fail(_C.testing.Operation.TO_HOST, 3)
    assert_same(gradients(model, lambda: model(X).square().sum(), stash), expected)
    assert stash.report().stayed == 1
    assert_empty(stash.report())


def test_what_does_not_come_back_raises_and_can_be_asked_for_again() -> None:
    faults = _C.testing.FaultScript()
    model = net()
    expected = gradients(model, lambda: model(X).square().sum())
    stash = hydra_ext.stash(device=SimulatedDevice(faults=faults))
    with stash:
        loss = model(X).square().sum()
    faults.fail(_C.testing.Operation.TO_DEVICE, 2)
    with pytest.raises(TransferError):
        loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert_same([p.grad for p in model.parameters() if p.grad is not None], expected[1:])
    del loss
    assert_empty(stash.report())
