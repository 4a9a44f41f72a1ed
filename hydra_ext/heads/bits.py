"""Whether a head in rows has the bits of the plain one on this machine: both are tried with the shapes at hand.

Which kernel a matrix library takes, and in which order that sums, depends on shapes, types, threads and the machine.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hydra_ext.heads.terms import Logits, Parts
from hydra_ext.heads.unmade import Unmade, Unmaking


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """What kernels depend on, beside the machine."""

    rows: int
    inputs: int
    classes: int
    has_bias: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def weight_bytes(self) -> int:
        return self.inputs * self.classes * self.dtype.itemsize

    @property
    def parts(self) -> Parts:
        return Parts.of(self.rows, self.classes, self.weight_bytes, max(self.dtype.itemsize, torch.float32.itemsize))

    @property
    def logits_bytes(self) -> int:
        """Of the logits, as the loss takes them."""
        return self.rows * self.classes * max(self.dtype.itemsize, torch.float32.itemsize)

    @property
    def least_bytes(self) -> int:
        """That a plain head takes at least, nearly: the weight, the logits' log-softmax, and both gradients."""
        return 3 * self.logits_bytes + self.weight_bytes

    @property
    def ample_bytes(self) -> int:
        """That are enough: the logits too, which the user may hold, and the weight's gradient."""
        return 4 * self.logits_bytes + 2 * self.weight_bytes


_known: dict[tuple[HeadShape, int, str], bool] = {}


def has_plain_bits(shape: HeadShape) -> bool:
    """Whether loss and gradients have the same bits. The first call with a shape runs both heads, outside of budgets.

    False as well if the plain one cannot run, as without memory for it.
    """
    threads = torch.get_num_threads()
    key = shape, threads, torch.get_float32_matmul_precision()
    if key not in _known:
        found: list[bool] = []
        # A thread of its own: allocations are not charged there, and the caller's modes and hooks are not active.
        trial = threading.Thread(target=lambda: found.append(_try(shape, threads)), name="head-in-rows")
        trial.start()
        trial.join()
        _known[key] = found == [True]
    return _known[key]


def _try(shape: HeadShape, threads: int) -> bool:
    try:
        return torch.get_num_threads() == threads and _is_alike(shape)
    except RuntimeError:
        return False


def _is_alike(shape: HeadShape) -> bool:
    draw = torch.Generator(shape.device).manual_seed(0)

    def drawn(*sizes: int) -> Tensor:
        return torch.empty(sizes, dtype=shape.dtype, device=shape.device).normal_(generator=draw)

    hidden = drawn(shape.rows, shape.inputs)
    weight = drawn(shape.classes, shape.inputs).mul_(shape.inputs**-0.5)
    bias = drawn(shape.classes) if shape.has_bias else None
    target = torch.randint(shape.classes, (shape.rows,), generator=draw, device=shape.device)
    plain = _trained(hidden, weight, bias, target, None)
    return all(map(torch.equal, plain, _trained(hidden, weight, bias, target, shape.parts)))


def _trained(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, parts: Parts | None
) -> tuple[Tensor, ...]:
    """The loss, and the gradients of what is given."""
    given = [each.detach().requires_grad_() for each in (hidden, weight, bias) if each is not None]
    if parts is None:
        logits = functional.linear(given[0], given[1], *given[2:])
    else:
        with Unmaking(lambda hidden, weight, bias: Unmade(Logits(hidden, weight, bias, parts))):
            logits = functional.linear(given[0], given[1], *given[2:])
    loss = functional.cross_entropy(logits.float() if logits.dtype.itemsize < 4 else logits, target)
    return loss.detach(), *torch.autograd.grad(loss, given)
