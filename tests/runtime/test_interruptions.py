"""What goes wrong at any module, and what is left afterwards: a model that trains on, and nothing else."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ext
from hydra_ext import _C, optim
from support.benches import ROOMY, Bench, Outcome, assert_same, tight_budget
from support.runtime.footprint import footprint, process_footprint
from support.windows.window_cases import train
from support.windows.window_cases_interrupted import Stop, before_call, during_backward, raising
from support.windows.window_subjects import language_loss, tiny_gpt2

POISONED = hydra_ext.Checks(poison_hosts=True)
LAYERS = 1


def called_modules() -> list[str]:
    """Modules whose call the model makes: not containers, not what a fused operation stands in for."""
    model = tiny_gpt2(LAYERS)
    called: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda _module, _args, name=name: called.append(name))
    language_loss(model, 0)
    return called


MODULES = called_modules()


def reference() -> Outcome:
    model = tiny_gpt2(LAYERS)
    return [*train(Bench([model])), *(parameter.detach() for parameter in model.parameters())]


def interrupted_and_trained(error: type[BaseException], name: str, *, backward: bool) -> Outcome:
    model = tiny_gpt2(LAYERS)
    module = model.get_submodule(name)
    budget = tight_budget(model, language_loss, passes=2)
    with hydra_ext.offload(model, budget=budget, checks=POISONED) as run:
        bench = Bench([model], [run])
        if backward:
            with during_backward(module, error):
                loss = language_loss(model, 0)
                with pytest.raises(error):
                    loss.backward()
            del loss
        else:
            with before_call(module, error), pytest.raises(error):
                language_loss(model, 0)
        bench.assert_at_rest()
        model.zero_grad()
        outcome = [*train(bench), *(parameter.detach() for parameter in model.parameters())]
        assert run.report().windows > 0
    return outcome


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("name", MODULES)
def test_after_a_raise_in_the_forward_of_any_module_training_is_as_if_it_had_not_been(
    name: str, error: type[BaseException]
) -> None:
    assert_same(reference(), interrupted_and_trained(error, name, backward=False))


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
@pytest.mark.parametrize("name", [name for name in MODULES if name not in ("", "transformer")])
def test_after_a_raise_in_the_backward_of_any_module_training_is_as_if_it_had_not_been(
    name: str, error: type[BaseException]
) -> None:
    assert_same(reference(), interrupted_and_trained(error, name, backward=True))


# ---- what is left ---------------------------------------------------------------------------------------------------


def a_whole_life(model: nn.Module, *, error: type[BaseException] | None = None) -> hydra_ext.Run:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    hooks = [dict(optimizer._optimizer_step_pre_hooks), dict(optimizer._optimizer_step_post_hooks)]
    with hydra_ext.offload(model, optimizer, budget=tight_budget(model, language_loss), checks=POISONED) as run:
        train(Bench([model], [run]))
        if error is not None:
            raise error
        assert run.report().windows > 0
    assert [dict(optimizer._optimizer_step_pre_hooks), dict(optimizer._optimizer_step_post_hooks)] == hooks
    return run


@pytest.mark.cases(1)
@pytest.mark.parametrize("error", [None, Stop, KeyboardInterrupt])
def test_nothing_is_left_of_a_context(error: type[BaseException] | None) -> None:
    a_whole_life(tiny_gpt2())  # what torch makes once and keeps
    gc.collect()
    model = tiny_gpt2()
    before, process = footprint(model), process_footprint()
    try:
        a_whole_life(model, error=error)
    except (Stop, KeyboardInterrupt) as caught:
        assert type(caught) is error  # noqa: PT017 - both kinds are expected here
    gc.collect()
    assert footprint(model) == before
    assert process_footprint() == process


def test_a_run_that_ended_holds_no_device_memory_and_still_reports() -> None:
    run = a_whole_life(tiny_gpt2())
    gc.collect()
    assert run.core.pager.resident_bytes == 0
    assert run.core.memory.ledger.in_use == 0
    assert run.report().windows > 0
    assert "peak" in str(run.report())


def a_step_within_both_budgets(folder: Path) -> list[weakref.ref[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
    optimizer = optim.AdamW(model.parameters())
    blocks = list(model.children())
    with hydra_ext.offload(
        model, optimizer, budget=2**20, blocks=blocks, checks=POISONED, host_budget=5 * 2**20, spill_dir=folder
    ) as run:
        run.step([torch.ones(2, 256)] * 2, lambda rows: model(rows).sum(), max_norm=1.0)
        model(torch.ones(2, 256)).sum().backward()
        optimizer.step()
        assert run.report().disk_bytes > 0
    return [weakref.ref(each) for each in (run, run.core, model, optimizer)]


def test_a_run_goes_with_its_last_name_and_its_memory_with_it(tmp_path: Path) -> None:
    a_step_within_both_budgets(tmp_path)  # imports keep the frames that they were made in
    gc.collect()
    gc.disable()
    try:
        assert [each() for each in a_step_within_both_budgets(tmp_path)] == [None] * 4
    finally:
        gc.enable()


@pytest.mark.every_case
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_of_a_backward_that_a_parameters_hook_ended_nothing_is_kept(name: str, register: str) -> None:
    """torch keeps what was ready to run, here the graph below the layer, until its thread runs another backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)])
    rows = torch.ones(4, 64)
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED) as run:
        handle = getattr(model[3][0].get_parameter(name), register)(raising(Stop))
        loss = model(rows).sum()
        with pytest.raises(Stop):
            loss.backward()
        handle.remove()
        del loss
        model.zero_grad()
        assert run.core.memory.ledger.in_use_by(_C.MemoryClass.ACTIVATIONS) == 0
        model(rows).sum().backward()
        found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(rows).sum().backward()
    assert_same([parameter.grad for parameter in model.parameters()], found)


# ---- what users keep ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_run", [False, True])
def test_a_graph_kept_beyond_its_context_says_that_the_context_has_ended(keep_run: bool) -> None:
    model = tiny_gpt2(LAYERS)
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED) as run:
        loss = language_loss(model, 0)
    if not keep_run:
        del run
    with pytest.raises(RuntimeError, match="context it belonged to has ended"):
        loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    expected = reference()
    model = tiny_gpt2(LAYERS)
    assert_same(expected, [*train(Bench([model])), *(parameter.detach() for parameter in model.parameters())])


def kept_face(model: nn.Module) -> torch.Tensor:
    """A device parameter that the user got hold of inside the forward."""
    kept: list[torch.Tensor] = []
    module = model.transformer.h[0].mlp.c_fc
    handle = module.register_forward_pre_hook(lambda layer, _args: kept.append(layer.weight))
    language_loss(model, 0)
    handle.remove()
    assert _C.is_face(kept[0])
    return kept[0]


@pytest.mark.parametrize("keep_run", [False, True])
def test_a_device_parameter_kept_beyond_its_context_says_so_wherever_it_is_used(keep_run: bool) -> None:
    model = tiny_gpt2(LAYERS)
    with hydra_ext.offload(model, budget=ROOMY, checks=POISONED) as run:
        face = kept_face(model)
    if not keep_run:
        del run
    for use in (lambda: face + 1, lambda: face.sum(), lambda: torch.nn.functional.linear(face, face)):
        with pytest.raises(RuntimeError, match=r"'transformer\.h\.0\.mlp\.c_fc\.weight'.* has ended"):
            use()
    assert face.shape == model.transformer.h[0].mlp.c_fc.weight.shape


RAW_ACCESS = """
import copy, io, json, pickle, sys
import numpy as np
import torch
import hydra_ext
from hydra_ext import _C, optim
from runtime.test_interruptions import kept_face
from support.benches import ROOMY
from support.windows.window_subjects import language_loss, tiny_gpt2

uses = {
    "data_ptr": lambda face: face.data_ptr(),
    "numpy": lambda face: face.detach().numpy(),
    "asarray": lambda face: np.asarray(face.detach()),
    "repr": lambda face: repr(face),
    "tolist": lambda face: face.tolist(),
    "save": lambda face: torch.save(face, io.BytesIO()),
    "pickle": lambda face: pickle.dumps(face),
    "deepcopy": lambda face: copy.deepcopy(face),
    "dlpack": lambda face: torch.from_dlpack(face.detach()),
    "storage": lambda face: face.untyped_storage().data_ptr(),
    "share_memory": lambda face: face.detach().share_memory_(),
}

def evict(run):
    with _C.Windows([run.core], _C.PassKind.BACKWARD):
        try:
            torch.empty(2 * ROOMY, dtype=torch.uint8)
        except torch.OutOfMemoryError:
            pass
    assert run.core.pager.resident_bytes == 0

def try_all(face, moment, before):
    for name, use in uses.items():
        before()
        print(json.dumps([moment, name]), flush=True)  # the last one seen, should the process crash
        try:
            said = "no error: " + str(use(face))
        except (RuntimeError, ValueError, BufferError) as error:
            said = str(error)
        print(json.dumps([moment, name, said]), flush=True)

model = tiny_gpt2(1)
with hydra_ext.offload(model, budget=ROOMY) as run:
    face = kept_face(model)
    language_loss(model, 0).backward()
    try_all(face, "evicted", lambda: evict(run))
    weight = model.transformer.h[0].mlp.c_fc.weight
    print(json.dumps(["host", "values", str(weight.detach())]))
try_all(face, "ended", lambda: None)
"""


def test_raw_access_to_an_absent_device_parameter_is_our_error_and_no_crash() -> None:
    command = [sys.executable, "-W", "ignore", "-c", RAW_ACCESS]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    said = {(moment, name): text for moment, name, text in (line for line in lines if len(line) == 3)}
    assert len(said) == 2 * 11 + 1
    # Made of operations, which the fault path serves while there is a context.
    values = said.pop(("host", "values"))
    assert said.pop(("evicted", "dlpack")) == f"no error: {values}"
    numbers = values.removeprefix("tensor(").removesuffix(")")
    for name in ("repr", "deepcopy"):
        assert numbers in said.pop(("evicted", name))
    for (moment, name), text in said.items():
        assert "hydra_ext: " in text, (moment, name, text)
        assert "'transformer.h.0.mlp.c_fc.weight'" in text, (moment, name, text)
        assert ("not on the device" if moment == "evicted" else "has ended") in text, (moment, name, text)
