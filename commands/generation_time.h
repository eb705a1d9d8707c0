// The speed of generating tokens.
#pragma once

#include <chrono>

#include "model/stream.h"

namespace streambp {

struct GenerationTime {
  using Clock = std::chrono::steady_clock;
  Clock::time_point start = Clock::now(), first, end;
  Index tokens = 0, first_step = 0, steps = 0;  // steps after the first sampled token
  void drawn(Index step) {
    if (tokens++ == 0) first = Clock::now(), first_step = step;
  }
  void stop(Index step) { end = Clock::now(), steps = step - first_step; }
  static double seconds(Clock::time_point a, Clock::time_point b) {
    return std::chrono::duration<double>(b - a).count();
  }
};

}  // namespace streambp
