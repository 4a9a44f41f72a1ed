"""A dry run says what a real microbatch takes, and leaves everything as it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from transformers import BatchEncoding

from hydra_ext.calls import StandIn
from hydra_ext.errors import AlreadyOffloaded, InvalidDevice, NotOnFakeTensors, UnsupportedModel
from hydra_ext.profile.cards import Speed
from hydra_ext.profile.dry_run import dry_run
from hydra_ext.state.arguments import tensors_in
from support.models.zoo import FAMILIES
from support.models.zoo_more import MORE_FAMILIES
from support.profile.real_run import peaks, saved_by_modules
from support.profile.unchanged import is_same, random_states, state_of

ELSEWHERE = Speed(flops_per_second=1e12, bytes_per_second=1e11)  # of a device whose workspaces are not known
ALL = {**FAMILIES, **MORE_FAMILIES}
STATIC = [name for name in ALL if name not in ("dynamic", "experts")]  # whose paths do not depend on numbers


def made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    family = ALL[name]
    model = family.make(0)
    for module in model.modules():
        if hasattr(module, "layerdrop"):
            module.layerdrop = 0.0  # a real microbatch may leave out a layer
    return model, family.batches(1, 1)[0]


@pytest.mark.parametrize("name", STATIC)
def test_saved_and_input_bytes_are_those_of_a_real_forward(name: str) -> None:
    family = ALL[name]
    model, batch = made(name)
    profile = dry_run(model, batch, lambda mb: family.loss(model, mb))
    counted = saved_by_modules(model, batch, lambda mb: family.loss(model, mb))
    for module, figures in profile.modules.items():
        real = counted[module]
        assert figures.calls == real.calls, module
        assert figures.saved.fresh == sum(real.fresh.values()), module
        assert figures.saved.all == sum(real.saved.values()), module
        assert figures.inputs.fresh == sum(real.fresh_inputs.values()), module
        assert figures.inputs.all == sum(real.inputs.values()), module


@pytest.mark.parametrize("name", [*FAMILIES, "bart", "resnet", "normed"])
def test_peaks_are_those_of_a_real_microbatch(name: str) -> None:
    family = ALL[name]
    model, batch = made(name)
    profile = dry_run(model, batch, lambda mb: family.loss(model, mb), speed=ELSEWHERE)
    # A real kernel may keep more than its output: a mean squared error keeps the room for all squares. And a model may
    # make a mask on fake tensors that it leaves out where it reads that nothing is masked.
    given = [batch]
    del batch
    real = peaks(model, given, lambda mb: family.loss(model, mb))
    assert profile.modules[""].backward_bytes == pytest.approx(real.pop("backward"), rel=0.06)
    for module, most in real.items():
        assert profile.modules[module].forward_bytes == pytest.approx(most, rel=0.06, abs=2048), module


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])  # oneDNN's LSTM saves notes of its own, which no fake tensor knows
def test_recurrent_layers(kind: type[nn.RNNBase]) -> None:
    model, x = kind(8, 32, num_layers=2, batch_first=True), torch.randn(16, 12, 8)
    weights = list(model._flat_weights)
    profile = dry_run(model, x, lambda mb: model(mb)[0].sum())
    counted = saved_by_modules(model, x, lambda mb: model(mb)[0].sum())
    assert profile.modules[""].saved.fresh == sum(counted[""].fresh.values())
    assert all(one is other for one, other in zip(model._flat_weights, weights, strict=True))


# ---- by hand --------------------------------------------------------------------------------------------------------
ROWS, WIDTH = 256, 64
MAP = 4 * ROWS * WIDTH  # bytes of an activation
MATRIX = 4 * WIDTH * WIDTH


def test_a_perceptron_by_hand() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=False))
    x = torch.randn(ROWS, WIDTH)
    profile = dry_run(model, x, lambda mb: model(mb).sum(), speed=Speed(flops_per_second=1e9, bytes_per_second=1e12))
    first, relu, last = (profile.modules[name] for name in "012")
    assert [each.saved.fresh for each in (first, relu, last)] == [MAP, MAP, 0]
    assert [each.saved.all for each in (first, relu, last)] == [MAP, MAP, MAP]
    assert [each.inputs.fresh for each in (first, relu, last)] == [MAP, MAP, 0]
    assert [each.parked_bytes for each in (first, relu, last)] == [MAP, 2 * MAP, 2 * MAP]  # fn keeps x
    assert [each.order for each in (first, relu, last)] == [2, 3, 4]
    assert all(each.is_repeatable for each in (first, relu, last))
    # The loss's gradient is an expanded number; the last layer reads its input and gives one gradient.
    assert last.backward_bytes == pytest.approx(2 * MAP, abs=64)
    assert relu.backward_bytes == pytest.approx(3 * MAP, abs=64)
    assert first.backward_bytes == pytest.approx(2 * MAP, abs=64)  # no gradient of x
    assert first.forward_seconds == pytest.approx(2 * ROWS * WIDTH * WIDTH / 1e9)
    assert relu.forward_seconds == pytest.approx(2 * MAP / 1e12)
    assert [(block.name, block.weight_bytes, block.gradient_bytes) for block in profile.blocks] == [
        ("0", MATRIX, MATRIX),
        ("2", MATRIX, MATRIX),
    ]
    assert profile.least_bytes() == pytest.approx(3 * MAP + MATRIX, abs=MATRIX)


class Bank(nn.Module):
    """One block of matrices that are used one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for matrix in self.matrices:
            x = x @ matrix
        return x


def test_a_gradient_counts_from_its_first_bytes_until_it_is_summed() -> None:
    count = 5
    model = nn.Sequential(Bank(count))
    profile = dry_run(model, torch.randn(ROWS, WIDTH), lambda mb: model(mb).square().sum())
    bank = profile.modules["0"]
    assert [(block.name, block.gradient_bytes) for block in profile.blocks] == [("0", count * MATRIX)]
    # A product's backward reads its input and gives two gradients. That of the matrix before is gone.
    assert bank.backward_bytes == pytest.approx(3 * MAP, abs=64)
    assert bank.live_gradient_bytes == bank.own.live_gradient_bytes == MATRIX
    assert profile.least_bytes() == bank.backward_bytes + count * MATRIX + MATRIX


def test_gradients_outside_of_the_calls_inside_are_those_of_own_parameters() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
            self.scale = nn.Parameter(torch.ones(ROWS, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y * self.scale

    model = Scaled()
    whole = dry_run(model, torch.randn(ROWS, WIDTH), lambda mb: model(mb).sum()).modules[""]
    assert whole.own.live_gradient_bytes == MAP
    assert whole.own.backward_bytes + MAP == whole.backward_bytes + whole.live_gradient_bytes


def test_workspaces_of_convolutions_count_on_this_machine_only() -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.Tanh()).to(memory_format=torch.channels_last)
    x = torch.randn(2, 64, 16, 16).contiguous(memory_format=torch.channels_last)
    weight = model[0].weight.nbytes
    here, there = (
        dry_run(model, x, lambda mb: model(mb).sum(), speed=speed).modules["0"] for speed in (None, ELSEWHERE)
    )
    assert here.backward_bytes - there.backward_bytes == 2 * weight
    assert here.live_gradient_bytes == there.live_gradient_bytes == weight
    assert 0 < here.forward_bytes - there.forward_bytes <= 1.125 * weight


def test_weights_may_compute_in_another_dtype() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    profile = dry_run(model, x, lambda mb: model(mb).float().mean(), param_dtype=torch.bfloat16)
    assert profile.modules["1"].saved.fresh == MAP // 2
    assert profile.blocks[0].gradient_bytes == 2 * (WIDTH * WIDTH + WIDTH)


def test_autocast_counts() -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)

    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x).float().mean()

    x = torch.randn(ROWS, WIDTH)
    counted = saved_by_modules(model, x, fn)
    assert dry_run(model, x, fn).modules[""].saved.fresh == sum(counted[""].saved.values()) > 0


def test_a_frozen_base_has_no_gradients_and_saves_less() -> None:
    base, adapter = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Linear(WIDTH, 4, bias=False)
    model = nn.ModuleDict({"base": base, "adapter": adapter, "back": nn.Linear(4, WIDTH, bias=False)})

    def fn(x: Tensor) -> Tensor:
        loss: Tensor = (base(x) + model["back"](adapter(x))).square().mean()
        return loss

    x = torch.randn(ROWS, WIDTH)
    profile = dry_run(model, x, fn)
    assert profile.modules["base"].saved.all == 0
    assert {block.name: block.gradient_bytes for block in profile.blocks}["base"] == 0
    assert profile.modules["adapter"].saved.fresh == MAP


# ---- modules --------------------------------------------------------------------------------------------------------
def test_what_cannot_be_called_again() -> None:
    hooked = nn.Linear(8, 8)
    hooked.register_forward_hook(lambda *_: None)
    twice = nn.Linear(8, 8)
    model = nn.ModuleDict({"writes": nn.ReLU(inplace=True), "hooked": nn.Sequential(hooked), "twice": twice})

    def fn(x: Tensor) -> Tensor:
        return twice(twice(model["hooked"](model["writes"](x + 0)))).sum()  # type: ignore[no-any-return]

    profile = dry_run(model, torch.randn(4, 8), fn)
    assert not any(profile.modules[name].is_repeatable for name in ("writes", "hooked", "hooked.0", "twice"))
    assert profile.modules["twice"].calls == 2
    assert profile.modules[""].calls == 0  # fn calls its parts


def test_tied_weights_are_one_block_with_two_users() -> None:
    model = nn.Sequential(nn.Embedding(512, 16), nn.Linear(16, 16), nn.Linear(16, 512, bias=False))
    model[2].weight = model[0].weight
    tokens = torch.randint(0, 512, (4, 32))
    profile = dry_run(model, tokens, lambda mb: F.cross_entropy(model(mb).flatten(0, 1), mb.flatten()))
    assert profile.sites == {"0": (0,), "1": (1,), "2": (0,)}
    assert profile.modules["2"].saved.all == 4 * 32 * 16 * 4  # its input, and not the weight


@pytest.mark.full
def test_layers_that_are_checkpointed_are_called_once() -> None:
    family = ALL["gpt2"]
    model, batch = family.make(0), family.batches(1, 1)[0]
    plain = dry_run(model, batch, lambda mb: family.loss(model, mb))
    family.set_checkpointing(model, reentrant=False)
    profile = dry_run(model, batch, lambda mb: family.loss(model, mb))
    assert profile.modules[""].saved.fresh < plain.modules[""].saved.fresh
    assert {figures.calls for figures in profile.modules.values()} <= {0, 1}


def test_models_on_meta_are_as_real_ones() -> None:
    family = ALL["llama"]
    model, batch = family.make(0), family.batches(1, 1)[0]
    speed = Speed(flops_per_second=1e12, bytes_per_second=1e11)
    real = dry_run(model, batch, lambda mb: family.loss(model, mb), speed=speed)
    with torch.device("meta"):
        absent = family.make(0)
    meta = dry_run(absent, batch, lambda mb: family.loss(absent, mb), speed=speed)
    assert meta == real
    assert all(parameter.is_meta for parameter in absent.parameters())


def test_examples_of_any_form() -> None:
    model = nn.Linear(8, 8)
    x = torch.randn(64, 8)
    expected = dry_run(model, x, lambda mb: model(mb).sum()).modules[""].saved
    for example, fn in (
        ({"a": [x, 3]}, lambda mb: model(mb["a"][0]).sum()),
        (BatchEncoding({"x": x}), lambda mb: model(mb["x"]).sum()),
        ((x, None), lambda mb: (model(mb[0]).sum(), {"rows": 64})),
        ([x], lambda mb: {"loss": model(mb[0]).sum(), "other": 1}),
    ):
        assert dry_run(model, example, fn).modules[""].saved == expected
        assert not any(isinstance(tensor, FakeTensor) for tensor in tensors_in(example))


# ---- nothing is changed ---------------------------------------------------------------------------------------------
class Stateful(nn.Module):
    """Changes everything that a forward may change."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout()
        self.register_buffer("steps", torch.zeros(()))
        self.seen: list[Any] = []
        self.table = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.last = self.norm(self.first(x)) * self.table
        self.seen.append(self.last)
        self.register_buffer("made", x.mean())
        self.table = self.table + 1
        random.random(), np.random.rand(), torch.rand(3)
        found: Tensor = self.drop(self.last).sum()
        return found


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_changed(fails: bool) -> None:
    model = Stateful()
    model(torch.randn(4, 8)).backward()  # gradients that are there already
    table = model.table
    before = state_of(model)
    seen = list(model.seen)

    def fn(x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        if fails:
            raise KeyError("of the user")
        return loss

    if fails:
        with pytest.raises(KeyError, match="of the user"):
            dry_run(model, torch.randn(4, 8), fn)
    else:
        dry_run(model, torch.randn(4, 8), fn)
    assert model.table is table
    assert [id(each) for each in model.seen] == [id(each) for each in seen]
    assert "made" in model._buffers
    assert not isinstance(model.made, FakeTensor)
    assert is_same(before, state_of(model))


def test_random_states_are_kept() -> None:
    model = Stateful()
    before = random_states()
    example = torch.ones(4, 8)
    dry_run(model, example, lambda x: model(x))
    assert is_same(before, random_states())


def test_the_same_loss_after_a_dry_run() -> None:
    family = ALL["t5"]
    batch = family.batches(1, 1)[0]
    losses = []
    for is_dry in (False, True):
        model = family.make(0)
        if is_dry:
            dry_run(model, batch, lambda mb, model=model: family.loss(model, mb))
        torch.manual_seed(3)
        losses.append(family.loss(model, batch).item())
    assert losses[0] == losses[1]


# ---- errors ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "read",
    [
        lambda loss: loss.item(),
        lambda loss: float(loss),
        lambda loss: bool(loss > 0),
        lambda loss: loss.detach().numpy(),
        lambda loss: loss.tolist(),
        lambda loss: loss.expand(3).nonzero(),
    ],
)
def test_a_function_that_reads_numbers_is_refused_with_its_line(read: Callable[[Tensor], Any]) -> None:
    model = nn.Linear(4, 4)

    def fn(x: Tensor) -> tuple[Tensor, Any]:
        loss = model(x).sum()
        return loss, read(loss)

    with pytest.raises(NotOnFakeTensors, match=r"(?s)no numbers.*test_dry_run\.py.*real step"):
        dry_run(model, torch.randn(2, 4), fn)
    assert not isinstance(model.weight, FakeTensor)


@pytest.mark.parametrize("name", ["dynamic", "experts"])
def test_models_whose_path_depends_on_numbers_are_refused(name: str) -> None:
    family = ALL[name]
    model, batch = family.make(0), family.batches(1, 1)[0]
    with pytest.raises(NotOnFakeTensors, match=r"zoo_more\.py"):
        dry_run(model, batch, lambda mb: family.loss(model, mb))


def test_other_errors_are_the_users() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="same reduction dim") as caught:
        dry_run(model, torch.randn(2, 5), lambda x: model(x).sum())
    assert not isinstance(caught.value, NotOnFakeTensors)
    with pytest.raises(TypeError, match="return the loss"):
        dry_run(model, torch.randn(2, 4), lambda x: None)
    with pytest.raises(ValueError, match="scalar"):
        dry_run(model, torch.randn(2, 4), lambda x: model(x))
    with pytest.raises(UnsupportedModel, match="shape"):
        dry_run(nn.LazyLinear(3), torch.randn(2, 4), lambda x: x)


def test_a_model_that_is_offloaded_is_refused() -> None:
    model = nn.Linear(4, 4)
    call = StandIn(model)
    call.install()
    try:
        with pytest.raises(AlreadyOffloaded, match="before entering"):
            dry_run(model, torch.randn(2, 4), lambda x: model(x).sum())
    finally:
        call.remove()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(InvalidDevice, match="leave it out"):
        dry_run(model, torch.randn(2, 4), lambda x: model(x.to("cuda")).sum())
    with pytest.raises(InvalidDevice, match="'cpu'"):
        dry_run(model, torch.randn(2, 4), lambda x: model(x).sum(), device="cuda")
