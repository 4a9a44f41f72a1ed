"""Jobs that train adapters of one frozen base: they make their steps together, and none is disturbed by another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydra_ext.fleet import Job
from hydra_ext.fleet.techniques import WontDo
from hydra_ext.fleet.techniques.building import Batches, build_model
from hydra_ext.fleet.techniques.common import Asked, Beside, Common, CommonBase, base_of
from support.fleet import trainings
from support.fleet.adapters import (
    SLOW_LINK,
    WIDTH,
    assert_alone,
    begun,
    draws,
    evaluation,
    gang,
    job,
    several,
)


def test_jobs_step_together_and_have_the_numbers_of_each_alone() -> None:
    jobs = [replace(each, steps=5) for each in several()]
    with begun(jobs) as found:
        for _ in range(5):
            found.step()
        assert found.common.run is not None
        report = found.common.run.report()
        assert report.evictions > 0
        assert report.fallbacks == report.refusals == 0
    frozen = sum(each.nbytes for each in found.members[0].model.parameters() if not each.requires_grad)
    assert found.shared == [0, frozen, frozen, frozen]
    assert_alone(found, jobs)


def test_a_step_of_eight_jobs_fetches_each_block_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """All microbatches use a block while it is on the device."""
    width, layer = 128, 4 * 128 * 129
    options: dict[str, Any] = {
        "model": partial(trainings.adapted, width=width, rank=1),
        "data": partial(trainings.batches, width=width, microbatches=1),
        "evaluate": None,
    }
    jobs = [job(f"job-{i}", lr=1e-2 / 2**i, seed=i, steps=8, **options) for i in range(8)]
    with begun(jobs, 7 * layer // 2, SLOW_LINK) as found:
        found.step()
        assert found.common.run is not None
        # Which size of rounds is the fastest depends on what else this machine does.
        monkeypatch.setattr(found.common.run, "step", partial(found.common.run.step, round_size=8))
        for _ in range(3):  # the first ones measure
            found.step()
        together = [found.moved() for _ in range(3)]
        weights = sum(each.nbytes for each in found.common.run.model.parameters())  # type: ignore[union-attr]
        assert found.common.run is not None
        report = found.common.run.report()
        assert report.evictions > 0
        assert report.fallbacks == report.refusals == 0
    assert 6 * layer < max(together) <= 2 * weights  # once forward, once backward; the base does not stay there
    assert_alone(found, jobs)


def test_jobs_come_and_leave() -> None:
    """Models are on the host in between, as they were built."""
    jobs = several()[:3]
    with begun(jobs) as found:
        found.step()
        found.common.dismiss(found.members[1:2])
        assert found.common.run is None
        found.step([0, 2])
        assert len(found.common.run.model.models) == 2  # type: ignore[union-attr,arg-type]
        late = job("late", rank=2, steps=3)
        member = found.common.admit(late)
        assert found.common.share(member) > 0
        for step in range(3):
            microbatches = batches_of(late)[step]
            (outcome,) = found.common.step([Asked(member, microbatches, late.seeds(step, 2))])
            assert isinstance(outcome, float)
    assert_alone(found, jobs)
    weights, _, _ = trainings.plainly(late, threads=torch.get_num_threads())
    assert all(torch.equal(each, weights[name]) for name, each in member.model.state_dict().items())


def batches_of(given: Job) -> Sequence[Any]:
    batches = Batches(given)
    return [batches.of_step(step) for step in range(given.steps)]


def test_weights_that_differ_are_not_shared() -> None:
    jobs = [job("a"), job("b", model=partial(trainings.adapted, width=WIDTH, base=8))]
    with begun(jobs) as found:
        for _ in range(2):
            found.step()
    norm = 2 * 4 * WIDTH  # ones and zeros, in each model
    assert found.shared == [0, norm]
    assert_alone(found, jobs)


_base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)


class OverOneModule(nn.Module):
    """A model over a base that is the same object for all jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.base = _base
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.relu(self.base(x)))
        return found


def test_jobs_share_a_base_that_is_one_module() -> None:
    jobs = [job(name, model=OverOneModule, seed=seed) for seed, name in enumerate("ab")]
    with begun(jobs) as found:
        for _ in range(3):
            found.step()
    assert_alone(found, jobs)


def trained_base() -> nn.Module:
    return nn.Sequential(_base_trained, nn.Linear(WIDTH, 5))


_base_trained = nn.Linear(WIDTH, WIDTH)


def test_weights_that_two_jobs_would_train_are_refused() -> None:
    with Common(gang()) as common:
        common.share(common.admit(job("a", model=trained_base)))
        with pytest.raises(WontDo, match="weights that another job trains"):
            common.share(common.admit(job("b", model=trained_base)))


def raises_at(model: nn.Module, microbatch: Any, *, sign: float) -> Tensor:
    """Raises at the first microbatch whose numbers have this sign."""
    if float(microbatch[0].sum()) * sign > 0:
        raise RuntimeError("the loss has had a mishap")
    return trainings.loss(model, microbatch)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise RuntimeError("the backward has had a mishap")


def raises_in_backward(model: nn.Module, microbatch: Any) -> Tensor:
    found: Tensor = Backward.apply(trainings.loss(model, microbatch))  # type: ignore[no-untyped-call]
    return found


def leaves(model: nn.Module, microbatch: Any) -> Tensor:
    raise SystemExit(3)


def raises_at_once(model: nn.Module, microbatch: Any) -> Tensor:
    raise RuntimeError("the loss has had a mishap")


@pytest.mark.parametrize(
    ("loss", "said"), [(raises_at_once, "the loss has had a mishap"), (leaves, "the loss has raised SystemExit(3)")]
)
def test_a_loss_that_raises_is_its_own_job_s_failure(loss: Any, said: str) -> None:
    """The others go on from their checkpoints: what the step has changed cannot be undone for certain."""
    with begun([job("a"), job("raises", loss=loss), job("c", seed=3)]) as found:
        found.step()
    (failed,) = found.losses.pop("raises")
    assert isinstance(failed, RuntimeError)
    assert said in str(failed)
    assert all(isinstance(each, Beside) and said in str(each) for (each,) in found.losses.values())


def test_no_job_is_blamed_alone_for_an_error_in_backward() -> None:
    with begun([job("a"), job("raises", loss=raises_in_backward)]) as found:
        found.step()
    assert all(isinstance(each, RuntimeError) and "the backward" in str(each) for (each,) in found.losses.values())


class FailsOnce(torch.optim.SGD):
    """Its second update raises."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.updates = 0

    def step(self, closure: Any = None) -> None:
        self.updates += 1
        if self.updates == 2:
            raise ValueError("the update has had a mishap")
        super().step(closure)


def test_an_update_that_raises_is_its_own_job_s_failure() -> None:
    jobs = [job("fails", optimizer=FailsOnce), job("b", seed=3)]
    with begun(jobs) as found:
        for _ in range(3):
            found.step()
    assert [isinstance(each, ValueError) for each in found.losses["fails"]] == [False, True, False]
    del found.members[0]
    assert_alone(found, jobs[1:])


class KeepsZeros(torch.optim.AdamW):
    """Its gradients stay, as zeros: parameters that a step does not use are updated by their moments."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none=False)


def with_or_without_head(model: nn.Module, microbatch: Any) -> Tensor:
    x = microbatch[0]
    if float(x.sum()) > 5:
        return trainings.loss(model, microbatch)
    return model.layers[0](x).square().mean()  # type: ignore[index,no-any-return]


def test_an_optimizer_s_own_way_to_clear_gradients_is_kept() -> None:
    jobs = [job("a", optimizer=KeepsZeros, loss=with_or_without_head, schedule=None), job("b", seed=3)]
    with begun(jobs) as found:
        for _ in range(6):
            found.step()
    assert_alone(found, jobs)


def part_of_them(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters)[-2:], lr=0.1)


def test_trained_weights_that_no_optimizer_has_are_refused() -> None:
    with Common(gang()) as common, pytest.raises(WontDo, match="its optimizer does not have"):
        common.share(common.admit(job("a", optimizer=part_of_them)))


class Structured(nn.Module):
    """A model that asks for the type of its layers, and goes through a block by itself.

    Args:
        head: Name of the head.
    """

    def __init__(self, head: str) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.layers = nn.ModuleList(trainings.Adapter(WIDTH, 4) for _ in range(3))
            self.mixed = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        for layer in self.layers:
            layer.base.requires_grad_(False)  # type: ignore[union-attr]
        self.mixed.requires_grad_(False)
        self.add_module(head, nn.Linear(WIDTH, 5))
        self.head_name = head
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(1.0)
        for layer in self.layers:
            x = layer(x) if isinstance(layer, trainings.Adapter) else x
        for module in self.mixed:
            x = module(x)
        found: Tensor = getattr(self, self.head_name)(x * (1 + 1e-3 * len(self.seen)))
        return found


def test_models_are_what_they_are_alone() -> None:
    """Types, modules inside modules, and names."""
    heads = {"a": "head", "b": "classifier"}
    jobs = [job(name, model=partial(Structured, head=head), steps=4) for name, head in heads.items()]
    with begun(jobs) as found:
        for _ in range(4):
            found.step()
        assert isinstance(found.members[0].model.layers[0], trainings.Adapter)  # type: ignore[index]
    assert_alone(found, jobs)


_normed = nn.BatchNorm1d(WIDTH).requires_grad_(False)


def over_one_norm() -> nn.Module:
    return nn.Sequential(_normed, nn.Linear(WIDTH, 5))


def test_one_module_with_buffers_is_refused() -> None:
    with Common(gang()) as common:
        common.share(common.admit(job("a", model=over_one_norm)))
        with pytest.raises(WontDo, match="a module with buffers"):
            common.share(common.admit(job("b", model=over_one_norm)))


class Told(trainings.Adapted):
    """A model that sets attributes of its layers, and reads them."""

    def __init__(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            super().__init__(WIDTH, 3, 4, 0.0, False)
        self.layers.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            layer.factor = float(number) + float(x.abs().mean())
        found = super().forward(x)
        return found * self.layers[1].factor  # type: ignore[operator]


class Scaled(trainings.Adapter):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor  # type: ignore[operator]


class ToldInside(Told):
    """The layers read them, too."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.__class__ = Scaled


def test_attributes_of_blocks_are_the_blocks_own() -> None:
    jobs = [job(name, model=ToldInside, seed=seed, steps=3) for seed, name in enumerate("ab")]
    with begun(jobs) as found:
        for _ in range(3):
            found.step()
    assert_alone(found, jobs)


class Rooted(nn.Module):
    """A model whose root has parameters of its own, frozen and trained, beside an adapter."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.place = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
            self.layer = trainings.Adapter(WIDTH, 4)
        self.layer.base.requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.layer(x + self.place) * self.scale)
        return found


def test_models_whose_blocks_cannot_be_shared_are_refused() -> None:
    """Those whose root has parameters, or a module that holds most of the model beside its own."""
    with pytest.raises(WontDo, match="the model itself has weights"):
        CommonBase().search(job("a", model=Rooted), [gang().device])
    with pytest.raises(WontDo, match="'0' has weights beside those of its modules"):
        CommonBase().search(job("a", model=inner_rooted), [gang(2**15).device])
    jobs = [job(name, model=Rooted, seed=seed) for seed, name in enumerate("ab")]
    with begun(jobs) as found:
        for _ in range(3):
            found.step()
    assert_alone(found, jobs)  # the numbers would be right


def inner_rooted() -> nn.Module:
    return nn.Sequential(Rooted())


def peft_model(rank: int) -> nn.Module:
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4
        )
        base = LlamaForCausalLM(config)
    return peft.get_peft_model(base, peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"]))


def tokens(batches: int = 4) -> list[list[Tensor]]:
    return [[torch.randint(0, 64, (2, 16)) for _ in range(2)] for _ in range(batches)]


def language_loss(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(input_ids=batch, labels=batch).loss
    return found


@pytest.mark.full
def test_adapters_of_peft_over_one_llama() -> None:
    given: dict[str, Any] = {"data": tokens, "loss": language_loss, "evaluate": None, "steps": 4}
    jobs = [job(f"r{rank}", model=partial(peft_model, rank=rank), seed=rank, **given) for rank in (2, 4, 8)]
    with begun(jobs, budget=2**18) as found:
        for _ in range(4):
            found.step()
        assert found.common.run is not None
        report = found.common.run.report()
        assert report.evictions > 0
        assert report.fallbacks == report.refusals == 0
    assert_alone(found, jobs)


def writes(model: nn.Module, microbatch: Any) -> Tensor:
    with torch.no_grad():
        model.norm.weight.mul_(0.9)  # type: ignore[union-attr,operator]
    return trainings.loss(model, microbatch)


class Noisy(torch.optim.SGD):
    """Adds noise to what it updates."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(1e-3 * torch.randn_like(parameter))


class Drawing(torch.optim.lr_scheduler.LambdaLR):
    """A rate that is drawn."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, lambda _: float(torch.rand(())))


def unfreezes(model: nn.Module, microbatch: Any) -> Tensor:
    model.norm.requires_grad_(True)  # type: ignore[union-attr]
    return trainings.loss(model, microbatch)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss": draws}, "random numbers of Python"),
        ({"loss": writes}, "writes to frozen weights"),
        ({"loss": unfreezes}, "trains weights that were frozen"),
        ({"optimizer": Noisy}, "draws random numbers"),
        ({"schedule": Drawing}, "draws random numbers"),
    ],
)
def test_no_job_goes_on_with_what_another_one_may_have_spoiled(options: Any, said: str) -> None:
    with begun([job("a"), job("b", **options)]) as found:
        found.step()
    assert all(isinstance(each, WontDo) and said in str(each) for (each,) in found.losses.values())


class Merging(nn.Linear):
    """It adds its adapter to its frozen weight for evaluations, as libraries of adapters do."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.requires_grad_(False)
        self.up = nn.Parameter(torch.ones(WIDTH, 1))

    def train(self, mode: bool = True) -> Merging:
        if self.training and not mode:
            self.weight.data += self.up.detach() @ self.up.detach().T
        return super().train(mode)


def merging() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(Merging(), nn.Linear(WIDTH, 5))


def test_an_evaluation_that_changes_the_base_is_found(tmp_path: Path) -> None:
    """Also by those that save behind it."""
    jobs = [job(name, model=merging) for name in "ab"]
    with begun(jobs) as found:
        found.step()
        with pytest.raises(WontDo, match="writes to frozen weights"):
            found.members[0].evaluate(evaluation())
        with pytest.raises(WontDo, match="writes to frozen weights"):
            found.members[1].save(tmp_path, {})


def writes_unseen(model: nn.Module, microbatch: Any) -> Tensor:
    model.norm.weight.data.mul_(0.9)  # type: ignore[union-attr,operator]
    return trainings.loss(model, microbatch)


def test_no_job_goes_on_with_a_base_that_one_has_changed_and_left() -> None:
    with begun([job("a"), job("writes", loss=writes_unseen)]) as found:
        found.step()
        found.common.dismiss(found.members[1:])
        found.step([0])
    assert isinstance(found.losses["a"][1], WontDo)
    assert "writes to frozen weights" in str(found.losses["a"][1])


def of_one_number(model: nn.Module, microbatch: Any) -> Tensor:
    return trainings.loss(model, microbatch).reshape(1)


def test_losses_may_have_one_number_in_any_shape() -> None:
    jobs = [job("a", loss=of_one_number, steps=2), job("b", steps=2)]
    with begun(jobs) as found:
        for _ in range(2):
            found.step()
    assert_alone(found, jobs)


def test_the_base_is_told_by_its_bytes() -> None:
    def base(**options: Any) -> dict[str, Any]:
        given = job("a", model=partial(trainings.adapted, width=WIDTH, **options))
        return base_of(given, build_model(given))

    assert base(rank=2) == base(rank=4)
    assert not base()["seeded"]
    assert base(base=8)["base"] != base()["base"]
    assert base(base=None)["seeded"]
    with pytest.raises(WontDo, match="no weights are frozen"):
        CommonBase().search(trainings.job("a"), [gang().device])
