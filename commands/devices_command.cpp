// streambp devices: what this machine has to compute with, and why a part of it cannot be used.
#include "commands/command.h"
#include "commands/text.h"
#include "training/engine.h"

namespace streambp {
namespace {

constexpr const char* kDevicesDescription =
    "List the CPU and the GPUs of this machine, what this program brings for them, and why one cannot be used.";

class DevicesCommand : public Command {
 public:
  explicit DevicesCommand(CLI::App& app) : Command(app, "devices", kDevicesDescription) {}

 private:
  void run() override {
    print("CPU      %s, products with %s, %s of memory free\n", device_name(DeviceKind::cpu), product_instructions(),
          human_bytes(free_memory(DeviceKind::cpu)));
    const std::string no_gpu = why_no_gpu(), code = gpu_software(), mpi = process_library();
    Index number = 0;
    for (const FoundGpu& gpu : found_gpus()) {
      const std::string memory = human_bytes(gpu.free) + " of " + human_bytes(gpu.total) + " free";
      print("GPU %-4ld %s, compute capability %s, at %s: %s\n", number++, gpu.name, gpu.capability, gpu.address,
            gpu.problem.empty() ? memory : "not used: " + gpu.problem);
    }
    if (!no_gpu.empty()) print("GPU      none can be used: %s\n", no_gpu);
    if (!code.empty()) print("GPU code %s\n", code);
    print("MPI      %s\n", !mpi.empty() ? mpi
                                        : "none: a run has one process (on Debian or Ubuntu: apt-get install "
                                          "libopenmpi-dev, and build again)");
    if (const Index several = gpus_for_ranks(); several > 1)
      print("\nA run uses one GPU per process: mpirun -n %ld streambp train ... uses all of them.\n", several);
  }
};

}  // namespace

std::unique_ptr<Command> devices_command(CLI::App& app) { return std::make_unique<DevicesCommand>(app); }

}  // namespace streambp
