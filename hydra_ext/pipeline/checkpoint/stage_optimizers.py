"""Joins the optimizers of all stages into one, so that a checkpoint does not depend on the number of stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hydra_ext.checkpoint import optimizer_state, optimizer_values
from hydra_ext.checkpoint.format import strict_json
from hydra_ext.checkpoint.format.values import decode
from hydra_ext.checkpoint.optimizer_trials import Trials
from hydra_ext.errors import UnsupportedState
from hydra_ext.pipeline.stages.update import same_setting


def joined(captured: Sequence[dict[str, Any]], places: Mapping[str, int]) -> dict[str, Any] | None:
    """Joins the state of the stages' optimizers into the state of one optimizer; None if there are none.

    Groups with the same number and the same options become one group. Its parameters are in the model's order, as one
    optimizer for the whole model would have them.

    Args:
        captured: The results of :func:`optimizer_state.capture`, in the order of the stages.
        places: Places of the parameters in the model's order, by name.

    Raises:
        UnsupportedState: The optimizers are of several classes, or a parameter of several stages is in different
            groups.
    """
    if not captured:
        return None
    classes = sorted({each["class"] for each in captured})
    if len(classes) > 1:
        raise UnsupportedState(
            f"the stages have optimizers of several classes ({', '.join(classes)}): a checkpoint holds the state of one"
        )
    options: dict[tuple[int, bytes], Any] = {}
    found: dict[str, tuple[int, bytes]] = {}
    for each in captured:
        for number, group in enumerate(each["groups"]):
            key = number, strict_json.write(group["options"])
            options[key] = group["options"]
            for name in group["params"]:
                if found.setdefault(name, key) != key:
                    raise UnsupportedState(f"'{name}' is on several stages, in groups with different options")
    members: dict[tuple[int, bytes], list[str]] = {key: [] for key in options}
    for name in sorted(found, key=places.__getitem__):
        members[found[name]].append(name)
    ordered = [{"params": members[key], "options": options[key]} for key in sorted(options, key=lambda key: key[0])]
    state = {name: entries for each in captured for name, entries in each["state"].items()}
    return {"class": classes[0], "groups": ordered, "state": state}


class StageState:
    """The part of a checkpoint that belongs to the optimizer of one stage.

    Args:
        names: Names of the stage's parameters, by ``id``.
        saved: The saved state of an optimizer, which :func:`optimizer_state.check` has accepted; None without one.
        fetch: Reads a tensor by its name.

    Attributes:
        differences: Differences between the optimizer and the saved state, a line each.
        names: Names of the parameters that the optimizer has.
        tensors: Names of the tensors that :meth:`restore` will read.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        saved: dict[str, Any] | None,
        fetch: Callable[[str], Tensor],
    ) -> None:
        self.differences: list[str] = []
        self.tensors: set[str] = set()
        self.names = {names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]}
        self._optimizer = optimizer
        self._name_of = names
        self._fetch = fetch
        self._content: dict[str, Any] = {}
        self._known: list[bool] = []  # for each group, whether the saved state has parameters of it
        if saved is None:
            self.differences.append("there was no optimizer, and there is one now")
            return
        group_of = {name: group for group in saved["groups"] for name in group["params"]}
        groups = [self._group(number, group, group_of) for number, group in enumerate(optimizer.param_groups)]
        members = [name for group in groups for name in group["params"]]
        state = {name: saved["state"][name] for name in members if name in saved["state"]}
        self._content = {"class": saved["class"], "groups": groups, "state": state}
        if saved["class"] != optimizer_state.kind(optimizer):
            now = optimizer_state.kind(optimizer)
            self.differences.append(f"the optimizer was a {saved['class']!r:.200}, and is a {now}")
        decode([state, *(group["options"] for group in groups)], self._note)

    def _note(self, name: str) -> Tensor:
        self.tensors.add(name)
        return torch.empty(0, device="cpu")

    def _group(self, number: int, group: Mapping[str, Any], group_of: Mapping[str, Any]) -> dict[str, Any]:
        """The saved options and this group's present parameters; notes differences."""
        members = [(self._name_of[id(parameter)], parameter) for parameter in group["params"]]
        new = [name for name, parameter in members if name not in group_of and parameter.requires_grad]
        if new:
            self.differences.append(f"group {number} of the optimizer has {new} in addition"[:400])
        groups = {id(found): found for name, _ in members if (found := group_of.get(name)) is not None}
        several = [found["options"] for found in groups.values()]
        self._known.append(bool(several))
        if any(not self._same(several[0], other) for other in several[1:]):
            self.differences.append(
                f"group {number} of the optimizer has parameters that were in groups with different options"
            )
        return {"params": [name for name, _ in members], "options": several[0] if several else {}}

    def _same(self, options: Any, other: Any) -> bool:
        ours, theirs = decode(options, self._fetch), decode(other, self._fetch)
        return ours.keys() == theirs.keys() and all(same_setting(ours[key], theirs[key]) for key in ours)

    def check(self, described: Callable[[str], Tensor]) -> None:
        """Checks the saved state against the optimizer.

        Args:
            described: Gives a tensor on meta with the dtype and shape of the saved one with this name.

        Raises:
            BadValue: With this state the next step would fail or compute other numbers.
        """
        optimizer, content = self._optimizer, self._content
        trials = Trials(optimizer)
        for known, group, saved in zip(self._known, optimizer.param_groups, content["groups"], strict=True):
            if known:
                options = saved["options"]
                state = content["state"]
                optimizer_values.check_group(optimizer, group, self._name_of, options, state, described, trials)

    def restore(self) -> None:
        """Restores the optimizer's state. The weights have to be loaded before."""
        optimizer_state.restore(self._optimizer, self._name_of, self._content, self._fetch)
