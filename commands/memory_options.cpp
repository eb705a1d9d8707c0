#include "commands/memory_options.h"

#include "commands/text.h"
#include "parallel/processes.h"
#include "training/engine.h"

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

// What --keep says. Where it says nothing, memory decides.
struct Kept {
  std::array<std::optional<Place>, std::size(kThings)> named;  // such as weights=far
  std::optional<Place> others;  // near or far alone: all but attention's outputs, which need not be kept at all

  std::optional<Place> of(std::size_t thing) const {
    const bool attention = kThings[thing].place == &Places::attention;
    return named[thing] || attention ? named[thing] : others;
  }
  bool all_near() const {
    return others == Place::near && std::find(named.begin(), named.end(), Place::far) == named.end();
  }
};

Kept kept(const std::vector<std::string>& words) {
  Kept result;
  for (const std::string& word : words) {
    const std::size_t equals = word.find('=');
    const bool alone = equals == std::string::npos;
    const std::string what = alone ? "" : word.substr(0, equals), where = alone ? word : word.substr(equals + 1);
    std::optional<Place>* place = alone ? &result.others : nullptr;
    for (std::size_t i = 0; i < std::size(kThings); ++i)
      if (what == kThings[i].name) place = &result.named[i];
    require(place && (where == "near" || where == "far"), "--keep ", quote(word),
            ": expected near, far, or NAME=near or NAME=far with inputs, optimizer, weights, gradients or attention as "
            "NAME");
    require(!*place, "--keep ", quote(word), ": repeats or contradicts an earlier value; give one of them");
    *place = where == "far" ? Place::far : Place::near;
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
       "does not fit into near memory, that of the device, goes there",
       checks::memory(), lasts, default_of_far_memory});
  options.add(
      "--keep",
      {&keep,
       "near or far: where a step keeps the saved inputs of layers, the optimizer's state, the layers' weights and "
       "their gradients. To choose one by one, write far weights=near or inputs=far; the names are inputs, optimizer, "
       "weights and gradients. Several processes divide far weights, as with --shard weights. attention=near or =far "
       "keeps attention's outputs, so that backward does not compute them again; without --keep, train does this if "
       "there is room",
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

std::vector<Places> MemoryOptions::places(Mode mode, const StepSettings& s, Sampling sampling) const {
  const Kept insisted = kept(keep);
  const bool full = mode == Mode::full, ranks_sample = sampling == Sampling::of_each_rank && s.ranks.all.size > 1;
  const struct {
    Place Places::*thing;
    bool applies;
    const char* why;
  } fixed[] = {{&Places::inputs, full, "full mode keeps all activations in near memory; use --mode stream"},
               {&Places::attention, full, "full mode keeps all activations in near memory; use --mode stream"},
               {&Places::optimizer, s.optimizer == OptimizerKind::none, "--optimizer none has no state"},
               {&Places::weights, s.config.base == Base::nf4, "weights in 4 bits stay near"},
               {&Places::weights, ranks_sample, "GRPO that samples its completions needs all weights on every rank"}};
  const Places usual = {};
  const auto decided = [&](Places p) {
    for (std::size_t i = 0; i < std::size(kThings); ++i) {
      Place& place = p.*kThings[i].place;
      place = insisted.of(i).value_or(place);
      for (const auto& f : fixed) {
        if (f.thing != kThings[i].place || !f.applies) continue;
        place = usual.*f.thing;
        require(insisted.named[i].value_or(place) == place, "--keep ", kThings[i].name, "=",
                *insisted.named[i] == Place::far ? "far: " : "near: ", f.why);
      }
    }
    return p;
  };

  // In the order of what they cost: copies of inputs and weights hide behind the computation; the update waits for the
  // optimizer's state and for gradients. Outputs of attention that are kept save time if there is memory for them.
  const Place near = Place::near, far = Place::far;
  std::vector<Places> candidates;
  for (Place attention : {Place::nowhere, near, far}) {
    if ((attention != Place::nowhere && !keep.empty()) || (attention == Place::far && far_memory.empty())) break;
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
  if (kept(keep).all_near() || directory.empty()) return;
  const std::string reason = why_not_far(directory);
  require(reason.empty(), "--far ", quote(directory), ": ", reason, "; name a directory on a fast disk");
}

std::string MemoryOptions::far_place(DeviceKind device) const {
  if (device == DeviceKind::cuda) return "pinned host memory";
  const std::filesystem::path place = far_directory(directory);
  const std::string reason = why_not_far(place);
  return "a file in " + place.string() + (reason.empty() ? "" : ", which " + reason);
}

std::size_t far_room_of_each_rank(DeviceKind device, const std::string& directory) {
  const auto free = static_cast<Index>(free_far_memory(device, directory));
  return static_cast<std::size_t>(least_of_ranks(free / this_process().local_count));
}

std::string describe_far(const Bytes& far) {
  std::string text;
  for (std::size_t kind = 0; kind < far.size(); ++kind) {
    if (far[kind] > 0)
      text += format("%s%s (%s)", text.empty() ? "" : ", ", kKindNames[kind], human_bytes(far[kind]).c_str());
  }
  return text;
}

}  // namespace streambp
