// Self-contained HTML pages: the pieces in pages/, and values embedded as data, never as markup. A page opens from disk and
// may load nothing.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "data/files/files.h"
#include "text/json.h"

namespace streambp {

// A file of pages/, or streambp.cuh, compiled into the program.
struct Resource {
  const char* name;
  const char* sha256;  // in hexadecimal
  const char* text;
};
extern const std::vector<Resource> kResources;

const Resource& resource(std::string_view name);

// Writes a page, atomically, that runs these scripts of pages/ after page.js and chart.js.
void write_page(const fs::path& path, const std::string& title, const std::vector<const char*>& scripts,
                const Json& data);

// The command that runs now, for a shell, without some options and the values that may follow them, and without the values
// of others, which are secret.
std::string command_line(const std::set<std::string>& without = {}, const std::set<std::string>& secret = {});

// A new file, or an old page of this program.
void require_replaceable_page(const fs::path& path);

}  // namespace streambp
