// How much host memory a run may use.
#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels/base/control_groups.h"

namespace streambp {

// How much the process can still allocate before it swaps or is killed: MemAvailable, or less under a cgroup limit.
// Page cache counts as free, because the kernel drops it when memory runs short.
inline std::size_t available_memory(const std::filesystem::path& root = "/") {
  constexpr double unlimited = 0x1p62;
  double available = unlimited;
  std::ifstream file(root / "proc/meminfo");
  for (std::string word; file >> word;) {
    if (double kib; word == "MemAvailable:" && file >> kib) available = kib * 1024;
  }

  const ControlGroups groups = control_groups("memory", root);
  for (const std::filesystem::path& group : groups.directories) {
    auto within = [&](const char* limit_file, const char* used_file, const std::vector<std::string>& reclaimable) {
      const auto limit = number_in(group / limit_file);
      if (!limit || *limit >= unlimited) return;
      const double used = number_in(group / used_file).value_or(0);
      const double cache = sum_of_fields(group / "memory.stat", reclaimable);
      available = std::min(available, std::max(0.0, *limit - std::max(0.0, used - cache)));
    };
    if (groups.version == 2) {
      for (const char* limit : {"memory.max", "memory.high"})
        within(limit, "memory.current", {"inactive_file", "active_file", "slab_reclaimable"});
    } else {
      within("memory.limit_in_bytes", "memory.usage_in_bytes", {"total_inactive_file", "total_active_file"});
    }
  }
  return static_cast<std::size_t>(available);
}

}  // namespace streambp
