"""Cuts divide a model: no segment lies inside another, and nothing that is saved counts twice or is lost."""

from __future__ import annotations

import random

import pytest

from hydra_ext import Keep, Offload, Recompute
from hydra_ext.plan.steps.problem import StepProblem, StepSetting
from hydra_ext.policy import GivenPolicies
from hydra_ext.profile import Amount, ModuleFigures, Profile, cuts_of


class Tree:
    """A profile made by hand: a random tree of modules whose leaves save random bytes."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.modules: dict[str, ModuleFigures] = {}
        self.calls = 0
        self.own: dict[str, int] = {}  # bytes that a module saves outside its children
        self._add("", depth=self.draw.randint(1, 4))

    def _add(self, name: str, depth: int) -> int:
        self.calls += 1
        order = self.calls
        self.modules[name] = ModuleFigures(name=name)  # a module comes before those inside it
        is_container = bool(name) and depth > 0 and self.draw.random() < 0.2
        calls = 0 if is_container else self.draw.choice([1, 1, 1, 1, 2])
        inside = 0
        if depth:
            for number in range(self.draw.randint(1, 4)):
                inside += self._add(f"{name}.{number}".lstrip("."), depth - 1)
        self.own[name] = 0 if is_container else self.draw.choice([0, 1, 10, 100]) * 1024
        saved = inside + self.own[name]
        self.modules[name] = ModuleFigures(
            name=name,
            order=order if calls else 0,
            calls=calls,
            saved=Amount(fresh=saved, all=saved) if calls else Amount(),
            inputs=Amount(fresh=self.draw.choice([0, 1, 10]) * 1024),
        )
        return saved

    @property
    def profile(self) -> Profile:
        return Profile(modules=self.modules)


def _is_inside(name: str, other: str) -> bool:
    return name != other and (not other or name.startswith(f"{other}."))


@pytest.mark.parametrize("seed", range(60))
def test_cuts_are_partitions(seed: int) -> None:
    tree = Tree(seed)
    profile = tree.profile
    cuts = cuts_of(profile)
    assert len(cuts) <= 4
    assert len(set(cuts)) == len(cuts)
    for cut in cuts:
        assert cut
        assert not [(a, b) for a in cut for b in cut if _is_inside(a, b)]
        assert [profile.modules[name].order for name in cut] == sorted(profile.modules[name].order for name in cut)
        assert cut == ("",) or all(profile.modules[name].calls == 1 for name in cut)
        covered = sum(profile.modules[name].saved.fresh for name in cut)
        inside = {name for name in tree.modules if any(name == s or _is_inside(name, s) for s in cut)}
        outside = sum(size for name, size in tree.own.items() if name not in inside)
        assert covered + outside == sum(tree.own.values())


@pytest.mark.parametrize("seed", range(60))
def test_a_segment_follows_one_policy(seed: int) -> None:
    tree, draw = Tree(seed), random.Random(seed)
    profile = tree.profile
    names = [name for name in tree.modules if name]
    chosen = draw.sample(names, min(len(names), draw.randint(1, 3)))
    given = GivenPolicies({name: draw.choice([Keep(), Offload(), Recompute(), Recompute()]) for name in chosen})
    recomputed = {name for name in chosen if given.recomputes(name)}
    for cut in cuts_of(profile, given=given):
        for name in {*cut} - {""} - recomputed:
            assert not [other for other in chosen if _is_inside(other, name)]
        for name in recomputed:
            assert cut == ("",) or (name in cut) == (profile.modules[name].calls == 1)
            assert not [other for other in cut if other and _is_inside(other, name)]


def _chain(*saved: int) -> Profile:
    """A model of layers, each with two halves that save half of it."""
    modules = [ModuleFigures(name="", order=1, calls=1, saved=Amount(fresh=sum(saved)))]
    order = 1
    for number, size in enumerate(saved):
        order += 1
        given = Amount(fresh=10)
        modules.append(ModuleFigures(name=f"{number}", order=order, calls=1, saved=Amount(fresh=size), inputs=given))
        part = Amount(fresh=size // 2)
        for half in "ab":
            order += 1
            modules.append(ModuleFigures(name=f"{number}.{half}", order=order, calls=1, saved=part, inputs=given))
    return Profile(modules={figures.name: figures for figures in modules})


def test_the_balanced_cut_comes_first_and_the_finest_is_there() -> None:
    layers = ("0", "1", "2")
    halves = ("0.a", "0.b", "1.a", "1.b", "2.a", "2.b")
    assert cuts_of(_chain(40, 40, 40)) == [layers, halves]  # 3 * 10 + 40 < 6 * 10 + 20
    assert cuts_of(_chain(400, 400, 400)) == [halves, layers]  # 3 * 10 + 400 > 6 * 10 + 200


def test_a_module_that_saves_most_itself_is_not_cut() -> None:
    modules = [
        ModuleFigures(name="", order=1, calls=1, saved=Amount(fresh=100)),
        ModuleFigures(name="attention", order=2, calls=1, saved=Amount(fresh=100)),
        ModuleFigures(name="attention.query", order=3, calls=1, saved=Amount(fresh=20)),
    ]
    assert cuts_of(Profile(modules={figures.name: figures for figures in modules})) == [("attention",)]


def test_layers_in_a_container_are_segments() -> None:
    modules = [
        ModuleFigures(name="", order=1, calls=1, saved=Amount(fresh=20)),
        ModuleFigures(name="layers"),
        ModuleFigures(name="layers.1", order=2, calls=1, saved=Amount(fresh=10)),
        ModuleFigures(name="layers.0", order=3, calls=1, saved=Amount(fresh=10)),
    ]
    assert cuts_of(Profile(modules={figures.name: figures for figures in modules})) == [("layers.1", "layers.0")]


def test_a_model_that_is_one_module_is_one_segment() -> None:
    assert cuts_of(Profile(modules={"": ModuleFigures(name="", order=1, calls=1, saved=Amount(fresh=100))})) == [("",)]


@pytest.mark.parametrize("seed", range(20))
def test_what_a_profile_says_of_modules_inside_others(seed: int) -> None:
    tree = Tree(seed)
    names = [*tree.modules]
    sites = {name: (number % 7, number % 3) for number, name in enumerate(names) if tree.draw.random() < 0.5}
    profile = Profile(modules=tree.modules, sites=sites)
    for name in names:
        inside = [other for other in names if _is_inside(other, name)]
        assert [each.name for each in profile.children(name)] == [
            other for other in inside if "." not in other.removeprefix(name).lstrip(".")
        ]
        used = {block for site in (name, *inside) for block in sites.get(site, ())}
        assert profile.blocks_of(name) == sorted(used)
        assert [each.name for each in profile.outside([name])] == [
            other for other in names if other != name and other not in inside
        ]


def leaves(count: int) -> Profile:
    """Layers of ten leaves; each layer saves another number of bytes."""
    kilobyte = 1024
    modules = {"": ModuleFigures(name="", calls=1, saved=Amount(fresh=count**2 * kilobyte, all=count**2 * kilobyte))}
    for number in range(count // 10):
        size = (2000 + number) * 10 * kilobyte
        modules[f"{number}"] = ModuleFigures(
            name=f"{number}", order=11 * number + 1, calls=1, saved=Amount(fresh=size, all=size)
        )
        for leaf in range(10):
            name = f"{number}.{leaf}"
            saved = Amount(fresh=size // 10, all=size // 10)
            modules[name] = ModuleFigures(name=name, order=11 * number + leaf + 2, calls=1, saved=saved)
    return Profile(modules=modules)


def test_of_many_sizes_small_ones_are_limits_too() -> None:
    finest = tuple(f"{number}.{leaf}" for number in range(90) for leaf in range(10))
    assert finest in cuts_of(leaves(900))


@pytest.mark.parametrize(("count", "longest"), [(5000, 1000), (20000, 1)])
def test_a_model_of_many_modules_has_cuts_that_the_planner_takes(count: int, longest: int) -> None:
    profile = leaves(count)
    setting = StepSetting(microbatches=2, to_device=1e9, to_host=1e9, buffer_bytes=0)
    assert max(map(len, cuts_of(profile))) <= longest
    problem = StepProblem(profile, setting)
    assert problem.solve(problem.ideal_bytes).seconds == 0
