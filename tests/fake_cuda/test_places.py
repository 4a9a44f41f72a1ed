"""Inputs, buffers and devices, with device faces on ``cuda``: a tensor left on the host raises, as on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from hydra_ext.errors import ModelChanged
from hydra_ext.runtime.placement.devices import CudaPlace
from support.fake_cuda import DEVICE, fake_cuda


class WithDevice(nn.Module):
    """What libraries ask a model's ``device`` for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64), persistent=True)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, x: torch.Tensor, scale: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        self.steps += 1
        y = self.inner(x) + self.table + torch.ones(4, device=self.device)
        return y if scale is None else y * scale["by"]


class UnderAutocast(nn.Module):
    """As trainers wrap a model's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layer(x)


def test_an_autocast_for_the_host_alone_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    model = UnderAutocast()
    with fake_cuda(model):
        assert model(torch.ones(2, 4)).dtype == torch.float32
        model(torch.ones(2, 4))
    assert [record.message for record in caplog.records] == [
        "autocast to torch.bfloat16 is on for the CPU, but this model computes on cuda:0, without it. "
        "Put the training into `with torch.autocast('cuda', dtype=torch.bfloat16):`"
    ]


def test_one_for_the_device_too_is_not(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a GPU torch.autocast does nothing there, and what it would cast cannot be run.
    enabled = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda" or enabled(kind))
    model = UnderAutocast()
    with fake_cuda(model):
        model(torch.ones(2, 4))
    assert not caplog.records


def test_inputs_on_the_host_are_moved_wherever_they_stand_in_the_call() -> None:
    model = WithDevice()
    with fake_cuda(model):
        out = model(torch.ones(2, 4), scale={"by": torch.ones(4)})
        assert out.device == DEVICE
        assert model(x=torch.ones(2, 4)).device == DEVICE


def test_without_a_place_that_moves_inputs_the_forward_raises() -> None:
    """The suite's own control: mismatches do raise here."""
    model = WithDevice()
    with fake_cuda(model) as run:
        model(torch.ones(2, 4))
        run._place.move_input = lambda value: value  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="device"):
            model(torch.ones(2, 4))


def test_buffers_are_on_the_device_inside_and_the_models_own_again_outside() -> None:
    model = WithDevice()
    steps, table = model.steps, model.table
    with fake_cuda(model):
        model(torch.ones(2, 4))
        assert model.steps.device == DEVICE
        assert model.table.device == DEVICE
    assert model.steps is steps
    assert model.table is table


def test_a_state_dict_taken_inside_is_on_the_host() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    with fake_cuda(model):
        model(torch.ones(2, 4))
        assert {value.device.type for value in model.state_dict().values()} == {"cpu"}
        assert {value.device.type for value in model[1].state_dict().values()} == {"cpu"}
    assert not any(module._state_dict_hooks for module in model.modules())


def test_a_buffer_that_two_modules_share_stays_one_buffer() -> None:
    first, second = WithDevice(), WithDevice()
    second.table = first.table
    model = nn.ModuleDict({"first": first, "second": second})
    model.forward = lambda x: second(first(x))  # type: ignore[method-assign]
    with fake_cuda(model):
        model(torch.ones(2, 4))
        assert first.table is second.table
        assert first.table.device == DEVICE
    assert first.table is second.table


def test_the_model_says_that_it_is_on_the_device() -> None:
    model = WithDevice()
    assert model.device.type == "cpu"
    with fake_cuda(model):
        assert model.device == DEVICE
        assert model(torch.ones(2, 4, device=model.device)).device == DEVICE
        assert next(model.parameters()).device.type == "cpu"
    assert model.device.type == "cpu"


def test_moving_the_model_to_its_device_is_accepted_and_elsewhere_refused() -> None:
    model = WithDevice()
    with fake_cuda(model):
        assert model.to(model.device) is model
        assert model.to("cpu") is model
        with pytest.raises(ModelChanged):
            model.to("cuda:1")
        with pytest.raises(ModelChanged):
            model.half()
        model(torch.ones(2, 4))


def test_while_the_model_is_copied_everything_is_on_the_host() -> None:
    model = WithDevice()
    steps = model.steps
    with fake_cuda(model) as run:
        model(torch.ones(2, 4))
        with run.unhooked():
            assert model.steps is steps
            assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"cpu"}
        assert model.steps.device == DEVICE
        assert model(torch.ones(2, 4)).device == DEVICE


def test_batch_norm_in_training_writes_its_statistics_on_the_device() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train()
    with fake_cuda(model):
        assert model(torch.ones(2, 3, 8, 8)).device == DEVICE
        assert model[1].running_mean.device == DEVICE


def test_packed_sequences_keep_their_lengths_on_the_host() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)

        def forward(self, packed: nn.utils.rnn.PackedSequence) -> torch.Tensor:
            assert packed.batch_sizes.device.type == "cpu"
            return self.inner(packed.data)

    model = Rows()
    rows = pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
    with fake_cuda(model):
        assert model(rows).device == DEVICE


def test_a_recurrent_module_never_lays_its_weights_out_anew() -> None:
    model = nn.LSTM(4, 4, num_layers=2)
    weights = list(model._flat_weights)
    with fake_cuda(model):
        out, _ = model(torch.ones(3, 2, 4))
        assert out.device == DEVICE
        assert "flatten_parameters" in vars(model)
    assert "flatten_parameters" not in vars(model)
    assert all(now is before for now, before in zip(model._flat_weights, weights, strict=True))


def test_the_allocator_s_memory_is_given_back_once_a_first_backward_has_cut_it_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(None))
    place = CudaPlace(0)
    for _ in range(3):
        place.backward_ended()
    assert len(calls) == 1
