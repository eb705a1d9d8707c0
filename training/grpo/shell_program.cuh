// A shell command with pipes to its standard input and output; standard error is shared with ours. It runs in its own
// process group. When it is stopped, or when we end for any reason, what is left of the group is killed.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "kernels/base/error.cuh"
#include "kernels/base/temporary_file.cuh"

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
    process_ = spawn({"sh", "-c", "--", command}, questions.file, answers.file);
    guard_ = spawn({"sh", "-c", kGuard, "streambp-guard", std::to_string(process_)}, waiting.file, STDERR_FILENO);
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

  // Closes the program's input and kills its group `seconds` later. The process id cannot be reused until the program
  // is reaped, so the guard ends first and the kill comes before the wait. A program of another user may survive.
  void stop(double seconds) {
    input.reset();
    if (process_ > 0) {
      ended_within(seconds);
      if (guard_ > 0) {
        kill(guard_, SIGKILL);
        while (waitpid(guard_, nullptr, 0) < 0 && errno == EINTR) {
        }
        guard_ = 0;
      }
      kill(-process_, SIGKILL);
      if (ended_within(5)) waitpid(process_, nullptr, WNOHANG);
      process_ = 0;
    }
    lifeline_.reset();
    output.reset();
  }

 private:
  // The guard is a shell that reads from a pipe. Only this process holds the write end, so when this process ends for
  // any reason, the shell kills the program's group. (PR_SET_PDEATHSIG would signal only the program's first process,
  // and it fires when a thread ends.)
  static constexpr const char* kGuard = "read -r line; kill -KILL -\"$1\"";

  // Writing to a program that has ended must be an error, not a signal.
  static void ignore_broken_pipes() {
    struct sigaction action;
    sigaction(SIGPIPE, nullptr, &action);
    if (action.sa_handler == SIG_DFL) signal(SIGPIPE, SIG_IGN);
  }

  // The variables of this process, except those by which MPI would take the program for a rank of the run.
  static std::vector<char*> environment() {
    std::vector<char*> kept;
    for (char** variable = environ; *variable; ++variable) {
      const std::string_view text = *variable;
      bool of_launcher = false;
      for (const char* prefix : {"OMPI_COMM_WORLD", "PMIX_", "PMI_", "MV2_COMM_WORLD", "SLURM_STEP_NUM_TASKS"})
        of_launcher = of_launcher || text.starts_with(prefix);
      if (!of_launcher) kept.push_back(*variable);
    }
    kept.push_back(nullptr);
    return kept;
  }

  // Starts /bin/sh in a new process group. posix_spawn is safe with other threads running, and does not copy the page
  // tables of a large process.
  pid_t spawn(std::vector<std::string> arguments, int input_file, int output_file) {
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
    const int error = posix_spawn(&process, "/bin/sh", &files, &attributes, pointers.data(), environment().data());
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&files);
    if (error != 0) stop(0);
    require(error == 0, name_, "cannot start /bin/sh: ", std::strerror(error));
    return process;
  }

  void make_pipe(Descriptor& reading, Descriptor& writing) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) fail(name_, "cannot create a pipe: ", std::strerror(errno));
    reading.file = ends[0], writing.file = ends[1];
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
