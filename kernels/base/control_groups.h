// Linux control groups (cgroups), versions 1 and 2: resource limits set by containers, batch systems and systemd.
#pragma once

#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace streambp {

// The cgroup directories of this process, innermost first. The limits of all of them apply.
struct ControlGroups {
  int version = 0;  // 0: none
  std::vector<std::filesystem::path> directories;
};

// Tests pass another `root` than /. Inside a container, /proc/self/cgroup may name a host path that is not mounted; the
// mount point itself is then the container's group.
inline ControlGroups control_groups(const std::string& controller, const std::filesystem::path& root = "/") {
  namespace fs = std::filesystem;
  std::error_code ignored;
  const fs::path mount = root / "sys/fs/cgroup";
  ControlGroups groups;
  auto walk = [&](const fs::path& top, const std::string& path, int version) {
    if (!fs::is_directory(top, ignored)) return;
    groups.version = version;
    const bool outside = path.find("..") != std::string::npos;
    for (fs::path inside = outside ? "" : fs::path(path).relative_path(); !inside.empty();
         inside = inside.parent_path())
      if (fs::is_directory(top / inside, ignored)) groups.directories.push_back(top / inside);
    groups.directories.push_back(top);
  };
  // Lines are "number:controllers:path"; version 2 has the number 0 and no controllers.
  std::ifstream file(root / "proc/self/cgroup");
  std::string unified;
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
    if (controllers.empty()) unified = path;
    if (("," + controllers + ",").find("," + controller + ",") == std::string::npos) continue;
    const bool joint = fs::is_directory(mount / controllers, ignored);
    walk(mount / (joint ? controllers : controller), path, 1);
    return groups;
  }
  if (!unified.empty() && fs::exists(mount / "cgroup.controllers", ignored)) walk(mount, unified, 2);
  return groups;
}

// The first number in a file; empty if the file says "max" or cannot be read.
inline std::optional<double> number_in(const std::filesystem::path& path) {
  std::ifstream file(path);
  double number;
  return file >> number ? std::optional(number) : std::nullopt;
}

// The sum of these fields in a file of "name value" lines.
inline double sum_of_fields(const std::filesystem::path& path, const std::vector<std::string>& names) {
  std::ifstream file(path);
  double sum = 0, value;
  for (std::string name; file >> name >> value;) {
    for (const std::string& wanted : names) sum += name == wanted ? value : 0;
  }
  return sum;
}

}  // namespace streambp
