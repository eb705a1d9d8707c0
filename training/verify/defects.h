// Defects that trainers have had, each as a change of the step whose gradient is computed: other targets, other weights
// of tokens, other documents or positions, or another configuration of the model. The program itself stays as it is.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "data/files/recorded_step.h"
#include "training/objectives.h"

namespace streambp {

// What the mean of the loss is taken over; then the means of these parts are averaged.
enum class MeanOver { step, ranks, batches, rows, documents };

// A model and a step of it.
struct TrainingCase {
  Config config;
  RecordedStep step;
  MeanOver mean = MeanOver::step;
};

struct Defect {
  const char* name;
  const char* meaning;                   // "the gradient of ..."
  bool (*apply)(TrainingCase& correct);  // false: this model or step cannot have it
};

// The part of the step that a token belongs to.
inline std::vector<std::size_t> parts_of(const TrainingCase& of, std::size_t batch) {
  const RecordedBatch& b = of.step.batches[batch];
  std::vector<std::size_t> parts(b.rows.size(), 0);
  for (std::size_t t = 0; t < parts.size(); ++t) {
    parts[t] = of.mean == MeanOver::ranks       ? b.file
               : of.mean == MeanOver::batches   ? batch
               : of.mean == MeanOver::rows      ? (batch << 32) + static_cast<std::size_t>(b.rows[t])
               : of.mean == MeanOver::documents ? (batch << 32) + static_cast<std::size_t>(b.batch.key_begin[t])
                                                : 0;
  }
  return parts;
}

// The micro-batches, with d loss / d log-prob of each target as their advantages.
inline std::vector<Batch> weighted(const TrainingCase& of) {
  std::map<std::size_t, double> factors;  // of the targets of a part, summed
  std::vector<Batch> batches;
  for (std::size_t b = 0; b < of.step.batches.size(); ++b) {
    const Batch& batch = batches.emplace_back(of.step.batches[b].batch);
    const std::vector<std::size_t> parts = parts_of(of, b);
    for_each_target(batch, {0, batch.size()}, [&](std::size_t t) { factors[parts[t]] += batch.advantages[t]; });
  }
  if (of.step.reduction == Reduction::given) return batches;
  std::erase_if(factors, [](const auto& part) { return part.second == 0; });
  for (std::size_t b = 0; b < batches.size(); ++b) {
    const std::vector<std::size_t> parts = parts_of(of, b);
    for (std::size_t t = 0; t < parts.size(); ++t) {
      const double of_part = of.step.reduction == Reduction::sum || !factors.contains(parts[t])
                                 ? 1
                                 : factors.at(parts[t]) * static_cast<double>(factors.size());
      batches[b].advantages[t] /= -of_part;
    }
  }
  return batches;
}

// -Σ n log-prob, for batches from weighted().
inline Objective weighted_log_probs() {
  Objective objective;
  objective.kind = ObjectiveKind::own;
  objective.loss = [](const Batch& batch, const std::vector<double>& logps, std::vector<double>& weights) {
    double loss = 0;
    for_each_target(batch, {0, batch.size()}, [&](std::size_t t) {
      weights[t] = batch.advantages[t];
      loss += weights[t] * logps[t];
    });
    return loss;
  };
  return objective;
}

namespace defects {

template <class V>
bool change(V& field, const V& value) {
  return std::exchange(field, value) != value;
}

inline bool average(TrainingCase& c, MeanOver mean, bool applies) {
  applies = applies && c.mean == MeanOver::step && c.step.reduction == Reduction::mean;
  if (applies) c.mean = mean;
  return applies;
}

// The target of each token becomes target(batch, t); -1: none.
template <class F>
bool retarget(TrainingCase& c, F&& target) {
  if (c.step.reduction == Reduction::given) return false;
  for (RecordedBatch& b : c.step.batches) {
    const RecordedBatch before = b;
    for (std::size_t t = 0; t < before.rows.size(); ++t) {
      b.batch.targets[t] = target(before, t);
      const bool is_new = before.batch.targets[t] < 0;
      b.batch.advantages[t] = b.batch.targets[t] < 0 ? 0 : is_new ? 1 : before.batch.advantages[t];
    }
  }
  return c.step.targets() > 0;
}

inline bool same_document(const Batch& b, std::size_t t, std::size_t other) {
  return other < b.tokens.size() && b.key_begin[t] == b.key_begin[other];
}
inline bool same_row(const RecordedBatch& b, std::size_t t, std::size_t other) {
  return other < b.rows.size() && b.rows[t] == b.rows[other];
}

inline bool learn_everything(TrainingCase& c) {
  return retarget(c, [](const RecordedBatch& b, std::size_t t) {
    return same_document(b.batch, t, t + 1) ? b.batch.tokens[t + 1] : b.batch.targets[t];
  });
}
inline bool skip_last(TrainingCase& c) {
  return retarget(c, [](const RecordedBatch& b, std::size_t t) {
    std::size_t next = t + 1;
    while (same_document(b.batch, t, next) && b.batch.targets[next] < 0) ++next;
    return same_document(b.batch, t, next) ? b.batch.targets[t] : -1;
  });
}
inline bool shift_twice(TrainingCase& c) {
  return retarget(
      c, [](const RecordedBatch& b, std::size_t t) { return same_row(b, t, t + 1) ? b.batch.targets[t + 1] : -1; });
}
inline bool shift_never(TrainingCase& c) {
  return retarget(c, [](const RecordedBatch& b, std::size_t t) {
    return t > 0 && same_row(b, t, t - 1) ? b.batch.targets[t - 1] : -1;
  });
}
inline bool learn_next_document(TrainingCase& c) {
  bool any = false;
  return retarget(c,
                  [&](const RecordedBatch& b, std::size_t t) {
                    const bool last = same_row(b, t, t + 1) && !same_document(b.batch, t, t + 1);
                    any = any || last;
                    return last ? b.batch.tokens[t + 1] : b.batch.targets[t];
                  }) &&
         any;
}

// Keeps some micro-batches. Their loss is a mean over their own targets.
template <class F>
bool keep_batches(TrainingCase& c, F&& keep) {
  const std::vector<RecordedBatch> all = std::exchange(c.step.batches, {});
  for (std::size_t i = 0; i < all.size(); ++i)
    if (keep(all, i)) c.step.batches.push_back(all[i]);
  return c.step.batches.size() < all.size() && c.step.targets() > 0;
}
using Batches = std::vector<RecordedBatch>;
inline bool is_first_of_rank(const Batches& all, std::size_t i) { return i == 0 || all[i - 1].file != all[i].file; }
inline bool is_last_of_rank(const Batches& all, std::size_t i) {
  return i + 1 == all.size() || all[i + 1].file != all[i].file;
}

// Positions are columns of the padded row.
inline bool count_padding(TrainingCase& c) {
  bool any = false;
  for (RecordedBatch& b : c.step.batches) {
    for (std::size_t t = 0; t < b.rows.size(); ++t) {
      const bool documents_of_a_row =
          b.batch.key_begin[t] > 0 && b.rows[static_cast<std::size_t>(b.batch.key_begin[t]) - 1] == b.rows[t];
      if (!documents_of_a_row) any = change(b.batch.positions[t], b.columns[t]) || any;
    }
  }
  c.config.rope_scaling.longest = std::max(c.config.rope_scaling.longest, c.step.longest());
  return any && (c.config.positions == Positions::rope || c.step.longest() <= c.config.max_length);
}

enum class Restart { attention = 1, positions = 2, both = 3 };
// Documents of a row become one.
inline bool join_documents(TrainingCase& c, Restart ignored) {
  bool any = false;
  const auto is = [&](Restart what) { return (static_cast<int>(ignored) & static_cast<int>(what)) != 0; };
  for (RecordedBatch& b : c.step.batches) {
    std::int32_t begin = 0, position = 0;
    for (std::size_t t = 0; t < b.rows.size(); ++t) {
      const bool new_row = t == 0 || !same_row(b, t, t - 1);
      if (new_row) begin = static_cast<std::int32_t>(t), position = b.batch.positions[t];
      any = any || b.batch.key_begin[t] > begin;
      if (is(Restart::attention)) b.batch.key_begin[t] = begin;
      if (is(Restart::positions)) b.batch.positions[t] = position++;
    }
  }
  c.config.rope_scaling.longest = std::max(c.config.rope_scaling.longest, c.step.longest());
  return any && (c.config.positions == Positions::rope || !is(Restart::positions));
}

}  // namespace defects

inline const std::vector<Defect>& all_defects() {
  using namespace defects;
  static const std::vector<Defect> all = {
      {"micro-batch-means", "the mean of the micro-batches' mean losses, instead of the mean over all learned tokens",
       [](TrainingCase& c) { return average(c, MeanOver::batches, c.step.batches.size() > 1); }},
      {"rank-means", "the mean of the ranks' mean losses, instead of the mean over all learned tokens",
       [](TrainingCase& c) { return average(c, MeanOver::ranks, c.step.files > 1); }},
      {"document-means", "the mean of the documents' mean losses, instead of the mean over all learned tokens",
       [](TrainingCase& c) { return average(c, MeanOver::documents, true); }},
      {"row-means", "the mean of the rows' mean losses, instead of the mean over all learned tokens",
       [](TrainingCase& c) { return average(c, MeanOver::rows, true); }},
      {"last-micro-batch", "the last micro-batch of each rank alone: the gradients of the others were cleared",
       [](TrainingCase& c) { return keep_batches(c, is_last_of_rank); }},
      {"first-micro-batch", "the first micro-batch of each rank alone",
       [](TrainingCase& c) { return keep_batches(c, is_first_of_rank); }},
      {"first-rank", "the first rank alone: gradients were not exchanged",
       [](TrainingCase& c) {
         return keep_batches(c, [](const Batches& all, std::size_t i) { return all[i].file == 0; });
       }},
      {"prompt-learned", "a loss over all tokens, also those whose labels say that they are not learned",
       learn_everything},
      {"end-not-learned", "a loss without the last learned token of each document, usually its end token", skip_last},
      {"shifted-twice", "labels shifted twice: each token predicts the second one after it", shift_twice},
      {"not-shifted", "labels that were not shifted: each token predicts itself", shift_never},
      {"next-document-learned", "a loss in which the last token of a document predicts the first one of the next",
       learn_next_document},
      {"documents-joined", "packed documents that see each other, at positions that do not restart",
       [](TrainingCase& c) { return join_documents(c, Restart::both); }},
      {"attention-joined", "packed documents that see each other, at positions that restart",
       [](TrainingCase& c) { return join_documents(c, Restart::attention); }},
      {"positions-joined", "packed documents at positions that do not restart",
       [](TrainingCase& c) { return join_documents(c, Restart::positions); }},
      {"padding-positions", "positions that count the padding before a document", count_padding},
      {"window-ignored", "a model in which local layers attend to everything",
       [](TrainingCase& c) { return change(c.config.window, Index{0}); }},
      {"window-short", "a model with a window that is one token too short",
       [](TrainingCase& c) { return c.config.window > 1 && change(c.config.window, c.config.window - 1); }},
      {"window-long", "a model with a window that is one token too long",
       [](TrainingCase& c) { return c.config.window > 0 && change(c.config.window, c.config.window + 1); }},
      {"all-layers-local", "a model in which global layers are local, too",
       [](TrainingCase& c) { return c.config.window > 0 && change(c.config.local, {}); }},
      {"rope-theta", "a model with RoPE's usual theta of 10000",
       [](TrainingCase& c) { return c.config.positions == Positions::rope && change(c.config.rope_theta, 1e4); }},
      {"local-rope-theta", "a model whose local layers have the RoPE theta of the others",
       [](TrainingCase& c) { return change(c.config.local_rope_theta, 0.0); }},
      {"rope-scaling", "a model without its RoPE scaling",
       [](TrainingCase& c) {
         const bool scaled = c.config.rope_scaling.type != RopeType::plain;
         c.config.rope_scaling = {};
         return scaled;
       }},
      {"rope-pairs", "a model that rotates other pairs of numbers: interleaved for halves, or halves for interleaved",
       [](TrainingCase& c) {
         const bool halves = c.config.rope_pairs == RopePairs::halves;
         c.config.rope_pairs = halves ? RopePairs::interleaved : RopePairs::halves;
         return c.config.positions == Positions::rope;
       }},
      {"qk-norm-after-rope", "a model that normalises queries and keys after RoPE",
       [](TrainingCase& c) {
         return c.config.qk_norm == QkNorm::heads && change(c.config.qk_norm, QkNorm::heads_after_rope);
       }},
      {"norm-offset", "norms that do not add 1 to their weights",
       [](TrainingCase& c) { return change(c.config.norm_offset, 0.0); }},
      {"norm-epsilon", "norms with another epsilon, 1e-6 or 1e-5",
       [](TrainingCase& c) { return change(c.config.norm_eps, c.config.norm_eps == 1e-5 ? 1e-6 : 1e-5); }},
      {"score-cap", "attention without its soft cap", [](TrainingCase& c) { return change(c.config.score_cap, 0.0); }},
      {"logit-cap", "logits without their soft cap", [](TrainingCase& c) { return change(c.config.logit_cap, 0.0); }},
      {"score-scale", "attention with the usual scale of its scores",
       [](TrainingCase& c) { return change(c.config.score_scale, 0.0); }},
      {"embedding-scale", "embeddings without their scale",
       [](TrainingCase& c) { return change(c.config.embedding_scale, 1.0); }},
      {"residual-scale", "residual branches without their scale",
       [](TrainingCase& c) { return change(c.config.residual_scale, 1.0); }},
      {"logit-scale", "logits without their scale", [](TrainingCase& c) { return change(c.config.logit_scale, 1.0); }},
      {"adapter-scale", "adapters without their scale, alpha / rank",
       [](TrainingCase& c) {
         bool any = false;
         for (auto& [name, size] : c.config.adapters) any |= change(size.scale, 1.0);
         return any;
       }},
  };
  return all;
}

// A factor of the whole gradient, and what it means.
struct Factor {
  double value;
  std::string meaning;
};

inline std::vector<Factor> factors_of(const RecordedStep& step) {
  const auto batches = static_cast<double>(step.batches.size()), ranks = static_cast<double>(step.files);
  double learned = 0, tokens = 0, padded = 0;
  for (const RecordedBatch& b : step.batches) {
    tokens += static_cast<double>(b.batch.size()), padded += static_cast<double>(b.padded_size);
    for (const double factor : b.batch.advantages) learned += factor;
  }
  std::vector<Factor> factors = {{-1, "it has the wrong sign"}};
  const auto add = [&](double value, const std::string& meaning) {
    if (value != 1) factors.push_back({value, meaning});
  };
  if (step.reduction == Reduction::mean) {
    const double outside = static_cast<double>(step.outside), labels = static_cast<double>(step.targets());
    add(learned, "it is the sum over the learned tokens, not their mean");
    add(learned / labels, "the loss is divided by the learned tokens, not by the sum of their weights");
    add(learned / tokens, "the loss is divided by all tokens instead of the learned ones");
    add(learned / padded, "the loss is divided by all positions, with padding, instead of the learned tokens");
    add(learned / (learned + outside), "labels of documents' first tokens are counted, but nothing predicts them");
    if (learned > 1) add(learned / (learned - 1), "the loss is divided by one learned token too few");
    add(learned / (learned + 1), "the loss is divided by one learned token too many");
  } else if (step.reduction == Reduction::sum) {
    add(1 / learned, "it is the mean over the learned tokens, not their sum");
  }
  const std::string of_batches = std::to_string(step.batches.size()) + " micro-batches",
                    of_ranks = std::to_string(step.files) + " ranks";
  add(batches, "it is not divided by the " + of_batches);
  add(1 / batches, "it is divided by the " + of_batches + " once too often");
  add(ranks, "it is summed over the " + of_ranks + ", not averaged");
  add(1 / ranks, "it is divided by the " + of_ranks + " once too often");
  for (int power = 8; power <= 24; ++power)
    add(std::ldexp(1, power), "a loss scale of " + std::to_string(1 << power) + " is left in it");
  return factors;
}

}  // namespace streambp
