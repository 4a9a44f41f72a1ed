"""Groups of children of an nn.Sequential have the figures of a module around them, and cuts leave nothing out."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations, pairwise

import pytest
import torch
from torch import Tensor, nn

import hydra_ext.plan.steps.problem
from hydra_ext.plan.steps.problem import StepProblem, StepSetting
from hydra_ext.profile import Amount, ModuleFigures, Profile, cuts_of
from hydra_ext.profile.cards import Speed
from hydra_ext.profile.dry_run import dry_run
from hydra_ext.profile.figures import Chain, Link

SPEED = Speed(flops_per_second=1e10, bytes_per_second=1e10)
IMAGE = torch.randn(2, 3, 16, 16)


def stages() -> list[nn.Module]:
    return [
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.Dropout(0.1), nn.Identity(), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Tanh(), nn.Linear(128, 256), nn.ReLU(inplace=True)),
    ]


def profile_of(model: nn.Module, x: Tensor = IMAGE) -> Profile:
    return dry_run(model, x, lambda given: model(given).square().mean(), speed=SPEED)


def by_hand(first: int, end: int) -> ModuleFigures:
    """The figures of a module around these children."""
    children = stages()
    return profile_of(nn.Sequential(*children[:first], nn.Sequential(*children[first:end]), *children[end:])).modules[
        str(first)
    ]


# ---- figures --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("first", "end"), [(0, 4), (1, 3), (2, 4), (4, 9), (6, 8), (7, 9), (9, 13), (3, 10)])
def test_a_group_has_the_figures_of_a_module_around_it(first: int, end: int) -> None:
    group, whole = profile_of(nn.Sequential(*stages())).chains[""].group(first, end), by_hand(first, end)
    assert group.name == f"[{first}:{end}]"
    # Whether its input is alive anyway is not known.
    assert whole.forward_bytes <= group.forward_bytes <= whole.forward_bytes + group.inputs.all
    for figure in ("backward_bytes", "live_gradient_bytes", "parked_bytes", "is_repeatable"):
        assert getattr(group, figure) == getattr(whole, figure), figure
    assert (group.saved.all, group.inputs.all) == (whole.saved.all, whole.inputs.all)
    assert group.forward_seconds == pytest.approx(whole.forward_seconds)
    assert group.again_seconds == pytest.approx(whole.again_seconds)


def test_a_group_that_is_refused_is_repeated_no_more_and_others_are() -> None:
    profile = profile_of(nn.Sequential(*stages()))
    known = {place: profile.chains[""].group(*place).is_repeatable for place in combinations(range(10), 2)}
    first, end = next((first, end) for (first, end), repeatable in known.items() if repeatable and end - first == 2)
    refused = profile.refusing([f"[{first}:{end}]", "11"])
    chain = refused.chains[""]
    assert {place for place, was in known.items() if was and not chain.group(*place).is_repeatable} == {
        place for place, was in known.items() if was and place[0] == first and place[1] >= end
    }
    assert not refused.modules["11"].is_repeatable
    assert profile.modules["11"].is_repeatable
    assert not chain.group(11, 12).is_repeatable
    assert refused.refusing([]) == refused


def test_what_is_handed_on_is_the_next_group_s_and_nothing_counts_twice() -> None:
    profile = profile_of(nn.Sequential(*stages()))
    chain, draw = profile.chains[""], random.Random(0)
    count = len(chain.links)
    for _ in range(20):
        cuts = [0, *sorted(draw.sample(range(1, count), draw.randint(0, count - 1))), count]
        saved = sum(chain.group(first, end).saved.fresh for first, end in pairwise(cuts))
        assert saved == sum(sum(link.fresh.values()) for link in chain.links)
    # The pool saves what it takes from the ReLU, which has saved it, too.
    handed_on = sum(chain.links[7].saved.values())
    assert chain.group(4, 8).saved.fresh == by_hand(4, 8).saved.fresh - handed_on
    assert chain.group(8, 9).saved.fresh == by_hand(8, 9).saved.fresh + handed_on
    assert chain.group(8, 9).inputs == Amount(fresh=handed_on, all=handed_on)


def test_a_group_that_writes_to_its_input_cannot_run_again() -> None:
    """Also through a view, or what is returned as it was taken."""
    children = [nn.Conv2d(3, 8, 1), nn.Identity(), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(8 * 256, 2)]
    chain = profile_of(nn.Sequential(*children)).chains[""]
    spans = {*combinations(range(len(children) + 1), 2)}
    writing = {(first, end) for first in (1, 2, 3) for end in (4, 5)}
    assert {span for span in spans if chain.group(*span).is_repeatable} == spans - writing


def test_a_group_with_hooks_of_the_user_cannot_run_again() -> None:
    model = nn.Sequential(*stages())
    model[5].register_forward_hook(lambda *_: None)
    chain = profile_of(model).chains[""]
    assert not chain.group(4, 9).is_repeatable
    assert chain.group(0, 4).is_repeatable


class OfItsOwn(nn.Sequential):
    def forward(self, given: Tensor) -> Tensor:
        return super().forward(given) + 0  # type: ignore[no-any-return]


def _hooked(children: list[nn.Module]) -> nn.Module:
    model = nn.Sequential(*children)
    model.register_forward_pre_hook(lambda *_: None)
    return model


class CalledTwice(nn.Module):
    def __init__(self, children: list[nn.Module]) -> None:
        super().__init__()
        self.features = nn.Sequential(*children)

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x) + self.features(x + 1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [lambda children: OfItsOwn(*children), _hooked, CalledTwice])
def test_only_one_call_of_a_plain_sequential_has_groups(make: Callable[[list[nn.Module]], nn.Module]) -> None:
    assert not profile_of(make(stages())).chains


def test_weights_of_a_group_are_those_of_its_children() -> None:
    shared = nn.Linear(64, 64)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), shared, nn.ReLU(), shared, nn.Linear(64, 64))
    profile = profile_of(model, torch.randn(512, 64))
    assert [block.name for block in profile.blocks] == ["0", "2", "5"]
    assert [profile.blocks_of(name) for name in ("[0:2]", "[1:3]", "[2:5]", "[4:6]")] == [[0], [1], [1], [1, 2]]
    assert profile.members("[2:5]") == ["2", "3", "2"]
    outside = [{each.name for each in profile.outside([name])} for name in ("[2:5]", "[1:3]")]
    assert outside == [{"", "0", "1", "5"}, {"", "0", "2", "3", "5"}]  # the second one has one of two calls


# ---- cuts -----------------------------------------------------------------------------------------------------------
def made_chain(seed: int, count: int) -> Profile:
    """A model of one chain whose children save random bytes."""
    draw = random.Random(seed)
    links, modules = [], {}
    for at in range(count):
        size = draw.choice([1, 2, 4]) * 2**20
        given = Amount(all=draw.choice([1, 2, 3]) * 2**18)
        figures = ModuleFigures(
            name=str(at), order=at + 2, calls=1, saved=Amount(fresh=size, all=size), inputs=given, is_repeatable=True
        )
        modules[str(at)] = figures
        until = at + draw.randint(0, 2) if draw.random() < 0.2 else count
        links.append(Link(figures=figures, fresh={(at, 0): size}, saved={(at, 0): size}, inputs=(), intact_until=until))
    saved = Amount(fresh=sum(sum(link.fresh.values()) for link in links))
    whole = ModuleFigures(name="", order=1, calls=1, saved=saved)
    return Profile(modules={"": whole, **modules}, chains={"": Chain(name="", links=links)})


@pytest.mark.parametrize("seed", range(12))
def test_cuts_with_groups_leave_the_fewest_bytes_between_them(seed: int) -> None:
    """Against all cuts that keep to the limit."""
    profile = made_chain(seed, 9)
    chain = profile.chains[""]
    taken = [link.figures.inputs.all for link in chain.links]
    narrow = {at for at in range(1, 9) if taken[at] < taken[at - 1]}
    with_groups = [cut for cut in cuts_of(profile) if any(map(profile.place_of, cut))]
    assert 1 <= len(with_groups) <= 4
    for cut in with_groups:
        places = [profile.place_of(name) for name in cut]
        begins = [place.first for place in places if place is not None]
        assert [place.end for place in places if place is not None] == [*begins[1:], 9]
        assert narrow <= {*begins}
        several = [place for place in places if place is not None and place.end - place.first > 1]
        assert all(chain.group(place.first, place.end).is_repeatable for place in several)
        limits = [profile.modules[""].saved.fresh >> times for times in range(1, 12)]
        fewest = [_fewest(chain, narrow, limit) for limit in limits]
        assert sum(taken[begin] for begin in begins) in fewest


def _fewest(chain: Chain, narrow: set[int], limit: int) -> int:
    """The fewest bytes that groups of at most the limit take."""
    best = 2**62
    others = sorted({*range(1, 9)} - narrow)
    for more in (more for count in range(len(others) + 1) for more in combinations(others, count)):
        begins = sorted({0, *narrow, *more})
        spans = [*pairwise([*begins, 9])]
        if all(
            end - first == 1 or (chain.group(first, end).saved.fresh <= limit and chain.group(first, end).is_repeatable)
            for first, end in spans
        ):
            best = min(best, sum(chain.links[first].figures.inputs.all for first in begins))
    return best


def test_a_planner_chooses_a_group_where_that_is_foreseen_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    model = nn.Sequential(
        *(child for _ in range(4) for child in (nn.Conv2d(4, 16, 1), *map(_again, wide), nn.Conv2d(16, 4, 1)))
    )
    profile = profile_of(model, torch.randn(4, 4, 32, 32))
    setting = StepSetting(microbatches=1, to_device=2e7, to_host=2e7, buffer_bytes=0)
    problem = StepProblem(profile, setting)
    budget = int(0.5 * problem.ideal_bytes)
    found = problem.solve(budget)
    assert any(profile.place_of(name) for name in problem.names[found.cut])
    monkeypatch.setattr(
        hydra_ext.plan.steps.problem, "cuts_of", lambda profile, *, groups, given: cuts_of(profile, groups=False)
    )
    assert found.seconds < 0.8 * StepProblem(profile, setting).solve(budget).seconds


def _again(module: nn.Module) -> nn.Module:
    return {nn.Conv2d: lambda: nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d: lambda: nn.BatchNorm2d(16)}.get(
        type(module), lambda: nn.ReLU(inplace=True)
    )()


def test_without_recomputation_there_are_no_groups() -> None:
    profile = profile_of(nn.Sequential(*stages()))
    assert not [name for cut in cuts_of(profile, groups=False) for name in cut if profile.place_of(name)]
