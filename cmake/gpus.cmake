# Decides whether the GPU engines are compiled, and for which GPUs:
#
#   STREAMBP_CUDA=AUTO   if this machine has a GPU that can run them, because nvcc takes minutes
#   STREAMBP_CUDA=ON     also without one, for GPUs elsewhere
#
# Sets NVCC, CMAKE_CUDA_ARCHITECTURES, and no_gpu_code: why not, with the remedy; empty if they are compiled.

set(oldest_toolkit 12.4)
set(oldest_gpu 80)
set(no_gpu_code "")
if(NOT DEFINED usual_toolkits)  # the tests have others
  set(usual_toolkits /usr/local/cuda /opt/cuda)
  set(driver_files /dev/nvidia0 /proc/driver/nvidia/version)
endif()

find_program(NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS ${usual_toolkits} PATH_SUFFIXES bin)
set(toolkit 0)
if(NVCC)
  execute_process(COMMAND ${NVCC} --version OUTPUT_VARIABLE nvcc_says ERROR_QUIET)
  if(nvcc_says MATCHES "release ([0-9.]+)")
    set(toolkit ${CMAKE_MATCH_1})
  else()
    set(toolkit "of an unknown version")
  endif()
endif()

# The compute capabilities of this machine's GPUs, such as 80;90.
execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader OUTPUT_VARIABLE capabilities
                RESULT_VARIABLE failed ERROR_QUIET)
set(gpus "")
if(failed EQUAL 0)
  string(REGEX MATCHALL "[0-9]+[.][0-9]" gpus "${capabilities}")
  string(REPLACE "." "" gpus "${gpus}")
  list(REMOVE_DUPLICATES gpus)
endif()
set(usable_gpus ${gpus})
foreach(gpu ${gpus})
  if(gpu LESS oldest_gpu)
    list(REMOVE_ITEM usable_gpus ${gpu})
  endif()
endforeach()
set(has_driver "${gpus}")
foreach(file ${driver_files})
  if(EXISTS ${file})
    set(has_driver 1)
  endif()
endforeach()

if(STREAMBP_CUDA STREQUAL "OFF")
  set(no_gpu_code "-DSTREAMBP_CUDA=OFF was given")
elseif(NOT NVCC)
  set(no_gpu_code "nvcc was not found in PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda or /opt/cuda")
  if(has_driver)
    string(APPEND no_gpu_code ", although this machine has an NVIDIA GPU. Install the CUDA toolkit, ${oldest_toolkit} or "
                              "later, and build again")
  endif()
elseif(NOT toolkit VERSION_GREATER_EQUAL oldest_toolkit)
  set(no_gpu_code "${NVCC} is CUDA ${toolkit}. Install CUDA ${oldest_toolkit} or later and build again")
elseif(STREAMBP_CUDA STREQUAL "AUTO" AND gpus AND NOT usable_gpus)
  list(GET gpus 0 gpu)
  string(REGEX REPLACE "(.)$" ".\\1" gpu "${gpu}")
  set(no_gpu_code "this machine's GPU has compute capability ${gpu}, and 8.0 is the minimum")
elseif(STREAMBP_CUDA STREQUAL "AUTO" AND NOT gpus AND has_driver)
  string(CONCAT no_gpu_code "an NVIDIA driver is loaded, but nvidia-smi lists no GPU. Fix that and build again, or "
                            "compile for GPUs elsewhere with -DSTREAMBP_CUDA=ON")
elseif(STREAMBP_CUDA STREQUAL "AUTO" AND NOT gpus)
  set(no_gpu_code "this machine has no GPU (-DSTREAMBP_CUDA=ON compiles for others)")
endif()
if(no_gpu_code AND STREAMBP_CUDA STREQUAL "ON")
  message(FATAL_ERROR "STREAMBP_CUDA is ON, but ${no_gpu_code}.")
endif()

# Code for 8.0 also runs on 8.6 and 8.9. Newer GPUs than the toolkit knows translate the PTX of 9.0 when they first run it.
if(NOT no_gpu_code AND NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  execute_process(COMMAND ${NVCC} --list-gpu-code OUTPUT_VARIABLE known ERROR_QUIET)
  set(CMAKE_CUDA_ARCHITECTURES ${usable_gpus})
  foreach(gpu ${usable_gpus})
    if(NOT known MATCHES "sm_${gpu}[^0-9]")
      list(REMOVE_ITEM CMAKE_CUDA_ARCHITECTURES ${gpu})
      list(APPEND CMAKE_CUDA_ARCHITECTURES 90)
    endif()
  endforeach()
  if(NOT usable_gpus)
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
  endif()
  list(REMOVE_DUPLICATES CMAKE_CUDA_ARCHITECTURES)
endif()
