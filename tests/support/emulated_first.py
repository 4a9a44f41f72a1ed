"""Its import puts the emulated CUDA machine under torch, and so comes before anything that imports torch."""

import emulated_cuda

emulated_cuda.load()
