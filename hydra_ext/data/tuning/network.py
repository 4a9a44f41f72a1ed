"""A small Q network, the same for each stage, and how it learns.

Every stage has values of its own actions, and the value of what is done to all of them is their mean. So one network
serves pipelines of any length, and the best of all joint actions is the best of each stage. See Sunehag et al., "Value-
Decomposition Networks For Cooperative Multi-Agent Learning" (2017); the targets are those of double Q-learning (van
Hasselt et al., 2016).
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.nn import functional

from hydra_ext.data.tuning.states import ACTIONS, FEATURES, State

_WIDTH = 48
_DISCOUNT = 0.75  # of the reward of the next interval
_SHARE = 0.01  # of the network that the target network takes over with every update


class Network(nn.Module):
    """Values of the actions of each stage.

    Args:
        generator: Gives the first parameters.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.own = _linear(FEATURES, _WIDTH, generator)
        self.together = _linear(3 * _WIDTH, _WIDTH, generator)
        self.values = _linear(_WIDTH, len(ACTIONS), generator)

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps({name: its.tolist() for name, its in self.state_dict().items()}))

    @staticmethod
    def read(path: Path) -> Network:
        """What :meth:`write` has written."""
        network = Network(torch.Generator("cpu"))
        found = json.loads(path.read_text())
        network.load_state_dict(
            {name: torch.tensor(its, dtype=torch.float32, device="cpu") for name, its in found.items()}
        )
        return network

    def forward(self, features: torch.Tensor, is_there: torch.Tensor) -> torch.Tensor:
        """
        Args:
            features: float32[pipelines, stages, FEATURES].
            is_there: bool[pipelines, stages]: shorter pipelines have stages that are not there.

        Returns:
            float32[pipelines, stages, actions].
        """
        own = functional.relu(self.own(features)) * is_there[..., None]
        mean = own.sum(1, keepdim=True) / is_there.sum(1)[:, None, None]
        pooled = torch.cat([mean, own.amax(1, keepdim=True)], -1).expand(-1, own.shape[1], -1)
        return cast(torch.Tensor, self.values(functional.relu(self.together(torch.cat([own, pooled], -1)))))


_NO_FEATURES, _NO_ACTIONS = [0.0] * FEATURES, [False] * len(ACTIONS)


def padded(states: Sequence[State], stages: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, what is allowed, and which stages are there: of pipelines with so many stages or fewer."""
    short = [stages - len(state.features) for state in states]
    features = [[*state.features, *[_NO_FEATURES] * none] for state, none in zip(states, short, strict=True)]
    allowed = [[*state.allowed, *[_NO_ACTIONS] * none] for state, none in zip(states, short, strict=True)]
    is_there = [[True] * (stages - none) + [False] * none for none in short]
    return (
        torch.tensor(features, dtype=torch.float32, device="cpu"),
        torch.tensor(allowed, dtype=torch.bool, device="cpu"),
        torch.tensor(is_there, dtype=torch.bool, device="cpu"),
    )


def values(network: Network, states: Sequence[State]) -> list[list[list[float]]]:
    """Of each pipeline, stage and action: minus infinity of what is not allowed."""
    features, allowed, is_there = padded(states, max(len(state.features) for state in states))
    with torch.no_grad():
        found = network(features, is_there).masked_fill(~allowed, -math.inf)
    return cast(list[list[list[float]]], found.tolist())


@dataclass(frozen=True)
class Transition:
    """What was done in one interval, and what came of it."""

    state: State
    actions: Sequence[int]
    reward: float
    next_state: State


class Learner:
    """Learns from transitions that are kept and drawn again.

    Args:
        network: Changed in place.
        stages: The most that a pipeline has.
        kept: Number of transitions.
        batch: Number of them that an update draws.
        rate: Learning rate of Adam.
        generator: Draws them.
    """

    def __init__(
        self, network: Network, *, stages: int, kept: int, batch: int, rate: float, generator: torch.Generator
    ) -> None:
        self.network = network
        self._target = copy.deepcopy(network)
        self.optimizer = torch.optim.Adam(network.parameters(), lr=rate)
        self._batch = batch
        self._generator = generator
        self._count = 0
        self._kept = kept
        self._features = torch.zeros(2, kept, stages, FEATURES, dtype=torch.float32, device="cpu")  # now and next
        self._allowed = torch.zeros(kept, stages, len(ACTIONS), dtype=torch.bool, device="cpu")  # next
        self._is_there = torch.zeros(kept, stages, dtype=torch.bool, device="cpu")
        self._actions = torch.zeros(kept, stages, dtype=torch.int64, device="cpu")
        self._rewards = torch.zeros(kept, dtype=torch.float32, device="cpu")

    def add(self, transitions: Sequence[Transition]) -> None:
        """Take the places of the oldest ones, once there are as many as are kept."""
        if not transitions:
            return
        stages = self._is_there.shape[1]
        places = (torch.arange(len(transitions), device="cpu") + self._count) % self._kept
        self._count += len(transitions)
        self._features[0, places], _, self._is_there[places] = padded([each.state for each in transitions], stages)
        self._features[1, places], self._allowed[places], _ = padded([each.next_state for each in transitions], stages)
        actions = [[*each.actions, *[0] * (stages - len(each.actions))] for each in transitions]
        self._actions[places] = torch.tensor(actions, device="cpu")
        self._rewards[places] = torch.tensor([each.reward for each in transitions], dtype=torch.float32, device="cpu")

    def update(self) -> None:
        """One step of gradient descent, once there are transitions for a batch."""
        there = min(self._count, self._kept)
        if there < self._batch:
            return
        drawn = torch.randint(there, (self._batch,), generator=self._generator, device="cpu")
        with torch.enable_grad():
            self.optimizer.zero_grad()
            self._loss(drawn).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        with torch.no_grad():
            for mine, its in zip(self._target.parameters(), self.network.parameters(), strict=True):
                mine.lerp_(its, _SHARE)

    def _loss(self, drawn: torch.Tensor) -> torch.Tensor:
        before, after = self._features[:, drawn]
        there, allowed = self._is_there[drawn], self._allowed[drawn]
        found = self.network(before, there).gather(2, self._actions[drawn][..., None])[..., 0]
        with torch.no_grad():
            best = self.network(after, there).masked_fill(~allowed, -math.inf).argmax(-1, keepdim=True)
            later = self._target(after, there).gather(2, best)[..., 0]
            goal = self._rewards[drawn] + _DISCOUNT * _mean(later, there)
        return functional.smooth_l1_loss(_mean(found, there), goal)


def _mean(each: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    return (each * there).sum(1) / there.sum(1)


def _linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """With the distributions of nn.Linear, but not from the global generator."""
    layer = nn.Linear(inputs, outputs, device="meta", dtype=torch.float32).to_empty(device="cpu")
    with torch.no_grad():
        for each in layer.parameters():
            each.uniform_(-(inputs**-0.5), inputs**-0.5, generator=generator)
    return layer
