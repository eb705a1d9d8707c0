// How a training run fits into memory: the length of its streams, the chunk, what is kept for backward, and where.
#pragma once

#include "commands/train_options.h"
#include "training/train.h"

namespace streambp {

class TrainMemory {
 public:
  TrainMemory(const TrainOptions& options, Run& run) : o_(options), run_(run), mode_(mode_named(options.mode)) {}

  // The length of a pack: at least the longest document, and at least a few thousand tokens, so that a step has little
  // overhead; but no more than fits into memory and no more than there is data.
  Index length_for(const TokenFile& file) const;

  // Chooses the fastest step that fits, and plans the memory of the run. Returns the chunk.
  Index choose();

 private:
  std::vector<Places> places() const;
  Allowed allowed(const ChunkRange& chunks, const KeptChoice& kept) const;
  bool is_bounded() const;
  Capacity budget() const;
  bool chunk_is_chosen() const;
  Index usual_chunk() const;
  void plan_run();
  Index parallel_completions() const;
  void require_room_to_sample() const;
  [[noreturn]] void refuse(Index rows) const;

  const TrainOptions& o_;
  Run& run_;
  const Mode mode_;
};

}  // namespace streambp
