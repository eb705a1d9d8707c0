// Reference log-probs: the log-prob of every target under the reference model. They are computed once, by a forward
// pass before training, and cached in a file next to the data under a key of model and data. So training holds only one
// model in memory.
//
//   "logp"   F32 [N]   for each token of the token file, the log-prob of the next token; 0 where that has no loss
#pragma once

#include "data/documents/packing.h"
#include "data/documents/token_file.h"
#include "data/files/checkpoint.h"
#include "data/files/hash.h"

namespace streambp {

// A key that identifies reference log-probs. `longest`: documents are truncated to this length, as in training.
inline std::string reference_key(const TokenFile& file, const std::filesystem::path& model, const std::string& dtype,
                                 Index longest) {
  const Json key = {{"version", 2},
                    {"tokens", file.fingerprint()},
                    {"dtype", dtype},
                    {"longest", std::min(longest, file.longest())},
                    {"model", model_key(model)}};
  return key.dump();
}

inline std::string reference_name(const std::string& key) { return named_by_hash("reference", key); }

inline std::string_view bytes_of(const std::vector<float>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(float)};
}

// The reference model of the run that wrote this checkpoint.
inline std::string stored_reference(const std::filesystem::path& checkpoint) {
  const Json state = read_sealed_json(state_of(checkpoint));
  return Fields(state, state_of(checkpoint).string()).get<std::string>("reference");
}

// Reads the cache from the first of these places that contains it.
inline std::optional<std::vector<float>> find_reference(const std::vector<std::filesystem::path>& places,
                                                        const std::string& key, const TokenFile& data) {
  for (const auto& place : places) {
    if (!std::filesystem::exists(place / reference_name(key))) continue;
    try {
      const SafetensorsFile file(place / reference_name(key));
      if (file.metadata("key") != key || file.at("logp").count != data.token_count()) continue;
      std::vector<float> logp(static_cast<std::size_t>(data.token_count()));
      read(file.at("logp"), logp.data());
      MappedFile::require_intact();
      const bool possible = std::ranges::all_of(logp, [](float x) { return std::isfinite(x) && x < 0.01f; });
      if (possible && file.metadata("hash") == hash_of(bytes_of(logp))) return logp;
    } catch (const Error&) {  // damaged: compute it again
    }
  }
  return {};
}

// Writes the cache to the first of these places that is writable.
inline void save_reference(const std::vector<std::filesystem::path>& places, const std::string& key,
                           const std::vector<float>& logp) {
  for (std::size_t i = 0; i < places.size(); ++i) {
    try {
      std::filesystem::create_directories(places[i]);
      SafetensorsWriter writer(places[i] / reference_name(key),
                               {{"format", "streambp reference"}, {"key", key}, {"hash", hash_of(bytes_of(logp))}});
      writer.add("logp", "F32", {static_cast<Index>(logp.size())}, logp.data(), logp.size() * sizeof(float));
      return writer.finish();
    } catch (const std::exception&) {
      if (i + 1 == places.size()) throw;
    }
  }
}

// How they are computed: in batches of at most so many rows, `streams` batches at a time.
struct ReferenceBatches {
  Index longest, rows, streams;
  DocumentLayout layout = {};
};

// Computes them. logps_of(batches) returns the log-probs of each batch; done(fraction) reports progress.
template <class LogpsOf, class Done>
std::vector<float> compute_reference(const TokenFile& file, const ReferenceBatches& s, LogpsOf&& logps_of,
                                     Done&& done) {
  require(s.longest <= s.rows, "documents of ", s.longest, " tokens do not fit a stream of ", s.rows);
  std::vector<float> logp(static_cast<std::size_t>(file.token_count()));
  auto length = [&](Index d) { return std::min(file.length(d), s.longest); };
  for (Index first = 0, next = 0; first < file.documents();) {
    std::vector<Batch> batches(static_cast<std::size_t>(s.streams));
    for (Batch& batch : batches) {
      for (Index end = 0; next < file.documents(); ++next) {
        if ((end = s.layout.end(end, length(next))) > s.rows) break;
        append(batch, file, PackedPiece{next, 0, length(next)});
      }
    }
    std::erase_if(batches, [](const Batch& batch) { return batch.size() == 0; });
    for (const auto& values : logps_of(batches)) {
      for (auto value = values.begin(); value != values.end(); value += length(first++)) {
        std::copy_n(value, length(first), logp.begin() + file.begin(first));
      }
    }
    done(static_cast<double>(next) / static_cast<double>(file.documents()));
  }
  return logp;
}

}  // namespace streambp
