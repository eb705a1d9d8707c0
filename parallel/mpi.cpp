// The processes of a run, connected by MPI.
#include <mpi.h>
#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "parallel/processes.h"

namespace streambp {

namespace {

Process process;

// How many processes the launcher says that it has started.
int launched() {
  for (const char* variable : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"}) {
    if (const char* count = std::getenv(variable)) return std::atoi(count);
  }
  return 1;
}

// Processes that may run on the same cores share them, unless the user has decided with OMP_NUM_THREADS. Returns a note
// for the user; empty: none.
std::string share_cores(MPI_Comm machine) {
  const Processors mine = own_processors();
  std::vector<Processors> of_ranks(process.local_count);
  MPI_Allgather(&mine, sizeof mine, MPI_BYTE, of_ranks.data(), sizeof mine, MPI_BYTE, machine);
  if (std::getenv("OMP_NUM_THREADS") != nullptr) return "";
  const auto sharing = static_cast<int>(std::ranges::count(of_ranks, mine));
  omp_set_num_threads(std::max(1, omp_get_max_threads() / sharing));
  Processors all;
  for (const Processors& of_rank : of_ranks) all |= of_rank;
  const long processors = sysconf(_SC_NPROCESSORS_ONLN);
  if (process.local_rank > 0 || static_cast<long>(all.count()) >= processors) return "";
  return "the launcher gives the ranks " + std::to_string(all.count()) + " of the " + std::to_string(processors) +
         " processors of this machine; with mpirun, --bind-to none gives them all";
}

class MpiTransport : public Transport {
 public:
  explicit MpiTransport(MPI_Comm comm) : comm_(comm) {}

  void start(const Transfers& transfers) override {
    for (const Transfer& t : transfers.receives) {
      for_each_part(t, [&](char* data, int bytes, MPI_Request* request) {
        MPI_Irecv(data, bytes, MPI_BYTE, static_cast<int>(t.peer), 0, comm_, request);
      });
    }
    for (const Transfer& t : transfers.sends) {
      for_each_part(t, [&](const char* data, int bytes, MPI_Request* request) {
        MPI_Isend(data, bytes, MPI_BYTE, static_cast<int>(t.peer), 0, comm_, request);
      });
    }
  }
  void finish() override {
    MPI_Waitall(static_cast<int>(requests_.size()), requests_.data(), MPI_STATUSES_IGNORE);
    requests_.clear();
  }
  void exchange_on_host(const Transfers& transfers) override { start(transfers), finish(); }

 private:
  // MPI counts bytes in an int.
  template <class F>
  void for_each_part(const Transfer& t, F&& f) {
    constexpr std::size_t most = std::size_t{1} << 30;
    for (std::size_t begin = 0; begin < t.bytes; begin += most) {
      requests_.emplace_back();
      f(static_cast<char*>(t.data) + begin, static_cast<int>(std::min(most, t.bytes - begin)), &requests_.back());
    }
  }

  MPI_Comm comm_;
  std::vector<MPI_Request> requests_;  // of messages under way
};

// The transports live as long as the process.
Transport* new_transport(MPI_Comm comm) {
  static std::vector<std::unique_ptr<MpiTransport>> transports;
  return transports.emplace_back(std::make_unique<MpiTransport>(comm)).get();
}

}  // namespace

std::string process_library() {
  int version = 0, minor = 0;
  MPI_Get_version(&version, &minor);
  return "MPI " + std::to_string(version) + "." + std::to_string(minor);
}

std::string join_processes() {
  const int started = launched();
  if (started <= 1) return "";  // one process does not need MPI, which is slow to start
  int threads = 0, rank = 0, count = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &threads);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &count);
  require(count == started, started, " processes were started, but MPI connects ", count,
          " of them; use the mpirun of the MPI that the program was built with, or srun --mpi=pmix");
  process.rank = rank, process.count = count;
  MPI_Comm machine;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &machine);
  MPI_Comm_rank(machine, &rank);
  MPI_Comm_size(machine, &count);
  process.local_rank = rank, process.local_count = count;
  return share_cores(machine);
}

const Process& this_process() { return process; }

Ranks ranks_of_run(Index sequence_ranks) {
  if (process.count == 1) return {};
  Ranks ranks;
  MPI_Comm all, sequence;
  MPI_Comm_dup(MPI_COMM_WORLD, &all);
  ranks.all = {process.rank, process.count, new_transport(all)};
  const auto stream = static_cast<int>(process.rank / sequence_ranks);
  MPI_Comm_split(MPI_COMM_WORLD, stream, static_cast<int>(process.rank), &sequence);
  ranks.sequence = {process.rank % sequence_ranks, sequence_ranks, new_transport(sequence)};
  return ranks;
}

void leave_processes() {
  if (process.count > 1) MPI_Finalize();
}

void end_processes(int exit_code) {
  if (process.count > 1) MPI_Abort(MPI_COMM_WORLD, exit_code);
  std::_Exit(exit_code);
}

}  // namespace streambp
