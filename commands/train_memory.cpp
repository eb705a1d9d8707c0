#include "commands/train_memory.h"

#include "commands/text.h"

namespace streambp {

Index TrainMemory::length_for(const TokenFile& file) const {
  constexpr Index usual = 4096;
  const StepSettings& s = run_.settings;
  const Index all = round_up(file.token_count(), kTile), longest = round_up(file.longest_together(), kTile),
              limit = s.config.max_length > 0 ? file.together() * s.config.max_length : kLongestStream,
              wanted = std::min({std::max(longest, usual), all, limit, kLongestStream / o_.batch});
  const Allowed plain = allowed(exactly(usual_chunk()), {s.kept});
  const Rates rates = usual_rates(s.device, s.config.head_dim);
  if (fit(s, mode_, o_.batch * wanted, plain, rates).chunk > 0) return wanted;
  const Index fitting = longest_that_fits(s, mode_, plain).rows / o_.batch / kTile * kTile;
  if (fitting == 0) refuse(o_.batch * kTile);
  return fitting;
}

Index TrainMemory::choose() {
  StepSettings& s = run_.settings;
  const Index rows = run_.rows(), chunk = chunk_is_chosen() ? o_.chunk : default_chunk(s);
  const Allowed any =
      allowed(o_.given("--chunk") ? exactly(chunk) : up_to(chunk), o_.budget.kept_choice(mode_, s.config));
  const Fit found = fit(s, mode_, rows, any, usual_rates(s.device, s.config.head_dim));
  if (found.chunk == 0) refuse(rows);
  s = found.settings(s);
  run_.schedule = schedule_for(mode_, s, rows, found.chunk);
  plan_run();
  require_room_to_sample();
  return found.chunk;
}

std::vector<Places> TrainMemory::places() const {
  using Sampling = MemoryOptions::Sampling;
  return o_.budget.places(mode_, run_.settings, run_.grpo ? Sampling::of_each_rank : Sampling::none);
}

Allowed TrainMemory::allowed(const ChunkRange& chunks, const KeptChoice& kept) const {
  return {chunks, budget(), places(), kept, o_.budget.chosen_block(mode_)};
}

// By --memory, to less than what is free.
bool TrainMemory::is_bounded() const {
  return !o_.budget.memory.empty() && parse_bytes(o_.budget.memory) < o_.room.near;
}

// Near and far memory that a step may use. Some of what is free is left for tokens, buffers of files, and others.
Capacity TrainMemory::budget() const {
  const MemoryOptions& b = o_.budget;
  return {is_bounded() ? parse_bytes(b.memory) : o_.room.near / 100 * 95,
          b.far_memory.empty() ? o_.room.far : parse_bytes(b.far_memory)};
}

bool TrainMemory::chunk_is_chosen() const {
  return o_.given("--chunk") || (o_.resumed && o_.chunk % run_.settings.tile == 0);
}
Index TrainMemory::usual_chunk() const { return chunk_is_chosen() ? o_.chunk : default_chunk(run_.settings.tile); }

// The memory of a step, an evaluation and a sample.
void TrainMemory::plan_run() {
  GenerationShape shape = o_.sample_length > 0 ? GenerationShape{1, run_.length} : GenerationShape{};
  if (run_.grpo) {
    run_.grpo->parallel = parallel_completions();
    shape = run_.grpo->shape(run_.grpo->parallel);
  }
  run_.memory = streambp::plan_run(run_.settings, run_.rows(), run_.schedule, shape);
  run_.memory.directory = o_.budget.directory, run_.memory.on_reserved = show_reserved;
}

// On-line GRPO samples as many completions in parallel as fit into the memory of a step with the smallest chunk, all of
// it near, and into the budget. Their number does not change their tokens.
Index TrainMemory::parallel_completions() const {
  StepSettings near = run_.settings;
  near.places = {};
  const auto planned = [&](const StepSettings& s, const GenerationShape& g) {
    const Schedule schedule = schedule_for(Mode::stream, s, run_.rows(), s.tile);
    return streambp::plan_run(s, run_.rows(), schedule, g).near;
  };
  const std::size_t room = std::min(planned(near, {}), budget().near);
  return std::max<Index>(1, largest(run_.grpo->completions(), [&](Index slots) {
                           return planned(run_.settings, run_.grpo->shape(slots)) <= room;
                         }));
}

// Sampling may need more memory than a step, because it keeps the keys and values of all layers.
void TrainMemory::require_room_to_sample() const {
  const std::size_t allowed = is_bounded() ? budget().near : o_.room.near;
  require(run_.memory.near <= allowed, run_.grpo ? "sampling a completion" : "the sample at the end",
          " brings the run to ", human_bytes(run_.memory.near), ", and ", human_bytes(allowed),
          is_bounded() ? " are allowed by --memory" : " are free",
          run_.grpo ? "; use a smaller --completion" : "; use --sample 0 or a shorter --length");
}

// No step on so many rows fits: says what the smallest needs, and what there is.
void TrainMemory::refuse(Index rows) const {
  const StepSettings& s = run_.settings;
  const KeptChoice kept = o_.budget.kept_choice(mode_, s.config);
  const Fit least = closest(s, mode_, rows, allowed(o_.given("--chunk") ? exactly(o_.chunk) : up_to(o_.chunk), kept));
  const Capacity room = budget();
  const std::string there = human_bytes(room.near) + (is_bounded() ? " are allowed by --memory" : " are free"),
                    needs =
                        format("a step on %ld tokens needs at least %s", rows, human_bytes(least.usage.peak).c_str()),
                    remedy = (is_bounded() ? "more --memory, " : "") + o_.budget.remedy();
  if (least.usage.peak > room.near) {
    const Index longest = longest_that_fits(s, mode_, allowed(exactly(least.chunk), {s.kept})).rows;
    require(longest > 0, needs, ", and ", there, "; use ", remedy,
            "a smaller model, or a narrower --dtype or --optimizer");
    fail(needs, ", and ", there, ": room for ", longest, " tokens at a time in ", name(mode_), " mode; use ", remedy,
         mode_ == Mode::stream ? "" : "--mode stream, or ", "a smaller --batch or --length");
  }
  const bool far_is_bounded = !o_.budget.far_memory.empty();
  fail(needs, " and ", human_bytes(least.usage.far), " of far memory; ", there, ", and ", human_bytes(room.far),
       far_is_bounded ? " far are allowed" : " far are free in " + o_.budget.far_place(s.device), "; use ", remedy,
       far_is_bounded ? "more --far-memory" : "--far DIR, a directory on another disk", ", or a smaller --length");
}

}  // namespace streambp
