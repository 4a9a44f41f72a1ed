"""Finds GoogleTest, or gets it, and tells CMake: `googletest.py FOLDER --source ADDRESS --sha256 DIGEST`.

Taken from the system; else installed by the system's package manager, where that asks nothing; else from sources. It
counts as present only if a program that includes its header compiles and links: headers without a library, or the
other way round, are no GoogleTest. FOLDER/googletest.cmake then says where it is, for `cmake -C`.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

# As CMakeLists.txt asks for it: what this finds is what the tests are built with.
PROBE = {
    "CMakeLists.txt": """\
cmake_minimum_required(VERSION 3.24)
project(probe LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 20)
find_package(GTest REQUIRED)
add_executable(probe probe.cpp)
target_link_libraries(probe PRIVATE GTest::gtest_main)
""",
    "probe.cpp": """\
#include <gtest/gtest.h>
TEST(Probe, Links) {}
""",
}
# None of these commands asks a question.
INSTALLERS = {
    "apt-get": ["apt-get update -qq", "apt-get install -qq -y --no-install-recommends libgtest-dev"],
    "dnf": ["dnf install -q -y gtest-devel"],
    "pacman": ["pacman -S --noconfirm --needed gtest"],
}


def is_present() -> bool:
    with tempfile.TemporaryDirectory() as name:
        for file, text in PROBE.items():
            (Path(name) / file).write_text(text)
        configure = ["cmake", "-G", "Ninja", "-S", name, "-B", f"{name}/build"]
        return all(_run(command) for command in (configure, ["cmake", "--build", f"{name}/build"]))


def install() -> bool:
    """Whether a package manager says that it has installed it."""
    manager = next((name for name in INSTALLERS if shutil.which(name)), None)
    if manager is None:
        return False
    if os.geteuid() == 0:
        prefix = []
    elif shutil.which("sudo") and _run(["sudo", "-n", "true"]):
        prefix = ["sudo", "-n"]
    else:
        print(f"GoogleTest: not here, and installing it with {manager} needs a password")
        return False
    commands = [[*prefix, "env", "DEBIAN_FRONTEND=noninteractive", *command.split()] for command in INSTALLERS[manager]]
    print(f"GoogleTest: not here; running {INSTALLERS[manager][-1]}", flush=True)
    return [_run(command, sys.stdout) for command in commands][-1]  # without fresh lists it may work all the same


def fetch(source: str, sha256: str, folder: Path) -> Path:
    """The folder of the sources. `source` is an address or the path of an archive, `sha256` what it must have."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    archive = folder / Path(source).name
    try:
        if "://" in source:
            with urllib.request.urlopen(source, timeout=60) as content, archive.open("wb") as file:
                shutil.copyfileobj(content, file)
        else:
            shutil.copyfile(source, archive)
    except (OSError, urllib.error.URLError) as error:
        sys.exit(f"GoogleTest: {source} cannot be read ({error}). {_REMEDY}")
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != sha256:
        sys.exit(f"GoogleTest: {source} has the SHA-256 {found}; {sha256} was expected. {_REMEDY}")
    shutil.unpack_archive(archive, folder)
    return next(folder.glob("*/CMakeLists.txt")).parent


_REMEDY = (
    "Install GoogleTest (libgtest-dev, gtest-devel), or download its sources elsewhere and give "
    "`make GTEST_SOURCE=/path/to/archive GTEST_SHA256=its-digest`"
)


def _run(command: list[str], output: object = subprocess.DEVNULL) -> bool:
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Finds GoogleTest, or gets it, and tells CMake.")
    parser.add_argument("folder", type=Path, help="where googletest.cmake is written, and sources are unpacked")
    parser.add_argument("--source", required=True, help="an archive of the sources: an address or a path")
    parser.add_argument("--sha256", required=True, help="of that archive")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    # Asked again after an installation: a package may be there and broken.
    if is_present() or (install() and is_present()):
        root = ""
        print("GoogleTest: the system's")
    else:
        root = str(fetch(options.source, options.sha256, folder / "sources"))
        print(f"GoogleTest: built from {options.source}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "googletest.cmake").write_text(f'set(HYDRA_GTEST_SOURCE "{root}" CACHE PATH "" FORCE)\n')


if __name__ == "__main__":
    main()
