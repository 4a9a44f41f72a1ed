"""Fails unless the machine has a GPU and hydra_ext was built with CUDA, so that GPU tests cannot be skipped unseen."""

import sys

import torch

from hydra_ext import _build_info

if not torch.cuda.is_available():
    sys.exit(f"no GPU: torch {torch.__version__} (CUDA {torch.version.cuda}) finds none")
if _build_info.CUDA != "ON":
    sys.exit(f"hydra_ext was built without CUDA kernels: {_build_info.WITHOUT_CUDA}")
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
