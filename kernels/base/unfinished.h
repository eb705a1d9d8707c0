// Signals while a file is being written: the write stops, unfinished files are removed as after an error, and then the
// signal ends the process. While nothing is unfinished, the signal ends it at once.
#pragma once

#include <signal.h>

#include <atomic>
#include <exception>
#include <initializer_list>

namespace streambp {

// Not an error: main ends the process with this signal.
struct Cancelled {
  int signal;
};

// Lives as long as a file or directory under a temporary name.
class Unfinished {
 public:
  Unfinished() { ++count_; }
  // A signal may have come after the last check.
  ~Unfinished() {
    if (--count_ == 0 && signal_ != 0 && std::uncaught_exceptions() == 0) raise(signal_);
  }
  Unfinished(const Unfinished&) = delete;

  // Throws Cancelled if a signal came.
  static void check() {
    if (const int signal = signal_) throw Cancelled{signal};
  }

  // Call once, early in main. Signals that are ignored, as under nohup, stay ignored.
  static void catch_signals() {
    struct sigaction action = {}, present;
    action.sa_handler = note;
    action.sa_flags = SA_RESTART | SA_RESETHAND;  // the second signal ends the process
    sigemptyset(&action.sa_mask);
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
      sigaction(signal, nullptr, &present);
      if (present.sa_handler == SIG_DFL) sigaction(signal, &action, nullptr);
    }
  }

 private:
  static void note(int signal) {
    signal_ = signal;
    if (count_ == 0) raise(signal);
  }

  static inline std::atomic<int> count_ = 0, signal_ = 0;
};

}  // namespace streambp
