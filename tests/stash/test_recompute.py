"""Models whose blocks are called again in backward: the numbers are the same, and less is held and moved."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hydra_ext
from hydra_ext import Checks, SimulatedDevice
from hydra_ext.activations.report import StashReport
from support.models.picture_models import PICTURES
from support.models.zoo import FAMILIES, Family
from support.rounds.rounds import assert_nothing_left
from support.stash.recomputed import recomputed_blocks
from support.stash.stashed import assert_empty, assert_same, gradients

STEPS = 3
MODELS = FAMILIES | PICTURES
# How often a forward calls outermost modules with numbered names.
CALLS = {"gpt2": 4, "llama": 4, "t5": 6, "bert": 4, "vit": 4, "mixtral": 3, "whisper": 5, "unet": 9}
CALLS |= {"resnet": 6, "chain": 3, "unet_batch_norm": 9}
CHECKS = Checks(poison_hosts=True)


def trained(family: Family, policy: object = None) -> tuple[list[Tensor], StashReport]:
    """Losses, gradients, buffers and weights of a few steps."""
    model = family.make(seed=1)
    stash = hydra_ext.stash(policy or hydra_ext.Keep(), model=model, device="simulated")  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for batch in family.batches(seed=2, count=STEPS):
        found += gradients(model, lambda: family.loss(model, batch), stash if policy else None)  # noqa: B023
        found += [buffer.clone() for buffer in model.buffers()]
        optimizer.step()
        assert_empty(stash.report())
    return [*found, *(parameter.detach() for parameter in model.parameters())], stash.report()


@pytest.mark.parametrize("family", MODELS.values(), ids=MODELS)
def test_numbers_are_the_same_and_less_is_moved_and_kept(family: Family) -> None:
    expected, _ = trained(family)
    _, moving = trained(family, hydra_ext.Offload())
    found, report = trained(family, recomputed_blocks(hydra_ext.Offload()))
    assert_same(found, expected)
    assert report.recomputed == STEPS * CALLS[family.name]
    assert 0 < report.saved_bytes < 0.6 * moving.saved_bytes
    assert 0 < report.to_host_bytes < 0.6 * moving.to_host_bytes

    _, keeping = trained(family, hydra_ext.Keep())
    found, report = trained(family, recomputed_blocks(None))
    assert_same(found, expected)
    assert report.recomputed == STEPS * CALLS[family.name]
    assert report.kept == report.tensors < 0.6 * keeping.tensors
    assert report.saved_bytes == 0


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "reentrant", "calls"), [("gpt2", False, 4), ("gpt2", True, 4), ("unet", False, 3), ("unet", True, 4)]
)
def test_checkpoints_of_the_user(name: str, reentrant: bool, calls: int) -> None:
    """Those of one family are inside its blocks; those of the other around some, which are not called again then."""
    family = FAMILIES[name]
    model = family.make(seed=1)
    family.set_checkpointing(model, reentrant=reentrant)
    batch = family.batches(seed=2, count=1)[0]
    stash = hydra_ext.stash(recomputed_blocks(None), model=model, device="simulated")  # type: ignore[arg-type]
    expected = gradients(model, lambda: family.loss(model, batch))
    assert_same(gradients(model, lambda: family.loss(model, batch), stash), expected)
    assert stash.report().recomputed == calls


# ---- inside offload -------------------------------------------------------------------------------------------------
def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules that ``recomputed_blocks`` has called again, the outermost of them."""
    numbered = [module for name, module in model.named_modules() if name.rpartition(".")[2].isdigit()]
    inside = {inner for module in numbered for inner in [*module.modules()][1:]}
    return [module for module in numbered if module not in inside]


def offloaded(family: Family, policy: object, *, budget: int, rounds: bool) -> tuple[list[Tensor], hydra_ext.Report]:
    model = family.make(seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = family.batches(seed=2, count=2 * STEPS)
    found = []
    with hydra_ext.offload(
        model, optimizer, budget=budget, device=SimulatedDevice(), checks=CHECKS,
        blocks=blocks_of(model) if rounds else None, activations=policy,  # type: ignore[arg-type]
    ) as run:  # fmt: skip
        torch.manual_seed(5)
        for pair in (batches[at : at + 2] for at in range(0, 2 * STEPS, 2)):
            if rounds:
                out = run.step(pair, lambda batch: family.loss(model, batch), max_norm=1.0, recompute=False)
                found += out.losses
                assert_nothing_left(run)
            else:
                for batch in pair:
                    loss = family.loss(model, batch)
                    loss.backward()
                    found.append(loss.detach())
                optimizer.step()
                optimizer.zero_grad()
        report = run.report()
    return [*found, *(tensor.detach() for tensor in (*model.parameters(), *model.buffers()))], report


@pytest.mark.cases(1)
@pytest.mark.parametrize("rounds", [False, True], ids=["loop", "rounds"])
@pytest.mark.parametrize("family", MODELS.values(), ids=MODELS)
def test_inside_offload(family: Family, rounds: bool) -> None:
    expected, plain = offloaded(family, None, budget=2**26, rounds=rounds)
    found, ample = offloaded(family, recomputed_blocks(hydra_ext.Offload()), budget=2**26, rounds=rounds)
    assert_same(found, expected)
    # What was there beside weights at the fullest moment; how much of the gradients and activations on their way to the
    # host was among it is another figure in each run, so that the first share of the weights may still hold them all.
    held = ample.peak_activations_bytes + ample.peak_workspace_bytes + ample.peak_gradients_bytes
    for share in (2, 4, 8, 16, 32):
        budget = held + ample.parameter_bytes // share
        found, small = offloaded(family, recomputed_blocks(hydra_ext.Offload()), budget=budget, rounds=rounds)
        assert_same(found, expected)
        assert small.peak_bytes <= budget
        if small.evictions > 0:
            break
    assert small.evictions > 0, "the budget is not what it is taken for"
    for report in (ample, small):
        assert report.activations is not None
        assert report.activations.recomputed == 2 * STEPS * CALLS[family.name]
        assert (report.faults, report.fallbacks, report.refusals) == (plain.faults, 0, 0)
        assert_empty(report.activations)


def test_in_a_round_modules_that_hold_several_blocks_are_called_again() -> None:
    """Other microbatches wait meanwhile, as all blocks of such a module are in use in its call."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)),
        nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)),
    )
    policies = {"": hydra_ext.Offload(), "?": hydra_ext.Recompute()}

    def step(activations: object) -> tuple[list[Tensor], hydra_ext.Report]:
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hydra_ext.offload(
            model, optimizer, budget="64MiB", device="simulated", checks=CHECKS,
            blocks=["0.0", "0.2", "1"], activations=activations,  # type: ignore[arg-type]
        ) as run:  # fmt: skip
            losses = run.step(list(data), lambda x: model(x).square().sum(), recompute=False).losses
            return [*losses, *(value.clone() for value in model.state_dict().values())], run.report()

    start = {name: value.clone() for name, value in model.state_dict().items()}
    data = torch.randn(3, 32, 64)
    (expected, _), (found, report) = step(None), step(policies)
    assert_same(found, expected)
    assert report.activations is not None
    assert report.activations.recomputed == 2 * 3


class Counted(nn.Linear):
    """What it gives depends on how often it was called before."""

    def __init__(self) -> None:
        super().__init__(64, 64)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x * self.calls.item()).sin()


def test_in_a_round_each_call_is_made_again_with_the_buffers_that_it_found() -> None:
    def step(activations: object) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Counted(), Counted(), Counted())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hydra_ext.offload(
            model, optimizer, budget="64MiB", device="simulated", checks=CHECKS,
            blocks=list(model), activations=activations,  # type: ignore[arg-type]
        ) as run:  # fmt: skip
            for _ in range(2):
                run.step(list(torch.randn(3, 32, 64)), lambda x: model(x).square().sum(), recompute=False)
            report = run.report().activations
            assert (0 if report is None else report.recomputed) == 18 * (activations is not None)
        return list(model.state_dict().values())

    assert_same(step({"?": hydra_ext.Recompute()}), step(None))


def test_a_chain_of_blocks_keeps_nothing_on_the_device() -> None:
    def held(depth: int, policy: object) -> int:
        """Device bytes of activations between forward and backward."""
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(depth)]
        model = nn.Sequential(*layers)
        with hydra_ext.offload(
            model, budget="64MiB", device="simulated", activations=policy,  # type: ignore[arg-type]
        ) as run:  # fmt: skip
            loss = model(x).square().sum()
            run.report()  # once the transfers have ended
            held = run.activation_bytes()
            loss.backward()
            activations = run.report().activations
            assert activations is not None
            assert activations.recomputed == depth * ("*" in policy)  # type: ignore[operator]
            return held

    x = torch.randn(512, 64)
    recompute = {"*": hydra_ext.Recompute(), "": hydra_ext.Offload()}
    deeper = 16 * 6 * 2**10  # the random state that each call has begun with
    assert held(20, recompute) <= held(4, recompute) + deeper
    assert held(20, {"": hydra_ext.Keep()}) > held(20, recompute) + 30 * x.nbytes


def test_steps_that_recompute_by_themselves_come_first() -> None:
    family = FAMILIES["llama"]

    def step(policy: object) -> tuple[list[Tensor], hydra_ext.Report]:
        model = family.make(seed=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with hydra_ext.offload(
            model, optimizer, budget="64MiB", device="simulated", checks=CHECKS,
            blocks=blocks_of(model), activations=policy,  # type: ignore[arg-type]
        ) as run:  # fmt: skip
            torch.manual_seed(5)
            run.step(family.batches(seed=2, count=2), lambda batch: family.loss(model, batch), recompute=True)
            return [parameter.detach() for parameter in model.parameters()], run.report()

    (expected, _), (found, report) = step(None), step(recomputed_blocks(hydra_ext.Offload()))
    assert_same(found, expected)
    assert report.activations is not None
    assert report.activations.recomputed == 0


def test_a_weight_on_the_host_that_is_written_to_before_backward_raises() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    policies = {"1": hydra_ext.Recompute()}
    with hydra_ext.offload(model, budget="64MiB", device="simulated", activations=policies) as run:
        loss = model(torch.randn(8, 64)).sum()
        with torch.no_grad():
            model[1].weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.* Linear"):
            loss.backward()
        model(torch.randn(8, 64)).sum().backward()
        report = run.report().activations
        assert report is not None
        assert report.recomputed == 1
