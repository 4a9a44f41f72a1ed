"""Names a wheel by the torch that it was built for: `name_wheel.py build/wheel/hydra_ext-0.1.0-....whl dist`.

The copy in the second folder has the version 0.1.0+torch2.13 (+torch2.13.cu13 for a torch with CUDA 13). It requires
that torch, so that pip installs no other version.
"""

import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path


def suffix(torch: str, torch_cuda: str) -> str:
    return f"torch{torch}" + (f".cu{torch_cuda.partition('.')[0]}" if torch_cuda else "")


def renamed(metadata: str, torch: str, label: str) -> str:
    metadata = re.sub(r"^(Version: .*)$", rf"\1+{label}", metadata, count=1, flags=re.MULTILINE)
    return re.sub(r"^Requires-Dist: torch[<>=].*$", f"Requires-Dist: torch=={torch}.*", metadata, flags=re.MULTILINE)


def main(wheel: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob("*.whl"):
        earlier.unlink()
    with tempfile.TemporaryDirectory() as name:
        _wheel("unpack", "--dest", name, str(wheel))
        (content,) = Path(name).iterdir()
        stamp = runpy.run_path(str(content / "hydra_ext" / "_build_info.py"))
        label = suffix(stamp["TORCH"], stamp["TORCH_CUDA"])
        (info,) = content.glob("*.dist-info")
        metadata = info / "METADATA"
        metadata.write_text(renamed(metadata.read_text(), stamp["TORCH"], label))
        info.rename(content / f"{info.name.removesuffix('.dist-info')}+{label}.dist-info")
        _wheel("pack", "--dest-dir", str(folder), str(content))  # writes RECORD anew


def _wheel(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "wheel", *arguments], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
