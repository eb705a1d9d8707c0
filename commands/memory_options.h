// Options for memory: how much a step may use, and what it keeps in far memory.
#pragma once

#include <map>
#include <optional>

#include "commands/option_table.h"
#include "training/fit.h"

namespace streambp {

// What --keep says. Where it says nothing, memory decides.
class KeepOption {
 public:
  explicit KeepOption(const std::vector<std::string>& words);

  std::optional<Place> place(const std::string& name) const;         // such as weights=far
  std::optional<Place> place_or_all(const std::string& name) const;  // the same, or near or far alone
  bool mention(Place place) const;
  std::optional<KeptParts> parts() const;  // such as attention=near, or nothing
  void require_parts_of(const Config& config) const;

 private:
  bool names_part() const;

  std::map<std::string, Place> places_;  // without a name: near or far alone
  std::optional<KeptParts> all_parts_;   // nothing or everything
};

struct MemoryOptions {
  std::string memory, far_memory, directory, block;
  std::vector<std::string> keep;

  static constexpr const char* kFlags[] = {"--memory", "--far-memory", "--keep", "--block-rows"};
  void add_to(OptionTable& options, const char* help_of_memory, const char* default_of_far_memory);
  void add_directory_to(OptionTable& options);

  // The places that the options allow, near memory first. Ranks that sample do so at their own pace, so none may need the
  // others' shards of the weights.
  enum class Sampling { none, of_each_rank };
  std::vector<Places> places(Mode mode, const StepSettings& s, Sampling sampling = Sampling::none) const;
  // Which parts of layers may be kept for backward.
  KeptChoice kept_choice(Mode mode, const Config& config) const;
  std::optional<Index> chosen_block(Mode mode) const;
  bool name_far_memory() const { return KeepOption(keep).mention(Place::far); }
  // For refusals: "--keep auto, ", if --keep rules out steps.
  std::string remedy() const;
  // Refuses a directory in which far memory cannot be.
  void check() const;
  // "pinned host memory", or "a file in /tmp", and if it cannot be there, why.
  std::string far_place(DeviceKind device) const;

 private:
  const OptionTable* options_ = nullptr;
};

// "keys-values, attention, gate-up of 12 layers", "nothing" or "everything".
std::string describe(const KeptSets& kept, const Config& config);

// The free far memory of each rank; ranks on a machine share it.
std::size_t far_room_of_each_rank(DeviceKind device, const std::string& directory);

// "optimizer (1.20 GiB), saved layer inputs (3.10 GiB)"; empty if all is near.
std::string describe_far(const Bytes& far);

}  // namespace streambp
