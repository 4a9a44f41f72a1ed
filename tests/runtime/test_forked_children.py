"""Forked children: an error where the model is used, a quiet end of the context, and no harm to the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ext
from support.benches import ROOMY, assert_same
from support.runtime.native import BATCHES, state
from support.runtime.on_disk import DEPTH, DEVICE_BUDGET, budget_for, pair
from support.runtime.outcomes import POISONED

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
ONES = torch.ones(1, 8)


def model_of_linears() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])


def said_by_child(body: Callable[[], Any]) -> str:
    """What a forked child's ``body`` gives or raises. A child that hangs is ended by a signal, and says nothing."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(60)
            os.write(writing, f"gave {body()}".encode())
        except BaseException as error:  # noqa: BLE001 - told to the parent
            os.write(writing, f"{type(error).__name__}: {error}".encode())
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said


def test_a_forked_child_that_uses_the_model_is_told_that_it_cannot() -> None:
    plain, model = model_of_linears(), model_of_linears()
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED) as run:
        loss = model(ONES).sum()
        for use in (lambda: model(ONES), loss.backward, lambda: model.eval()(ONES)):
            said = said_by_child(use)
            assert said.startswith("StateError: this offloaded model belongs to process"), said
            assert "cannot be used in a forked child" in said
        loss.backward()
        found = [loss, *(parameter.grad for parameter in model.parameters())]
        assert run.report().windows == 2
    loss = plain(ONES).sum()
    loss.backward()
    assert_same([loss.detach(), *(parameter.grad for parameter in plain.parameters())], [found[0].detach(), *found[1:]])


def test_a_forked_child_may_leave_the_context_and_has_the_plain_model_then() -> None:
    plain, model = model_of_linears(), model_of_linears()
    context = hydra_ext.offload(model, budget=ROOMY, checks=POISONED)

    def leave() -> Any:
        with pytest.raises(SystemExit), context_entered(context):
            sys.exit()
        return model(ONES).tolist()

    with context:
        model(ONES).sum().backward()
        assert said_by_child(leave) == f"gave {plain(ONES).tolist()}"
        assert_same([plain(ONES)], [model(ONES)])


class context_entered:  # noqa: N801 - as contextlib's
    """The rest of a with-statement that the parent has entered."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


UNDER_WAY = """    optimizer.step()
"""


@pytest.mark.full
@pytest.mark.parametrize(("step", "code"), [("", 7), (UNDER_WAY, 1)], ids=["at rest", "a step under way"])
def test_a_forked_child_ends_by_itself_with_the_context_open(step: str, code: int) -> None:
    """The whole interpreter is taken down there, and every object of ours with it; 1 is an error's."""
    program = f"""
import os, signal, sys, torch, hydra_ext
model = torch.nn.Linear(4, 4)
optimizer = hydra_ext.optim.AdamW(model.parameters())
slow = hydra_ext.SimulatedDevice(host_memory_bytes_per_second=560)
with hydra_ext.offload(model, optimizer, budget="1MiB", device=slow) as run:
    model(torch.ones(1, 4)).sum().backward()
{step}    child = os.fork()
    if child == 0:
        signal.alarm(60)
        sys.exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False
    )
    assert (result.stdout, result.returncode) == (f"{code}\n", 0), result.stderr


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(BATCHES[0]).sum().backward()
    optimizer.step()


def uses_of(run: hydra_ext.Run, model: nn.Module, optimizer: Any, folder: Path) -> dict[str, Callable[[], Any]]:
    """What waits for a step under way, each in another manner."""
    return {
        "sync": run.sync,
        "an operation": lambda: [parameter.sum() for parameter in model.parameters()],
        "state_dict": model.state_dict,
        "the optimizer's state_dict": optimizer.state_dict,
        "forward": lambda: model(BATCHES[0]),
        "step": optimizer.step,
        "run.step": lambda: run.step([BATCHES[0]], lambda batch: model(batch).sum()),
        "save": lambda: run.save(folder / "of a child"),
        "load": lambda: run.load(folder / "checkpoint"),
        "leaving": run.close,
    }


@pytest.mark.cases(1)
@pytest.mark.parametrize("on_disk", [True, False])
def test_a_forked_child_that_uses_the_model_while_a_step_is_under_way_is_told_too(
    on_disk: bool, tmp_path: Path
) -> None:
    plain, theirs, model, ours = pair()
    numbers = sum(parameter.numel() for parameter in model.parameters())
    limits: dict[str, Any] = {"budget": DEVICE_BUDGET}
    if on_disk:
        limits |= {"host_budget": budget_for(model, ours, weights=DEPTH), "spill_dir": tmp_path}
    slow = hydra_ext.SimulatedDevice(host_memory_bytes_per_second=5 * 28 * numbers)  # a fifth of a second for each step
    with hydra_ext.offload(model, ours, device=slow, checks=POISONED, **limits) as run:
        step(model, ours)
        run.save(tmp_path / "checkpoint")
        for name, use in uses_of(run, model, ours, tmp_path).items():
            step(model, ours)
            said = said_by_child(use)
            assert said.startswith("StateError: this offloaded model belongs to process"), f"{name}: {said}"
        assert "gave" in said_by_child(run.report)
        assert not (tmp_path / "of a child").exists()
        run.load(tmp_path / "checkpoint")
        step(model, ours)
    step(plain, theirs)
    step(plain, theirs)
    assert_same(state(plain, theirs), state(model, ours))


def test_a_forked_child_may_offload_a_model_of_its_own() -> None:
    plain, model = model_of_linears(), model_of_linears()

    def offload_another() -> Any:
        with hydra_ext.offload(model_of_linears(), budget=ROOMY) as run, torch.no_grad():
            return run.model(ONES).tolist()

    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED), torch.no_grad():
        model(ONES)
        assert said_by_child(offload_another) == f"gave {plain(ONES).tolist()}"
