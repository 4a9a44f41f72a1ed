"""Decides the number of workers by Q-learning, in the way of InTune (RecSys 2023).

Its full text is not public. What is told of it, and not verified here: an agent changes the stages' shares in small
steps, is rewarded with throughput x (1 - share of memory), was trained in a simulator, and goes on learning while
training runs. The network, its states and its actions are this project's own. The limit is none of the agent's
business: no action is taken that is expected to need more, and what is above it is given back.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hydra_ext.data.tuning.network import Learner, Network, Transition, values
from hydra_ext.data.tuning.rule import shed
from hydra_ext.data.tuning.states import NOTHING, Memory, State, taken
from hydra_ext.data.tuning.views import View

_DRAWN = 0.02  # of the actions are drawn while it learns
_RATE = 1e-4
_LEAST = 0.003  # share of time or memory
_KEPT, _BATCH = 1000, 16


@dataclass(frozen=True)
class Reward:
    """The logarithm of throughput x (1 - share of memory)^weight, so that slow and fast pipelines count alike.

    Throughput is that beside what the consumer could take: the share of time in which it did not wait.

    Attributes:
        memory_weight: 1 is InTune's. 0 does not give up items for memory that is free anyway: the limit holds without.
    """

    memory_weight: float = 0.0

    def of(self, view: View) -> float:
        free = max(_LEAST, 1 - view.memory / view.limit)
        return math.log(max(_LEAST, 1 - view.starved)) + self.memory_weight * math.log(free)


class Agent:
    """Decides like a rule, one view for each interval.

    Args:
        network: A trained one. It is not changed: the agent goes on with a copy.
        learns: Whether it goes on learning, which draws a few of its actions.
        reward: What it learns from.
        seed: Of what it draws. No other generator is used.
    """

    def __init__(self, network: Network, *, learns: bool = True, reward: Reward | None = None, seed: int = 0) -> None:
        self._network = copy.deepcopy(network)
        self._learns = learns
        self._reward = reward or Reward()
        self._draw = random.Random(seed)
        self._memory = Memory()
        self._learner: Learner | None = None
        self._last: tuple[State, list[int]] | None = None

    def decide(self, view: View) -> tuple[int, ...]:
        """The workers of each stage from now on."""
        state = self._memory.state(view)
        if self._learns and self._last is not None:
            self._learn(Transition(*self._last, self._reward.of(view), state))
        if view.memory > view.limit:
            self._last = None
            return shed(view)
        found = values(self._network, [state])[0]
        actions, workers = chosen(view, found, _DRAWN if self._learns else 0.0, self._draw)
        self._last = state, actions
        return workers

    def _learn(self, transition: Transition) -> None:
        if self._learner is None:
            generator = torch.Generator("cpu").manual_seed(self._draw.getrandbits(32))
            stages = len(transition.state.features)
            self._learner = Learner(
                self._network, stages=stages, kept=_KEPT, batch=_BATCH, rate=_RATE, generator=generator
            )
        self._learner.add([transition])
        self._learner.update()


def chosen(
    view: View, found: Sequence[Sequence[float]], drawn: float, draw: random.Random
) -> tuple[list[int], tuple[int, ...]]:
    """The actions that have most value, or drawn ones, and the workers then.

    Args:
        found: Of each stage and action: values, minus infinity of what is not allowed.
        drawn: Share of the stages whose action is drawn.
    """
    wishes, gains = [], []
    for its, _ in zip(found, view.stages, strict=False):  # a batch has more stages than its shorter pipelines
        possible = [index for index, value in enumerate(its) if value > -math.inf]
        wish = draw.choice(possible) if draw.random() < drawn else max(possible, key=its.__getitem__)
        wishes.append(wish)
        gains.append(its[wish] - its[NOTHING])
    return taken(view, wishes, gains)
