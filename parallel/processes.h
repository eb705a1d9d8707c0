// The processes of a run: mpirun or srun starts them, MPI connects them. A program built without MPI, or started alone,
// is a run of one process.
#pragma once

#include <new>
#include <string>
#include <vector>

#include "parallel/gather.h"

namespace streambp {

struct Process {
  Index rank = 0, count = 1;
  Index local_rank = 0, local_count = 1;  // on this machine
};

// What connects processes: "MPI 3.1". Empty: nothing.
std::string process_library();

// Joins the other processes that the launcher started. Call once, early in main. Returns a note for the user; empty:
// none.
std::string join_processes();
// This process. Until join_processes(), it is alone.
const Process& this_process();

// The grid of ranks with this many sequence ranks per stream.
Ranks ranks_of_run(Index sequence_ranks);

// Shuts MPI down. All processes must call it.
void leave_processes();
// Ends all processes with this exit code.
[[noreturn]] void end_processes(int exit_code);

// --- Between hosts ---

// The ranks of the run.
const Group& all_ranks();
// The text of rank 0.
std::string from_first(const std::string& text);
// The first text of a rank that is not empty.
std::string any_of_ranks(const std::string& text);
// Refuses ranks that differ from rank 0: "rank 2 has the options ..., but rank 0 has ...; REMEDY".
void require_equal(const std::string& what, const std::string& text, const std::string& remedy = "they must be equal");
// Refuses two ranks with the same text: "ranks 0 and 2 both use the GPU ...; REMEDY".
void require_different(const std::string& what, const std::string& text, const std::string& remedy);
// The smallest and the largest of all ranks' numbers.
Index least_of_ranks(Index number);
Index largest_of_ranks(Index number);

// An error that all ranks throw, so that they can still work together.
struct SharedError : Error {
  using Error::Error;
};

inline std::string reason(const std::exception& error) {
  return dynamic_cast<const std::bad_alloc*>(&error) ? "out of host memory" : error.what();
}

// Calls f, which needs no other rank. If it fails on any of them, all throw its error.
template <class F>
void on_each_rank(F&& f) {
  std::string failure;
  try {
    f();
  } catch (const std::exception& error) {
    failure = reason(error);
  }
  failure = any_of_ranks(failure);
  if (!failure.empty()) throw SharedError(failure);
}

// Calls f on rank 0, then on the others: rank 0 writes files that the others then find.
template <class F>
void first_then_others(F&& f) {
  if (this_process().rank == 0) f();
  least_of_ranks(0);  // the others wait
  if (this_process().rank > 0) f();
}

}  // namespace streambp
