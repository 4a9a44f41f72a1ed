"""Where `make test` takes GoogleTest from: the system, its package manager, sources."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import googletest

ROOT = Path(__file__).resolve().parents[1]
DEBIAN = Path("/usr/src/googletest")
OWN_MOUNTS = ["unshare", "--mount", "--map-root-user"]


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def archive(folder: Path, content: Path | None = None) -> tuple[Path, str]:
    """An archive of sources, and its digest."""
    if content is None:
        content = folder / "googletest-1"
        content.mkdir()
        (content / "CMakeLists.txt").write_text("project(googletest)\n")
    path = folder / "googletest.tar.gz"
    with tarfile.open(path, "w:gz") as packed:
        packed.add(content, content.name)
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def only_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which programs are looked for; `env` runs one."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "env").symlink_to(shutil.which("env") or "")
    (folder / "sh").symlink_to(shutil.which("sh") or "")
    monkeypatch.setenv("PATH", str(folder))
    return folder


def find(folder: Path, source: str, sha256: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "argv", ["googletest.py", str(folder), "--source", source, "--sha256", sha256])
    googletest.main()
    return (folder / "googletest.cmake").read_text()


@pytest.mark.parametrize(
    "text",
    ["#include <gtest/no_such_header.h>\n", "void no_such_function(); int main() { no_such_function(); }\n"],
    ids=["compile", "link"],
)
def test_what_does_not_compile_or_link_is_not_present(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(googletest.PROBE, "probe.cpp", text)
    assert not googletest.is_present()


def test_what_is_present_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(googletest, "is_present", lambda: True)
    assert 'HYDRA_GTEST_SOURCE ""' in find(tmp_path, "nowhere", "", monkeypatch)


@pytest.mark.parametrize(("answers", "sources"), [([False, True], False), ([False, False], True)])
def test_after_an_installation_it_is_asked_again(
    answers: list[bool], sources: bool, only_programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(only_programs, "apt-get", f'echo "$@" >> {tmp_path}/asked')
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    left = list(answers)
    monkeypatch.setattr(googletest, "is_present", lambda: left.pop(0))
    path, digest = archive(tmp_path)
    content = find(tmp_path / "found", str(path), digest, monkeypatch)
    assert not left
    assert (tmp_path / "asked").read_text().splitlines()[-1].split()[-1] == "libgtest-dev"
    assert (f"{tmp_path}/found/sources/googletest-1" in content) is sources


@pytest.mark.parametrize(
    ("programs", "installed"),
    [
        ({}, False),
        ({"dnf": "exit 1"}, False),
        ({"dnf": "exit 0"}, True),
    ],
)
def test_a_package_manager_that_fails_has_installed_nothing(
    programs: dict[str, str], installed: bool, only_programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in programs.items():
        program(only_programs, name, text)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert googletest.install() is installed


@pytest.mark.parametrize(("sudo", "installed"), [("exit 1", False), ('shift; exec "$@"', True)])
def test_a_user_installs_only_where_sudo_asks_for_no_password(
    sudo: str, installed: bool, only_programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(only_programs, "apt-get", "exit 0")
    program(only_programs, "sudo", f'test "$1" = -n || exit 2\n{sudo}')
    (only_programs / "true").symlink_to(shutil.which("true", path=os.defpath) or "")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert googletest.install() is installed


def test_sources_of_another_digest_are_not_unpacked(tmp_path: Path) -> None:
    path, digest = archive(tmp_path)
    with pytest.raises(SystemExit, match=f"{digest}; {'0' * 64} was expected.*GTEST_SOURCE=") as stop:
        googletest.fetch(str(path), "0" * 64, tmp_path / "sources")
    assert "libgtest-dev" in str(stop.value)
    assert not list((tmp_path / "sources").glob("*/"))


@pytest.mark.parametrize("source", ["/no/such/archive.tar.gz", "http://127.0.0.1:1/archive.tar.gz"])
def test_sources_that_cannot_be_had_are_named(source: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"{source} cannot be read .*GTEST_SOURCE="):
        googletest.fetch(source, "0" * 64, tmp_path / "sources")


@pytest.mark.full
@pytest.mark.mounts
@pytest.mark.googletest_sources
def test_without_headers_the_sources_are_built(tmp_path: Path) -> None:
    """The package of Debian is there, but its headers are hidden; installing it again changes nothing."""
    path, digest = archive(tmp_path, DEBIAN)
    program(tmp_path, "apt-get", "exit 0")
    found, build = tmp_path / "found", tmp_path / "build"
    steps = [
        "mount -t tmpfs none /usr/include/gtest",
        f"{sys.executable} {ROOT}/tools/googletest.py {found} --source {path} --sha256 {digest}",
        f"cmake -C {found}/googletest.cmake -S {ROOT} -B {build} -G Ninja -DHYDRA_PYTHON=OFF -DHYDRA_TESTS=ON",
        f"cmake --build {build} --target gtest_main",
    ]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run([*OWN_MOUNTS, "sh", "-ec", "\n".join(steps)], env=environment, check=True)
    assert list(build.rglob("libgtest_main.a"))
