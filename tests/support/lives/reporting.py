"""Counts of programs by operation, model and optimizer, of refusals with their messages, and of failures."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from support.lives.program import Program
from support.lives.running import Outcome


@dataclass
class Tally:
    programs: int = 0
    refused: int = 0
    wrong: dict[int, list[str]] = field(default_factory=dict)
    operations: Counter[str] = field(default_factory=Counter)
    subjects: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    first: dict[str, int] = field(default_factory=dict)

    def count(self, seed: int, program: Program, outcome: Outcome) -> None:
        self.programs += 1
        self.operations += outcome.made
        self.subjects.update([f"model {program.model}", f"optimizer {program.optimizer}"])
        for refusal in outcome.refusals:
            words = re.sub(r"\d[\d.]*( [KMG]?i?B)?", "#", refusal)[:160]
            self.refusals[words] += 1
            self.first.setdefault(words, seed)
        self.refused += bool(outcome.refusals)
        if outcome.wrong:
            self.wrong[seed] = outcome.wrong

    def text(self) -> str:
        def listed(counter: Counter[str]) -> str:
            return ", ".join(f"{name} {number}" for name, number in counter.most_common())

        return "\n".join(
            [
                f"{self.programs} programs, {sum(self.operations.values())} operations",
                f"wrong: {len(self.wrong)} {sorted(self.wrong)[:20] if self.wrong else ''}",
                f"with a refusal or out of memory: {self.refused} ({self.refused / max(self.programs, 1):.1%})",
                *(f"  {number} x, first {self.first[words]}: {words}" for words, number in self.refusals.most_common()),
                f"operations: {listed(self.operations)}",
                f"of: {listed(self.subjects)}",
            ]
        )
