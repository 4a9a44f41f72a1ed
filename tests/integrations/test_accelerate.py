"""An Accelerator around an offloaded model, beside accelerate's own around a plain one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import DistributedType
from accelerate.utils.memory import find_executable_batch_size
from torch.utils.data import DataLoader

import hydra_ext
from hydra_ext.errors import InvalidArgument, StateError
from hydra_ext.integrations.accelerate import Accelerator
from support.benches import assert_same, tight_budget
from support.runtime.outcomes import POISONED
from support.trainers import forget_accelerate, states_of
from support.windows.window_subjects import batch, language_loss, tiny_gpt2

STEPS = 4
ROWS = [row for index in range(STEPS) for row in batch(index)]


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    forget_accelerate()


def trained(
    *,
    accelerator_of: type[accelerate.Accelerator],
    offloads: str = "",
    accumulates: int = 1,
    clips: bool = False,
    precision: str = "no",
    schedules: bool = False,
    native: bool = False,
    between: Callable[[accelerate.Accelerator, int], None] = lambda *_: None,
) -> list[Any]:
    """Losses, norms, a loss of an evaluation, weights and optimizer states.

    Args:
        offloads: When the context is entered: "before" or "after" ``prepare``; empty for never.
    """
    torch.manual_seed(0)
    accelerator = accelerator_of(cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulates)
    model = tiny_gpt2()
    optimizer: Any = (hydra_ext.optim.AdamW if native else torch.optim.AdamW)(model.parameters(), lr=1e-3)
    schedule: Any = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    loader: Any = DataLoader(ROWS, batch_size=2)  # type: ignore[arg-type]
    budget = tight_budget(tiny_gpt2(), language_loss)

    def context(optimizer: Any) -> Any:
        return hydra_ext.offload(model, optimizer, budget=budget, checks=POISONED)

    with context(optimizer) if offloads == "before" else nullcontext() as early:
        prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if schedules:
            schedule = accelerator.prepare(schedule)
        with context(optimizer) if offloads == "after" else nullcontext() as late:
            found = []
            for step, tokens in enumerate(loader):
                with accelerator.accumulate(prepared):
                    loss = prepared(tokens, labels=tokens, use_cache=False).loss
                    accelerator.backward(loss)
                    if clips and accelerator.sync_gradients:
                        found.append(accelerator.clip_grad_norm_(prepared.parameters(), 0.1))
                    optimizer.step()
                    if schedules:
                        schedule.step()
                    optimizer.zero_grad()
                found.append(loss.detach())
                between(accelerator, step)
            prepared.eval()
            with torch.no_grad():
                logits = prepared(batch(90)).logits
            found.append(accelerator.gather_for_metrics(logits))
            found += [value.clone() for value in accelerator.get_state_dict(prepared).values()]
            run = early or late
            if offloads:
                assert run.report().evictions > 0
                assert run.steps == STEPS // accumulates
    return [*found, *states_of(model, optimizer)]


def same_as_plain(offloads: str, **options: Any) -> None:
    expected = trained(accelerator_of=accelerate.Accelerator, **options)
    forget_accelerate()
    assert_same(expected, trained(accelerator_of=Accelerator, offloads=offloads, **options))


FEATURES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "accumulation": {"accumulates": 2},
    "clipping": {"clips": True},
    "clipping and accumulation": {"clips": True, "accumulates": 2},
    "bf16": {"precision": "bf16"},
    "schedule": {"schedules": True, "accumulates": 2},
    "optimizer of hydra_ext": {"native": True, "clips": True},
}


@pytest.mark.cases(4)
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("offloads", ["before", "after"])
def test_a_feature_has_the_bits_of_accelerates_own(feature: str, offloads: str) -> None:
    same_as_plain(offloads, **FEATURES[feature])


def test_accelerates_own_accelerator_works_inside_and_outside() -> None:
    """With one process it moves nothing on a CPU, so ours is not needed there."""
    expected = trained(accelerator_of=accelerate.Accelerator, clips=True)
    for offloads in ("before", "after"):
        assert_same(expected, trained(accelerator_of=accelerate.Accelerator, offloads=offloads, clips=True))


def test_a_state_is_saved_and_loaded(tmp_path: Path) -> None:
    """In the middle, and what comes then is as it was."""

    def between(accelerator: accelerate.Accelerator, step: int) -> None:
        folder = tmp_path / type(accelerator).__module__.replace(".", "_")
        if step == 1:
            accelerator.save_state(str(folder))
            for model in accelerator._models:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(2.0)
            accelerator.load_state(str(folder))

    same_as_plain("before", between=between)


def test_the_batch_size_finder_goes_on_after_a_budget_that_is_too_small() -> None:
    tried = []

    @find_executable_batch_size(starting_batch_size=8)  # type: ignore[untyped-decorator]
    def train(size: int) -> int:
        tried.append(size)
        if size > 2:
            with hydra_ext.offload(tiny_gpt2(), budget="1KiB"):
                pass
        return size

    assert train() == 2
    assert (tried[0], tried[-1]) == (8, 2)
    assert len(tried) > 2


def test_an_accelerator_that_shards_weights_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Accelerator, "distributed_type", property(lambda _: DistributedType.FSDP))
    with pytest.raises(InvalidArgument, match="accelerate is configured for FSDP, which moves weights itself"):
        Accelerator(cpu=True)


def test_ranks_whose_gradients_nothing_averages_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = Accelerator(cpu=True)
    model = tiny_gpt2()
    monkeypatch.setattr(Accelerator, "use_distributed", property(lambda _: True))
    monkeypatch.setattr(Accelerator, "num_processes", property(lambda _: 2))
    prepared = accelerator.prepare_model(model)
    assert prepared is model
    with pytest.raises(StateError, match="nothing averages the gradients of a GPT2LMHeadModel"):
        accelerator.backward(language_loss(model, 0))
    budget = tight_budget(tiny_gpt2(), language_loss)
    with (
        hydra_ext.offload(model, budget=budget),
        pytest.raises(StateError, match="make the Accelerator before the context"),
    ):
        accelerator.backward(language_loss(model, 0))
