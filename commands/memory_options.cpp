#include "commands/memory_options.cuh"

#include <unistd.h>

#include "commands/text.cuh"
#include "parallel/processes.cuh"
#include "training/engine.cuh"

namespace streambp {

namespace {

// What --keep can name.
struct Thing {
  const char* name;
  Place Places::*place;
};
constexpr Thing kThings[] = {{"inputs", &Places::inputs},
                             {"optimizer", &Places::optimizer},
                             {"weights", &Places::weights},
                             {"gradients", &Places::gradients},
                             {"attention", &Places::attention}};

// What --keep says, in the order of kThings; without a value, memory decides. A word without a name is for all but
// attention's outputs, which need not be kept at all.
struct Kept {
  std::array<std::optional<Place>, std::size(kThings)> places;
  bool by_name = false;

  const std::optional<Place>& of(Place Places::*thing) const {
    std::size_t i = 0;
    while (kThings[i].place != thing) ++i;
    return places[i];
  }
};

Kept kept(const std::vector<std::string>& words) {
  Kept result;
  for (const std::string& word : words) {
    const std::size_t equals = word.find('=');
    const std::string what = equals == std::string::npos ? "" : word.substr(0, equals),
                      where = equals == std::string::npos ? word : word.substr(equals + 1);
    bool known = false;
    for (std::size_t i = 0; i < std::size(kThings); ++i) {
      const bool named = what == kThings[i].name;
      if (!named && !(equals == std::string::npos && kThings[i].place != &Places::attention)) continue;
      require(!result.places[i], "--keep ", quote(word), ": names ", kThings[i].name, " a second time; name it once");
      result.places[i] = where == "far" ? Place::far : Place::near;
      known = where == "near" || where == "far";
      result.by_name |= named;
    }
    require(known, "--keep ", quote(word),
            ": write near, far, or what and where, such as inputs=far optimizer=near; there are inputs, optimizer, "
            "weights, gradients and attention");
  }
  return result;
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
       "near or far: where a step keeps the saved inputs of layers, the optimizer's state, the layers' weights and "
       "their gradients; or one by one: inputs=far optimizer=far weights=near gradients=near. attention=near or =far "
       "also "
       "keeps attention's outputs, so that backward does not compute them again",
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

std::vector<Places> MemoryOptions::places(Mode mode, const StepSettings& s) const {
  const Kept insisted = kept(keep);
  constexpr const char* full = "full mode keeps all activations in near memory; use --mode stream";
  const struct {
    Place Places::*thing;
    bool applies;
    const char* why;
  } fixed[] = {{&Places::inputs, mode == Mode::full, full},
               {&Places::attention, mode == Mode::full, full},
               {&Places::optimizer, s.optimizer == OptimizerKind::none, "--optimizer none has no state"},
               {&Places::weights, s.config.base == Base::nf4, "weights in 4 bits stay near; leave out weights=far"}};
  const Places usual = {};
  for (const auto& f : fixed) {
    const std::optional<Place> wanted = insisted.by_name ? insisted.of(f.thing) : std::nullopt;
    require(!f.applies || !wanted || *wanted == usual.*f.thing, "--keep: ", f.why);
  }
  const auto decided = [&](Places p) {
    for (const Thing& thing : kThings)
      if (const auto place = insisted.of(thing.place)) p.*thing.place = *place;
    for (const auto& f : fixed)
      if (f.applies) p.*f.thing = usual.*f.thing;
    return p;
  };

  // In the order of what they cost: copies of inputs and weights hide behind the computation; the update waits for the
  // optimizer's state and for gradients. Kept outputs of attention are worth considering where there is much memory.
  const Place near = Place::near, far = Place::far;
  std::vector<Places> candidates;
  for (Place attention : {Place::nowhere, near, far}) {
    if (attention != Place::nowhere && (far_memory.empty() || !keep.empty())) break;
    for (const auto& [inputs, optimizer, weights, gradients] : {std::array{near, near, near, near},
                                                                {far, near, near, near},
                                                                {near, far, near, near},
                                                                {far, far, near, near},
                                                                {far, near, far, near},
                                                                {far, far, far, near},
                                                                {far, far, far, far}}) {
      const Places candidate = decided({inputs, optimizer, attention, weights, gradients});
      if (std::find(candidates.begin(), candidates.end(), candidate) == candidates.end())
        candidates.push_back(candidate);
    }
  }
  return candidates;
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
