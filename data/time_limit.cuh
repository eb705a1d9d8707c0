// A limit on the processor time of the calling thread, for work whose amount depends on an untrusted file.
#pragma once

#include <ctime>

namespace streambp {

class TimeLimit {
 public:
  explicit TimeLimit(double seconds) : end_(now() + seconds) {}
  bool passed() const { return now() > end_; }

 private:
  static double now() {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  }
  double end_;
};

}  // namespace streambp
