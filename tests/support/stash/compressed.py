"""Assertions about a compression within a bound."""

from __future__ import annotations

import torch

from hydra_ext import codec

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def assert_kept(before: torch.Tensor, after: torch.Tensor, packed: codec.Packed) -> None:
    assert (after.shape, after.dtype) == (before.shape, before.dtype)
    before = before.resolve_neg().contiguous()
    exact = ~before.isfinite() | ((before == 0) & before.signbit())
    bits = BITS[before.dtype]
    same = before.view(bits) == after.contiguous().view(bits)
    near = (before.double() - after.double()).abs() <= packed.error_bound
    wrong = ~torch.where(exact, same, near)
    if packed.keep_signs:
        wrong |= ~exact & (before.sign() != after.sign())
    assert not wrong.any(), (before[wrong][:5].tolist(), after[wrong][:5].tolist(), packed)
