// Options for memory: how much a step may use, and what it keeps in far memory.
#pragma once

#include "commands/option_table.h"
#include "commands/text.h"
#include "parallel/processes.h"
#include "training/engine.h"
#include "training/fit.h"

namespace streambp {

inline std::string all_parts() {
  std::string names;
  for (std::size_t i = 1; i < kParts; ++i) names += format("%s%s", i == 1 ? "" : ", ", kPartNames[i]);
  return names + " (keys-values only near)";
}

// What --keep can name, beside the parts of a layer.
struct StepData {
  const char* name;
  Place Places::*place;
};

constexpr StepData kStepData[] = {{"inputs", &Places::inputs},
                                  {"optimizer", &Places::optimizer},
                                  {"weights", &Places::weights},
                                  {"gradients", &Places::gradients}};

inline bool can_be_kept(const std::string& name) {
  return name.empty() ||
         std::ranges::count(kPartNames, name) + std::ranges::count(kStepData, name, &StepData::name) > 0;
}

inline std::string is_block(const std::string& text) {
  const bool digits = !text.empty() && text.size() < 9 && text.find_first_not_of("0123456789") == std::string::npos;
  const bool fits = text == "auto" || text == "all" || (digits && std::stol(text) > 0);
  return fits ? "" : quote(text) + ": expected auto, all, or from 1 to 99999999 rows";
}

// "keys-values, attention, gate-up of 12 layers", "nothing" or "everything".
inline std::string describe(const KeptSets& kept, const Config& c) {
  std::string text;
  const Index lowest = lowest_trained_layer(c), layers = c.layers - lowest;
  bool everything = true;
  for (std::size_t i = 1; i < kParts; ++i) {
    if (!has(c, static_cast<Part>(i))) continue;
    Index near = 0, far = 0;
    for (Index l = lowest; l < c.layers; ++l) {
      const Place place = kept.of(l).place(static_cast<Part>(i));
      near += place == Place::near, far += place == Place::far;
    }
    everything &= near == layers;
    for (const auto& [count, where] : {std::pair(near, ""), {far, "far"}}) {
      if (count == 0) continue;
      std::string note = where;
      if (count < layers) note += (note.empty() ? "" : ", ") + counted(count, "layer");
      text += (text.empty() ? "" : ", ") + std::string(kPartNames[i]) + (note.empty() ? "" : " (" + note + ")");
    }
  }
  return text.empty() ? "nothing" : everything ? "everything" : text;
}

// The free far memory of each rank; ranks on a machine share it.
inline std::size_t far_room_of_each_rank(DeviceKind device, const std::string& directory) {
  const auto free = static_cast<Index>(free_far_memory(device, directory));
  return static_cast<std::size_t>(least_of_ranks(free / this_process().local_count));
}

// "optimizer (1.20 GiB), saved layer inputs (3.10 GiB)"; empty if all is near.
inline std::string describe_far(const Bytes& far) {
  std::string text;
  for (std::size_t kind = 0; kind < far.size(); ++kind) {
    if (far[kind] > 0) text += format("%s%s (%s)", text.empty() ? "" : ", ", kKindNames[kind], human_bytes(far[kind]));
  }
  return text;
}

// What --keep says. Where it says nothing, memory decides.
class KeepOption {
 public:
  explicit KeepOption(const std::vector<std::string>& words) {
    if (words == std::vector<std::string>{"auto"}) return;
    require(!std::ranges::count(words, "auto"),
            "--keep auto decides on everything that is kept; give it alone, or leave ", "it out");
    for (const std::string& word : words) {
      const std::size_t equals = word.find('=');
      const std::string name = word.substr(0, equals == std::string::npos ? 0 : equals),
                        place = word.substr(equals == std::string::npos ? 0 : equals + 1);
      const bool of_all_parts = word == "nothing" || word == "everything";
      require(of_all_parts || ((place == "near" || place == "far") && can_be_kept(name) && equals != 0), "--keep ",
              quote(word),
              ": expected auto, near, far, nothing, everything, or NAME=near or NAME=far; the names are inputs, ",
              "optimizer, weights, gradients, ", all_parts());
      require(word != "keys-values=far", "--keep ", quote(word), ": keys and values stay near");
      const bool first =
          of_all_parts ? !all_parts_ : places_.emplace(name, place == "near" ? Place::near : Place::far).second;
      if (of_all_parts) all_parts_ = word == "nothing" ? KeptParts::inputs() : KeptParts::everything();
      require(first && !(all_parts_ && names_part()), "--keep ", quote(word), ": repeats or contradicts an earlier ",
              "value; give one of them");
    }
  }

  // Such as weights=far.
  std::optional<Place> place(const std::string& name) const {
    const auto found = places_.find(name);
    return found == places_.end() ? std::nullopt : std::optional(found->second);
  }
  // The same, or near or far alone.
  std::optional<Place> place_or_all(const std::string& name) const {
    const auto named = place(name);
    return named ? named : place("");
  }
  bool mention(Place place) const {
    return std::ranges::any_of(places_, [&](const auto& named) { return named.second == place; });
  }
  // Such as attention=near, or nothing.
  std::optional<KeptParts> parts() const {
    std::optional<KeptParts> result = all_parts_;
    for (std::size_t i = 1; i < kParts; ++i)
      if (const auto where = place(kPartNames[i]))
        result = result.value_or(KeptParts::inputs()).with(static_cast<Part>(i), *where);
    return result;
  }
  void require_parts_of(const Config& config) const {
    for (std::size_t i = 1; i < kParts; ++i)
      require(!place(kPartNames[i]) || has(config, static_cast<Part>(i)), "--keep ", kPartNames[i],
              "=...: the layers of this model have no such part");
  }

 private:
  bool names_part() const {
    return std::any_of(kPartNames.begin() + 1, kPartNames.end(),
                       [&](const char* name) { return place(name).has_value(); });
  }

  std::map<std::string, Place> places_;  // without a name: near or far alone
  std::optional<KeptParts> all_parts_;   // nothing or everything
};

struct MemoryOptions {
  std::string memory, far_memory, directory, block;
  std::vector<std::string> keep;

  void add_to(OptionTable& options, const char* help_of_memory, const char* default_of_far_memory) {
    options_ = &options;
    options.add("--memory", &memory, help_of_memory, checks::memory());
    options.add(
        "--far-memory", &far_memory,
        "Budget of far memory of each rank, such as 200GiB: for a GPU pinned host memory, for a CPU a file. What "
        "does not fit into near memory, that of the device, goes there",
        checks::memory(), default_of_far_memory);
    options.add(
        "--keep", &keep,
        "What a step keeps, and where. near, far: where layer inputs, the optimizer's state, the layers' weights and "
        "their gradients are; or one of them alone, inputs=far, optimizer=far, weights=far, gradients=far (several "
        "processes divide far weights, as with --shard weights). nothing, everything: what is kept of each layer "
        "beside "
        "its input, so that backward need not recompute it; or some parts, PART=near or PART=far, with " +
            all_parts() + " as PART. auto: what fits and is fastest",
        {}, "what fits and is fastest");
    options.add(
        "--block-rows", &block,
        "Stream mode: how many rows, in whole chunks, go through all layers before the next rows do. all: the whole "
        "stream, layer by layer. Smaller blocks keep K, V and their gradients of all layers in place of layer inputs, "
        "which saves memory where most layers have windows (docs/dial.md). auto: what fits and is fastest",
        is_block, "what fits and is fastest");
  }
  void add_directory_to(OptionTable& options) {
    options.add("--far", &directory, "On a CPU: directory of far memory, on a fast disk and not in memory (tmpfs)", {},
                "TMPDIR or /tmp");
  }

  // The places that the options allow, near memory first. Ranks that sample do so at their own pace, so none may need the
  // others' shards of the weights.
  enum class Sampling { none, of_each_rank };
  std::vector<Places> places(Mode mode, const StepSettings& s, Sampling sampling = Sampling::none) const {
    const KeepOption insisted(keep);
    const bool full = mode == Mode::full, ranks_sample = sampling == Sampling::of_each_rank && s.ranks.all.size > 1;
    const struct {
      Place Places::*thing;
      bool applies;
      const char* why;
    } fixed[] = {{&Places::inputs, full, "full mode keeps all activations in near memory; use --mode stream"},
                 {&Places::optimizer, s.optimizer == OptimizerKind::none, "--optimizer none has no state"},
                 {&Places::weights, s.config.in_4_bits(),
                  s.config.keeps_mxfp4() ? "experts in MXFP4 stay near; --base unpacked has them in the run's type"
                                         : "weights in 4 bits stay near"},
                 {&Places::weights, ranks_sample, "GRPO that samples its completions needs all weights on every rank"}};
    const Places usual = {};
    const auto decided = [&](Places p) {
      for (const StepData& thing : kStepData) {
        Place& place = p.*thing.place;
        place = insisted.place_or_all(thing.name).value_or(place);
        for (const auto& f : fixed) {
          if (f.thing != thing.place || !f.applies) continue;
          place = usual.*f.thing;
          const Place named = insisted.place(thing.name).value_or(place);
          require(named == place, "--keep ", thing.name, named == Place::far ? "=far: " : "=near: ", f.why);
        }
      }
      return p;
    };

    // In the order of what they cost: copies of inputs and weights hide behind the computation; the update waits for the
    // optimizer's state and for gradients.
    const Place near = Place::near, far = Place::far;
    std::vector<Places> candidates;
    for (const auto& [inputs, optimizer, weights, gradients] : {std::array{near, near, near, near},
                                                                {far, near, near, near},
                                                                {near, far, near, near},
                                                                {far, far, near, near},
                                                                {far, near, far, near},
                                                                {far, far, far, near},
                                                                {far, far, far, far}}) {
      const Places candidate = decided({inputs, optimizer, weights, gradients});
      if (std::find(candidates.begin(), candidates.end(), candidate) == candidates.end())
        candidates.push_back(candidate);
    }
    return candidates;
  }
  // Which parts of layers may be kept for backward.
  KeptChoice kept_choice(Mode mode, const Config& config) const {
    const KeepOption insisted(keep);
    if (mode != Mode::stream) {
      require(!insisted.parts() || !options_->given("--keep"),
              "--keep with parts of layers is for --mode stream; leave it out");
      return {KeptSets()};
    }
    insisted.require_parts_of(config);
    return {insisted.parts(), !far_memory.empty() && insisted.place("") != Place::near};
  }
  std::optional<Index> chosen_block(Mode mode) const {
    if (mode != Mode::stream) {
      require(!options_->given("--block-rows"), "--block-rows is for --mode stream; leave it out");
      return 0;
    }
    if (block.empty() || block == "auto") return {};
    return block == "all" ? 0 : std::stol(block);
  }
  bool name_far_memory() const { return KeepOption(keep).mention(Place::far); }
  // For refusals: "--keep auto, ", if --keep rules out steps.
  std::string remedy() const {
    const bool keeps = !keep.empty() && keep[0] != "auto", has_blocks = !block.empty() && block != "auto";
    return std::string(keeps ? "--keep auto, " : "") + (has_blocks ? "--block-rows auto, " : "");
  }
  // Refuses a directory in which far memory cannot be.
  void check() const {
    const KeepOption words(keep);
    const bool all_near = words.place("") == Place::near && !words.mention(Place::far);
    if (all_near || directory.empty()) return;
    const std::string reason = why_not_far(directory);
    require(reason.empty(), "--far ", quote(directory), ": ", reason, "; name a directory on a fast disk");
  }
  // "pinned host memory", or "a file in /tmp", and if it cannot be there, why.
  std::string far_place(DeviceKind device) const {
    if (device == DeviceKind::cuda) return "pinned host memory";
    const std::filesystem::path place = far_directory(directory);
    const std::string reason = why_not_far(place);
    return "a file in " + place.string() + (reason.empty() ? "" : ", which " + reason);
  }

 private:
  const OptionTable* options_ = nullptr;
};

}  // namespace streambp
