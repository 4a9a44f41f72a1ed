"""Figures of cards and of this machine."""

from __future__ import annotations

import time

import pytest
import torch

from hydra_ext.errors import InvalidArgument
from hydra_ext.profile.cards import CARDS, Speed, card_named, speed_of_this_machine


def test_names_and_figures_belong_together() -> None:
    for name, card in CARDS.items():
        model, memory = name.rsplit("-", 1)
        assert card_named(name) is card
        assert model
        assert card.memory_bytes == pytest.approx(int(memory) * 2**30, rel=0.08)
        assert card.half_flops > 1.9 * card.full_flops
        assert card.link_bytes_per_second < 0.2 * card.memory_bytes_per_second
    with pytest.raises(InvalidArgument, match="rtx4090-24"):
        card_named("abacus")


def test_the_speed_of_a_card_depends_on_the_dtype() -> None:
    new, old = CARDS["h100-80"], CARDS["v100-16"]
    assert new.speed(torch.bfloat16) == new.speed(torch.float16)
    assert old.speed(torch.bfloat16) == old.speed(torch.float32)
    assert old.speed(torch.float16).flops_per_second == old.half_flops


def test_this_machine_is_measured_in_no_time() -> None:
    begin = time.thread_time()
    speed = speed_of_this_machine(torch.device("cpu"), torch.float32)
    assert time.thread_time() - begin < 1
    assert 1e8 < speed.flops_per_second < 1e14
    assert 1e8 < speed.bytes_per_second < 1e13


def test_a_speed_is_positive() -> None:
    with pytest.raises(InvalidArgument, match="positive"):
        Speed(flops_per_second=0, bytes_per_second=1)
