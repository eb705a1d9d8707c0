// The data that --data names: files, folders of files, and how they are mixed: "a.jsonl:0.7 b.jsonl:0.3".
#pragma once

#include <charconv>
#include <cmath>
#include <optional>
#include <vector>

#include "data/files/files.h"

namespace streambp {

// What one argument names.
struct DataPart {
  std::string name;             // without the weight
  std::vector<fs::path> files;  // of a folder all data files, in the order of their names
  double weight = 0;            // its share of the tokens, in proportion to other parts; 0: no weights are given
};

// Files in a folder that are data. Others, such as a README.md, are left alone.
inline bool is_data(const fs::path& path) {
  const std::string type = content_type(path);
  for (const char* known :
       {".jsonl", ".ndjson", ".json", ".txt", ".bin", ".safetensors", ".parquet", ".arrow", ".csv", ".tsv"})
    if (type == known) return true;
  return false;
}

// Reading Parquet takes a library of a hundred megabytes, and converting it once takes one line.
inline void refuse_tables(const fs::path& path) {
  constexpr const char* tables[][4] = {{".parquet", "Parquet", "parquet", ""},
                                       {".arrow", "Arrow", "file", ""},
                                       {".csv", "CSV", "csv", ""},
                                       {".tsv", "TSV", "csv", ", sep=\"\\t\""}};
  for (const auto& [type, name, reader, more] : tables)
    require(content_type(path) != type, path.string(), ": ", name,
            " is not read; convert it: python3 -c 'import datasets; datasets.Dataset.from_", reader, "(\"",
            path.string(), "\"", more, ").to_json(\"", path.stem().string(), ".jsonl\")'");
}

inline std::vector<fs::path> files_in(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::recursive_directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const bool hidden = entry->path().filename().string().starts_with(".");
    std::error_code unknown;
    const bool folder = entry->is_directory(unknown), link = entry->is_symlink(unknown);
    if (hidden && folder) entry.disable_recursion_pending();
    if (hidden || (folder && !link)) continue;
    require(!folder, entry->path().string(), ": is a link to a folder, which is not followed; name that folder too");
    require(!link || is_there(entry->path()), entry->path().string(),
            ": is a link to a file that is not there; remove it");
    if (is_data(entry->path())) files.push_back(entry->path());
  }
  require(!error, folder.string(), ": cannot list the folder: ", error.message(), "; check its permissions");
  require(!files.empty(), folder.string(), ": no data in this folder; .jsonl, .json, .txt, .bin and .safetensors ",
          "files are read, and .jsonl.gz, .jsonl.zst and the like");
  std::ranges::sort(files);
  return files;
}

// The weight at the end of "FILE:0.7", if FILE is there.
inline std::optional<double> weight_of(const std::string& argument) {
  const std::size_t colon = argument.rfind(':');
  if (colon == std::string::npos || is_there(argument) || !is_there(argument.substr(0, colon))) return {};
  double weight = 0;
  const char *begin = argument.data() + colon + 1, *end = argument.data() + argument.size();
  const auto parsed = std::from_chars(begin, end, weight);
  require(parsed.ec == std::errc() && parsed.ptr == end && 1e-6 <= weight && weight <= 1e6, argument, ": the weight \"",
          argument.substr(colon + 1), "\" is not a number from 0.000001 to 1000000; only the ratios ",
          "of weights count, so 0.7 and 0.3 are as good as 7 and 3");
  return weight;
}

inline std::vector<DataPart> data_parts(const std::vector<std::string>& arguments) {
  std::vector<DataPart> parts;
  for (const std::string& argument : arguments) {
    const std::optional<double> weight = weight_of(argument);
    DataPart part{weight ? argument.substr(0, argument.rfind(':')) : argument, {}, weight.value_or(0)};
    part.files =
        is_there(part.name) && fs::is_directory(part.name) ? files_in(part.name) : std::vector<fs::path>{part.name};
    for (const fs::path& file : part.files) regular_file_size(file), refuse_tables(file);
    parts.push_back(std::move(part));
  }
  for (const DataPart& part : parts) {
    require((part.weight > 0) == (parts[0].weight > 0), part.weight > 0 ? parts[0].name : part.name,
            ": has no weight, unlike other data; give all of it a weight, as in ", part.name, ":0.5, or none");
    require(part.weight == 0 || parts.size() > 1, part.name, ": the only data needs no weight; leave it out");
  }
  return parts;
}

// The same for data that is not mixed.
inline std::vector<fs::path> data_files(const std::vector<std::string>& arguments) {
  std::vector<fs::path> files;
  for (const DataPart& part : data_parts(arguments)) {
    require(part.weight == 0, part.name, ": weights are for training on documents; leave them out");
    files.insert(files.end(), part.files.begin(), part.files.end());
  }
  return files;
}

}  // namespace streambp
