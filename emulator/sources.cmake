# The sources of the emulated CUDA machine, and how kernels are translated for it. Read where CUDA's headers are found:
# by the C++ tests, which know no torch, and by emulator/CMakeLists.txt.
set(HYDRA_EMULATED_RUNTIME_SOURCES # no torch, no Python
  emulator/cudart/api_copy.cpp emulator/cudart/api_device.cpp emulator/cudart/api_error.cpp
  emulator/cudart/api_event.cpp emulator/cudart/api_memory.cpp emulator/cudart/api_stream.cpp emulator/cudart/call.cpp
  emulator/cudart/control.cpp emulator/cudart/device_memory.cpp emulator/cudart/engine.cpp emulator/cudart/host_time.cpp
  emulator/cudart/idle_time.cpp emulator/cudart/machine.cpp
  emulator/cudart/memory_guard.cpp emulator/cudart/pinned_memory.cpp emulator/cudart/quiet_process.cpp
  emulator/cudart/script.cpp emulator/cudart/stream.cpp emulator/cudart/virtual_clock.cpp)
set(HYDRA_EMULATED_KERNEL_SOURCES # no torch, no Python
  emulator/kernels/block.cpp emulator/kernels/executor.cpp emulator/kernels/meeting.cpp)
set(HYDRA_EMULATED_FIBER_SOURCES emulator/kernels/fiber.cpp emulator/kernels/fiber_executor.cpp)
set(HYDRA_EMULATED_THREAD_SOURCES emulator/kernels/thread_executor.cpp) # in place of fibers, for ThreadSanitizer
set(HYDRA_EMULATED_CACHE_SOURCES # no torch, no Python
  emulator/c10_cuda/device_cache.cpp emulator/c10_cuda/runtime_calls.cpp)
set(HYDRA_EMULATED_NCCL_SOURCES # no torch, no Python
  emulator/nccl/communicator.cpp emulator/nccl/exchange.cpp emulator/nccl/header.cpp emulator/nccl/socket.cpp)
set(HYDRA_EMULATED_TORCH_SOURCES
  emulator/c10_cuda/caching_allocator.cpp emulator/c10_cuda/functions.cpp emulator/c10_cuda/streams.cpp
  emulator/torch/call.cpp emulator/torch/copies.cpp emulator/torch/hooks.cpp emulator/torch/host_kernels.cpp
  emulator/torch/invocation.cpp emulator/torch/kernels.cpp emulator/torch/meta_shapes.cpp
  emulator/torch/nccl_kernels.cpp emulator/torch/nccl_work.cpp
  emulator/torch/operands.cpp emulator/torch/operator_traits.cpp emulator/torch/operators.cpp
  emulator/torch/pinned_memory.cpp emulator/torch/process_group_nccl.cpp emulator/torch/random.cpp
  emulator/torch/result_shapes.cpp emulator/torch/storages.cpp emulator/torch/stream_work.cpp
  emulator/torch/workspaces.cpp)
set(HYDRA_EMULATED_PYTHON_SOURCES
  emulator/python/collective_bindings.cpp emulator/python/device_bindings.cpp
  emulator/python/machine_bindings.cpp emulator/python/memory_bindings.cpp emulator/python/module.cpp)
foreach(list RUNTIME KERNEL FIBER THREAD CACHE NCCL TORCH PYTHON)
  list(TRANSFORM HYDRA_EMULATED_${list}_SOURCES PREPEND ${PROJECT_SOURCE_DIR}/)
endforeach()
if(HYDRA_SANITIZE STREQUAL "thread")
  list(APPEND HYDRA_EMULATED_KERNEL_SOURCES ${HYDRA_EMULATED_THREAD_SOURCES})
else()
  list(APPEND HYDRA_EMULATED_KERNEL_SOURCES ${HYDRA_EMULATED_FIBER_SOURCES})
endif()

# Sets `variable` to the C++ sources that the CUDA sources become.
function(hydra_translate_kernels variable)
  set(translator ${PROJECT_SOURCE_DIR}/emulator/kernels/translate.py)
  foreach(kernel IN LISTS ARGN)
    get_filename_component(name ${kernel} NAME_WE)
    set(source ${PROJECT_SOURCE_DIR}/${kernel})
    set(translated ${CMAKE_CURRENT_BINARY_DIR}/translated/${name}.cpp)
    add_custom_command(OUTPUT ${translated} COMMAND ${Python_EXECUTABLE} ${translator} ${source} ${translated}
                       DEPENDS ${source} ${translator} COMMENT "Translating ${kernel}" VERBATIM)
    list(APPEND all ${translated})
  endforeach()
  # Like the kernels of a GPU, without fused multiply-adds.
  set_source_files_properties(${all} PROPERTIES COMPILE_OPTIONS -ffp-contract=off)
  set(${variable} ${all} PARENT_SCOPE)
endfunction()
