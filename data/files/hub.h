// Models that Hugging Face's tools have downloaded: "OWNER/NAME" is a directory in their cache.
#pragma once

#include <cstdlib>
#include <cstring>

#include "data/files/files.h"

namespace streambp {

// HF_HUB_CACHE, or hub in HF_HOME, or in ~/.cache/huggingface.
inline fs::path hub_cache() {
  const auto variable = [](const char* name) { return std::getenv(name) ? fs::path(std::getenv(name)) : fs::path(); };
  if (const fs::path cache = variable("HF_HUB_CACHE"); !cache.empty()) return cache;
  if (const fs::path home = variable("HF_HOME"); !home.empty()) return home / "hub";
  const fs::path cache = variable("XDG_CACHE_HOME");
  return (cache.empty() ? variable("HOME") / ".cache" : cache) / "huggingface/hub";
}

inline bool is_hub_name(const std::string& name) {
  const std::size_t slash = name.find('/');
  const bool plain =
      std::ranges::all_of(name, [](unsigned char c) { return std::isalnum(c) || std::strchr("/-_.", c); });
  return plain && slash != std::string::npos && slash > 0 && slash + 1 < name.size() && slash == name.rfind('/') &&
         name[0] != '.';
}

// The downloaded files of such a model; any other name as it is, and one that is a path here.
inline std::string local_model(const std::string& name) {
  std::error_code error;
  if (fs::exists(name, error) || !is_hub_name(name)) return name;
  const std::size_t slash = name.find('/');
  const fs::path model = hub_cache() / ("models--" + name.substr(0, slash) + "--" + name.substr(slash + 1));
  if (!fs::is_regular_file(model / "refs/main", error)) return name;
  std::string commit = read_file(model / "refs/main");
  while (!commit.empty() && std::isspace(static_cast<unsigned char>(commit.back()))) commit.pop_back();
  const fs::path snapshot = model / "snapshots" / commit;
  return !commit.empty() && fs::exists(snapshot / "config.json", error) ? snapshot.string() : name;
}

// Its name again, from the directory; empty for other directories.
inline std::string hub_name(const fs::path& snapshot) {
  const std::string prefix = "models--", cached = snapshot.parent_path().parent_path().filename().string();
  const std::size_t owner_ends = cached.find("--", prefix.size());
  if (!cached.starts_with(prefix) || owner_ends == std::string::npos) return "";
  return cached.substr(prefix.size(), owner_ends - prefix.size()) + "/" + cached.substr(owner_ends + 2);
}

// How to get it; empty for other names.
inline std::string how_to_download(const std::string& name) {
  if (!is_hub_name(name)) return "";
  return "; if it is a model on Hugging Face, which is not in " + hub_cache().string() +
         " yet, download it with: hf download " + name;
}

}  // namespace streambp
