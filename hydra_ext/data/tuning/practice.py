"""Trains the agent's network with random problems in the simulator.

As a command it writes a file: python -m hydra_ext.data.tuning.practice network.json [--seed 0] [--intervals 3000]
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch

from hydra_ext.data.tuning.agent import Reward, chosen
from hydra_ext.data.tuning.network import Learner, Network, Transition, values
from hydra_ext.data.tuning.rule import shed
from hydra_ext.data.tuning.simulator import SimulatedPipeline, changed, random_problem
from hydra_ext.data.tuning.states import Memory, State

FIRST = 10**6  # seeds of the problems begin here: lower ones are for tests of what was learned
_STAGES = 7  # at most
_PIPELINES = 32  # at the same time
_LENGTH = 50  # intervals of a problem
_NOISES = (0.0, 0.01, 0.03, 0.1)
_KEPT, _BATCH = 50_000, 128
_UPDATES = 2  # an interval
_RATE = 1e-3  # of Adam, at first
_DRAWN = 0.02  # share of actions that are drawn, at last


class _Pipeline:
    """One after the other: each begins with one worker a stage, and changes once in its middle."""

    def __init__(self, draw: random.Random, age: int) -> None:
        self._draw = draw
        self._begin()
        self._age = age  # so that not all begin together

    def _begin(self) -> None:
        seed = FIRST + self._draw.randrange(10**9)
        problem = random_problem(seed, stages=self._draw.randint(1, _STAGES))
        self.simulated = SimulatedPipeline(problem, noise=self._draw.choice(_NOISES), seed=seed)
        self._memory = Memory()
        self._age = 0
        self.last: tuple[State, list[int]] | None = None
        self._look()

    def _look(self) -> None:
        self.view = self.simulated.view()
        self.state = self._memory.state(self.view)

    def go_on(self, actions: list[int] | None, workers: tuple[int, ...]) -> None:
        self._age += 1
        self.last = None if actions is None else (self.state, actions)
        if self._age >= _LENGTH:
            self._begin()
            return
        self.simulated.workers = workers
        if self._age == _LENGTH // 2:
            self.simulated.problem = changed(self.simulated.problem, self._draw.randrange(10**9))
        self._look()


def trained(*, seed: int = 0, intervals: int = 3000, reward: Reward | None = None) -> Network:
    """A network that has learned from so many intervals of 32 pipelines at a time: some minutes of one core."""
    reward = reward or Reward()
    draw, generator = random.Random(seed), torch.Generator("cpu").manual_seed(seed)
    network = Network(generator)
    learner = Learner(network, stages=_STAGES, kept=_KEPT, batch=_BATCH, rate=_RATE, generator=generator)
    pipelines = [_Pipeline(draw, draw.randrange(_LENGTH)) for _ in range(_PIPELINES)]
    for interval in range(intervals):
        left = 1 - interval / intervals
        drawn = max(_DRAWN, 1.5 * left - 0.5)
        for group in learner.optimizer.param_groups:
            group["lr"] = _RATE * max(0.03, left)
        found = values(network, [each.state for each in pipelines])
        learner.add([Transition(*each.last, reward.of(each.view), each.state) for each in pipelines if each.last])
        for pipeline, its in zip(pipelines, found, strict=True):
            if pipeline.view.memory > pipeline.view.limit:
                pipeline.go_on(None, shed(pipeline.view))
            else:
                pipeline.go_on(*chosen(pipeline.view, its, drawn, draw))
        for _ in range(_UPDATES):
            learner.update()
    return network


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--intervals", type=int, default=3000)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    trained(seed=asked.seed, intervals=asked.intervals).write(asked.file)


if __name__ == "__main__":
    main()
