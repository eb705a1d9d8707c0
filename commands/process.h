// Prepares the process before anything else.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include "data/files/unfinished.h"
#include "kernels/base/system.h"

namespace streambp {

#ifdef __x86_64__
// Older processors run nothing else of this program: it ends before anything else is initialised.
[[gnu::constructor(101), gnu::target("arch=x86-64")]] inline void require_vector_instructions() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return;
  constexpr char message[] =
      "streambp: this processor has no AVX2 or no fused multiply-add; use one of 2013 or later\n";
  _exit(write(STDERR_FILENO, message, sizeof message - 1) > 0 ? 1 : 2);
}
#endif

// Opens /dev/null on closed standard descriptors. Otherwise the next files opened would get their numbers and receive
// what the program prints.
inline void open_standard_descriptors() {
  for (int file = 0; file <= 2; ++file)
    if (fcntl(file, F_GETFD) < 0) open("/dev/null", O_RDWR);
}

// Call first in main: it may execute the program again.
inline void set_up_process(char** argv) {
  open_standard_descriptors();
  signal(SIGXFSZ, SIG_IGN);  // write() then fails with EFBIG, and the file is cleaned up
  signal(SIGPIPE, SIG_IGN);  // the reader of the console may leave; files are written all the same
  limit_spinning(argv);
  choose_threads();
  Unfinished::catch_signals();
}

}  // namespace streambp
