"""Chooses the blocks whose home is the device: as many as the budget allows, from the last one backwards.

Activations, and a slot for every block, come first. A block at home on the device keeps its weights, its gradients and
the state of a native optimizer (:mod:`hydra_ext.optim`) there and is updated there. It returns to the host when room is
needed, when an operation outside the model uses one of its tensors, and before ``run.sync()`` and ``state_dict()``
return. After a return the next attempt waits for some steps, more each time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch import Tensor

from hydra_ext import _C
from hydra_ext.blocks import Layout
from hydra_ext.errors import TransferError
from hydra_ext.optim.host_optimizer import HostOptimizer

logger = logging.getLogger(__name__)

STEPS_TO_SEE = 2
_LONGEST_WAIT = 1024
_LONG_STAY = 8  # a stay of this many waits resets the wait


class Homes:
    """Moves blocks of one model to the device, step by step.

    Args:
        core: Core of the model.
        layout: Blocks of the model.
        optimizer: Optimizer that steps them.
        budget: Device bytes.
        in_flight: Bytes of gradients that may be on their way to the host at once; 0 for no bound.
        refusal: Reason why no block can settle on the device; empty if blocks can.
    """

    def __init__(
        self,
        core: _C.PagedModel,
        layout: Layout,
        optimizer: HostOptimizer,
        *,
        budget: int,
        in_flight: int,
        refusal: str,
    ) -> None:
        self._core = core
        self._blocks = layout.blocks
        self._optimizer = optimizer
        self._budget = budget
        self._in_flight = in_flight
        self._refusal = refusal
        self._stepped: set[Tensor] = set()
        self._steps = 0
        self._settled: dict[int, int] = {}  # by block: the step after which it settled on the device
        self._wait = 1
        self._next_try = STEPS_TO_SEE
        self.reason = self._refusal or f"{STEPS_TO_SEE} steps are seen first"

    # ---- a step -----------------------------------------------------------------------------------------------------

    def expect_step(self, gradients: Mapping[int, Sequence[tuple[Tensor, Tensor]]]) -> None:
        """Brings blocks for which the coming step creates optimizer state to the host, before anything is changed."""
        for block in self._core.homes.on_device:
            if any(parameter not in self._stepped for parameter, _ in gradients.get(block, ())):
                self._core.moves.bring_home(block)
        for members in gradients.values():
            self._stepped.update(parameter for parameter, _ in members)

    def end_step(self) -> None:
        """Settles the blocks that fit on the device, if an attempt is due."""
        self._steps += 1
        if self._refusal:
            return
        self._note_returned()
        if self._steps < self._next_try:
            return
        left = self._left()
        full, refused = "", ""
        for block in reversed(range(len(self._blocks))):
            if block in self._settled:
                continue
            full = self._why_not(block, left)
            if full:
                break
            reason = self._refused(block)
            if reason:
                refused = refused or reason
                continue
            self._settled[block] = self._steps
            left -= self._cost(block)
        self.reason = refused or full
        if refused:
            self._postpone()

    def _refused(self, block: int) -> str:
        """Makes the device the block's home. Returns why that failed; empty if it did not."""
        name = self._blocks[block].name
        try:
            settled = self._core.moves.settle_on_device(block, self._state_of_block(block))
        except TransferError as error:
            logger.warning("'%s' stays on the host: %s", name, error)
            return f"'{name}' could not be moved: {error}"
        return "" if settled else f"memory of '{name}' has another owner, or there was no room for it"

    def _postpone(self) -> None:
        self._wait = min(max(2 * self._wait, 1), _LONGEST_WAIT)
        self._next_try = self._steps + self._wait

    def _note_returned(self) -> None:
        returned = set(self._settled) - set(self._core.homes.on_device)
        if not returned:
            return
        stayed = self._steps - max(self._settled.pop(block) for block in returned)
        if stayed >= _LONG_STAY * self._wait:
            self._wait = 0
        self._postpone()
        name = self._blocks[max(returned)].name
        self.reason = (
            f"'{name}' came back, for want of room or because its tensors were used on the host; the next try is after "
            f"step {self._next_try}"
        )

    # ---- bytes ------------------------------------------------------------------------------------------------------

    def _why_not(self, block: int, left: int) -> str:
        name = self._blocks[block].name
        trained = [parameter for _, parameter in self._blocks[block].parameters if parameter.requires_grad]
        if not all(parameter in self._stepped for parameter in trained):
            return f"'{name}' has parameters that the optimizer has not stepped yet"
        cost = self._cost(block)
        if cost > left:
            return f"'{name}' needs {_C.human_bytes(cost)} more, and {_C.human_bytes(max(left, 0))} are left"
        return ""

    def _left(self) -> int:
        """Bytes of the budget beside activations, a slot for every block, gradients on their way, homes, and slack."""
        kinds = (_C.PassKind.FORWARD, _C.PassKind.BACKWARD)
        activations = max((size for kind in kinds for _, size in self._core.pager.recorded(kind)), default=self._budget)
        slots = sum(_aligned(p.nbytes) for block in self._blocks for _, p in block.parameters)
        homes = sum(self._cost(block) for block in self._settled)
        return self._budget - self._core.memory.slack - activations - slots - self._margin() - homes

    def _margin(self) -> int:
        """Bytes of gradients on their way."""
        largest = max((self._gradient_bytes(block) for block in range(len(self._blocks))), default=0)
        return max(2 * largest, self._in_flight)

    def _cost(self, block: int) -> int:
        """Bytes of the block's gradients and state, which come on top of its slot."""
        return self._gradient_bytes(block) + sum(_aligned(state.nbytes) for state in self._state_of_block(block))

    def _gradient_bytes(self, block: int) -> int:
        return sum(parameter.nbytes for _, parameter in self._blocks[block].parameters if parameter.requires_grad)

    def _state_of_block(self, block: int) -> list[Tensor]:
        return [state for _, parameter in self._blocks[block].parameters for state in self._state_of(parameter)]

    def _state_of(self, parameter: Tensor) -> list[Tensor]:
        return self._optimizer.tensors_beside(parameter)

    # ---- for the plan and the report ---------------------------------------------------------------------------------

    def demand(self) -> tuple[int, int]:
        """Bytes that homes of all blocks would take on the device beside slots, and bytes that they leave free."""
        if self._refusal:
            return 0, 0
        return sum(self._cost(block) for block in range(len(self._blocks))), self._margin()

    @property
    def names(self) -> tuple[str, ...]:
        """The blocks at home on the device."""
        return tuple(self._blocks[block].name for block in self._core.homes.on_device)

    @property
    def nbytes(self) -> int:
        """Bytes of weights, gradients and state of the blocks at home on the device."""
        blocks = self._core.homes.on_device
        slots = sum(_aligned(p.nbytes) for block in blocks for _, p in self._blocks[block].parameters)
        return slots + sum(self._cost(block) for block in blocks)


def _aligned(size: int) -> int:
    return -(-size // _C.PAGE_ALIGNMENT) * _C.PAGE_ALIGNMENT
