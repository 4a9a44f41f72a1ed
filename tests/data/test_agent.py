"""The agent's values do not depend on what it is beside, it learns what gains, and it stays within memory."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_ext.data.tuning import practice
from hydra_ext.data.tuning.agent import Agent, Reward
from hydra_ext.data.tuning.network import Learner, Network, Transition, values
from hydra_ext.data.tuning.simulator import SimulatedPipeline, changed, random_problem
from hydra_ext.data.tuning.states import ACTIONS, FEATURES, Memory, State
from hydra_ext.data.tuning.views import StageView, View


def network(seed: int = 0) -> Network:
    return Network(torch.Generator().manual_seed(seed))


def state(seed: int, *, stages: int = 5) -> State:
    return Memory().state(SimulatedPipeline(random_problem(seed, stages=stages), noise=0.0, seed=0).view())


@given(st.integers(0, 99), st.integers(1, 5), st.integers(1, 5))
@settings(deadline=None, max_examples=10)
def test_values_of_a_pipeline_do_not_depend_on_those_beside_it(seed: int, stages: int, others: int) -> None:
    its = state(seed, stages=stages)
    alone = values(network(), [its])[0]
    beside = values(network(), [its, state(seed + 1, stages=others)])[0]
    torch.testing.assert_close(torch.tensor(beside[:stages]), torch.tensor(alone))


def test_stages_are_alike_to_the_network() -> None:
    its = state(3)
    order = [3, 0, 4, 1, 2]
    turned = values(
        network(), [State([its.features[index] for index in order], [its.allowed[index] for index in order])]
    )[0]
    torch.testing.assert_close(torch.tensor(turned), torch.tensor(values(network(), [its])[0])[order])


def test_an_action_is_worth_its_reward_and_what_comes_later() -> None:
    """One stage in one state. The best action's value would be -0.1 / (1 - 0.75) in the end."""
    generator = torch.Generator().manual_seed(0)
    learner = Learner(network(), stages=1, kept=64, batch=32, rate=1e-2, generator=generator)
    only = State([[1.0] * FEATURES], [[True, False, False, True, False]])
    for _ in range(32):
        learner.add([Transition(only, [3], -0.1, only), Transition(only, [0], -0.3, only)])
    for _ in range(120):
        learner.update()
    found = values(learner.network, [only])[0][0]
    assert found[3] - found[0] == pytest.approx(0.2, abs=0.03)
    assert -0.45 < found[3] < -0.17
    assert found[1] == found[2] == found[4] == -math.inf


def test_a_reward_is_the_logarithm_of_throughput_and_free_memory() -> None:
    view = View([StageView(1, 0.1, 10)], rate=5.0, starved=0.5, memory=30, limit=40)
    assert Reward().of(view) == math.log(0.5)
    assert Reward(memory_weight=1.0).of(view) == pytest.approx(math.log(0.5 * (1 - 30 / 40)))


@given(st.integers(0, 999), st.integers(1, 6), st.booleans())
@settings(deadline=None, max_examples=10)
def test_an_agent_that_knows_nothing_stays_within_memory(seed: int, stages: int, learns: bool) -> None:
    agent = Agent(network(seed), learns=learns, seed=seed)
    pipeline = SimulatedPipeline(random_problem(seed, stages=stages), noise=0.03, seed=seed)
    for interval in range(40):
        if interval == 20:
            pipeline.problem = changed(pipeline.problem, seed)
        view = pipeline.view()
        assert view.memory <= view.limit or interval == 20
        pipeline.workers = agent.decide(view)
        assert len(pipeline.workers) == stages
        assert min(pipeline.workers) >= 1


def test_what_is_above_the_limit_is_given_back_at_once() -> None:
    view = View([StageView(4, 0.1, 10), StageView(3, 0.1, 2)], rate=5.0, starved=0.0, memory=46, limit=25)
    assert Agent(network()).decide(view) == (1, 3)


def decisions(seed: int, *, learns: bool = True) -> list[tuple[int, ...]]:
    agent, pipeline = (
        Agent(network(), learns=learns, seed=seed),
        SimulatedPipeline(random_problem(5), noise=0.1, seed=0),
    )
    found = []
    for _ in range(40):
        pipeline.workers = agent.decide(pipeline.view())
        found.append(pipeline.workers)
    return found


def test_draws_are_its_own_and_follow_from_its_seed() -> None:
    random.seed(3)
    torch.manual_seed(3)
    before = random.getstate(), torch.get_rng_state()
    first = decisions(0)
    practice.trained(seed=1, intervals=3)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    random.seed(4)
    torch.manual_seed(4)
    assert decisions(0) == first != decisions(1)
    assert decisions(0, learns=False) == decisions(1, learns=False)


def test_a_network_is_not_changed_by_the_agent_and_comes_back_from_its_file(tmp_path: Path) -> None:
    its = practice.trained(seed=1, intervals=6)
    its.write(tmp_path / "network.json")
    agent, pipeline = Agent(its), SimulatedPipeline(random_problem(5), noise=0.0, seed=0)
    for _ in range(30):
        pipeline.workers = agent.decide(pipeline.view())
    read = Network.read(tmp_path / "network.json")
    assert values(read, [state(1)]) == values(its, [state(1)])
    assert values(practice.trained(seed=1, intervals=6), [state(1)]) == values(its, [state(1)])
    assert values(practice.trained(seed=2, intervals=6), [state(1)]) != values(its, [state(1)])


def test_what_is_allowed_alone_fits_the_limit() -> None:
    view = View(
        [StageView(1, 0.1, 10), StageView(8, 0.1, 4), StageView(2, 0.1, 30)],
        rate=5.0,
        starved=0.5,
        memory=70,
        limit=100,
    )
    found = Memory().state(view).allowed
    assert [ACTIONS[index] for index, can in enumerate(found[0]) if can] == [1.0, 1.125, 2.0]
    assert [ACTIONS[index] for index, can in enumerate(found[1]) if can] == [0.5, 0.875, 1.0, 1.125]  # twice needs 32
    assert [ACTIONS[index] for index, can in enumerate(found[2]) if can] == [0.5, 0.875, 1.0, 1.125]
