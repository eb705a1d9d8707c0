// Helpers of the tests of the emulation.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "tests/temporary.h"

namespace streambp::emulation {

using cuda_on_cpu::launch;
using cuda_on_cpu::Schedule;
constexpr unsigned kAllLanes = 0xffffffff;

// Calls body() under every order of threads.
inline void for_all_schedules(const std::function<void()>& body) {
  for (const Schedule s : {Schedule::forward, Schedule::backward, Schedule::shuffled}) {
    for (unsigned seed = 1; seed <= (s == Schedule::shuffled ? 5u : 1u); ++seed) {
      cuda_on_cpu::schedule = s, cuda_on_cpu::shuffle_seed = seed;
      SCOPED_TRACE("schedule " + std::to_string(static_cast<int>(s)) + ", seed " + std::to_string(seed));
      body();
    }
  }
  cuda_on_cpu::schedule = Schedule::forward;
}

template <class T>
T* shared() {
  return static_cast<T*>(cuda_on_cpu::shared_memory());
}

// The error that launch throws, or "".
template <class F>
std::string complaint(dim3 grid, dim3 block, std::size_t shared_bytes, F&& body) {
  return error_of<std::logic_error>([&] { launch(grid, block, shared_bytes, body); });
}

}  // namespace streambp::emulation
