"""Parameters whose memory is known under several storages, or outside torch: all see a step as in the plain loop."""

from __future__ import annotations

import copy
import ctypes
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import hydra_ext
from hydra_ext import Run, SimulatedDevice, optim
from support.benches import Outcome, assert_same
from support.runtime.native import BATCHES, WIDTH, stack

TIGHT, ROOMY = 60_000, 2**20
SLOW = 2e7  # bytes/s: some hundredths of a second for a step
AWAY = "an optimizer step is writing this tensor now"
Made = tuple[nn.Sequential, torch.optim.Optimizer]


@contextmanager
def offloaded(made: Made, *, budget: int = TIGHT, speed: float = SLOW, **options: Any) -> Iterator[Run]:
    model, optimizer = made
    device = SimulatedDevice(host_memory_bytes_per_second=speed)
    with hydra_ext.offload(
        model, optimizer, budget=budget, blocks=list(model.children()), device=device, **options
    ) as run:
        yield run


def step(made: Made, batch: torch.Tensor, penalty: Callable[[], Any] = lambda: 0.0) -> torch.Tensor:
    model, optimizer = made
    loss = model(batch).pow(2).mean() + penalty()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().clone()


def array_of(model: nn.Sequential, *layers: int) -> Any:
    """The weights of these layers are this array of numpy's, each in a storage of its own."""
    array = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32) * 0.1
    for layer in layers:
        model[layer].weight = nn.Parameter(torch.from_numpy(array))
    return array


# ---- one memory, several storages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("spilled", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize("backwards", [False, True])
def test_two_parameters_over_one_array_are_updated_in_the_optimizer_s_order(
    backwards: bool, spilled: bool, tmp_path: Path
) -> None:
    def made() -> Made:
        model = stack()
        array_of(model, 0, 4)
        parameters = list(model.parameters())
        return model, optim.AdamW(parameters[::-1] if backwards else parameters, lr=0.05, weight_decay=0.3)

    plain, ours = made(), made()
    expected = [step(plain, batch) for batch in BATCHES]
    options: dict[str, Any] = {"host_budget": 400_000, "spill_dir": tmp_path} if spilled else {}
    with offloaded(ours, **options):
        assert_same(expected, [step(ours, batch) for batch in BATCHES])


def test_a_frozen_parameter_over_the_array_of_a_trained_one() -> None:
    """A step changes one row, which no sample of the frozen one need hold, and no version of it."""
    rows = 4096

    def made() -> Made:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(rows, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, rows, bias=False))
        array = np.random.default_rng(0).standard_normal((rows, WIDTH)).astype(np.float32)
        model[0].weight = nn.Parameter(torch.from_numpy(array))
        model[2].weight = nn.Parameter(torch.from_numpy(array), requires_grad=False)
        return model, optim.SGD([each for each in model.parameters() if each.requires_grad], lr=100.0)

    token = torch.tensor([77])
    plain, ours = made(), made()
    expected = [step(plain, token) for _ in range(3)]
    with offloaded(ours, budget=2**23):
        assert_same(expected, [step(ours, token) for _ in range(3)])


def test_an_array_under_a_parameter_shows_a_step_at_once() -> None:
    def seen() -> tuple[Made, Any]:
        model = stack()
        array = array_of(model, 4)
        return (model, optim.AdamW(model.parameters(), lr=0.05)), array

    (plain, expected), (ours, found) = seen(), seen()
    with offloaded(ours, speed=2e6):
        for batch in BATCHES:
            step(plain, batch)
            step(ours, batch)
            assert np.array_equal(expected, found)
        with pytest.raises(RuntimeError, match=AWAY):
            ours[0][5].weight.data_ptr()  # the others' updates are still behind


def test_an_array_under_a_gradient_may_be_written_behind_a_step() -> None:
    def losses(made: Made) -> Outcome:
        array = np.zeros((WIDTH, WIDTH), dtype=np.float32)
        made[0][4].weight.grad = torch.from_numpy(array)
        seen: Outcome = []
        for batch in BATCHES:
            loss = made[0](batch).pow(2).mean()
            loss.backward()
            made[1].step()
            array[:] = 0.0
            for parameter in made[0].parameters():
                parameter.grad = parameter.grad if parameter is made[0][4].weight else None
            seen.append(loss.detach().clone())
        return seen

    model = stack()
    plain, ours = ((each, optim.AdamW(each.parameters(), lr=0.05)) for each in (copy.deepcopy(model), model))
    expected = losses(plain)
    with offloaded(ours, speed=2e6):
        assert_same(expected, losses(ours))


# ---- parameters outside the model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [False, True], ids=["last", "first"])
@pytest.mark.parametrize("budget", [2 * TIGHT, ROOMY])
def test_a_parameter_outside_the_model_over_one_inside(budget: int, first: bool) -> None:
    def made() -> tuple[Made, nn.Parameter]:
        model = stack()
        extra = nn.Parameter(model[2].weight.data)
        inside = list(model.parameters())
        parameters = [extra, *inside] if first else [*inside, extra]
        return (model, optim.AdamW(parameters, lr=0.05, weight_decay=0.3)), extra

    (plain, outside), (ours, beside) = made(), made()
    expected = [step(plain, batch, lambda: outside.abs().mean()) for batch in BATCHES]
    with offloaded(ours, budget=budget):
        assert_same(expected, [step(ours, batch, lambda: beside.abs().mean()) for batch in BATCHES])


def test_its_gradient_is_not_clipped_with_the_model_s() -> None:
    def made() -> tuple[Made, nn.Parameter]:
        model = stack()
        extra = nn.Parameter(model[2].weight.data)
        return (model, optim.SGD([*model.parameters(), extra], lr=0.05)), extra

    def penalty(extra: nn.Parameter) -> None:
        extra.grad = torch.full_like(extra, 0.01)

    (plain, outside), (ours, beside) = made(), made()
    expected: Outcome = []
    for batch in BATCHES:
        plain[0](batch).pow(2).mean().backward()
        penalty(outside)
        expected.append(optim.clip_grad_norm_(plain[0].parameters(), 1e-3).clone())
        plain[1].step()
        plain[1].zero_grad()
    with offloaded(ours) as run:
        found: Outcome = []
        for batch in BATCHES:
            penalty(beside)
            result = run.step([batch], lambda part: ours[0](part).pow(2).mean(), max_norm=1e-3)
            found.append(result.grad_norm.clone())
        assert_same(expected, found)
    assert_same(list(plain[0].parameters()), list(ours[0].parameters()))


def test_a_frozen_parameter_that_is_written_through_one_outside() -> None:
    rows = 4096

    def made() -> tuple[Made, nn.Parameter]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(rows, WIDTH), nn.Linear(WIDTH, WIDTH))
        model[0].weight.requires_grad_(False)
        extra = nn.Parameter(model[0].weight.data)
        return (model, optim.SGD([*model[1].parameters(), extra], lr=100.0)), extra

    def losses(made: Made, extra: nn.Parameter) -> Outcome:
        return [step(made, torch.tensor([77]), lambda: extra[77].sum()) for _ in range(3)]

    plain, ours = made(), made()
    expected = losses(*plain)
    with offloaded(ours[0], budget=2**23):
        assert_same(expected, losses(*ours))


# ---- bytes that change hands ----------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_weight_that_a_forward_writes_is_another_block_s_too() -> None:
    rows, width = 4096, 16

    class Writes(nn.Embedding):
        def forward(self, index: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight[77:78].mul_(1.5)
            return super().forward(index)

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(Writes(rows, width), nn.Linear(width, width), nn.Linear(width, rows, bias=False))
        model[2].weight.data = model[0].weight.data
        return model.requires_grad_(False)

    def seen(model: nn.Sequential) -> Outcome:
        found: Outcome = []
        for _ in range(4):
            model[0](torch.tensor([77]))
            found.append(model[2](torch.ones(1, width))[0, 77].clone())
        return found

    plain, ours = made(), made()
    expected = seen(plain)
    with hydra_ext.offload(ours, budget=2**22, blocks=list(ours.children())):
        assert_same(expected, seen(ours))


@pytest.mark.parametrize("read", [False, True], ids=["unread", "read"])
def test_data_is_replaced_behind_a_step(read: bool) -> None:
    kept: dict[nn.Module, torch.Tensor] = {}

    class Keeps(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            kept[self] = self.weight
            return super().forward(inputs)

    def made() -> Made:
        torch.manual_seed(0)
        model = nn.Sequential(*[Keeps(WIDTH, WIDTH) for _ in range(4)])
        return model, optim.AdamW(model.parameters(), lr=0.05)

    def losses(made: Made) -> Outcome:
        seen: Outcome = []
        for number, batch in enumerate(BATCHES):
            seen.append(step(made, batch))
            if read:
                with torch.no_grad():  # of a face, on the device
                    seen.append(kept[made[0][0]].sum().clone())
            made[0][0].weight.data = torch.full((WIDTH, WIDTH), 0.1 * (number + 1))
        return seen

    plain, ours = made(), made()
    expected = losses(plain)
    with offloaded(ours):
        assert_same(expected, losses(ours))


# ---- what stays behind, and what does not ---------------------------------------------------------------------------


def save_all(made: Made) -> None:
    torch.save([made[0].state_dict(), made[1].state_dict()], io.BytesIO())


def load_state(made: Made) -> None:
    file = io.BytesIO()
    torch.save(made[1].state_dict(), file)
    file.seek(0)
    made[1].load_state_dict(torch.load(file))


@pytest.mark.cases(1)
@pytest.mark.parametrize("touch", [save_all, load_state])
def test_saving_and_loading_end_no_deferral(touch: Callable[[Made], None]) -> None:
    """Python's wrappers of the storages live on, and refer to nothing."""
    model = stack()
    made = model, optim.AdamW(model.parameters(), lr=1e-2)
    with offloaded(made, speed=2e6):
        step(made, BATCHES[0])
        touch(made)
        for batch in BATCHES[:2]:
            step(made, batch)
        for parameter in model.parameters():
            with pytest.raises(RuntimeError, match=AWAY):
                parameter.data_ptr()


def test_a_storage_that_python_keeps_shows_a_step_at_once() -> None:
    model = stack()
    made = model, optim.SGD(model.parameters(), lr=1e-2)
    with offloaded(made, speed=2e6):
        kept = model[3].weight.untyped_storage()
        before = bytes(kept)
        step(made, BATCHES[0])
        assert bytes(kept) != before
        with pytest.raises(RuntimeError, match=AWAY):
            model[5].weight.data_ptr()


def test_saving_keeps_no_block_from_the_device_nor_from_the_arena() -> None:
    model = stack()
    made = model, optim.AdamW(model.parameters(), lr=1e-2)
    save_all(made)
    with offloaded(made, budget=ROOMY) as run:
        assert run.core.blocks.foreign_bytes == 0
        for number, batch in enumerate([*BATCHES, *BATCHES]):
            step(made, batch)
            if number == 0:
                save_all(made)
        assert run.report().homes == tuple(str(layer) for layer in range(len(model)))


def test_views_of_one_vector_are_updated_behind_the_next_forward() -> None:
    model = stack()
    made = model, optim.AdamW(model.parameters(), lr=1e-2)
    vector_to_parameters(parameters_to_vector(model.parameters()).detach(), model.parameters())
    hosts = list(model.parameters())
    told: list[str] = []

    def look(*_: object) -> None:
        try:
            hosts[-1].data_ptr()
        except RuntimeError as error:
            told.append(str(error))

    with offloaded(made, speed=2e6):
        step(made, BATCHES[0])
        model[0].register_forward_pre_hook(look)
        with torch.no_grad():
            model(BATCHES[0])
    assert len(told) == 1
    assert AWAY in told[0]


# ---- no thread ------------------------------------------------------------------------------------------------------


@contextmanager
def no_new_threads() -> Iterator[None]:
    """Their stacks would be too large for any address space."""
    libc = ctypes.CDLL(None, use_errno=True)
    usual, attributes = ctypes.create_string_buffer(256), ctypes.create_string_buffer(256)
    assert libc.pthread_getattr_default_np(usual) == 0
    assert libc.pthread_getattr_default_np(attributes) == 0
    assert libc.pthread_attr_setstacksize(attributes, ctypes.c_size_t(2**60)) == 0
    assert libc.pthread_setattr_default_np(attributes) == 0
    try:
        yield
    finally:
        assert libc.pthread_setattr_default_np(usual) == 0


def test_a_step_whose_thread_cannot_begin_leaves_all_tensors_as_they_were() -> None:
    model = stack()
    made = model, optim.AdamW(model.parameters(), lr=1e-2)
    with offloaded(made):
        step(made, BATCHES[0])
        before = [parameter.detach().clone() for parameter in model.parameters()]
        model(BATCHES[0]).pow(2).mean().backward()
        with no_new_threads(), pytest.raises(RuntimeError, match="Resource temporarily unavailable"):
            made[1].step()
        assert_same(before, [parameter.detach().clone() for parameter in model.parameters()])
        for parameter in model.parameters():
            parameter.data_ptr()
        made[1].step()
        assert not torch.equal(before[0], model[0].weight)
