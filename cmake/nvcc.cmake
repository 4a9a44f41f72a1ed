# Which nvcc fits the installed torch, whose CUDA is TORCH_CUDA: what to install, and what is refused or warned of.
string(REGEX MATCH "^[0-9]+" HYDRA_CUDA_MAJOR "${TORCH_CUDA}")
set(HYDRA_NVCC_REMEDY "install nvcc of CUDA ${HYDRA_CUDA_MAJOR} (package cuda-nvcc), on PATH or named by CUDACXX")

function(hydra_expect_fitting_nvcc version)
  string(REGEX MATCH "^[0-9]+" major "${version}")
  string(REGEX MATCH "^[0-9]+\\.[0-9]+" minor "${version}")
  if(NOT HYDRA_CUDA_MAJOR STREQUAL major)
    message(FATAL_ERROR "torch was built with CUDA ${TORCH_CUDA}, but nvcc is ${version}: "
                        "${HYDRA_NVCC_REMEDY}; or build without CUDA kernels, with HYDRA_CUDA=OFF")
  endif()
  # What nvcc compiles calls functions of its own runtime. torch loads an older one, which may lack them.
  if(minor VERSION_GREATER TORCH_CUDA)
    message(WARNING "torch loads the runtime of CUDA ${TORCH_CUDA}, but nvcc is ${version}, which is newer: hydra_ext may "
                    "fail to load, with an undefined symbol. Then install nvcc of CUDA ${TORCH_CUDA}, or an older one of "
                    "CUDA ${HYDRA_CUDA_MAJOR}, and install hydra_ext again.")
  endif()
endfunction()
