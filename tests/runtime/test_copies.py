"""Copies, pickles and averages of an offloaded model and of its parts are plain modules with the same numbers."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

import hydra_ext
from hydra_ext import Offload, Recompute, SimulatedDevice
from hydra_ext.calls import StandIn
from support.benches import ROOMY, assert_same
from support.runtime.native import WIDTH
from support.runtime.outcomes import POISONED

BATCHES = torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(1))
SLOW = SimulatedDevice(host_memory_bytes_per_second=2e7)
Copier = Callable[[nn.Module], nn.Module]


class Net(nn.Module):
    def __init__(self, wrap: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Sequential(wrap(nn.Linear(WIDTH, WIDTH)), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.memory = nn.LSTM(WIDTH, 16, batch_first=True)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.memory(self.middle(self.first(x))[None])[0][0])


def pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))  # noqa: S301 - written in the same line


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    found: nn.Module = torch.load(file, weights_only=False)
    return found


def averaged(module: nn.Module) -> nn.Module:
    average = AveragedModel(module)
    average.update_parameters(module)
    return average.module


COPIERS: dict[str, Copier] = {
    "deepcopy": copy.deepcopy,
    "averaged": averaged,
    "pickle": pickled,
    "saved": saved,
}
WRAPS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "plain": lambda layer: layer,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
}
ACTIVATIONS: dict[str, Any] = {
    "kept": None,
    "offloaded": Offload(),
    "by module": {"middle*": Recompute(), "first": Offload()},
}


def step(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> torch.Tensor:
    loss = model(BATCHES[index]).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().clone()


def training(module: nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """A step of it for each input, and what it has then."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for each in inputs:
        output = module(each)
        loss = (output[0] if isinstance(output, tuple) else output).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(value.clone() for value in module.state_dict().values())]


def ours(value: Any) -> bool:
    return type(value).__module__.startswith("hydra_ext")


def assert_plain(found: nn.Module, plain: nn.Module) -> None:
    kinds = [[type(module).__name__ for module in each.modules()] for each in (found, plain)]
    assert kinds[0] == kinds[1]
    for module in found.modules():
        for attribute in module.__dict__.values():
            held = attribute.values() if isinstance(attribute, dict) else [attribute]
            assert not any(ours(each) for each in held)
    assert all(parameter.data_ptr() and parameter.is_leaf for parameter in found.parameters())
    assert_same([*plain.state_dict().values()], [*found.state_dict().values()])


@contextmanager
def offloaded(model: nn.Module, optimizer: Any, home: str, folder: Path, **options: Any) -> Iterator[hydra_ext.Run]:
    """``home``: of the weights."""
    if home == "disk":
        options |= {"host_budget": 2**21, "spill_dir": folder}
    budget = ROOMY if home == "device" else 3 * 2**18
    with hydra_ext.offload(model, optimizer, budget=budget, device=SLOW, checks=POISONED, **options) as run:
        yield run


@pytest.mark.parametrize("home", ["host", "device", "disk"])
@pytest.mark.parametrize("copier", COPIERS)
def test_a_copy_is_a_plain_module_while_an_update_is_under_way(copier: str, home: str, tmp_path: Path) -> None:
    plain, model = Net(WRAPS["plain"]), Net(WRAPS["plain"])
    theirs, own = (hydra_ext.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model))
    with offloaded(model, own, home, tmp_path) as run:
        for index in range(2):
            assert_same([step(plain, theirs, index)], [step(model, own, index)])
        windows = run.report().windows
        found, expected = COPIERS[copier](model), COPIERS[copier](plain)
        assert_plain(found, expected)
        assert_same(training(expected, *BATCHES[:2]), training(found, *BATCHES[:2]))
        assert run.report().windows == windows
        assert_same([step(plain, theirs, 2)], [step(model, own, 2)])
        assert run.report().windows == windows + 2
    assert_same(training(plain, *BATCHES), training(model, *BATCHES))
    assert_plain(COPIERS[copier](model), plain)


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("wrap", WRAPS)
def test_deep_copies_of_the_model_and_of_its_parts(wrap: str, activations: str, tmp_path: Path) -> None:
    plain, model = Net(WRAPS[wrap]), Net(WRAPS[wrap])
    theirs, own = (hydra_ext.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model))
    home = "device" if wrap == "orthogonal" else "host"  # its backward takes room
    with offloaded(model, own, home, tmp_path, activations=ACTIVATIONS[activations]):
        for name in ("", "first", "middle", "middle.0", "memory"):
            step(plain, theirs, 0), step(model, own, 0)
            for copier in (copy.deepcopy, averaged):
                found, expected = (copier(each.get_submodule(name)) for each in (model, plain))
                assert_plain(found, expected)
                assert_same(training(expected, *BATCHES[:2]), training(found, *BATCHES[:2]))
        assert_same([step(plain, theirs, 1)], [step(model, own, 1)])


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_pickles_of_the_model_and_of_its_parts(activations: str, tmp_path: Path) -> None:
    plain, model = Net(WRAPS["plain"]), Net(WRAPS["plain"])
    theirs, own = (hydra_ext.optim.AdamW(each.parameters(), lr=1e-2) for each in (plain, model))
    with offloaded(model, own, "host", tmp_path, activations=ACTIVATIONS[activations]) as run:
        assert_same([step(plain, theirs, 0)], [step(model, own, 0)])
        run.sync()  # raw access to a part's bytes does not wait
        for name in ("", "first", "middle", "memory"):
            found, expected = (pickled(each.get_submodule(name)) for each in (model, plain))
            assert_plain(found, expected)
            assert_same(training(expected, *BATCHES[:2]), training(found, *BATCHES[:2]))


def test_a_pickle_needs_nothing_of_the_library() -> None:
    model = Net(WRAPS["plain"])
    with hydra_ext.offload(model, budget=ROOMY, activations={"middle*": Recompute()}):
        assert b"hydra" not in pickle.dumps(model)
        assert b"hydra" not in pickle.dumps(model.memory)


def test_the_copy_of_a_recurrent_module_lays_out_its_own_weights() -> None:
    model = Net(WRAPS["plain"])
    with hydra_ext.offload(model, budget=ROOMY):
        for found in (copy.deepcopy(model.memory), pickled(model.memory)):
            assert found.flatten_parameters.__self__ is found
            assert found.flatten_parameters.__func__ is nn.RNNBase.flatten_parameters


def test_a_stash_leaves_no_trace_in_copies() -> None:
    plain, model = Net(WRAPS["weight_norm"]), Net(WRAPS["weight_norm"])
    with hydra_ext.stash({"middle*": Recompute(), "first": Offload()}, model=model):
        assert isinstance(model.first.__dict__["_compiled_call_impl"], StandIn)
        assert_plain(copy.deepcopy(model), plain)
    assert_plain(copy.deepcopy(model), plain)
