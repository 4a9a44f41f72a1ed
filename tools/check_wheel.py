"""Checks a wheel's contents, size and name: `check_wheel.py dist/*.whl`."""

import fnmatch
import re
import sys
import zipfile
from pathlib import Path

LARGEST_BYTES = 5_000_000
NEEDED = ("_C.*.so", "_build_info.py", "__init__.py", "py.typed", "cli/main.py")
REQUIRED = ("torch", "safetensors", "numpy")


def faults(wheel: Path) -> list[str]:
    found = []
    size = wheel.stat().st_size
    if size >= LARGEST_BYTES:
        found.append(f"{size / 1e6:.1f} MB: {LARGEST_BYTES / 1e6:.0f} MB are allowed")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
        torch = re.findall(r'^TORCH = "(.*)"$', archive.read("hydra_ext/_build_info.py").decode(), re.MULTILINE)
    found += [f"no hydra_ext/{name}" for name in NEEDED if not fnmatch.filter(names, f"hydra_ext/{name}")]
    found += [f"{name} does not belong in it" for name in names if not name.startswith(("hydra_ext/", "hydra_ext-"))]
    found += [f"{name} does not belong in it" for name in names if "__pycache__" in name]
    needs = [line.split(":", 1)[1].strip() for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    found += [f"does not require {name}" for name in REQUIRED if not any(need.startswith(name) for need in needs)]
    found += [f"not named by torch {minor}" for minor in torch if f"+torch{minor}" not in wheel.name]
    found += [f"does not require torch {minor}" for minor in torch if f"torch=={minor}.*" not in needs]
    return found


def main(paths: list[str]) -> int:
    if len(paths) != 1:
        print(f"one wheel was expected: {paths}")
        return 1
    wheel = Path(paths[0])
    found = faults(wheel)
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB", *found, sep="\n  ")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
