// Built without MPI: a run has one process.
#include <cstdlib>

#include "parallel/processes.h"

namespace streambp {

std::string process_library() { return ""; }

std::string join_processes() {
  for (const char* variable : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    const char* count = std::getenv(variable);
    require(
        count == nullptr || std::atoi(count) <= 1, count,
        " processes were started, but this program was built without MPI; install libopenmpi-dev and build it again");
  }
  return "";
}

const Process& this_process() {
  static const Process alone;
  return alone;
}

Ranks ranks_of_run(Index) { return {}; }
void leave_processes() {}
void end_processes(int exit_code) { std::_Exit(exit_code); }

}  // namespace streambp
