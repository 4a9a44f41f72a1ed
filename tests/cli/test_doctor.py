"""The doctor: both of its forms as a user runs it, and the functions it is made of."""

import dataclasses
import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ext
from hydra_ext import _build_info
from hydra_ext.cli import main
from hydra_ext.cli.doctor import build, device, host, report
from hydra_ext.cli.doctor.report import Check, Report, Status
from support.stamped import PYTHON, copy_for

GIB = 1 << 30
COMMAND = str(Path(sys.executable).with_name("hydra-ext"))
LINK = device.LinkFacts("cuda", 20e9, 18e9)
HOST = host.HostFacts(8, 64 * GIB, 32 * GIB, 2, None, None)


def run_doctor(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hydra_ext", "doctor", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


@pytest.mark.full
def test_json_says_what_is_installed_and_what_works(tmp_path: Path) -> None:
    run = run_doctor("--json", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    content = json.loads(run.stdout)
    assert content["ok"] is True
    assert content["build"]["hydra_ext"] == hydra_ext.__version__
    assert content["build"]["torch"] == torch.__version__
    assert content["build"]["built_for_torch"] == _build_info.TORCH
    assert Path(content["build"]["extension"]).name.startswith("_C.")
    assert content["host"]["memory_total_bytes"] > content["host"]["memory_available_bytes"] > 0
    assert content["host"]["cores"] >= 1
    assert content["device"]["to_device_bytes_per_second"] > 1e8
    assert {"extension", "host memory", "cores", "cuda", "link"} <= {check["name"] for check in content["checks"]}
    assert all(check["status"] in ("ok", "warn", "fail") for check in content["checks"])
    assert all(set(check) == {"name", "status", "detail", "remedy"} for check in content["checks"])


@pytest.mark.full
def test_text_says_the_same(tmp_path: Path) -> None:
    run = run_doctor(cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert torch.__version__ in run.stdout
    assert "what will work here" in run.stdout
    assert "GB/s" in run.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    "program",
    [["-m", "hydra_ext"], [COMMAND]],
    ids=["module", "command"],
)
def test_a_broken_build_is_examined_too(program: list[str], tmp_path: Path) -> None:
    """A copy of the package stamped for another torch: importing it fails, the doctor runs and says why."""
    command = [*PYTHON, *program, "doctor", "--json"]
    run = subprocess.run(command, env=copy_for("1.0", tmp_path), capture_output=True, text=True)
    assert run.returncode == 1, run.stderr
    checks = {check["name"]: check for check in json.loads(run.stdout)["checks"]}
    assert checks["extension"]["status"] == "fail"
    assert "built against torch 1.0" in checks["extension"]["detail"]


def test_an_unknown_verb_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main.run(["diagnose"])
    assert stop.value.code == 2
    assert "doctor" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(
    ("program", "called"),
    [(["-m", "hydra_ext"], "python -m hydra_ext"), ([COMMAND], "hydra-ext")],
    ids=["module", "command"],
)
def test_without_arguments_all_verbs_are_listed(program: list[str], called: str, tmp_path: Path) -> None:
    text = subprocess.check_output([sys.executable, "-W", "ignore", *program], cwd=tmp_path, text=True)
    assert text.startswith(f"usage: {called} ")
    assert f"`{called} VERB --help`" in text
    assert all(f"  {name} " in text for name in main.VERBS)


@pytest.mark.full
def test_a_reader_that_has_read_enough_is_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hydra_ext", "doctor", "--json"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as doctor:
        assert doctor.stdout is not None
        assert doctor.stderr is not None
        doctor.stdout.close()
        assert "BrokenPipe" not in doctor.stderr.read()
    assert doctor.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize(
    ("statuses", "code"),
    [([], 0), ([Status.OK, Status.WARN], 0), ([Status.OK, Status.FAIL], 1)],
)
def test_only_failures_make_the_exit_code(statuses: list[Status], code: int) -> None:
    assert Report({}, [Check("x", status, "") for status in statuses]).exit_code == code


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB"),
        (3 * GIB, "3.0 GiB"),
        (1 << 41, "2.0 TiB"),
        (None, "unlimited"),
    ],
)
def test_human_bytes(count: int | None, text: str) -> None:
    assert report.human_bytes(count) == text


def test_meminfo() -> None:
    text = "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:    600 kB\n"
    assert host.parse_meminfo(text) == (1000 * 1024, 600 * 1024)


def write_limit(root: Path, path: str, value: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(value + "\n")


def test_cgroup_v2_takes_the_tightest_limit_on_the_way(tmp_path: Path) -> None:
    write_limit(tmp_path, "a/memory.max", str(2 * GIB))
    write_limit(tmp_path, "a/b/memory.max", "max")
    assert host.cgroup_limit(tmp_path, "0::/a/b\n") == (2, 2 * GIB)


def test_cgroup_v1_without_a_limit(tmp_path: Path) -> None:
    write_limit(tmp_path, "memory/a/memory.limit_in_bytes", "9223372036854771712")
    assert host.cgroup_limit(tmp_path, "4:cpu,memory:/a\n0::/\n") == (1, None)


def test_cgroup_of_a_container_is_found_at_the_root(tmp_path: Path) -> None:
    write_limit(tmp_path, "memory/memory.limit_in_bytes", str(GIB))
    assert host.cgroup_limit(tmp_path, "4:memory:/outside/of/us\n") == (1, GIB)


def test_no_cgroups(tmp_path: Path) -> None:
    assert host.cgroup_limit(tmp_path, "") == (None, None)


def test_a_small_container_is_a_warning() -> None:
    tight = host.HostFacts(8, 64 * GIB, 32 * GIB, 2, GIB, None)
    assert [check.status for check in host.checks(tight)] == [Status.WARN, Status.OK]
    assert [check.status for check in host.checks(HOST)] == [Status.OK, Status.OK]


def test_driver_version(tmp_path: Path) -> None:
    path = tmp_path / "version"
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 12.2.0\n"
    )
    assert device.read_driver(path) == "580.159.04"
    assert device.read_driver(tmp_path / "none") is None


def cuda_facts(**changes: object) -> device.DeviceFacts:
    gpu = device.Device("GPU", 80 * GIB, "9.0")
    working = device.DeviceFacts(
        torch_has_cuda=True, cuda_available=True, driver="580.1", devices=[gpu], pinning=True, link=LINK
    )
    return dataclasses.replace(working, **changes)  # type: ignore[arg-type]


def statuses_of(facts: device.DeviceFacts, built: str) -> dict[str, Status]:
    return {check.name: check.status for check in device.checks(facts, built, 8192)}


def test_a_gpu_that_works() -> None:
    assert set(statuses_of(cuda_facts(), "ON").values()) == {Status.OK}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("changes", "built", "name"),
    [
        ({}, "OFF", "cuda"),
        ({"cuda_available": False}, "ON", "cuda"),
        ({"cuda_available": False, "torch_has_cuda": False}, "OFF", "cuda"),
        ({"cuda_available": False, "driver": None}, "OFF", "cuda"),
        ({"pinning": False}, "ON", "pinned memory"),
        ({"link": device.LinkFacts("cuda")}, "ON", "link"),
        ({"link": device.LinkFacts("cuda", 1e9, 20e9)}, "ON", "link"),
    ],
)
def test_what_a_gpu_lacks_is_a_warning_with_a_remedy(changes: dict[str, object], built: str, name: str) -> None:
    facts = cuda_facts(**changes)
    assert statuses_of(facts, built)[name] is Status.WARN
    remedies = [check.remedy for check in device.checks(facts, built, 8192) if check.status is Status.WARN]
    assert all(remedy.startswith(("install", "pip install", "see", "raise", "use")) for remedy in remedies), remedies


def test_a_problem_of_the_build_is_a_failure() -> None:
    facts = build.collect()
    assert [check.status for check in build.checks(facts)] == [Status.OK]
    broken = dataclasses.replace(facts, problem="built for another torch")
    assert [check.status for check in build.checks(broken)] == [Status.FAIL]


def test_a_build_without_kernels_for_a_torch_with_cuda_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = build.collect()
    monkeypatch.setattr(_build_info, "TORCH_CUDA", "13.0")
    monkeypatch.setattr(_build_info, "WITHOUT_CUDA", "no nvcc was found that works")
    found = build.checks(dataclasses.replace(facts, built_for_torch_cuda="13.0", without_cuda=_build_info.WITHOUT_CUDA))
    assert [check.status for check in found] == [Status.OK, Status.WARN]
    assert "no nvcc" in found[1].detail
    assert found[1].remedy.startswith("install nvcc of CUDA 13,")


@pytest.mark.gpu
def test_the_link_of_a_gpu_is_measured() -> None:
    facts = device.collect()
    assert facts.cuda_available
    assert facts.pinning
    assert (facts.link.to_device_bytes_per_second or 0) > 1e9
    assert (facts.link.to_host_bytes_per_second or 0) > 1e9


def test_a_link_that_cannot_be_measured_is_told_without_figures(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no memory can be pinned")

    monkeypatch.setattr(torch, "ones", refused)
    with caplog.at_level("DEBUG"):
        assert device.measure_cuda_link(pinned=True) == device.LinkFacts("cuda")
    assert "the link could not be measured: no memory can be pinned" in caplog.text


@pytest.mark.parametrize(("soft", "expected"), [(4096, 4096), (resource.RLIM_INFINITY, None)])
def test_the_limit_of_pinned_memory_is_the_process_s(
    soft: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, 8192) if kind == resource.RLIMIT_MEMLOCK else None)
    assert host.memlock_limit() == expected


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [("pinned", True, "yes"), ("pinned", False, "no"), ("kind", None, "none"), ("n", 3, "3")],
)
def test_values_are_shown_in_words(name: str, value: object, shown: str) -> None:
    assert report._shown(name, value) == shown
