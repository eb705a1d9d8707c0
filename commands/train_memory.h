// How a training run fits into memory: the length of its streams, the chunk, what is kept for backward, and where.
#pragma once

#include "commands/text.h"
#include "commands/train_options.h"
#include "training/train.h"

namespace streambp {

class TrainMemory {
 public:
  TrainMemory(const TrainOptions& options, Run& run) : o_(options), run_(run), mode_(mode_named(options.mode)) {}

  // The length of a pack: what it is filled to, or the longest document, but no more than fits into memory.
  Index length_for(const TokenFile& file) const {
    const StepSettings& s = run_.settings;
    const Index unused = layout_of(s.config).most_unused(file.together()),
                longest = round_up(std::max(file.longest_together() + unused, run_.pack), kTile),
                limit = s.config.max_length > 0 ? file.together() * s.config.max_length + unused : kLongestStream,
                wanted = std::min({longest, limit, kLongestStream / o_.batch}),
                length = length_for(std::max<Index>(file.longest_whole(), 1) + unused, wanted);
    if (length == 0) refuse(o_.batch * kTile);
    return length;
  }
  // The wanted length of a pack, or what fits: `least` if it does, with any chunk. 0: nothing.
  Index length_for(Index least, Index wanted) const {
    const StepSettings& s = run_.settings;
    const Rates rates = usual_rates(s.device, s.config.head_dim);
    Index fitting = 0;
    for (const Index chunk : {usual_chunk(), chunk_is_chosen() ? o_.chunk : s.tile}) {
      const Allowed plain = allowed(exactly(chunk), {s.kept});
      if (fit(s, mode_, layout_of(s.config).rows_of_packs(o_.batch, wanted), plain, rates).chunk > 0) return wanted;
      fitting = longest_that_fits(s, mode_, plain).rows / o_.batch / kTile * kTile;
      if (fitting >= least) return fitting;  // else smaller chunks may have more room
    }
    return fitting;
  }
  // What makes room for a document, pair or completion of so many tokens, which --length, the model or memory rule out.
  std::string remedy_for(Index tokens) const {
    const StepSettings& s = run_.settings;
    if (s.config.positions == Positions::learned && tokens > s.config.max_length) return "";  // of the model
    const Index rows = o_.batch * round_up(tokens, kTile);
    const Usage needed = least(s, rows).usage;
    const Capacity room = budget();
    const std::string length = "--length " + std::to_string(tokens);
    if (needed.fits(room))
      return "use " + length + (o_.given("--length") ? "" : ", which is beyond the model's context");
    const auto amount = [](std::size_t bytes) {
      return format("%ldMiB", ceil_div(static_cast<Index>(bytes), 1 << 20));
    };
    std::vector<std::string> all;
    if (needed.peak > room.near)
      all.push_back(is_bounded() && needed.peak < o_.room.near ? "--memory " + amount(needed.peak)
                                                               : "a machine with " + amount(needed.peak) + " free");
    if (needed.far > room.far)
      all.push_back(o_.budget.far_memory.empty() ? "--far DIR, a directory with " + amount(needed.far) + " free"
                                                 : "--far-memory " + amount(needed.far));
    for (const auto& [options, config] : smaller_parts()) {
      StepSettings part = s;
      part.config = config;
      if (!least(part, rows).usage.fits(room)) continue;
      all.push_back(options);
      break;
    }
    std::string text = "use ";
    for (std::size_t i = 0; i < all.size(); ++i) text += (i == 0 ? "" : i + 1 < all.size() ? ", " : " or ") + all[i];
    return text + (o_.given("--length") ? " with " + length : "");
  }

  // Chooses the fastest step that fits, and plans the memory of the run. Returns the chunk.
  Index choose() {
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
  // Whether it finds one.
  bool fits() {
    try {
      return choose() > 0;
    } catch (const Error&) {
      return false;
    }
  }

  // Refuses a run without room for a checkpoint in its directory. Warns if later ones have none.
  std::string check_disk(const std::filesystem::path& out) const {
    const StepSettings& s = run_.settings;
    const Usage u = plan(s, run_.rows(), run_.schedule);
    const auto kind = static_cast<std::size_t>(Kind::optimizer);
    const bool wide =
        !o_.fine_tunes() || o_.trains_adapters() || o_.save_dtype == "f32";  // or perhaps as it was loaded
    const auto weights =
        static_cast<std::size_t>(o_.trains_adapters() ? trained_count(s.config) : parameter_count(s.config));
    const std::size_t each = static_cast<std::size_t>(s.ranks.all.size) * (u.by_kind[kind] + u.far_by_kind[kind]) +
                             weights * (wide ? 4 : 2),
                      free = std::filesystem::space(out).available;
    run_.checkpoint_bytes = static_cast<double>(each);
    const std::string takes = "a checkpoint takes at least " + human_bytes(each),
                      there = human_bytes(free) + " are free in " + out.string();
    require(each <= free, takes, ", and ", there, "; free some space, or choose another --out");
    const Index every = o_.checkpoint_interval, steps = run_.optimizer.steps;
    const Index count = every > 0    ? ceil_div(steps, every)
                        : every == 0 ? 1
                                     : 4;  // by time two and the best are kept while one is saved
    if (o_.resumed || static_cast<double>(each) * static_cast<double>(count) <= static_cast<double>(free)) return "";
    return "warning: " + takes + ", and this run keeps " + std::to_string(count) + "; " + there;
  }

 private:
  std::vector<Places> places() const {
    using Sampling = MemoryOptions::Sampling;
    return o_.budget.places(mode_, run_.settings, run_.grpo ? Sampling::of_each_rank : Sampling::none);
  }
  Allowed allowed(const ChunkRange& chunks, const KeptChoice& kept) const {
    return {chunks, budget(), places(), kept, o_.budget.chosen_block(mode_)};
  }
  // By --memory, to less than what is free.
  bool is_bounded() const { return !o_.budget.memory.empty() && parse_bytes(o_.budget.memory) < o_.room.near; }
  // Near and far memory that a step may use. Some of what is free is left for tokens, buffers of files, and others.
  Capacity budget() const {
    const MemoryOptions& b = o_.budget;
    return {is_bounded() ? parse_bytes(b.memory) : o_.room.near / 100 * 95,
            b.far_memory.empty() ? o_.room.far : parse_bytes(b.far_memory)};
  }
  bool chunk_is_chosen() const { return o_.given("--chunk") || (o_.resumed && o_.chunk % run_.settings.tile == 0); }
  Index usual_chunk() const { return chunk_is_chosen() ? o_.chunk : default_chunk(run_.settings.tile); }
  // Of all allowed steps, the one with the least memory.
  Fit least(const StepSettings& s, Index rows) const {
    const ChunkRange chunks = o_.given("--chunk") ? exactly(o_.chunk) : up_to(o_.chunk);
    return closest(s, mode_, rows, allowed(chunks, o_.budget.kept_choice(mode_, s.config)));
  }
  // Options that train less of the model, in less memory, those first that change less.
  std::vector<std::pair<std::string, Config>> smaller_parts() const {
    std::vector<std::pair<std::string, Config>> all;
    if (o_.part.blocks || !o_.part.train.empty()) return all;
    Config config = run_.settings.config;
    std::string options;
    if (!o_.trains_adapters()) {
      PartOptions part = o_.part;
      part.lora.rank = 16, options = "--lora 16";
      part.apply(config);
      all.push_back({options, config});
    }
    if (config.base == Base::nf4) return all;
    apply_base("nf4", config);
    all.push_back({options + (options.empty() ? "" : " ") + "--base nf4", config});
    return all;
  }
  // The memory of a step, an evaluation and a sample.
  void plan_run() {
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
  Index parallel_completions() const {
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
  void require_room_to_sample() const {
    const std::size_t allowed = is_bounded() ? budget().near : o_.room.near;
    require(run_.memory.near <= allowed, run_.grpo ? "sampling a completion" : "the sample at the end",
            " brings the run to ", human_bytes(run_.memory.near), ", and ", human_bytes(allowed),
            is_bounded() ? " are allowed by --memory" : " are free",
            run_.grpo ? "; use a smaller --completion" : "; use --sample 0 or a shorter --length");
  }
  // No step on so many rows fits: says what the smallest needs, and what there is.
  [[noreturn]] void refuse(Index rows) const {
    const StepSettings& s = run_.settings;
    const Fit least = this->least(s, rows);
    const Capacity room = budget();
    const std::string there = human_bytes(room.near) + (is_bounded() ? " are allowed by --memory" : " are free"),
                      needs = format("a step on %ld tokens needs at least %s", rows, human_bytes(least.usage.peak)),
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

  const TrainOptions& o_;
  Run& run_;
  const Mode mode_;
};

}  // namespace streambp
