"""Prints requirements from pyproject.toml, one a line: `requirements.py build run demo test dev`.

`build` selects the requirements to build the package, and `run` those to run it, without torch, which the Makefile
installs. The other arguments select extras.
"""

import sys
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]


def requirements(groups: list[str]) -> list[str]:
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = content["project"]
    known = {
        "build": [*content["build-system"]["requires"], "ninja", "wheel"],
        "run": [name for name in project["dependencies"] if not name.startswith("torch")],
        **project["optional-dependencies"],
    }
    return [requirement for group in groups for requirement in known[group]]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))
