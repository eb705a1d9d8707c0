// What the program does to its own process before anything else.
#pragma once

#include <fcntl.h>
#include <signal.h>

#include "kernels/base/threads.cuh"

namespace streambp {

// Whoever starts the program may have closed its standard descriptors. The next files to be opened would take their
// numbers, and receive what is printed.
inline void open_standard_descriptors() {
  for (int file = 0; file <= 2; ++file)
    if (fcntl(file, F_GETFD) < 0) open("/dev/null", O_RDWR);
}

// Call first in main: it may start the program once more.
inline void set_up_process(char** argv) {
  open_standard_descriptors();
  signal(SIGXFSZ, SIG_IGN);  // write() then fails with EFBIG, and the file is cleaned up
  limit_spinning(argv);
  respect_cpu_quota();
}

}  // namespace streambp
