"""Records do not change once they are made, but for those that are built up piece by piece."""

from __future__ import annotations

import ast
from pathlib import Path

import hydra_ext

PACKAGE = Path(hydra_ext.__file__).parent
BUILT_UP = {
    "Batch",
    "BatchGradients",
    "EventDraft",
    "GlueContext",
    "JobHistory",
    "JobRecord",
    "Known",
    "Layout",
    "Left",
    "Memory",
    "ModuleContents",
    "Note",
    "Outcome",
    "OwnStage",
    "PreparedStep",
    "Reduction",
    "Running",
    "Setbacks",
    "StageGradients",
    "StageLinks",
    "Track",
    "Usage",
    "Tally",
    "_BlockReduction",
    "_Call",
    "_Forward",
    "_Gang",
    "_Installed",
    "_Noted",
    "_Pending",
    "_Place",
    "_Share",
    "_Slot",
    "_Sums",
}


def decorated(node: ast.ClassDef) -> list[str]:
    texts = [ast.unparse(decorator) for decorator in node.decorator_list]
    return [text for text in texts if text.partition("(")[0] in ("dataclass", "dataclasses.dataclass")]


def test_dataclasses_are_frozen_unless_they_are_listed() -> None:
    classes = [
        node
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and decorated(node)
    ]
    assert len(classes) > 100
    changing = {node.name for node in classes if "frozen=True" not in decorated(node)[0]}
    assert changing == BUILT_UP
