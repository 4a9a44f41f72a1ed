"""Finds or gets GoogleTest, and tells CMake: `googletest.py FOLDER --source ADDRESS --sha256 DIGEST`.

GoogleTest comes from the system, else from the system's package manager if it asks no question, else from sources.
It counts as present only if a program that includes its header compiles and links: headers without a library, or a
library without headers, do not count. Writes the place to FOLDER/googletest.cmake, for `cmake -C`.
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

# Like the search in CMakeLists.txt, so that the tests are built with the GoogleTest that this program finds.
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
# These commands ask no question.
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
    """Whether a package manager reports that it has installed GoogleTest."""
    manager = next((name for name in INSTALLERS if shutil.which(name)), None)
    if manager is None:
        return False
    if os.geteuid() == 0:
        prefix = []
    elif shutil.which("sudo") and _run(["sudo", "-n", "true"]):
        prefix = ["sudo", "-n"]
    else:
        print(f"GoogleTest: not installed, and {manager} needs a password to install it")
        return False
    commands = [[*prefix, "env", "DEBIAN_FRONTEND=noninteractive", *command.split()] for command in INSTALLERS[manager]]
    print(f"GoogleTest: not installed; running {INSTALLERS[manager][-1]}", flush=True)
    return [_run(command, sys.stdout) for command in commands][-1]  # the installation may succeed without fresh lists


def fetch(source: str, sha256: str, folder: Path) -> Path:
    """Returns the folder of the sources. `source` is the address or the path of an archive with the digest `sha256`."""
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
    parser = argparse.ArgumentParser(description="Finds or gets GoogleTest, and tells CMake.")
    parser.add_argument("folder", type=Path, help="folder for googletest.cmake and unpacked sources")
    parser.add_argument("--source", required=True, help="address or path of an archive of the sources")
    parser.add_argument("--sha256", required=True, help="SHA-256 digest of that archive")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    # Checked again after an installation: an installed package may be broken.
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
