"""What training takes of host memory for a parameter, with an exact fp32 master and AdamW."""

from itertools import pairwise

import pytest

from hydra_ext.runtime.placement import exempt
from support.runtime.hooked_run import build_hook
from support.runtime.host_memory import ALIGNED, HEAP, MAPPED, MICROBATCHES, PAGE_ALIGNED, STEPS, HostMemory, observe

SETTLED = slice(3, None)  # steps by which everything has been seen


@pytest.fixture(scope="module")
def resident() -> HostMemory:
    return observe(layers=48)


@pytest.fixture(
    scope="module", params=[MICROBATCHES, pytest.param(1, marks=pytest.mark.full)], ids=["one round", "several rounds"]
)
def hooked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HostMemory:
    return observe(layers=8, hook=build_hook(tmp_path_factory.mktemp("hook")), round_size=request.param)


def test_weights_and_state_take_at_most_12_5_bytes_a_parameter(hooked: HostMemory) -> None:
    assert hooked.updates == STEPS
    assert hooked.arena_before + hooked.state <= 12.5 * hooked.parameters


@pytest.mark.full
def test_weights_and_state_take_at_most_12_5_bytes_a_parameter_and_gradients_2_1(resident: HostMemory) -> None:
    assert resident.parameters > 40e6
    assert resident.updates == STEPS
    assert resident.arena_before + resident.state <= 12.5 * resident.parameters
    for step in resident.steps:
        assert step.arena - resident.arena_before <= 2.1 * resident.parameters


@pytest.mark.full
def test_the_process_holds_no_more_than_that_and_the_simulated_device(resident: HostMemory) -> None:
    for step in resident.steps:
        held = step.resident - resident.resident_before - step.slots
        assert held >= (2 + 10 + 2) * resident.parameters, "something is not counted"
        assert held <= (12.5 + 2.1) * resident.parameters


def test_nothing_is_allocated_for_a_step_from_the_fourth_on(hooked: HostMemory) -> None:
    assert hooked.steps[-1].live[MAPPED] > hooked.steps[-1].arena // 2, "the hook saw nothing"
    for before, after in pairwise(hooked.steps[SETTLED]):
        assert after.arena == before.arena
        assert after.live[ALIGNED] == before.live[ALIGNED]
        assert after.live[MAPPED] == before.live[MAPPED]
        assert after.peak[MAPPED] <= after.live[MAPPED] + exempt.SCRATCH.passing_bytes
        assert after.live[PAGE_ALIGNED] == after.slots
        assert abs(after.live[HEAP] - before.live[HEAP]) <= exempt.BOOKKEEPING.passing_bytes
        # In between, what tensors and slots take is the device's.
        passing = after.peak[ALIGNED] + after.peak[PAGE_ALIGNED] - before.live[ALIGNED] - before.live[PAGE_ALIGNED]
        assert passing <= after.device_peak + exempt.SCRATCH.passing_bytes
