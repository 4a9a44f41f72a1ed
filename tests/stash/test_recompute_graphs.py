"""What users do with graphs of calls that are made again, and what cannot be made again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hydra_ext
from hydra_ext.errors import UnsupportedModel
from support.runtime.footprint import footprint
from support.stash.recomputed import X, compare, net, recomputing
from support.stash.stashed import assert_empty, assert_same, gradients


# ---- graphs ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net(1)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x.sin(), use_reentrant=reentrant).cos()  # type: ignore[no-any-return]

    model = nn.Sequential(nn.Linear(64, 64), Checkpointed(), Checkpointed())
    compare(model, lambda: model(X).square().sum(), "1", "2", "1.inner", calls=2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint_nothing_is_done(reentrant: bool) -> None:
    model = net()
    x = X.clone().requires_grad_()
    compare(model, lambda: checkpoint(model, x, use_reentrant=reentrant).sum(), "?", calls=0)


def test_backward_twice() -> None:
    model = net()
    expected = gradients(model, lambda: model(X).square().sum())
    stash = recomputing(model, "?")
    torch.manual_seed(11)
    with stash:
        loss = model(X).square().sum()
    for _ in range(3):
        loss.backward(retain_graph=True)
        assert_same([p.grad for p in model.parameters() if p.grad is not None], expected[1:])
        model.zero_grad()
    assert stash.report().recomputed == 9
    del loss
    assert_empty(stash.report())


def test_double_backward() -> None:
    def penalty(stash: hydra_ext.stash | None) -> list[Tensor]:
        model = net()
        x = X.clone().requires_grad_()

        def loss() -> Tensor:
            (gradient,) = torch.autograd.grad(model(x).square().sum(), [x], create_graph=True)
            return gradient.square().sum()

        return gradients(model, loss, stash if stash is None else recomputing(model, "?"))

    assert_same(penalty(recomputing(net(), "?")), penalty(None))


def test_a_graph_that_is_dropped_gives_everything_back() -> None:
    model = net()
    stash = recomputing(model, "?")
    for _ in range(3):
        with stash:
            loss = model(X).square().sum()
        assert stash.report().host_bytes > 0
        del loss
        assert_empty(stash.report())
    assert stash.report().recomputed == 0


# ---- errors ---------------------------------------------------------------------------------------------------------
class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.fails_at = 0

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x).sin()
        self.fails_at -= 1
        if self.fails_at == 0:
            raise ValueError("as asked")
        return h.cos()


def test_an_error_in_the_forward() -> None:
    model = nn.Sequential(nn.Linear(64, 64), Failing())
    before = footprint(model)
    stash = recomputing(model, "1")
    model[1].fails_at = 1
    with pytest.raises(ValueError, match="as asked"), stash:
        model(X)
    assert footprint(model) == before
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert_empty(stash.report())
    compare(model, lambda: model(X).sum(), "1", calls=1)


def test_writing_to_an_input_after_the_call_raises_as_without() -> None:
    for inside in (False, True):
        model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()))
        stash = recomputing(model, "1") if inside else recomputing(model)
        with stash:
            h = model[0](X)
            loss = model[1](h).sum()
            h.mul_(2)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.* version 1; expected version 0"):
            loss.backward()
        assert stash.report().recomputed == 0


@pytest.mark.parametrize("way", ["written", "replaced", "large buffer"])
def test_changing_a_weight_after_the_call_raises(way: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].register_buffer("large", torch.zeros(2**19))
    with recomputing(model, "1"):
        loss = model(X).sum()
    with torch.no_grad():
        if way == "written":
            model[1].weight.mul_(2)
        elif way == "replaced":
            model[1].weight = nn.Parameter(torch.zeros(64, 64))
        else:
            model[1].large.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*Linear"):
        loss.backward()


class Writing(nn.Module):
    def __init__(self, to_weight: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))
        self.to_weight = to_weight

    def forward(self, x: Tensor) -> Tensor:
        if self.to_weight:
            with torch.no_grad():
                self.weight.mul_(0.5)
        else:
            functional.relu_(x)
        return x @ self.weight


@pytest.mark.parametrize("to_weight", [False, True])
def test_a_module_that_writes_to_what_it_is_given_is_refused(to_weight: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 64), Writing(to_weight))
    with pytest.raises(UnsupportedModel, match="Writing writes to its inputs, or"), recomputing(model, "1"):
        model(X)
    if not to_weight:
        compare(model, lambda: model(X).sum(), "", calls=1)  # around it all is as it was


def test_a_module_that_keeps_something_elsewhere_is_found_out_and_kept_from_then_on() -> None:
    drawn = torch.Generator().manual_seed(5)

    class Drawing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * torch.rand(64, generator=drawn)).sin()

    model = nn.Sequential(nn.Linear(64, 64), Drawing())
    stash = recomputing(model, "1")
    with stash:
        loss = model(X).sum()
    with pytest.raises(UnsupportedModel, match=r"Drawing .* gives something else"):
        loss.backward()
    model.zero_grad()
    state = drawn.get_state()
    expected = gradients(model, lambda: model(X).sum())
    drawn.set_state(state)
    assert_same(gradients(model, lambda: model(X).sum(), stash), expected)
    assert stash.report().recomputed == 1


def test_results_of_any_kind_are_compared() -> None:
    """The first time, whatever a module gives beside tensors of numbers."""

    class Mixed(nn.Module):
        def forward(self, x: Tensor) -> dict[str, object]:
            wide = torch.complex(x.sin(), x.cos()).conj()
            return {"a": (wide, wide.imag), "b": [x > 0, x.bfloat16()], "c": torch.eye(3).to_sparse(), "d": "text"}

    model = nn.ModuleList([nn.Linear(64, 64), Mixed()])

    def loss() -> Tensor:
        out = model[1](model[0](X))
        return out["a"][0].real.sum() + out["a"][1].exp().sum() + out["b"][1].float().exp().sum()  # type: ignore[no-any-return]

    compare(model, loss, "1", calls=1)
