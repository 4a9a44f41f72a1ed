"""The doctor's report, and its two forms: text and JSON."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


class Status(str, enum.Enum):
    OK = "ok"
    WARN = "warn"  # works, but slower or with fewer features
    FAIL = "fail"  # does not work, and is needed


@dataclass(frozen=True)
class Check:
    """One answer to "will it work here?". `remedy` is empty if there is nothing to do."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


Facts = Mapping[str, object]


@dataclass(frozen=True)
class Report:
    """`sections` has facts by title, `checks` the conclusions from them."""

    sections: Mapping[str, Facts]
    checks: Sequence[Check]

    @property
    def exit_code(self) -> int:
        return int(any(check.status is Status.FAIL for check in self.checks))


def human_bytes(count: int | None) -> str:
    """ "1.5 GiB"; "unlimited" for None."""
    if count is None:
        return "unlimited"
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def to_json(report: Report) -> str:
    content: dict[str, object] = dict(report.sections)
    content["checks"] = [{**asdict(check), "status": check.status.value} for check in report.checks]
    content["ok"] = report.exit_code == 0
    return json.dumps(content, indent=2)


def to_text(report: Report) -> str:
    lines: list[str] = []
    for title, facts in report.sections.items():
        lines.append(title)
        lines += [f"  {_label(name):<24} {_shown(name, value)}" for name, value in facts.items()]
        lines.append("")
    lines.append("what will work here")
    for check in report.checks:
        lines.append(f"  {check.status.value:<5} {check.name:<18} {check.detail}")
        if check.remedy:
            lines.append(f"        {'':<16} -> {check.remedy}")
    return "\n".join(lines)


def _label(name: str) -> str:
    return name.removesuffix("_bytes").removesuffix("_per_second").removesuffix("_bytes").replace("_", " ")


def _shown(name: str, value: object) -> str:
    if name.endswith("_per_second"):
        return f"{value / 1e9:.2f} GB/s" if isinstance(value, float) else "not measured"
    if name.endswith("_bytes") and (value is None or isinstance(value, int)):
        return human_bytes(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_item, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value in (None, "") else str(value)


def _item(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(_shown(name, entry) for name, entry in value.items())
    return str(value)
