"""Logits that are not computed yet: the losses and gradients of plain PyTorch, whatever is done with them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hydra_ext.errors import StateError
from hydra_ext.heads import bits
from hydra_ext.heads.bits import HeadShape, has_plain_bits
from hydra_ext.heads.calls import Heads
from hydra_ext.heads.terms import Logits, LogSoftmax, OneOfEach, Parts, SoftmaxGradient
from hydra_ext.heads.unmade import Unmade

CLASSES, WIDTH = 1031, 24
SHAPE = (3, 37)  # rows of the batch, and tokens

Loss = Callable[[Tensor, Tensor], Tensor]


def targets() -> Tensor:
    found = torch.arange(SHAPE[0] * SHAPE[1]).view(SHAPE) * 13 % CLASSES
    return torch.where(found % 7 == 0, -100, found)


def flat(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(logits.view(-1, logits.size(-1)), target.view(-1), **options)


IN_ROWS: dict[str, Loss] = {
    "view": flat,
    "float": lambda y, t: flat(y.float(), t),
    "flatten": lambda y, t: functional.cross_entropy(y.flatten(0, 1), t.flatten()),
    "reshape": lambda y, t: functional.cross_entropy(y.reshape(-1, CLASSES), t.reshape(-1)),
    "contiguous": lambda y, t: flat(y.contiguous(), t),
    "there and back": lambda y, t: flat(y.view(-1, CLASSES).view(*SHAPE, CLASSES), t),
    "sum": lambda y, t: flat(y, t, reduction="sum") / 7,
    "each": lambda y, t: flat(y, t, reduction="none").square().sum(),
    "another ignored class": lambda y, t: flat(y, t.clamp(min=4), ignore_index=4),
    "the first class ignored": lambda y, t: flat(y, t.clamp(min=0), ignore_index=0),
    "the first class ignored, sum": lambda y, t: flat(y, t.clamp(min=0), ignore_index=0, reduction="sum"),
    "module": lambda y, t: nn.CrossEntropyLoss()(y.view(-1, CLASSES), t.view(-1)),
    "two functions": lambda y, t: functional.nll_loss(y.view(-1, CLASSES).log_softmax(-1), t.view(-1)),
}


def with_metrics(logits: Tensor, target: Tensor) -> Tensor:
    found = flat(logits, target)
    return found * (1 + (logits.argmax(-1) == target).float().mean())


def written_to(logits: Tensor, target: Tensor) -> Tensor:
    halved = logits.view(-1, CLASSES)
    before = halved.float()
    logits.mul_(0.5)
    logits[..., :5] = -1.0
    return flat(halved, target) + flat(before, target)


def written_after(logits: Tensor, target: Tensor) -> Tensor:
    found = logits.view(-1, CLASSES).log_softmax(-1)
    logits.data.zero_()
    return functional.nll_loss(found, target.view(-1))


def part_written_after(logits: Tensor, target: Tensor) -> Tensor:
    found = flat(logits, target)
    logits.detach()[..., 1::2] = -5.0
    return found


def part_taken_before(logits: Tensor, target: Tensor) -> Tensor:
    part = logits.detach().view(-1, CLASSES)[:, ::2]
    found = flat(logits, target) + flat(logits.float(), target)
    part.fill_(-3.0)
    return found


def array_written(logits: Tensor, target: Tensor) -> Tensor:
    found = flat(logits.double(), target)
    logits.detach().numpy()[...] = 0
    return found


WHOLE: dict[str, Loss] = {
    "scaled": lambda y, t: flat(y / 3, t),
    "metrics": with_metrics,
    "written to": written_to,
    "written after": written_after,
    "part written after": part_written_after,
    "part taken before": part_taken_before,
    "array written": array_written,
    "another product": lambda y, t: (y.view(-1, CLASSES) @ y.detach().new_ones(CLASSES, 3)).square().mean(),
    "sum of columns": lambda y, t: y.view(-1, CLASSES).sum(0).square().mean(),
    "smooth": lambda y, t: flat(y, t, label_smoothing=0.1),
    "weighted": lambda y, t: flat(y, t, weight=torch.linspace(0.5, 2, CLASSES)),
    "probabilities": lambda y, t: functional.cross_entropy(y, torch.softmax(y.detach() * 2, 2)),
    "classes second": lambda y, t: functional.cross_entropy(y.transpose(1, 2), t),
    "another loss beside": lambda y, t: flat(y, t) + 1e-4 * y.logsumexp(-1).square().mean(),
    "another loss": lambda y, t: y.square().mean(),
    "other rows": lambda y, t: flat(y.view(CLASSES, -1).view(*SHAPE, CLASSES), t),
    "one row": lambda y, t: functional.cross_entropy(y[0, 0], t[0, 1]),
    "twice": lambda y, t: flat(y, t) + flat(y, t.roll(1)),
    "clone": lambda y, t: flat(y.clone(), t),
}


def ran(loss_of: Loss, *, in_rows: bool, dtype: torch.dtype = torch.float32, bias: bool = False) -> Any:
    """The loss, all gradients, and what was computed."""
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, CLASSES, bias=bias).to(dtype)
    hidden = torch.randn(*SHAPE, WIDTH, dtype=dtype, requires_grad=True)
    heads = Heads(layer, 0 if in_rows else None, exact=True)
    with heads.installed():
        logits = layer(hidden)
        assert isinstance(logits, Unmade) == in_rows
        loss = loss_of(logits, targets())
        (loss * 0.3).backward()
    return [loss.detach(), hidden.grad, *(each.grad for each in layer.parameters())], heads.tally


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", IN_ROWS)
def test_a_cross_entropy_is_computed_in_parts_with_the_same_bits(name: str, bias: bool, dtype: torch.dtype) -> None:
    loss_of = IN_ROWS[name]
    if dtype == torch.bfloat16:
        loss_of = lambda y, t: IN_ROWS[name](y.float(), t)  # noqa: E731 - as libraries do
    plain, _ = ran(loss_of, in_rows=False, dtype=dtype, bias=bias)
    found, tally = ran(loss_of, in_rows=True, dtype=dtype, bias=bias)
    assert all(map(torch.equal, plain, found))
    assert tally.parts > 10
    assert tally.wholes == 0


@pytest.mark.every_case
@pytest.mark.parametrize("name", WHOLE)
def test_whatever_else_is_done_with_logits_sees_all_of_them(name: str) -> None:
    plain, _ = ran(WHOLE[name], in_rows=False)
    found, tally = ran(WHOLE[name], in_rows=True)
    assert all(map(torch.equal, plain, found))
    assert tally.wholes == 1


def test_a_loss_in_bfloat16_is_the_plain_one() -> None:
    plain, _ = ran(flat, in_rows=False, dtype=torch.bfloat16)
    found, tally = ran(flat, in_rows=True, dtype=torch.bfloat16)
    assert all(map(torch.equal, plain, found))
    assert tally.wholes == 1


def unmade() -> tuple[Unmade, Tensor]:
    torch.manual_seed(0)
    layer, hidden = nn.Linear(WIDTH, CLASSES), torch.randn(2, 5, WIDTH)
    with Heads(layer, 0, exact=False).installed():
        found = layer(hidden)
    return found, layer(hidden)


def test_numbers_can_be_read_without_operators() -> None:
    found, plain = unmade()
    assert isinstance(found, Unmade)
    assert found.tolist() == plain.tolist()
    assert repr(found) == repr(plain.detach())
    assert (found.detach().numpy() == plain.detach().numpy()).all()
    assert torch.equal(copy.deepcopy(found.detach()), plain)
    file = io.BytesIO()
    torch.save(found.detach(), file)
    file.seek(0)
    assert torch.equal(torch.load(file), plain)


def test_second_derivatives_are_those_of_the_plain_head() -> None:
    gradients = []
    for in_rows in (False, True):
        torch.manual_seed(0)
        layer, hidden = nn.Linear(WIDTH, CLASSES), torch.randn(*SHAPE, WIDTH, requires_grad=True)
        with Heads(layer, 0 if in_rows else None, exact=True).installed():
            (first,) = torch.autograd.grad(flat(layer(hidden), targets()), hidden, create_graph=True)
            gradients.append(torch.autograd.grad(first.square().sum() * 1e6, [hidden, *layer.parameters()]))
    assert all(map(torch.equal, *gradients))


def test_logits_of_weights_that_have_changed_raise() -> None:
    layer, hidden = nn.Linear(WIDTH, CLASSES), torch.randn(*SHAPE, WIDTH)
    with Heads(layer, 0, exact=False).installed():
        logits = layer(hidden)
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(StateError, match=r"before optimizer\.step"):
        logits.sum()


def test_a_target_out_of_range_raises() -> None:
    logits, _ = unmade()
    for wrong in (CLASSES, -1):
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            functional.cross_entropy(logits.view(-1, CLASSES), torch.full((10,), wrong))


def test_heads_are_layers_with_many_outputs_that_only_compute() -> None:
    class Own(nn.Linear):
        pass

    wide, narrow, last = nn.Linear(8, 64), nn.Linear(64, 63), nn.Linear(8, 9)
    hooked, own = nn.Linear(8, 64), Own(8, 64)
    hooked.register_forward_hook(lambda *_: None)
    model = nn.ModuleDict({"wide": wide, "narrow": narrow, "hooked": hooked, "own": own, "last": last})
    x = torch.randn(4, 8, requires_grad=True)
    heads = Heads(model, 0, exact=False)
    with heads.installed():
        kinds = {name: type(each(x if name != "narrow" else x.repeat(1, 8))) for name, each in model.items()}
        with torch.no_grad():
            assert type(wide(x)) is Tensor
    assert {name for name, kind in kinds.items() if kind is Unmade} == {"wide", "last"}
    assert heads.in_rows == ["wide", "last"]
    assert type(wide(x)) is Tensor


@pytest.mark.every_case
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (16, 64), (37, 130), (64, 1000)])
def test_parts_are_those_of_the_whole(rows: int, columns: int) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(rows, 8, generator=draw), torch.randn(8, columns, generator=draw)
    classes = torch.randint(columns, (rows, 1), generator=draw)
    parts = Parts(16, 64)
    logits = Logits(hidden, weight, None, parts)
    logs = LogSoftmax(logits)
    ones = OneOfEach(torch.rand(rows, 1, generator=draw), classes, columns, parts)
    for term in (logits, logs, ones, SoftmaxGradient(ones, logs)):
        whole = term._make()
        assert whole.shape == term.size == (rows, columns)
        assert torch.equal(torch.cat([term.rows(at) for at in term.row_parts()]), whole)
        assert torch.allclose(torch.cat([term.columns(at) for at in term.column_parts()], 1), whole, atol=1e-6)


def test_with_another_precision_of_products_the_check_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = HeadShape(rows=16, inputs=8, classes=64, has_bias=False, dtype=torch.float32, device=torch.device("cpu"))
    precisions: list[str] = []
    monkeypatch.setattr(bits, "_known", {})
    monkeypatch.setattr(bits, "_is_alike", lambda _: not precisions.append(torch.get_float32_matmul_precision()))
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            assert has_plain_bits(shape)
    finally:
        torch.set_float32_matmul_precision(before)
    assert precisions == ["highest", "high"]


def test_the_check_finds_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = HeadShape(rows=64, inputs=16, classes=512, has_bias=True, dtype=torch.float32, device=torch.device("cpu"))
    monkeypatch.setattr(bits, "_known", {})
    assert has_plain_bits(shape)
    monkeypatch.setattr(bits, "_known", {})
    columns = Logits._columns
    monkeypatch.setattr(Logits, "_columns", lambda self, at: columns(self, at) * (1 + 2**-20))
    assert not has_plain_bits(shape)
