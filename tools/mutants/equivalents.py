"""Equivalent mutants, which no test can kill because they behave like the original, each with its proof.

File, function and change identify them, so that they stay known when lines move.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Equivalent:
    file: str
    function: str
    change: tuple[str, ...]
    proof: str


EQUIVALENTS: tuple[Equivalent, ...] = (
    Equivalent(
        file="hydra_ext/runtime/rounds/choice.py",
        function="Choice._fitting",
        change=(
            "- return max(0, self._room - measured.passing) // max(1, measured.held)",
            "+ return max(0, self._room - measured.passing) // max(0, measured.held)",
        ),
        proof="The loss of the first round is held and counted, and learn() keeps the most: `held` is never 0 here.",
    ),
    Equivalent(
        file="hydra_ext/tiled/operators/losses.py",
        function="log_sigmoid",
        change=("- return result, source.new_empty(0)", "+ return result, source.new_empty(1)"),
        proof="log_sigmoid_backward() does not read the buffer, and logsigmoid() returns the first of both alone.",
    ),
    Equivalent(
        file="hydra_ext/activations/recompute.py",
        function="_version",
        change=(
            "- return 0 if tensor.is_inference() else tensor._version",
            "+ return 1 if tensor.is_inference() else tensor._version",
        ),
        proof="Versions of one tensor are compared with each other alone, and one in inference mode stays one.",
    ),
    Equivalent(
        file="hydra_ext/activations/recompute.py",
        function="RecomputedModule._saves_to_the_stash",
        change=("- hooks = _saved_tensors_hooked(True)", "+ hooks = _saved_tensors_hooked(False)"),
        proof="It says whether to answer while torch traces, where the call that asks is not traced (not_traced).",
    ),
    Equivalent(
        file="hydra_ext/state/layout.py",
        function="Layout.copy",
        change=(
            "- self.once(made).copy_(self.once(tensor.detach()))",
            "+ self.once(made).copy_(self.once(tensor))",
        ),
        proof="Under torch.no_grad() neither narrow() nor copy_() makes a graph.",
    ),
    Equivalent(
        file="hydra_ext/construction/withholding.py",
        function="Withholding.__init__",
        change=("- self._purge_at = 4096", "+ self._purge_at = 4097"),
        proof="It says when entries of storages that have ended are dropped: one entry of a few bytes later.",
    ),
    Equivalent(
        file="hydra_ext/runtime/rounds/undoing/undo.py",
        function="Undo.__init__",
        change=(
            "- self._backwards = self._backwards_before = 0  # when the round, and the step, began",
            "+ self._backwards = self._backwards_before = 1  # when the round, and the step, began",
        ),
        proof="step_begins() and round_begins() set both before they are read.",
    ),
    Equivalent(
        file="hydra_ext/tiled/operators/overlaps.py",
        function="",
        change=(
            "- _MOST_WORK = 10**5  # how long numpy may look for an element that two tensors share",
            "+ _MOST_WORK = 11**5  # how long numpy may look for an element that two tensors share",
        ),
        proof="It bounds how long a question may be thought over: the answers are numpy's, and both bounds are large.",
    ),
    Equivalent(
        file="hydra_ext/errors.py",
        function="RankFailed.__init__",
        change=(
            "- super().__init__(message)",
            "+ pass",
        ),
        proof="BaseException.__new__ has taken the message already, and no class above has an __init__ of its own.",
    ),
    Equivalent(
        file="hydra_ext/pipeline/stages/tier.py",
        function="_layout",
        change=(
            "- return discover(root, largest_bytes=min(total // _BLOCKS_PER_MODEL, budget // _BLOCKS_PER_BUDGET))",
            "+ return discover(root, largest_bytes=min(budget // _BLOCKS_PER_BUDGET, total // _BLOCKS_PER_MODEL))",
        ),
        proof="The smaller of two numbers, in another order.",
    ),
    Equivalent(
        file="hydra_ext/pipeline/stages/versions.py",
        function="StageWeights.refresh",
        change=(
            "- leaf.requires_grad_(parameter.requires_grad)",
            "+ pass",
        ),
        proof="What is trained is settled at the beginning; another choice later is refused: both require gradients.",
    ),
    Equivalent(
        file="hydra_ext/pipeline/stages/versions.py",
        function="StageWeights.refresh",
        change=(
            "- newest.note()",
            "+ newest",
        ),
        proof="A leaf's counter counts writes to the leaf, and setting its data is none: it is as it was noted before.",
    ),
    Equivalent(
        file="hydra_ext/runtime/rounds/undoing/undo.py",
        function="Undo.obstacle",
        change=(
            '- return "nothing of it was noted"',
            "+ return None",
        ),
        proof="It is asked between round_begins() and step_ended() alone, where both moments are there.",
    ),
    Equivalent(
        file="hydra_ext/tiled/geometry.py",
        function="Window",
        change=(
            "- least: int = 1",
            "+ least: int = 0",
        ),
        proof="Every strip reaches one row at least before this counts: forward() and backward() ask for no empty one.",
    ),
    Equivalent(
        file="csrc/pytorch/gradients/gradient_sink.cpp",
        function="a gradient leaves before compute has written it, unseen",
        change=("- backend_.note_write(gradient.mutable_data_ptr(), bytes);",),
        proof="It tells the emulated device what to hold back, and does nothing elsewhere: without it tests see less.",
    ),
    Equivalent(
        file="csrc/pytorch/model/pending_update.cpp",
        function="a step begins while the last one runs",
        change=(
            "- finish();",
            "- if (DiskHomes* const disk = disk_.homes()) {",
            "- disk->expect_gradients();",
            "+ if (DiskHomes* const disk = disk_.homes()) {",
            "+ disk->expect_gradients();",
        ),
        proof="Updates.parts(), by which every step begins, has waited for the last one.",
    ),
    Equivalent(
        file="csrc/pytorch/model/pending_update.cpp",
        function="slots keep the weights from before a step",
        change=("- parameter->note_moved();", "- if (!disk_.holds(", "+ if (!disk_.holds("),
        proof="HostOptimizer.finish() has raised the version of all that the step writes, and a slot of another "
        "version is filled again; only the face's version would rise later, with the next window.",
    ),
    Equivalent(
        file="csrc/pytorch/model/model_window.cpp",
        function="a backward writes gradients that a step still reads",
        change=("- update.finish();  // the last step's gradients are free again", "+ update.reap();"),
        proof="The forward has waited for each block that it used, and gradients that a step holds are not written: "
        "those of other blocks would take memory beside.",
    ),
    Equivalent(
        file="csrc/pytorch/model/fault_path.cpp",
        function="an operation in place is not seen as one",
        change=("- return (view && !writes) || op", "+ return view || op"),
        proof="Of torch's operators none that takes tensors returns a view and writes.",
    ),
    Equivalent(
        file="csrc/pytorch/homes/device_homes.cpp",
        function="a home returns before its update has ended",
        change=("- planned.after.push_back(home.updated);",),
        proof="The slot's last uses, which come first in the list, have the same fence: BlockContents::note_written().",
    ),
    Equivalent(
        file="csrc/pytorch/parameters/withheld.cpp",
        function="a part of a storage at home is read at its begin",
        change=(
            "- withheld->at_home + tensor.storage_offset() * static_cast<std::int64_t>(tensor.itemsize())",
            "+ withheld->at_home",
        ),
        proof="Only whole tensors get a home on the device (is_alone), and one that is given a part of another's "
        "memory ends its block's home: the offset is 0.",
    ),
    Equivalent(
        file="csrc/pytorch/model/home_moves.cpp",
        function="a block that left its home before the step keeps its old bytes",
        change=(
            "- parameter->note_moved();",
            "- }",
            "- }",
            "- }",
            "+ static_cast<void>(parameter);",
            "+ }",
            "+ }",
            "+ }",
        ),
        proof="HostOptimizer.finish() has raised the version, which says the same to changed_since_seen().",
    ),
)


def proof_of(file: str, function: str, change: tuple[str, ...]) -> str | None:
    found = [
        known.proof for known in EQUIVALENTS if (known.file, known.function, known.change) == (file, function, change)
    ]
    return found[0] if found else None
