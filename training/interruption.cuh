// Signals that end a run: the first one lets it finish its step and save a checkpoint, the second one ends it at once.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <initializer_list>
#include <string_view>

namespace streambp {

// Catches SIGINT, SIGTERM and SIGHUP during its lifetime. A signal that the process already ignores, as under nohup,
// stays ignored.
class Interruption {
 public:
  Interruption() {
    caught_ = 0;
    struct sigaction action = {}, present;
    action.sa_handler = note;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    for (const int signal : kSignals) {
      sigaction(signal, nullptr, &present);
      if (present.sa_handler != SIG_IGN) sigaction(signal, &action, nullptr);
    }
  }
  ~Interruption() { restore(); }
  Interruption(const Interruption&) = delete;

  // The signal received, or 0. It outlives the object; main exits with 128 + signal.
  static int signal() { return caught_; }

 private:
  static constexpr std::initializer_list<int> kSignals = {SIGINT, SIGTERM, SIGHUP};

  static void restore() {
    struct sigaction present;
    for (const int signal : kSignals) {
      sigaction(signal, nullptr, &present);
      if (present.sa_handler == note) ::signal(signal, SIG_DFL);
    }
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
};

}  // namespace streambp
