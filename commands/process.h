// Prepares the process before anything else.
#pragma once

#include <fcntl.h>
#include <signal.h>

#include <cstdio>
#include <cstdlib>

#include "data/files/unfinished.h"
#include "kernels/base/system.h"

namespace streambp {

// Opens /dev/null on closed standard descriptors. Otherwise the next files opened would get their numbers and receive
// what the program prints.
inline void open_standard_descriptors() {
  for (int file = 0; file <= 2; ++file)
    if (fcntl(file, F_GETFD) < 0) open("/dev/null", O_RDWR);
}

// Call first in main: it may execute the program again.
inline void set_up_process(char** argv) {
  open_standard_descriptors();
#ifdef __x86_64__
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
    std::fputs("streambp: this processor has no AVX2 and fused multiply-add; use one of 2013 or later\n", stderr);
    std::exit(1);
  }
#endif
  signal(SIGXFSZ, SIG_IGN);  // write() then fails with EFBIG, and the file is cleaned up
  signal(SIGPIPE, SIG_IGN);  // the reader of the console may leave; files are written all the same
  limit_spinning(argv);
  choose_threads();
  Unfinished::catch_signals();
}

}  // namespace streambp
