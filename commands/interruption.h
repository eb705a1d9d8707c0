// Signals that end a run: the first one lets it finish its step and save a checkpoint, the second one ends it at once.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <string_view>

namespace streambp {

// Catches SIGINT, SIGTERM and SIGHUP during its lifetime. A signal that the process already ignores, as under nohup,
// stays ignored.
class Interruption {
 public:
  Interruption() {
    caught_ = 0;
    struct sigaction action = {};
    action.sa_handler = note;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    for (std::size_t i = 0; i < kSignals.size(); ++i) {
      sigaction(kSignals[i], nullptr, &before_[i]);
      if (before_[i].sa_handler != SIG_IGN) sigaction(kSignals[i], &action, nullptr);
    }
  }
  ~Interruption() { restore(); }
  Interruption(const Interruption&) = delete;

  // The signal received, or 0. It outlives the object; main exits with 128 + signal.
  static int signal() { return caught_; }

 private:
  static constexpr std::array kSignals = {SIGINT, SIGTERM, SIGHUP};

  static void restore() {
    for (std::size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before_[i], nullptr);
  }

  // Uses only calls that are safe in a signal handler.
  static void note(int signal) {
    const int error = errno;
    caught_ = signal;
    restore();
    constexpr std::string_view said =
        "\nstreambp: interrupted; finishing the step and saving a checkpoint (interrupt again to stop immediately)\n";
    [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, said.data(), said.size());
    errno = error;
  }

  static inline volatile sig_atomic_t caught_ = 0;
  static inline std::array<struct sigaction, kSignals.size()> before_ = {};  // how signals were handled
};

}  // namespace streambp
