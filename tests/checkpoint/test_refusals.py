"""What cannot be saved or loaded is refused by name, before anything is written or changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext.errors import (
    CheckpointMismatch,
    InvalidArgument,
    StateError,
    UnsupportedState,
)
from support.checkpoint.checkpoints import Job, backward, differences, offloaded, small

pytestmark = pytest.mark.every_case

# ---- the caller's own -----------------------------------------------------------------------------------------------

HERSELF: list[Any] = []
HERSELF.append(HERSELF)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ((1, 2), "extra is a tuple"),
        ({"a": [1, {2}]}, r"extra\['a'\]\[1\] is a set"),
        ({1: 2}, "extra has the key 1"),
        ({"a": {None: 2}}, r"extra\['a'\] has the key None"),
        (float("nan"), "extra is nan"),
        ({"loss": torch.tensor(1.0)}, r"extra\['loss'\] is a Tensor"),
        ([numpy.float64(1)], r"extra\[0\] is a float64"),
        ("\ud800", "halves of characters"),
        (10**5000, "too large a number"),
        (HERSELF, "nested too deeply"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_extra_that_does_not_come_back_as_it_was(run: hydra_ext.Run, extra: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=message):
        run.save(tmp_path / "ckpt", extra=extra)
    assert not (tmp_path / "ckpt").exists()


def test_extra_that_does(run: hydra_ext.Run, tmp_path: Path) -> None:
    extra = {"": [None, True, 0, -1, 2**70, 0.1, 1e-310, -0.0, "ä\0", []], "$": {"$": "tensor"}}
    run.save(tmp_path, extra=extra)
    assert not differences(run.load(tmp_path).extra, extra)


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, None])
def test_keep_is_a_number(run: hydra_ext.Run, keep: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="keep="):
        run.save(tmp_path, keep=keep)


class Several:
    """Two schedules in one, as users write it."""

    def state_dict(self) -> Any:
        return [{"last_epoch": 1}, {"last_epoch": 2}]

    def load_state_dict(self, state_dict: Any) -> None:
        raise AssertionError("nothing could be saved")


@pytest.mark.parametrize("name", ["schedule", "scaler"])
def test_state_that_is_no_dict(run: hydra_ext.Run, name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedState, match=rf"{name}=: state_dict\(\) of .*Several gives a list"):
        run.save(tmp_path / "ckpt", **{name: Several()})
    assert not (tmp_path / "ckpt").exists()


# ---- moments --------------------------------------------------------------------------------------------------------


def test_not_while_gradients_wait_for_a_step(run: hydra_ext.Run, tmp_path: Path) -> None:
    backward(run)
    with pytest.raises(StateError, match=r"'\d\.\w+' has a gradient that no step has used"):
        run.save(tmp_path)
    run.optimizer.step()
    run.save(tmp_path)  # used, though they are still there
    backward(run)
    run.optimizer.zero_grad(set_to_none=False)
    run.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_not_with_gradients_that_no_step_will_use(tmp_path: Path) -> None:
    model = small()
    with hydra_ext.offload(model, torch.optim.SGD(model[0].parameters(), lr=0.1), budget="1MiB") as run:
        backward(run)
        run.optimizer.step()
        run.optimizer.zero_grad()
        with pytest.raises(StateError, match=r"'1\.\w+' has a gradient"):
            run.save(tmp_path)
        model.zero_grad()
        run.save(tmp_path)


def test_a_load_drops_gradients(run: hydra_ext.Run, tmp_path: Path) -> None:
    run.save(tmp_path)
    backward(run)
    run.load(tmp_path)
    assert all(parameter.grad is None for parameter in run.model.parameters())
    run.save(tmp_path)


@pytest.mark.parametrize("verb", ["save", "load"])
def test_not_inside_a_pass_or_a_step_and_not_afterwards(verb: str, tmp_path: Path) -> None:
    model = small()
    asked: list[str] = []

    def ask(*_: Any) -> None:
        with pytest.raises(StateError, match="is under way"):
            getattr(run, verb)(tmp_path)
        asked.append("")

    with hydra_ext.offload(model, torch.optim.SGD(model.parameters(), lr=0.1), budget="1MiB") as run:
        run.save(tmp_path)
        handle = model[1].register_forward_hook(ask)
        output = model(torch.randn(3, 2))
        output.register_hook(ask)
        output.sum().backward()
        handle.remove()
        model.zero_grad()
        run.step([0], lambda _: [ask(), model(torch.randn(3, 2)).sum()][1])
    assert len(asked) == 3
    with pytest.raises(StateError, match="has ended"):
        getattr(run, verb)(tmp_path)


def test_in_the_callback_of_a_step(run: hydra_ext.Run, tmp_path: Path) -> None:
    run.on_step(lambda figures: run.save(tmp_path))
    backward(run)
    run.optimizer.step()
    run.step([0], lambda _: run.model(torch.randn(3, 2)).sum())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


# ---- models and optimizers ------------------------------------------------------------------------------------------


class Extra(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None: ...


def dropping(model: nn.Module, name: str) -> nn.Module:
    model.register_state_dict_post_hook(lambda _module, state, prefix, _local: state.__delitem__(prefix + name))
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: Extra(2, 2), "'_extra_state' in the model's state_dict"),
        (lambda: dropping(nn.Linear(2, 2), "bias"), "leaves out the parameter 'bias'"),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), dropping(nn.BatchNorm1d(2), "running_mean")),
            "leaves out the buffer '1.running_mean'",
        ),
        (lambda: with_buffer(torch.zeros(2, dtype=torch.complex128)), "'0.b' is torch.complex128"),
        (lambda: with_buffer(torch.eye(2).to_sparse()), "'0.b' is torch.sparse_coo"),
    ],
)
def test_models_that_no_checkpoint_holds(model: Callable[[], nn.Module], message: str, tmp_path: Path) -> None:
    with hydra_ext.offload(model(), budget="1MiB") as run, pytest.raises(UnsupportedState, match=message):
        run.save(tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists()


def with_buffer(buffer: torch.Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_buffer("b", buffer)
    return model


class OwnState(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "more": 1}


class OwnLoading(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)


def hooked(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_state_dict_post_hook(lambda _optimizer, state: {**state, "mine": 1})
    return optimizer


def shared_state(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["preconditioners"] = {"all": torch.ones(2)}
    return optimizer


def strange_state(value: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[model[0].weight]["odd"] = value
        return optimizer

    return make


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: OwnState(model.parameters(), lr=0.1), r"OwnState has a state_dict\(\) of its own"),
        (lambda model: OwnLoading(model.parameters(), lr=0.1), r"OwnLoading has a load_state_dict\(\) of its own"),
        (hooked, r"a hook puts \['mine'\]"),
        (shared_state, "SGD keeps state of 'preconditioners'"),
        (strange_state(object()), "'0.weight/odd' is a object"),
        (strange_state([torch.zeros(2, dtype=torch.float64).to_sparse()]), "'0.weight/odd/0' is torch.sparse_coo"),
        (lambda model: torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], lr=0.1), r"of shape \[3\]"),
    ],
)
def test_optimizers_that_no_checkpoint_holds(make: Any, message: str, tmp_path: Path) -> None:
    model = small()
    with (
        hydra_ext.offload(model, make(model), budget="1MiB") as run,
        pytest.raises(UnsupportedState, match=message),
    ):
        run.save(tmp_path / "ckpt")
    assert not (tmp_path / "ckpt").exists()


def test_a_generator_of_numpys_that_was_replaced(run: hydra_ext.Run, tmp_path: Path) -> None:
    before = numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(numpy.random.PCG64())
        with pytest.raises(UnsupportedState, match="PCG64"):
            run.save(tmp_path / "ckpt")
    finally:
        numpy.random.set_bit_generator(before)


# ---- what a checkpoint is loaded into -------------------------------------------------------------------------------


def test_another_optimizer_gets_the_list_of_differences(tmp_path: Path) -> None:
    made = Job("images", "adamw", "cosine").make(0)
    with offloaded(made) as run:
        made.steps(1)
        run.save(tmp_path, schedule=made.schedule)

    def found(job: Job, *, schedule: bool = True, regroup: Callable[[Any], Any] = lambda o: o) -> list[str]:
        other = job.make(1)
        regroup(other.optimizer)
        before = other.state()
        with offloaded(other) as run:
            with pytest.raises(CheckpointMismatch) as caught:
                run.load(tmp_path, schedule=other.schedule if schedule else None)
            assert not differences(other.state(), before)
        return list(caught.value.differences)

    assert found(Job("images", "amsgrad", "cosine")) == [
        "the optimizer was a 'torch.optim.adamw.AdamW', and is a torch.optim.adam.Adam",
        "the optimizer had 2 groups of parameters, and has 1",
        "group 0 of the optimizer lacks [], has ['body.1.bias', 'body.3.bias', 'body.4.bias', 'head.bias'] in addition",
    ]
    assert found(Job("images", "adamw", "cosine"), schedule=False) == [
        "schedule= was 'torch.optim.lr_scheduler.CosineAnnealingLR', and is None"
    ]
    assert found(Job("images", "adamw", "cosine"), regroup=lambda o: o.param_groups[0]["params"].reverse()) == [
        "group 0 of the optimizer has its parameters in another order"
    ]
    model = Job("images").make(0).model
    with hydra_ext.offload(model, budget="8MiB") as run, pytest.raises(CheckpointMismatch) as caught:
        run.load(tmp_path, schedule=made.schedule)
    assert caught.value.differences == ("there was an optimizer, and there is none now",)
