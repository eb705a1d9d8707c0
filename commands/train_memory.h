// How a training run fits into memory: the length of its streams, the chunk, what is kept for backward, and where.
#pragma once

#include "commands/train_options.h"
#include "training/train.h"

namespace streambp {

class TrainMemory {
 public:
  TrainMemory(const TrainOptions& options, Run& run) : o_(options), run_(run), mode_(mode_named(options.mode)) {}

  // The length of a pack: what it is filled to, or the longest document, but no more than fits into memory.
  Index length_for(const TokenFile& file) const;
  // The wanted length of a pack, or what fits: `least` if it does, with any chunk. 0: nothing.
  Index length_for(Index least, Index wanted) const;
  // What makes room for a document, pair or completion of so many tokens, which --length, the model or memory rule out.
  std::string remedy_for(Index tokens) const;

  // Chooses the fastest step that fits, and plans the memory of the run. Returns the chunk.
  Index choose();
  bool fits();  // whether it finds one

  // Refuses a run without room for a checkpoint in its directory. Warns if later ones have none.
  std::string check_disk(const std::filesystem::path& out) const;

 private:
  std::vector<Places> places() const;
  Allowed allowed(const ChunkRange& chunks, const KeptChoice& kept) const;
  bool is_bounded() const;
  Capacity budget() const;
  bool chunk_is_chosen() const;
  Index usual_chunk() const;
  Fit least(const StepSettings& s, Index rows) const;
  std::vector<std::pair<std::string, Config>> smaller_parts() const;
  void plan_run();
  Index parallel_completions() const;
  void require_room_to_sample() const;
  [[noreturn]] void refuse(Index rows) const;

  const TrainOptions& o_;
  Run& run_;
  const Mode mode_;
};

}  // namespace streambp
