"""Copies of the package in which some files are others."""

from __future__ import annotations

import compileall
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path


class Packages:
    """Makes copies of the package, built extension included, below a folder."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._folder = folder
        self._made = 0
        self.plain = folder / "plain"
        shutil.rmtree(self.plain, ignore_errors=True)
        shutil.copytree(root / "hydra_ext", self.plain / "hydra_ext", ignore=shutil.ignore_patterns("__pycache__"))
        for path in _built():
            shutil.copy2(path, self.plain / "hydra_ext")
        compileall.compile_dir(self.plain, quiet=1)

    def changed(self, files: Mapping[str, str | Path]) -> Path:
        """Makes a copy in which these files have another text, or are other files. Paths are relative to the root."""
        self._made += 1
        copy = self._folder / f"copy-{os.getpid()}-{self._made}"
        shutil.copytree(self.plain, copy, copy_function=os.link)
        for name, content in files.items():
            path = copy / name
            path.unlink(missing_ok=True)
            for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
                compiled.unlink()
            if isinstance(content, Path):
                shutil.copy2(content, path)
            else:
                path.write_text(content)
        return copy


def _built() -> list[Path]:
    """Returns the files that the build adds to the sources, and their places. A separate process finds them, since the
    package must not be imported in this one."""
    program = (
        "import hydra_ext._C as built, hydra_ext._build_info as info; print(built.__file__, info.__file__, sep='\\n')"
    )
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=False)
    if found.returncode:
        raise RuntimeError(f"hydra_ext is not installed: build it first\n{found.stderr}")
    return [Path(line) for line in found.stdout.splitlines()]


def digest(paths: Iterable[Path]) -> str:
    """Returns a digest of the contents of files."""
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]
