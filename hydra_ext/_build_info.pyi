# The generated hydra_ext/_build_info.py (see the end of CMakeLists.txt).
VERSION: str  # of hydra_ext
TORCH: str  # minor version of the torch built against: "2.13"
TORCH_CUDA: str  # CUDA version of that torch: "13.0", or "" for one without
CUDA: str  # "ON", "OFF" or "CHECK" (compiled, not linked)
WITHOUT_CUDA: str  # why there are no CUDA kernels, or "" where there are
FAULT_KEY: str  # dispatch key of device parameters
COMPILER: str
