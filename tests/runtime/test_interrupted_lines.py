"""A KeyboardInterrupt at any line that hydra_ext runs in a forward or a backward."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from itertools import chain
from types import FrameType
from typing import Any

import pytest
import torch
from runtime.test_threads import BATCHES, POISONED, adam, faces, stack, step

import hydra_ext
from support.benches import ROOMY, assert_same

# Python looks for signals when a function begins, a loop turns and a call ends: never between `try:` or `finally:` and
# what follows.
_IN_C = ("with windows_of(", "with torch._C.DisableTorchFunction(")  # entered and left by code in C
_NOT_INTERRUPTED = ("try:", *_IN_C, "window.exit(", "window.end_visit(")


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line of Python that hydra_ext, or contextlib for it, runs in a call."""

    def __init__(self, line: int) -> None:
        self._left = line
        self.raised = False
        self.error: BaseException | None = None  # with its traceback, as notebooks keep it

    def call(self, work: Callable[[], Any]) -> None:
        before = sys.gettrace()
        try:
            sys.settrace(self._trace)
            work()
        except KeyboardInterrupt as error:
            self.error = error
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        path = frame.f_code.co_filename
        if "hydra_ext" not in path and "contextlib" not in path:
            return None
        if event == "line" and not linecache.getline(path, frame.f_lineno).strip().startswith(_NOT_INTERRUPTED):
            self._left -= 1
            if self._left == 0:
                self.raised = True
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace


# Python drops what is raised while a generator is being closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_an_interrupt_at_any_line_of_ours_leaves_no_window_open(backward: bool) -> None:
    plain, model = stack(), stack()
    expected = [step(plain, optimizer, batch) for optimizer in [adam(plain)] for batch in BATCHES]
    optimizer = adam(model)
    kept = []
    with hydra_ext.offload(model, optimizer, budget=ROOMY, checks=POISONED) as run:
        seen = [step(model, optimizer, BATCHES[0])]
        lines = 0
        while True:
            lines += 1
            loss = model(BATCHES[1]).sum() if backward else None
            interrupt = Interrupt(lines)
            interrupt.call(loss.backward if loss is not None else lambda: model(BATCHES[1]))
            assert not run.core.gate.open
            assert run.core.pager.pins == 0
            assert faces(model) == 0
            assert torch._C._is_torch_function_enabled()
            if not interrupt.raised:
                break
            kept.append(interrupt)
        assert lines > 20
        optimizer.zero_grad()
        seen += [step(model, optimizer, batch) for batch in BATCHES[1:]]
    assert_same(list(chain(*expected)), list(chain(*seen)))
