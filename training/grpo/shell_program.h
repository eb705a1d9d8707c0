// A shell command with pipes to its standard input and output; standard error is shared with ours. When it is stopped,
// or when we end for any reason, everything that it has started is killed: its process group, and daemons, which leave
// the group but inherit a variable that no other process has.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "kernels/base/error.h"
#include "kernels/base/system.h"

namespace streambp {

class ShellProgram {
 public:
  static constexpr double kMoment = 1;  // seconds for the program to exit after its input is closed

  // Errors begin with `name`.
  ShellProgram(const std::string& command, const std::string& name) : name_(name) {
    ignore_broken_pipes();
    Descriptor questions, answers, waiting;  // the ends of the program and of the guard
    make_pipe(questions, input);
    make_pipe(output, answers);
    make_pipe(waiting, lifeline_);
    for (const int ours : {input.file, output.file}) fcntl(ours, F_SETFL, fcntl(ours, F_GETFL) | O_NONBLOCK);
    std::string cookie = kCookie + unique();
    std::vector<char*> with_cookie = environment();
    with_cookie.insert(with_cookie.begin(), cookie.data());
    process_ = spawn({"sh", "-c", "--", command}, with_cookie, questions.file, answers.file);
    guard_ = spawn({"sh", "-c", kGuard, "streambp-guard", std::to_string(process_), cookie}, environment(),
                   waiting.file, STDERR_FILENO);
  }
  ShellProgram(const ShellProgram&) = delete;
  ~ShellProgram() { stop(kMoment); }

  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  Descriptor input, output;  // our ends of its standard input and output; reads and writes do not block

  // Waits for the program to end; then end() is its status.
  bool ended_within(double seconds) { return ended_within(process_, seconds); }
  const siginfo_t& end() const { return end_; }

  // Closes the program's input and kills what is left `seconds` later. Its process id cannot be reused until it is
  // reaped, so that is done last. A process of another user may survive.
  void stop(double seconds) {
    input.reset();
    if (process_ > 0) {
      ended_within(seconds);
      stop_guard();
      kill(-process_, SIGKILL);  // if someone has killed the guard
      if (ended_within(kLongest)) waitpid(process_, nullptr, WNOHANG);
      process_ = 0;
    }
    output.reset();
  }

 private:
  static constexpr double kLongest = 5;  // seconds for a killed process to disappear
  static constexpr const char* kCookie = "STREAMBP_REWARD_PROGRAM=";

  // The guard is a shell that waits for a line from us, or for our end, after which nobody can write to its pipe. Then
  // it kills the program's group $1 and, where there is /proc, processes with the cookie $2 until it finds none. It has
  // no cookie itself. (PR_SET_PDEATHSIG would signal only the first process, and it fires when a thread ends.)
  static constexpr const char* kGuard = R"(
    read -r line
    exec 2> /dev/null
    kill -KILL -"$1"
    cd /proc || exit
    round=0
    while [ $((round += 1)) -le 100 ]; do
      found=$(grep -lsF -- "$2" [0-9]*/environ)
      [ "$found" ] || exit
      for file in $found; do kill -KILL "${file%/environ}"; done
    done)";

  static std::string unique() {
    std::random_device random;
    std::string text = std::to_string(getpid());
    for (int i = 0; i < 4; ++i) text += "-" + std::to_string(random());
    return text;
  }

  void stop_guard() {
    if (guard_ <= 0) return;
    [[maybe_unused]] const ssize_t written = write(lifeline_.file, "\n", 1);
    lifeline_.reset();
    if (!ended_within(guard_, kLongest)) kill(guard_, SIGKILL);
    while (waitpid(guard_, nullptr, 0) < 0 && errno == EINTR) {
    }
    guard_ = 0;
  }

  // Writing to a program that has ended must be an error, not a signal.
  static void ignore_broken_pipes() {
    struct sigaction action;
    sigaction(SIGPIPE, nullptr, &action);
    if (action.sa_handler == SIG_DFL) signal(SIGPIPE, SIG_IGN);
  }

  // The variables of this process, except the cookie of a reward program that has started us, and those by which MPI
  // would take the program for a rank of the run.
  static std::vector<char*> environment() {
    std::vector<char*> kept;
    for (char** variable = environ; *variable; ++variable) {
      const std::string_view text = *variable;
      bool left_out = false;
      for (const char* prefix : {kCookie, "OMPI_COMM_WORLD", "PMIX_", "PMI_", "MV2_COMM_WORLD", "SLURM_STEP_NUM_TASKS"})
        left_out = left_out || text.starts_with(prefix);
      if (!left_out) kept.push_back(*variable);
    }
    kept.push_back(nullptr);
    return kept;
  }

  // Starts /bin/sh in a new process group. posix_spawn is safe with other threads running, and does not copy the page
  // tables of a large process.
  pid_t spawn(std::vector<std::string> arguments, const std::vector<char*>& variables, int input_file,
              int output_file) {
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, input_file, STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&files, output_file, STDOUT_FILENO);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    sigset_t defaults;  // the program must not inherit signals that we ignore
    sigemptyset(&defaults);
    sigaddset(&defaults, SIGXFSZ);
    sigaddset(&defaults, SIGPIPE);
    posix_spawnattr_setsigdefault(&attributes, &defaults);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGDEF);
    std::vector<char*> pointers;
    for (std::string& argument : arguments) pointers.push_back(argument.data());
    pointers.push_back(nullptr);
    pid_t process = 0;
    const int error = posix_spawn(&process, "/bin/sh", &files, &attributes, pointers.data(), variables.data());
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&files);
    if (error != 0) stop(0);
    require(error == 0, name_, "cannot start /bin/sh: ", std::strerror(error));
    return process;
  }

  void make_pipe(Descriptor& reading, Descriptor& writing) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) fail(name_, "cannot create a pipe: ", std::strerror(errno));
    reading.file = ends[0];
    writing.file = ends[1];
  }

  bool ended_within(pid_t process, double seconds) {
    for (const double until = now() + seconds;;) {
      end_ = {};
      const bool ours = waitid(P_PID, static_cast<id_t>(process), &end_, WEXITED | WNOHANG | WNOWAIT) == 0;
      if (!ours || end_.si_pid != 0) return true;  // not ours: with SIGCHLD ignored, the kernel reaps it
      if (now() >= until) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

  const std::string name_;
  Descriptor lifeline_;  // to the guard
  pid_t process_ = 0, guard_ = 0;
  siginfo_t end_ = {};
};

}  // namespace streambp
