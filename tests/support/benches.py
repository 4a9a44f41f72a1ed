"""Runs one piece of user code on plain and on offloaded models, and compares all results.

On the simulated device both faces of a weight are CPU memory. So a comparison proves something only with poisoned
hosts, and only if windows have opened. :func:`assert_equal_to_plain` ensures both.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import nn

import hydra_ext
from hydra_ext import _C
from hydra_ext.runtime import engine

Outcome = list["torch.Tensor | str"]
ROOMY = 2**30


@dataclass
class Bench:
    """The models that a piece of user code works on, and their runs if they are offloaded."""

    models: Sequence[nn.Module]
    runs: list[hydra_ext.Run] = field(default_factory=list)

    @property
    def model(self) -> nn.Module:
        return self.models[0]

    def refresh(self) -> None:
        for run in self.runs:
            run.refresh()

    def assert_at_rest(self) -> None:
        """Asserts that the user sees host parameters between calls, and that no memory is in use."""
        for model in self.models:
            assert not any(_C.is_face(parameter) for parameter in model.parameters()), "device parameters left in place"
        for run in self.runs:
            assert not run.core.gate.open
            assert run.core.pager.pins == 0


Body = Callable[[Bench], Outcome]


@dataclass(frozen=True)
class Subject:
    """The models that user code works on.

    Attributes:
        build: Makes the models; every call makes the same ones.
        pass_of: One forward of one model up to its loss, by which activations are measured.
    """

    build: Callable[[], list[nn.Module]]
    pass_of: Callable[[nn.Module, int], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A piece of user code and its special properties.

    Attributes:
        prepare: A function that changes the models before they are offloaded.
        passes: The number of forwards whose activations live at the same time.
        foreign: Whether the code itself replaces parameters in running modules (a functional call).
        keeps_bytes: Whether memory outlives the code on purpose (caches of compilers).
    """

    name: str
    body: Body
    subject: Subject
    prepare: Callable[[Sequence[nn.Module]], None] = lambda _models: None
    passes: int = 1
    foreign: bool = False
    keeps_bytes: bool = False


def activation_bytes(model: nn.Module, pass_of: Callable[[nn.Module, int], torch.Tensor]) -> int:
    """Returns the peak of a plain forward and backward, without parameters and gradients."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    meter = _C.testing.Meter()
    meter.begin()
    try:
        pass_of(model, 0).backward()
    finally:
        meter.end()
    return meter.ledger.peak


def parameter_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def tight_budget(
    model: nn.Module, pass_of: Callable[[nn.Module, int], torch.Tensor], *, passes: int = 1, share: float = 0.4
) -> int:
    """Returns a budget for the activations of ``passes`` passes, with a margin, and for a share of the weights."""
    return int(1.25 * passes * activation_bytes(model, pass_of) + share * parameter_bytes(model))


def run_plain(case: Case) -> Outcome:
    bench = Bench(case.subject.build())
    case.prepare(bench.models)
    return _outcome(case, bench)


def run_offloaded(case: Case, *, tight: bool) -> tuple[Outcome, list[hydra_ext.Run]]:
    bench = Bench(case.subject.build())
    budgets = [ROOMY for _ in bench.models]
    if tight:
        budgets = [tight_budget(model, case.subject.pass_of, passes=case.passes) for model in bench.models]
    case.prepare(bench.models)
    classes = [type(model) for model in bench.models]
    checks = hydra_ext.Checks(poison_hosts=True)
    with ExitStack() as contexts:
        for model, budget in zip(bench.models, budgets, strict=True):
            # A tight budget is one for the activations and for some weights. Others are for what the default makes of it.
            activations: Literal[auto] | None = None if tight else "auto"
            context = hydra_ext.offload(model, budget=budget, checks=checks, activations=activations)
            bench.runs.append(contexts.enter_context(context))
        outcome = _outcome(case, bench)
        bench.assert_at_rest()
    assert [type(model) for model in bench.models] == classes
    assert not engine.installed()
    return outcome, bench.runs


def _outcome(case: Case, bench: Bench) -> Outcome:
    torch.manual_seed(9)
    outcome = case.body(bench)
    for model in bench.models:
        outcome += [parameter.detach() for parameter in model.parameters()]
    _C.suspend_charging()
    return [value if isinstance(value, str) else _copied(value) for value in outcome]


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_dense().clone() if tensor.is_sparse else tensor.detach().clone()


def assert_same(plain: Outcome, offloaded: Outcome) -> None:
    assert len(plain) == len(offloaded)
    for index, (expected, got) in enumerate(zip(plain, offloaded, strict=True)):
        if isinstance(expected, str) or isinstance(got, str):
            assert got == expected
        else:
            assert not expected.isnan().any(), f"value {index} proves nothing: it is NaN in plain PyTorch too"
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected), f"value {index} of {len(plain)} differs, shape {tuple(got.shape)}"


def assert_equal_to_plain(case: Case, *, tight: bool) -> None:
    """Asserts that both give the same results, that the models were offloaded, and that nothing is left behind."""
    plain = run_plain(case)
    offloaded, runs = run_offloaded(case, tight=tight)
    assert_same(plain, offloaded)
    for run in runs:
        report = run.report()
        assert report.windows > 0
        assert report.loads > 0
        assert report.peak_bytes <= report.budget_bytes
        assert (run.core.gate.foreign_entries > 0) == case.foreign
    assert any(run.report().evictions > 0 for run in runs) == tight, "the budget is not what it is taken for"
    gc.collect()
    if not case.keeps_bytes:
        assert [run.core.memory.ledger.in_use for run in runs] == [0 for _ in runs]
