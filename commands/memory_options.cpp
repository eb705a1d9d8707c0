#include "commands/memory_options.cuh"

#include <unistd.h>

#include "commands/text.cuh"
#include "parallel/processes.cuh"
#include "training/engine.cuh"

namespace streambp {

namespace {

// What --keep says; without a value, memory decides.
struct Kept {
  std::optional<Place> inputs, optimizer, attention;
};

Kept kept(const std::vector<std::string>& words) {
  Kept result;
  for (const std::string& word : words) {
    const std::size_t equals = word.find('=');
    const std::string what = equals == std::string::npos ? "" : word.substr(0, equals),
                      where = equals == std::string::npos ? word : word.substr(equals + 1);
    const bool known = (where == "near" || where == "far") &&
                       (what.empty() || what == "inputs" || what == "optimizer" || what == "attention");
    require(known, "--keep ", quote(word), ": write near, far, or what and where, such as inputs=far optimizer=near");
    const Place place = where == "far" ? Place::far : Place::near;
    auto set = [&](const char* name, std::optional<Place>& kept) {
      if (what != name && !(what.empty() && &kept != &result.attention)) return;
      require(!kept, "--keep ", quote(word), ": names ", name, " a second time; name it once");
      kept = place;
    };
    set("inputs", result.inputs), set("optimizer", result.optimizer), set("attention", result.attention);
  }
  return result;
}

// What may be: what is insisted on, else all choices.
std::vector<Place> choices(const std::optional<Place>& insisted, std::vector<Place> all) {
  return insisted ? std::vector<Place>{*insisted} : all;
}

}  // namespace

void MemoryOptions::add_to(OptionTable& options, const char* help_of_memory, const char* default_of_far_memory,
                           Lasts lasts) {
  options.add("--memory", {&memory, help_of_memory, checks::memory(), lasts, "none"});
  options.add(
      "--far-memory",
      {&far_memory,
       "Budget of far memory of each rank, such as 200GiB: for a GPU pinned host memory, for a CPU a file. What "
       "does not fit into near memory, that of the device, goes there; and attention's outputs are kept if that "
       "saves time",
       checks::memory(), lasts, default_of_far_memory});
  options.add(
      "--keep",
      {&keep,
       "near or far: where a step keeps the saved inputs of layers and the optimizer's state; or one by one: "
       "inputs=far optimizer=near. attention=near or =far also keeps attention's outputs, so that backward does "
       "not compute them again",
       {},
       lasts,
       "what fits and is fastest"});
}

void MemoryOptions::add_directory_to(OptionTable& options, Lasts lasts) {
  options.add("--far", {&directory,
                        "On a CPU: directory of far memory, on a fast disk and not in memory (tmpfs)",
                        {},
                        lasts,
                        "TMPDIR or /tmp"});
}

std::vector<Places> MemoryOptions::places(Mode mode, OptimizerKind optimizer) const {
  Kept insisted = kept(keep);
  const bool by_name = keep.size() > 1 || (keep.size() == 1 && keep[0].find('=') != std::string::npos);
  const bool full = mode == Mode::full, no_state = optimizer == OptimizerKind::none;
  require(!full || !by_name || (insisted.inputs != Place::far && !insisted.attention),
          "--keep: full mode keeps all activations in near memory; use --mode stream");
  require(!no_state || !by_name || insisted.optimizer != Place::far,
          "--keep optimizer=far: --optimizer none has no state");
  if (full) insisted.inputs = Place::near, insisted.attention = Place::nowhere;
  if (no_state) insisted.optimizer = Place::near;
  // Kept outputs of attention are worth considering where there is much memory.
  std::vector<Place> attention = {Place::nowhere};
  if (!far_memory.empty() && keep.empty()) attention = {Place::nowhere, Place::near, Place::far};
  const std::vector<Place> near_or_far = {Place::near, Place::far};
  std::vector<Places> result;
  for (Place of_attention : choices(insisted.attention, attention))
    for (Place of_inputs : choices(insisted.inputs, near_or_far))
      for (Place of_optimizer : choices(insisted.optimizer, near_or_far))
        result.push_back({of_inputs, of_optimizer, of_attention});
  return result;
}

void MemoryOptions::check() const {
  kept(keep);
  require(directory.empty() || std::filesystem::is_directory(directory), "--far ", quote(directory),
          ": is not a directory; name one on a fast disk");
  require(directory.empty() || access(directory.c_str(), W_OK | X_OK) == 0, "--far ", quote(directory),
          ": cannot be written; check its permissions");
  require(directory.empty() || !is_in_memory(directory), "--far ", quote(directory),
          ": is in memory (tmpfs), so it saves none; name a directory on a disk");
}

std::size_t far_room_of_each_rank(DeviceKind device, const std::string& directory) {
  const auto free = static_cast<Index>(free_far_memory(device, directory));
  return static_cast<std::size_t>(least_of_ranks(free / this_process().local_count));
}

std::string describe_far(const Bytes& far) {
  std::string text;
  for (std::size_t kind = 0; kind < far.size(); ++kind) {
    if (far[kind] > 0)
      text += format("%s%s (%s)", text.empty() ? "" : " and ", kKindNames[kind], human_bytes(far[kind]).c_str());
  }
  return text;
}

}  // namespace streambp
