"""The Makefile says what it can do, and what workflows and hooks ask of it exists."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
# These make an environment of a runner's; everything else is a target, which runs on any machine.
ACTIONS = {"actions/checkout", "actions/setup-python", "actions/upload-artifact"}
PRINTS_FAST = "include Makefile\nfast: ; @echo $(FAST)\n"


def test_help_lists_every_target() -> None:
    lines = subprocess.check_output(["make", "-s", "help"], cwd=ROOT, text=True).splitlines()
    assert [line.split()[0] for line in lines if len(line.split()) < 2] == []
    assert {line.split()[0] for line in lines} == TARGETS


def test_the_fast_tests_are_of_every_part_of_the_package() -> None:
    text = subprocess.check_output(["make", "-s", "-f", "-", "fast"], cwd=ROOT, text=True, input=PRINTS_FAST)
    paths = [ROOT / "tests" / name for name in text.split()]
    assert [path for path in paths if not path.exists()] == []
    apart = {"cpp", "cuda", "docs", "emulated", "fake_cuda", "programs", "support"}  # another language, a GPU, or long
    parts = {path.parent.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/test_*.py")}
    assert parts - apart <= {path.relative_to(ROOT / "tests").parts[0] for path in paths}


def test_only_the_python_tests_of_ci_are_samples() -> None:
    recipes = dict(re.findall(r"^([a-z][\w-]*):[^\n]*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    with_pytest = {target for target, recipe in recipes.items() if re.search(r"PYTEST|-m pytest", recipe)}
    assert with_pytest == {"check", "pytest", "test-full", "other-key", "gpu-test", "emulated-test"}
    assert {target for target in with_pytest if re.search(r"sample", recipes[target], re.IGNORECASE)} == {
        "emulated-test",
        "pytest",
    }
    assert '-m "not gpu and not emulated"' in recipes["test-full"]  # the marked ones too


def test_there_are_workflows_for_tests_docs_and_wheels() -> None:
    assert [path.stem for path in WORKFLOWS] == ["docs", "tests", "wheels"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_steps_of_workflows_are_targets(path: Path) -> None:
    jobs = yaml.safe_load(path.read_text())["jobs"].values()
    steps = [step for job in jobs for step in job["steps"]]
    assert {step["uses"].partition("@")[0] for step in steps if "uses" in step} <= ACTIONS
    commands = [step["run"].split() for step in steps if "run" in step]
    assert commands
    assert {command[0] for command in commands} == {"make"}
    assert {command[1] for command in commands} <= TARGETS


def test_workflows_try_each_python_and_torch_that_the_package_allows() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    (lowest,) = re.findall(r'^requires-python = ">=3\.(\d+)"$', project, re.MULTILINE)
    ((first, above),) = re.findall(r'"torch>=2\.(\d+),<2\.(\d+)"', project)
    for name in ("tests", "wheels"):
        content = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
        (job,) = content["jobs"].values()
        matrix = job["strategy"]["matrix"]
        assert matrix["torch"] == [f"2.{minor}" for minor in range(int(first), int(above))]
        assert matrix["python"] == [f"3.{minor}" for minor in range(int(lowest), 14)]


def test_the_hook_is_a_target() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["entry"] for hook in repository["hooks"]] == ["make lint"]
    assert "lint" in TARGETS
