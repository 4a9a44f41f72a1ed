"""The budget's own count against a malloc hook that knows nothing of it, term by term.

Slots and tensors are aligned blocks, the host arena is mapped, and the rest has to be within what
``hydra_ext.runtime.placement.exempt`` names.
"""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from hydra_ext.runtime.placement import exempt
from support.models.zoo import FAMILIES
from support.runtime.hooked_run import HookedRun, Scenario, StepSeen, build_hook, observe
from support.training import Recipe, build, parameter_bytes, plain_peak

SCENARIOS = {
    "gpt2": ("gpt2", Recipe(), 25, False),
    "gpt2-checkpointing": ("gpt2", Recipe(checkpointing="plain"), 25, False),
    "gpt2-autocast": ("gpt2", Recipe(autocast=True), 25, False),
    "gpt2-autocast-without-bf16": ("gpt2", Recipe(autocast=True), 25, True),
    "unet": ("unet", Recipe(), 50, False),
    "unet-autocast-room-for-all": ("unet", Recipe(autocast=True), 110, False),
    "unet-autocast-without-bf16": ("unet", Recipe(autocast=True), 110, True),
}
BY_DEFAULT = ("gpt2", "unet-autocast-without-bf16")


def _scenario(family: str, recipe: Recipe, percent: int, without_bf16: bool) -> Scenario:
    parameters = parameter_bytes(build(FAMILIES[family], recipe))
    budget = plain_peak(FAMILIES[family], recipe) + percent * parameters // 100
    return Scenario(family, recipe.checkpointing, recipe.autocast, budget, without_bf16)


def _copied_to_float(scenario: Scenario, step: StepSeen) -> int:
    """At most so much of exempt.HALF_PRECISION is there at a time."""
    without = scenario.without_bf16 or not torch.cpu._is_avx512_bf16_supported()
    return 2 * step.largest_tensor if scenario.autocast and without else 0


@pytest.fixture(scope="module")
def hook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_hook(tmp_path_factory.mktemp("hook"))


Seen = tuple[Scenario, HookedRun]


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in BY_DEFAULT else pytest.mark.full) for name in SCENARIOS],
)
def seen(request: pytest.FixtureRequest, hook: Path) -> Seen:
    scenario = _scenario(*SCENARIOS[request.param])
    (run,) = observe(hook, [scenario])
    return scenario, run


def test_slots_are_the_bytes_that_the_ledger_counts_at_every_moment(seen: Seen) -> None:
    _, run = seen
    assert run.windows == 2 * len(run.steps)
    assert run.weights_moved > 0
    for step in run.steps:
        for moment in (step.after_forward, step.after_backward, step.after_step):
            assert moment.slots == moment.ledger_slots
    assert any(step.after_forward.slots > 0 for step in run.steps)


def test_tensors_are_what_the_ledger_counts_and_kernels_compiled_in_the_first_step(seen: Seen) -> None:
    _, run = seen
    kernels = run.steps[0].after_step.tensors - run.steps[0].after_step.ledger_tensors
    assert 0 <= kernels <= exempt.KERNELS.once_bytes
    for step in run.steps[1:]:
        for moment in (step.after_forward, step.after_backward, step.after_step):
            assert moment.tensors == moment.ledger_tensors + kernels
        assert step.after_forward.ledger_tensors > 0
        assert step.after_step.ledger_tensors == 0


def test_the_peak_the_hook_sees_is_within_the_budget_but_for_exempt_bytes(seen: Seen) -> None:
    scenario, run = seen
    kernels = run.steps[0].after_step.tensors - run.steps[0].after_step.ledger_tensors
    largest_gradient = max(parameter.nbytes for parameter in FAMILIES[scenario.family].make(0).parameters())
    for step in run.steps[1:]:
        held = step.hook_device_peak - kernels
        assert step.ledger_peak <= scenario.budget
        assert held <= step.ledger_peak + exempt.SCRATCH.passing_bytes + _copied_to_float(scenario, step)
        # The lane frees a gradient before it is counted down, so that the count may be ahead by one of them.
        assert step.ledger_peak <= held + largest_gradient


def test_mappings_are_the_host_arena_and_kernels_compiled_in_the_first_step(seen: Seen) -> None:
    _, run = seen
    kernels = run.steps[0].after_step.mapped - run.steps[0].after_step.arena
    assert 0 <= kernels <= exempt.KERNELS.once_bytes
    for step in run.steps[1:]:
        for moment in (step.after_forward, step.after_backward, step.after_step):
            assert moment.mapped == moment.arena + kernels
        assert step.after_step.arena > 0, "gradients go to the arena"


def test_the_heap_holds_only_bookkeeping(seen: Seen) -> None:
    scenario, run = seen
    left = [step.after_step.heap for step in run.steps]
    assert left[0] <= exempt.BOOKKEEPING.once_bytes
    for before, after in pairwise(run.steps):
        passing = after.hook_heap_peak - before.after_step.heap
        assert passing <= exempt.BOOKKEEPING.passing_bytes + _copied_to_float(scenario, after)
    assert left[-1] - left[1] <= exempt.BOOKKEEPING.passing_bytes


def test_matrix_buffers_are_made_in_the_first_step(seen: Seen) -> None:
    _, run = seen
    kept = {moment.matrix_buffers for step in run.steps[1:] for moment in (step.after_forward, step.after_step)}
    assert kept == {run.steps[0].after_step.matrix_buffers}
    assert max(kept) <= exempt.MATRIX_BUFFERS.once_bytes


def test_every_exemption_has_a_name_of_its_own_and_a_reason() -> None:
    assert len({exemption.name for exemption in exempt.EXEMPTIONS}) == len(exempt.EXEMPTIONS)
    assert all(exemption.why.endswith(".") for exemption in exempt.EXEMPTIONS)
