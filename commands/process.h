// Prepares the process before anything else.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>

#include "kernels/base/system.h"
#include "kernels/base/unfinished.h"

namespace streambp {

#ifdef __x86_64__
// Older processors run nothing else of this program: it ends before anything else is initialised.
[[gnu::constructor(101), gnu::target("arch=x86-64")]] inline void require_vector_instructions() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return;
  constexpr char message[] =
      "streambp: this processor has no AVX2 or no fused multiply-add; use one of 2013 or later\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, message, sizeof message - 1);
  _exit(2);
}
#endif

// Opens /dev/null on closed standard descriptors. Otherwise the next files opened would get their numbers and receive
// what the program prints.
inline void open_standard_descriptors() {
  for (int file = 0; file <= 2; ++file)
    if (fcntl(file, F_GETFD) < 0) open("/dev/null", O_RDWR);
}

// libgomp exits with 1 if it cannot start its threads, and 1 means that a verification failed. Only main may say that.
inline bool main_has_ended = false;
inline void exit_with_2_before_the_end() {
#ifdef __GLIBC__
  on_exit(
      [](int code, void*) {
        if (code == 1 && !main_has_ended) std::fflush(nullptr), _exit(2);
      },
      nullptr);
#endif
}

inline void require_threads_that_can_start() {
  constexpr int most = 4096;
  if (omp_get_max_threads() <= most) return;
  std::fprintf(stderr,
               "streambp: OMP_NUM_THREADS asks for %d threads, and at most %d can start; use the number of cores\n",
               omp_get_max_threads(), most);
  _exit(2);
}

// Call first in main: it may execute the program again.
inline void set_up_process(char** argv) {
  open_standard_descriptors();
  signal(SIGXFSZ, SIG_IGN);  // write() then fails with EFBIG, and the file is cleaned up
  signal(SIGPIPE, SIG_IGN);  // the reader of the console may leave; files are written all the same
  limit_spinning(argv);
  exit_with_2_before_the_end();
  require_threads_that_can_start();
  choose_threads();
  Unfinished::catch_signals();
}

}  // namespace streambp
