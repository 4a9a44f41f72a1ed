"""The largest difference between two sums of the same gradients in different orders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


class Summands:
    """The gradients that backward passes add up for some leaves.

    Attributes:
        counts: The number of summands so far, by name.
        magnitudes: The sums of their magnitudes, in fp64.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.magnitudes: dict[str, Tensor] = {}
        self._epsilons: dict[str, float] = {}

    def watch(self, roots: Iterable[Tensor], leaves: Mapping[str, Tensor]) -> None:
        """Records what the next backward pass from ``roots`` adds to each leaf."""
        for name, leaf in leaves.items():
            self.counts.setdefault(name, 0)
            self.magnitudes.setdefault(name, torch.zeros_like(leaf, dtype=torch.float64))
            self._epsilons[name] = torch.finfo(leaf.dtype).eps
        names = {id(leaf): name for name, leaf in leaves.items()}
        ahead = [root.grad_fn for root in roots]
        seen = set(ahead)
        while ahead:
            node = ahead.pop()
            if node is None:
                continue
            uses = []
            for place, (following, _) in enumerate(node.next_functions):
                name = names.get(id(getattr(following, "variable", None)))
                if name is not None:
                    uses.append((place, name))
                elif following not in seen:
                    seen.add(following)
                    ahead.append(following)
            if uses:
                node.register_hook(self._note(uses))

    def bound(self, name: str) -> Tensor:
        """Returns the largest difference, for each element, between two sums of the summands.

        Each of n - 1 additions rounds once, whatever the order: Higham, Accuracy and Stability of Numerical
        Algorithms, section 4.2.
        """
        roundings = max(self.counts[name] - 1, 0) * self._epsilons[name] / 2
        return 2 * roundings / (1 - roundings) * self.magnitudes[name]

    def _note(self, uses: list[tuple[int, str]]) -> Callable[[Any, Any], None]:
        def note(gradients: Any, _: Any) -> None:
            for place, name in uses:
                if gradients[place] is not None:
                    self.counts[name] += 1
                    self.magnitudes[name] += gradients[place].detach().double().abs()

        return note


def assert_sums_alike(found: Tensor, expected: Tensor, bound: Tensor, where: str) -> None:
    beyond = (found.double() - expected.double()).abs() - bound
    assert beyond.max().item() <= 0, f"{where}: {beyond.max().item()} beyond the bound of its order"
