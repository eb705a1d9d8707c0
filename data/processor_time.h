// CPU time of the calling thread, to limit work on untrusted files.
#pragma once

#include <ctime>

namespace streambp {

inline double processor_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

}  // namespace streambp
