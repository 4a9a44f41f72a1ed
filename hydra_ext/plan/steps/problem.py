"""A model's training step as a problem of the planner of activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hydra_ext import _C
from hydra_ext.errors import BudgetTooSmall
from hydra_ext.plan.segments import segments_of
from hydra_ext.profile import Amount, Profile, cuts_of

REST = "(outside of the segments)"


@dataclass(frozen=True, kw_only=True)
class StepSetting:
    """What a plan depends on beside the profile.

    Attributes:
        microbatches: Of a step.
        to_device: Bytes a second from the host to the device.
        to_host: Bytes a second back.
        buffer_bytes: Of the model's buffers, which stay on the device.
        update_seconds: Of the optimizer's step.
        round_sizes: Numbers of microbatches that may run together; empty for those that the planner tries.
        recompute: Whether segments may run again in backward.
        slowness: Seconds of compute for each one of the profile.
    """

    microbatches: int
    to_device: float
    to_host: float
    buffer_bytes: int
    update_seconds: float = 0.0
    round_sizes: tuple[int, ...] = ()
    recompute: bool = True
    slowness: float = 1.0


class StepProblem:
    """The planner's problem: a model's cuts as chains of segments.

    Attributes:
        names: Of the segments of each cut. The last one is what runs outside of them.
        least_bytes: The smallest budget that any plan fits.
        ideal_bytes: The budget with which all activations of a step stay, and all weights.
    """

    def __init__(self, profile: Profile, setting: StepSetting) -> None:
        self.profile = profile
        self.setting = setting
        self.names = [(*names, REST) for names in cuts_of(profile)]
        self.cuts = [
            [
                *segments_of(profile, names, recompute=setting.recompute, slowness=setting.slowness),
                _rest(profile, names, setting.slowness),
            ]
            for names in cuts_of(profile)
        ]
        least = max(_C.least_activation_budget(self.cuts), profile.least_bytes())
        self.least_bytes = least + setting.buffer_bytes
        self.ideal_bytes = max(self.least_bytes, self._ideal())

    def _ideal(self) -> int:
        """The budget with which all is kept, and all weights stay."""
        weights = sum(block.weight_bytes for block in self.profile.blocks)
        peaks = []
        for cut in self.cuts:
            *_, peak = _C.simulate_activations(
                cut,
                options=[_C.ActivationOption.KEEP] * len(cut),
                round_size=self.setting.microbatches,
                stash_bytes=0,
                microbatches=self.setting.microbatches,
                budget=1 << 49,
            )
            peaks.append(peak)
        return min(peaks) + weights + self.setting.buffer_bytes

    def solve(
        self, budget: int, *, faster: float = 1.0, microbatches: int | None = None, effort: float = 1.0
    ) -> _C.ActivationPlan:
        """The best plan under a budget; ``faster``: how many times as fast the link is as in the setting."""
        setting = self.setting
        return _C.plan_activations(
            self.cuts,
            microbatches=microbatches or setting.microbatches,
            budget=budget - setting.buffer_bytes,
            to_device=setting.to_device * faster,
            to_host=setting.to_host * faster,
            update_seconds=setting.update_seconds,
            round_sizes=setting.round_sizes,
            effort=effort,
        )

    def kept_bytes(self, found: _C.ActivationPlan) -> int:
        """Bytes of one microbatch that a plan leaves on the device; at most what the whole model saves."""
        profile, whole = self.profile, self.profile.modules[""].saved.fresh
        kept, inside = 0, 0
        for name, option in zip(self.names[found.cut], found.options, strict=True):
            saved, inputs = Amount(fresh=whole - inside, all=whole - inside), Amount()
            if name != REST:
                saved, inputs = profile.modules[name].saved, profile.modules[name].inputs
            inside += saved.fresh
            kept += saved.all if option == _C.ActivationOption.KEEP else 0
            kept += inputs.all if option == _C.ActivationOption.RECOMPUTE else 0
        return min(kept, whole)

    def too_small(self, budget: int) -> BudgetTooSmall:
        moment, name, terms = self._neediest()
        terms["buffers"] = self.setting.buffer_bytes
        terms["between segments"] = self.least_bytes - sum(terms.values())
        terms = {what: size for what, size in terms.items() if size}
        listed = ", ".join(f"{what} {_C.human_bytes(size)}" for what, size in terms.items())
        return BudgetTooSmall(
            f"budget={budget} is less than a step of this model takes: the {moment} needs "
            f"{_C.human_bytes(self.least_bytes)} ({listed}); give at least {self.least_bytes} bytes, or a smaller "
            f"microbatch. With {self.ideal_bytes} bytes all activations stay",
            block=name,
            block_bytes=terms.get("weights", 0),
            needed=self.least_bytes,
            moment=moment,
            terms=terms,
            ideal=self.ideal_bytes,
        )

    def _neediest(self) -> tuple[str, str, dict[str, int]]:
        whole = self.profile.modules[""]
        found = [
            (whole.forward_bytes, "forward", "", {"activations": whole.forward_bytes, "weights": 0, "gradients": 0}),
            (whole.backward_bytes, "backward", "", {"activations": whole.backward_bytes, "weights": 0, "gradients": 0}),
        ]
        for name, numbers in self.profile.sites.items():
            figures, used = self.profile.modules[name], [self.profile.blocks[number] for number in numbers]
            weights = sum(block.weight_bytes for block in used)
            gradients = sum(block.gradient_bytes for block in used)
            for way, activations, more in (
                ("forward", figures.forward_bytes, 0),
                ("backward", figures.backward_bytes, gradients),
            ):
                terms = {"activations": activations, "weights": weights, "gradients": more}
                found.append((sum(terms.values()), way, name, terms))
        _, way, name, terms = max(found, key=lambda each: each[0])
        return f"{way} of {name or 'the model'}", name, terms


def _rest(profile: Profile, names: Sequence[str], slowness: float) -> _C.ActivationSegment:
    """What runs outside of the segments, such as the loss, as one more segment behind them."""
    whole = profile.modules[""]
    inside = [profile.modules[name] for name in names]
    outside = [figures for figures in profile.modules.values() if not _is_within(figures.name, names)]
    forward_seconds = slowness * max(0.0, whole.forward_seconds - sum(figures.forward_seconds for figures in inside))
    saved = max(0, whole.saved.fresh - sum(figures.saved.fresh for figures in inside))
    used = {block for name in names for block in profile.blocks_of(name)}
    blocks = [block for number, block in enumerate(profile.blocks) if number not in used]
    weights = [block.weight_bytes for block in blocks]
    return _C.ActivationSegment(
        forward_seconds=forward_seconds,
        backward_seconds=forward_seconds * profile.backward_ratio,
        saved_fresh=saved,
        saved_all=saved,
        inputs_fresh=0,
        inputs_all=0,
        parked_bytes=0,
        forward_bytes=max((figures.own_forward_bytes for figures in outside), default=0),
        backward_bytes=max((figures.own_backward_bytes for figures in outside), default=0),
        weight_bytes=sum(weights),
        slot_bytes=max(weights, default=0),
        gradient_bytes=sum(block.gradient_bytes for block in blocks),
    )


def _is_within(name: str, segments: Sequence[str]) -> bool:
    return any(not segment or name == segment or name.startswith(f"{segment}.") for segment in segments)
