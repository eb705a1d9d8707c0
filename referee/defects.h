// Defects that trainers have had, each as a change of the step whose gradient is computed: other targets, other weights
// of tokens, other documents or positions, or another configuration of the model. The program itself stays as it is.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "model/parameters.h"
#include "referee/recorded_step.h"
#include "referee/wrong.h"

namespace streambp {

// What the mean of the loss is taken over; then the means of these parts are averaged.
enum class MeanOver { step, ranks, batches, rows, documents };

// A model and a step of it.
struct TrainingCase {
  Config config;
  RecordedStep step;
  MeanOver mean = MeanOver::step;
  Wrong wrong = {};
  Index scaled = -1;  // the micro-batch that counts 1 + wrong.strength times
  bool needs_oracle() const { return wrong != Wrong() && scaled < 0; }
};

// Where a defect is, if its strength or its place follows from the gradient.
enum class Where { everywhere, layers, micro_batches, windows, chunks, expert_ranks };

struct Defect {
  const char* name;
  const char* meaning;                    // "the gradient of ..."
  bool (*change)(TrainingCase& correct);  // false: this model or step cannot have it
  std::optional<Where> solved = {};

  bool apply(TrainingCase& correct) const {
    if (solved && solved != Where::windows) correct.wrong.what = name;
    return change(correct);
  }
};

// Whether this is a tensor of all experts, or their adapters.
inline bool of_experts(const std::string& name) { return name.find(".experts.") != std::string::npos; }

namespace defects {

template <class V>
bool change(V& field, const V& value) {
  return std::exchange(field, value) != value;
}

// What only the oracle computes is for small models, in seconds. It knows no micro-batches, which balance their experts.
inline bool is_small(TrainingCase& c) {
  if (c.config.balance() > 0) return false;
  Index tokens = 0;
  for (const RecordedBatch& b : c.step.batches) tokens += b.batch.size();
  return tokens * parameter_count(c.config) <= 1'000'000'000;
}

// A defect of delta rules.
template <auto field, bool value = true>
bool delta(TrainingCase& c) {
  return c.config.has_delta_rule() && is_small(c) && change(c.wrong.*field, value);
}
template <Wrong::LayerScale where>
bool scale_layers(TrainingCase& c) {
  return c.config.layer_scale && is_small(c) && change(c.wrong.layer_scale, where);
}
// A chunk without what the one before it left.
inline bool loses_chunk(TrainingCase& c, bool possible) {
  return possible && is_small(c) && c.step.longest() > c.wrong.chunk;
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
inline bool skip_first(TrainingCase& c) {
  return retarget(c, [](const RecordedBatch& b, std::size_t t) {
    const bool first = t == 0 || !same_document(b.batch, t, t - 1) || b.batch.targets[t - 1] < 0;
    return first ? -1 : b.batch.targets[t];
  });
}
inline bool learn_first_again(TrainingCase& c) {
  return retarget(c, [](const RecordedBatch& b, std::size_t t) {
    if (same_row(b, t, t + 1)) return b.batch.targets[t];
    std::size_t first = t;
    while (first > 0 && same_row(b, t, first - 1)) --first;
    return b.batch.tokens[first];
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

inline bool rotates(const TrainingCase& c) { return c.config.positions == Positions::rope; }

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
      {"start-not-learned", "a loss without the first learned token of each document", skip_first},
      {"labels-rolled", "labels that were rolled instead of shifted: a row's last token predicts its first",
       learn_first_again},
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
      {"norm-offset-added", "norms that add 1 to their weights",
       [](TrainingCase& c) {
         return c.config.norm == Norm::rms && c.config.norm_offset == 0 && change(c.config.norm_offset, 1.0);
       }},
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
      {"scores-unscaled", "attention without a scale of its scores",
       [](TrainingCase& c) { return change(c.config.score_scale, 1.0); }},
      {"rope-reversed", "a model that rotates queries and keys the other way",
       [](TrainingCase& c) { return rotates(c) && change(c.config.rope_reversed, !c.config.rope_reversed); }},
      {"activation", "a model with the other activation: SiLU for GELU, or GELU for SiLU",
       [](TrainingCase& c) {
         return c.config.gated() &&
                change(c.config.mlp_kind, c.config.mlp_kind == Mlp::swiglu ? Mlp::geglu : Mlp::swiglu);
       }},
      {"attention-everywhere", "attention without a causal mask: tokens see the whole document",
       [](TrainingCase& c) { return is_small(c) && change(c.wrong.sees, Wrong::Sees::everything); }},
      {"attention-peeks", "attention with a mask that is one token too long: tokens see the next one",
       [](TrainingCase& c) { return is_small(c) && change(c.wrong.sees, Wrong::Sees::next); }},
      {"attention-short", "attention with a mask that is one token too short: tokens do not see themselves",
       [](TrainingCase& c) { return is_small(c) && change(c.wrong.sees, Wrong::Sees::before); }},
      {"rope-of-queries", "a model that rotates queries only",
       [](TrainingCase& c) { return is_small(c) && rotates(c) && change(c.wrong.rotates_keys, false); }},
      {"rope-of-keys", "a model that rotates keys only",
       [](TrainingCase& c) { return is_small(c) && rotates(c) && change(c.wrong.rotates_queries, false); }},
      {"heads-in-turn", "query heads that share key/value heads in turn, instead of in groups",
       [](TrainingCase& c) {
         const bool differs = c.config.kv_heads > 1 && c.config.kv_heads < c.config.heads;
         return is_small(c) && differs && change(c.wrong.heads_in_turn, true);
       }},
      {"convolution-leaks", "short convolutions that read the tokens before a document's start",
       [](TrainingCase& c) {
         return is_small(c) && !c.config.mixers.empty() && change(c.wrong.convolution_leaks, true);
       }},
      {"convolution-reset", "convolutions that do not read the chunk before",
       [](TrainingCase& c) { return loses_chunk(c, !c.config.mixers.empty()); }, Where::chunks},
      {"state-reset", "delta rules that do not keep the state of the chunk before",
       [](TrainingCase& c) { return loses_chunk(c, c.config.has_delta_rule()); }, Where::chunks},
      {"state-leaks", "delta rules that keep the state of the document before", delta<&Wrong::state_leaks>},
      {"state-and-convolution-leak", "delta rules and convolutions that know nothing of documents' starts",
       [](TrainingCase& c) { return delta<&Wrong::state_leaks>(c) && change(c.wrong.convolution_leaks, true); }},
      {"state-bf16", "delta rules with a state in bfloat16", delta<&Wrong::rounds_state>},
      {"delta-unscaled", "delta rules of queries and keys of any length", delta<&Wrong::normalises_keys, false>},
      {"beta-undoubled", "delta rules with a beta up to 1 in a model where it goes up to 2",
       [](TrainingCase& c) { return c.config.doubles_beta && delta<&Wrong::doubles_beta, false>(c); }},
      {"decay-missing", "delta rules without decay", delta<&Wrong::decays, false>},
      {"decay-bias", "delta rules that decay without dt_bias", delta<&Wrong::decays_by_bias, false>},
      {"decay-softplus", "delta rules that decay by exp(A) exp instead of exp(A) softplus",
       delta<&Wrong::decays_by_softplus, false>},
      {"gate-before-norm", "delta rules with the gate before the output norm", delta<&Wrong::gates_before_norm>},
      {"output-norm-offset", "delta rules with an output norm that adds 1 to its weight",
       delta<&Wrong::adds_one_to_output_norm>},
      {"attention-gate", "attention without its gate",
       [](TrainingCase& c) {
         return c.config.attention_gate && is_small(c) && change(c.wrong.gates_attention, false);
       }},
      {"value-norm-missing", "attention without the norm of values",
       [](TrainingCase& c) { return c.config.value_norm && is_small(c) && change(c.wrong.norms_values, false); }},
      {"values-after-norm", "attention with values that are keys after their norm, not before",
       [](TrainingCase& c) {
         return c.config.keys_are_values && is_small(c) && change(c.wrong.values_after_norm, true);
       }},
      {"layer-scale-missing", "layers that do not scale their output", scale_layers<Wrong::LayerScale::missing>},
      {"layer-scale-branches", "layers that scale their branches, and not the residual stream",
       scale_layers<Wrong::LayerScale::of_branches>},
      {"sinks-missing", "attention without its sinks",
       [](TrainingCase& c) { return c.config.sinks && is_small(c) && change(c.wrong.sinks, Wrong::Sinks::missing); }},
      {"sinks-scaled", "attention with sinks that are scaled as its scores are",
       [](TrainingCase& c) { return c.config.sinks && is_small(c) && change(c.wrong.sinks, Wrong::Sinks::scaled); }},
      {"gate-up-swapped", "feed-forwards that take the gate for what it multiplies, and the reverse",
       [](TrainingCase& c) {
         return c.config.gated() && is_small(c) && change(c.wrong.gate_up, Wrong::GateUp::swapped);
       }},
      {"gate-up-halves", "experts that take half of a tensor for the gate, although gate and up take turns in it",
       [](TrainingCase& c) {
         const bool in_turns = c.config.experts > 0 && family_of(c.config).modules.experts_interleaved;
         return in_turns && is_small(c) && change(c.wrong.gate_up, Wrong::GateUp::halves);
       }},
      {"clamp-missing", "an activation without its limits",
       [](TrainingCase& c) {
         return c.config.mlp_kind == Mlp::clamped_swiglu && is_small(c) && change(c.wrong.clamps, false);
       }},
      {"router-renormalised",
       "experts with weights that are divided by their sum in a model where they are not, or the reverse",
       [](TrainingCase& c) {
         const bool differs = c.config.experts_per_token < c.config.experts;
         return differs && change(c.config.router_renormalised, !c.config.router_renormalised);
       }},
      {"router-bias", "experts weighed with the bias that only chooses them",
       [](TrainingCase& c) { return c.config.router_bias && is_small(c) && change(c.wrong.bias_weighs, true); }},
      {"shared-gate", "a shared expert without its gate",
       [](TrainingCase& c) { return c.config.shared_mlp > 0 && is_small(c) && change(c.wrong.gates_shared, false); }},
      {"balance-missing", "a loss that does not balance the experts",
       [](TrainingCase& c) { return c.config.balance() > 0 && change(c.config.balanced, false); }},
      {"balance-summed", "a loss that balances the experts once for each micro-batch, not divided by their number",
       [](TrainingCase& c) {
         const double count = static_cast<double>(c.step.batches.size());
         return c.config.balance() > 0 && count > 1 && change(c.config.balance_factor, count * c.config.balance());
       }},
      {"balance-doubled", "a loss that balances the experts twice",
       [](TrainingCase& c) {
         return c.config.balance() > 0 && change(c.config.balance_factor, 2 * c.config.balance());
       }},
      {"router-foreign-slots",
       "routers that also learn from what a rank computes, without use, in place of other ranks' experts",
       [](TrainingCase& c) {
         c.wrong.expert_ranks = 2;
         return c.config.experts > 0 && c.config.experts % 2 == 0 && is_small(c);
       },
       Where::expert_ranks},
      {"expert-adapters-unused", "a model that does not use the adapters of its experts",
       [](TrainingCase& c) {
         bool any = false;
         for (auto& [name, size] : c.config.adapters) any |= of_experts(name) && change(size.scale, 0.0);
         return any;
       }},
      {"branch-router", "another gradient of the logits of routers",
       [](TrainingCase& c) { return c.config.experts > 0 && is_small(c); }, Where::layers},
      {"rope-whole-head", "a model that rotates whole heads, not a part of them",
       [](TrainingCase& c) {
         const bool possible = rotates(c) && c.config.rope_scaling.type != RopeType::longrope;
         return possible && change(c.config.rotary_share, 1.0);
       }},
      {"micro-batch-scaled", "a step in which a micro-batch counts more or less than once",
       [](TrainingCase& c) { return c.step.batches.size() > 1 && change(c.scaled, Index{0}); }, Where::micro_batches},
      {"attention-window", "a model in which layers attend to a window",
       [](TrainingCase& c) { return c.config.window == 0 && is_small(c); }, Where::windows},
      {"label-smoothing", "a loss with label smoothing", is_small, Where::everywhere},
      {"z-loss", "a loss with a z-loss, a multiple of log² of the softmax's denominator", is_small, Where::everywhere},
      {"weight-decay", "a loss with weight decay of all parameters", is_small, Where::everywhere},
      {"weight-decay-matrices", "a loss with weight decay of the matrices", is_small, Where::everywhere},
      {"branch-attention", "another gradient of attention's output", is_small, Where::layers},
      {"branch-attention-norm", "another gradient of attention's normed input", is_small, Where::layers},
      {"branch-attention-input", "another gradient of attention's input, before its norm", is_small, Where::layers},
      {"branch-attention-skip", "another gradient of the residual stream beside attention", is_small, Where::layers},
      {"branch-queries", "another gradient of queries", is_small, Where::layers},
      {"branch-keys", "another gradient of keys", is_small, Where::layers},
      {"branch-scores", "another gradient of attention's scores", is_small, Where::layers},
      {"branch-values", "another gradient of values", is_small, Where::layers},
      {"branch-mlp", "another gradient of the MLP's output", is_small, Where::layers},
      {"branch-mlp-norm", "another gradient of the MLP's normed input", is_small, Where::layers},
      {"branch-mlp-input", "another gradient of the MLP's input, before its norm", is_small, Where::layers},
      {"branch-mlp-skip", "another gradient of the residual stream beside the MLP", is_small, Where::layers},
      {"branch-gate", "another gradient of the MLP's gate", is_small, Where::layers},
      {"branch-up", "another gradient of what the MLP's gate multiplies", is_small, Where::layers},
      {"branch-norms", "another gradient of the scale by which norms divide", is_small, Where::layers},
  };
  return all;
}

}  // namespace streambp
