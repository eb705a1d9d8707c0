// The oracle: a slow, naive and independent implementation of log-probs and gradients, in double precision.
//
// Tests and `verify` measure against it, so it shares no arithmetic with the program: plain loops, one head at a time,
// and every intermediate result kept, including the N x N attention probabilities and the logits of the whole stream. The
// operations are in oracle_operations.h.
#pragma once

#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "model/parameters.h"
#include "referee/oracle_experts.h"

namespace streambp::oracle {

struct Result {
  double loss = 0;                                      // Σ_t w[t] logp[t]
  std::vector<double> logp;                             // N; 0 without a target
  std::vector<double> logits;                           // N x vocab
  std::map<std::string, std::vector<double>> gradient;  // by key(parameter); each laid out as its tensor is
};

// GPT-2's q, k and v share one name, so the key includes the part.
inline std::string key(const Parameter& p) { return p.name + "#" + std::to_string(p.part); }

// ---- The model is composed of operations, so its backward needs no code ----

// x wᵀ + b
inline Array linear(Tape& tape, Array x, Array w, Array b = {}) {
  const Array y = product(tape, x, transpose(w));
  return b.rows ? add(tape, y, repeat(b, y.rows)) : y;
}

// y + scale (x aᵀ) bᵀ
inline Array add_adapter(Tape& tape, Array y, Array x, Array a, const Adapter<Number>& adapter) {
  if (!adapter.b) return y;
  const Array low = product(tape, x, transpose(a));
  const Array added = product(tape, low, transpose(adapter.b));
  return add(tape, y, multiply(tape, added, tape.constant(y.rows, y.cols, adapter.scale)));
}

// x wᵀ + b + scale (x aᵀ) bᵀ
inline Array linear(Tape& tape, Array x, const Linear<Number>& w) {
  return add_adapter(tape, linear(tape, x, w.weight, w.bias), x, w.adapter.a, w.adapter);
}

// x̂ * w + b, or x̂ * (1 + w), or x̂ without weights, where x̂ is the standardised x
inline Array norm(Tape& tape, const Config& c, Norm kind, Array x, Array w, Array b = {}) {
  const Array standard = standardise(tape, kind, c.norm_eps, x);
  if (!w.rows) return standard;
  Array y = multiply(tape, standard, repeat(w, x.rows));
  if (c.norm_offset == 1) y = add(tape, y, standard);
  return b.rows ? add(tape, y, repeat(b, y.rows)) : y;
}

struct LayerKind {
  MixerKind mixer;
  bool local, rotates, experts = false;
};

// Σ_h softmax(q_h k_hᵀ / sqrt(dim)) v_h o_hᵀ + b, where head h has its columns of q, k, v and of the weight o. Several
// query heads may share a key/value head. Depending on the model, q_h and k_h are normed (with weights that all heads share
// or not) and rotated, or rotated and normed, or the norm is that of all heads. In some models, what a head attended is
// multiplied by a gate before o_h.
inline Array attention(Tape& tape, const Config& c, LayerKind kind, const TokenBatch& batch, const Layer<Number>& w,
                       Array x) {
  const AttentionShape shape = c.attention(tape.layer);
  auto head = [&](Array a, Index h) { return columns(a, h * shape.head_dim, shape.head_dim); };
  auto norm_and_rope = [&](Array y, Array norm_weight, double beta, bool rotates) {
    if (c.qk_norm == QkNorm::heads) y = norm(tape, c, Norm::rms, y, norm_weight);
    if (c.qk_norm == QkNorm::own_weights) y = norm(tape, c, Norm::layer, y, norm_weight);
    if (kind.rotates && rotates) y = rope(tape, c, c.has_local_rope(tape.layer), batch.positions, y, beta);
    if (c.qk_norm == QkNorm::heads_after_rope) y = norm(tape, c, Norm::rms, y, norm_weight);
    return y;
  };
  Array q = linear(tape, x, w.q);
  Array k = linear(tape, x, w.keys());
  const bool own_weights = c.qk_norm == QkNorm::own_weights;
  if (c.qk_norm == QkNorm::all) q = norm(tape, c, Norm::rms, q, w.q_norm.weight);
  if (c.qk_norm == QkNorm::all) k = norm(tape, c, Norm::rms, k, w.k_norm.weight);
  const Array v = branch(tape, "branch-values", c.has_values(tape.layer) ? linear(tape, x, w.values()) : k);
  Array sum = tape.zeros(x.rows, c.hidden), gate;
  if (c.attention_gate && tape.wrong.gates_attention) gate = sigmoid(tape, linear(tape, x, w.gate_of_attention()));
  for (Index h = 0; h < c.heads; ++h) {
    const Index shared = tape.wrong.heads_in_turn ? h % shape.kv_heads : h / shape.group();
    const Array q_h = branch(tape, "branch-queries",
                             norm_and_rope(head(q, h), own_weights ? head(w.q_norm.weight, h) : w.q_norm.weight,
                                           c.rope_scaling.query_beta, tape.wrong.rotates_queries));
    const Array k_h =
        branch(tape, "branch-keys",
               norm_and_rope(head(k, shared), own_weights ? head(w.k_norm.weight, shared) : w.k_norm.weight, 0,
                             tape.wrong.rotates_keys));
    Array s = branch(tape, "branch-scores", product(tape, q_h, transpose(k_h)));
    if (c.score_cap > 0) s = soft_cap(tape, s, c.score_cap * score_root(c));
    const bool sinks = c.sinks && tape.wrong.sinks != Wrong::Sinks::missing;
    const Array p = attention_softmax(tape, c, kind.local, batch, s, sinks ? columns(w.sinks, h, 1) : Array());
    Array v_h = head(v, shared);
    const bool keys_normed = tape.wrong.values_after_norm && !c.has_values(tape.layer);
    if (keys_normed) v_h = norm(tape, c, Norm::rms, v_h, w.k_norm.weight);
    if (c.value_norm && tape.wrong.norms_values) v_h = standardise(tape, Norm::rms, c.norm_eps, v_h);
    Array attended = product(tape, p, v_h);
    const Array of_head = c.gates_heads && gate.rows ? columns(gate, h, 1) : Array();
    if (of_head.rows)
      attended = multiply(tape, attended, {of_head.data, x.rows, shape.head_dim, of_head.row_stride, 0});
    else if (gate.rows)
      attended = multiply(tape, attended, head(gate, h));
    sum = add(tape, sum, linear(tape, attended, head(w.o.weight, h)));
    if (w.o.adapter.b) sum = add_adapter(tape, sum, attended, head(w.o.adapter.a, h), w.o.adapter);
  }
  return w.o.bias ? add(tape, sum, repeat(w.o.bias, sum.rows)) : sum;
}

// Σ_k w_k * u[t - k]
inline Array convolution(Tape& tape, const TokenBatch& batch, Array u, Array w) {
  const Array taps = transpose(w);
  Array sum = tape.zeros(u.rows, u.cols);
  for (Index k = 0; k < taps.rows; ++k) {
    const Array tap = {&taps(taps.rows - 1 - k, 0), 1, taps.cols, taps.row_stride, taps.col_stride};
    sum = add(tape, sum, multiply(tape, delayed(tape, batch, u, k), repeat(tap, u.rows)));
  }
  return sum;
}

// o(c * convolution(b * x)), where b, c and x are projections of the input
inline Array short_convolution(Tape& tape, const TokenBatch& batch, const Layer<Number>& w, Array input) {
  const Array b = linear(tape, input, w.b), c = linear(tape, input, w.c_part());
  const Array u = multiply(tape, b, linear(tape, input, w.x_part()));
  return linear(tape, multiply(tape, c, convolution(tape, batch, u, w.taps)), w.o);
}

// The log of what a row keeps of the state of each head: -exp(A) softplus(decay(x) + dt)
inline Array log_decay(Tape& tape, const Layer<Number>& w, Array x) {
  const Wrong& wrong = tape.wrong;
  if (!wrong.decays) return tape.constant(x.rows, w.a_log.cols, 0);
  Array a = linear(tape, x, w.decay_part());
  if (wrong.decays_by_bias) a = add(tape, a, repeat(w.dt_bias, x.rows));
  const Array step = wrong.decays_by_softplus ? softplus(tape, a) : exponential(tape, a);
  const Array rate = multiply(tape, exponential(tape, w.a_log), tape.constant(1, w.a_log.cols, -1));
  return multiply(tape, step, repeat(rate, x.rows));
}

// o(norm(delta rule of q, k, v) * silu(z)). All but z pass through a convolution and silu; q and k then get length 1. Value
// heads share the queries and keys of a key head in groups. The norm is of each head, its weight that of all heads.
inline Array delta_rule(Tape& tape, const Config& c, const TokenBatch& batch, const Layer<Number>& w, Array x) {
  const Index heads = c.delta_value_heads, key_heads = c.delta_key_heads, keys = c.delta_key_dim,
              values = c.delta_value_dim;
  const auto silu = [&](Array a) { return activation(tape, Mlp::swiglu, a); };
  const auto convolved = [&](const Linear<Number>& part, Index first) {
    const Array y = linear(tape, x, part);
    return silu(convolution(tape, batch, y, w.taps.slice({first, first + y.cols})));
  };
  const Array q_all = convolved(w.q, 0), k_all = convolved(w.keys(), key_heads * keys);
  const auto unit_head = [&](const char* name, Array all, Index h) {
    const Array head = columns(all, h * keys, keys);
    return branch(tape, name, tape.wrong.normalises_keys ? unit(tape, head, 1e-6) : head);
  };
  const Array v = branch(tape, "branch-values", convolved(w.values(), 2 * key_heads * keys));
  Array beta = sigmoid(tape, linear(tape, x, w.beta));
  if (c.doubles_beta && tape.wrong.doubles_beta) beta = add(tape, beta, beta);
  const Array g = log_decay(tape, w, x);
  const Array o = tape.zeros(x.rows, heads * values),
              root = tape.constant(x.rows, keys, 1 / std::sqrt(static_cast<double>(keys)));
  for (Index h = 0; h < heads; ++h) {
    const Index shared = tape.wrong.heads_in_turn ? h % key_heads : h / (heads / key_heads);
    const Array q = multiply(tape, unit_head("branch-queries", q_all, shared), root),
                k = unit_head("branch-keys", k_all, shared);
    delta_rule(
        tape, batch,
        {q, k, columns(v, h * values, values), columns(beta, h, 1), columns(g, h, 1), columns(o, h * values, values)});
  }
  const auto by_head = [&](Array a) { return Array(a.data, a.rows * heads, values, values, 1); };
  const Array z = by_head(silu(linear(tape, x, w.z_part())));
  Array y = by_head(o);
  if (tape.wrong.gates_before_norm) y = multiply(tape, y, z);
  Config plain = c;
  plain.norm_offset = tape.wrong.adds_one_to_output_norm ? 1 : 0;
  if (c.output_norm_eps > 0) plain.norm_eps = c.output_norm_eps;
  y = norm(tape, plain, Norm::rms, y, w.output_norm.weight);
  if (!tape.wrong.gates_before_norm) y = multiply(tape, y, z);
  return linear(tape, Array(y.data, x.rows, heads * values, heads * values, 1), w.o);
}

// f(gate) * up, in some models f(gate) * (up + 1)
inline Array gated(Tape& tape, Mlp kind, Array gate, Array up) {
  if (tape.wrong.gate_up == Wrong::GateUp::swapped) std::swap(gate, up);
  if (tape.wrong.gate_up == Wrong::GateUp::halves) {
    const Array first = half_of_turns(tape, gate, up, 0);
    up = half_of_turns(tape, gate, up, up.cols), gate = first;
  }
  const double most = limit(tape);
  if (kind == Mlp::clamped_swiglu)
    up = map(
        tape, up, [=](double x) { return 1 + std::clamp(x, -most, most); },
        [=](double x) { return std::abs(x) <= most ? 1.0 : 0.0; });
  return multiply(tape, activation(tape, kind, gate), up);
}

// down(f(gate(x)) * up(x)), without a gate down(f(up(x)))
inline Array mlp(Tape& tape, const Config& c, const Layer<Number>& w, Array x) {
  const Array up = branch(tape, "branch-up", linear(tape, x, w.ups()));
  if (!c.gated()) return linear(tape, activation(tape, c.mlp_kind, up), w.down);
  return linear(tape, gated(tape, c.mlp_kind, branch(tape, "branch-gate", linear(tape, x, w.gate)), up), w.down);
}

// The sum of the experts that a row chooses, and of the shared one.
inline Array experts(Tape& tape, const Config& c, const Layer<Number>& w, Array x) {
  const MixtureWeights<Number>& r = w.routed;
  const auto of_expert = [&](const Matrix<Number>& all, Index e) {
    const Index rows = all.rows / c.experts;
    return all.slice({e * rows, (e + 1) * rows});
  };
  const auto expert_linear = [&](Array in, const Linear<Number>& all, Index e) {
    const Index width = all.bias.cols / c.experts;
    Linear<Number> own = {of_expert(all.weight, e), all.bias ? all.bias.columns(e * width, width) : all.bias};
    if (all.adapter.b) own.adapter = {of_expert(all.adapter.a, e), of_expert(all.adapter.b, e), all.adapter.scale};
    return linear(tape, in, own);
  };
  const Array bias = r.bias ? Array(r.bias) : Array();
  const Array logits = branch(tape, "branch-router", linear(tape, x, r.router));
  if (c.balance() > 0) tape.routers.push_back({logits, choice(tape, c.routed(), logits, bias)});
  Array y = mixture(tape, c.routed(), x, logits, bias, [&](Index e) {
    const Array inner = gated(tape, c.mlp_kind, expert_linear(x, r.gate, e), expert_linear(x, r.ups(), e));
    return expert_linear(inner, r.down, e);
  });
  if (c.shared_mlp == 0) return y;
  const MixtureWeights<Number>& s = w.shared;
  const Array shared = linear(tape, gated(tape, c.mlp_kind, linear(tape, x, s.gate), linear(tape, x, s.up)), s.down);
  if (!tape.wrong.gates_shared) return add(tape, y, shared);
  const Array open = sigmoid(tape, linear(tape, x, s.router));
  return add(tape, y, multiply(tape, shared, {open.data, x.rows, x.cols, 1, 0}));
}

// h = x + attention(norm(x))        y = h + mlp(norm(h))        with post-norms: x + norm(attention(...)), h + norm(mlp(...))
// Some models have only post-norms, some of these only in layers with attention. Parallel branches: y = h + mlp(norm(x)). Some
// scale both branches.
inline Array layer(Tape& tape, const Config& c, LayerKind kind, const TokenBatch& batch, const Layer<Number>& w,
                   Array x) {
  const auto by_layer_scale = [&](Array y, Wrong::LayerScale where) {
    const bool here = c.layer_scale && tape.wrong.layer_scale == where;
    return here ? multiply(tape, y, {w.scale.data, y.rows, y.cols, 0, 0}) : y;
  };
  const auto scaled = [&](Array y) {
    y = multiply(tape, y, tape.constant(y.rows, y.cols, c.residual_scale));
    return by_layer_scale(y, Wrong::LayerScale::of_branches);
  };
  const bool other_way = c.norms_by_mixer && kind.mixer != MixerKind::attention;
  const bool before = other_way ? c.post_norms : c.pre_norms, after = other_way ? c.pre_norms : c.post_norms;
  const auto normed = [&](Array y, const NormWeights<Number>& weights) {
    return before ? norm(tape, c, c.norm, y, weights.weight, weights.bias) : y;
  };
  const Array x_norm =
      branch(tape, "branch-attention-norm", normed(branch(tape, "branch-attention-input", x), w.attention_norm));
  Array attended = kind.mixer == MixerKind::attention     ? attention(tape, c, kind, batch, w, x_norm)
                   : kind.mixer == MixerKind::convolution ? short_convolution(tape, batch, w, x_norm)
                                                          : delta_rule(tape, c, batch, w, x_norm);
  if (after) attended = norm(tape, c, c.norm, attended, w.post_attention_norm.weight);
  const Array h =
      add(tape, branch(tape, "branch-attention-skip", x), scaled(branch(tape, "branch-attention", attended)));
  const auto own_norm = [&] {
    return branch(tape, "branch-mlp-norm", normed(branch(tape, "branch-mlp-input", h), w.mlp_norm));
  };
  const Array input = c.parallel ? x_norm : own_norm();
  Array y = kind.experts ? experts(tape, c, w, input) : mlp(tape, c, w, input);
  if (after) y = norm(tape, c, c.norm, y, w.post_mlp_norm.weight);
  y = add(tape, branch(tape, "branch-mlp-skip", h), scaled(branch(tape, "branch-mlp", y)));
  return by_layer_scale(y, Wrong::LayerScale::right);
}

// The logits of every token: N x vocab.
inline Array model(Tape& tape, const Config& c, const TokenBatch& batch, const Tensors<Number>& w) {
  Array x = look_up(tape, w.embedding.tokens, batch.tokens);
  if (c.embedding_scale != 1) x = multiply(tape, x, tape.constant(x.rows, x.cols, c.embedding_scale));
  if (c.embedding_norm) x = norm(tape, c, c.norm, x, {});
  if (c.positions == Positions::learned) x = add(tape, x, look_up(tape, w.embedding.positions, batch.positions));
  for (std::size_t l = 0; l < w.layers.size(); ++l) {
    const bool local = c.window > 0 && (c.local.empty() || c.local[l]);
    const bool rotates = c.positions == Positions::rope && (c.without_rope.empty() || !c.without_rope[l]);
    tape.layer = static_cast<Index>(l);
    const MixerKind mixer = c.mixers.empty() ? MixerKind::attention : c.mixers[l];
    x = layer(tape, c, {mixer, local, rotates, c.has_experts(tape.layer)}, batch, w.layers[l], x);
  }
  tape.layer = -1;
  if (tape.wrong.stops_at_head) tape.steps.clear();
  x = norm(tape, c, c.norm, x, w.norm.weight, w.norm.bias);
  Array logits = linear(tape, x, c.tied ? w.embedding.tokens : w.head.weight);
  logits = multiply(tape, logits, tape.constant(logits.rows, logits.cols, c.logit_scale));
  return c.logit_cap > 0 ? soft_cap(tape, logits, c.logit_cap) : logits;
}

// ---- The interface ----

// A copy of the weights with room for their gradient, on the tape.
template <class T>
Tensors<Number> copy(Tape& tape, const Config& c, Tensors<T>& weights) {
  Tensors<Number> copies(c);
  const Table<T> from = table(c, weights);
  const Table<Number> to = table(c, copies);
  for (std::size_t n = 0; n < to.size(); ++n) {
    const Matrix<T>& weight = *from[n].matrix;
    const Array a = tape.zeros(weight.rows, weight.cols);
    for (Index i = 0; i < a.rows; ++i) {
      for (Index j = 0; j < a.cols; ++j) a(i, j).value = weight(i, j);
    }
    *to[n].matrix = {a.data, a.rows, a.cols};
  }
  return copies;
}

// A loss and its derivatives w[t] = d loss / d logp[t], as a function of the log-probs of the targets.
struct Loss {
  double value;
  std::vector<double> w;
};
using LossOf = std::function<Loss(const std::vector<double>& logp)>;

// loss = Σ_t w[t] logp[t]
inline LossOf linear(const std::vector<double>& w) {
  return [=](const std::vector<double>& logp) {
    return Loss{std::inner_product(w.begin(), w.end(), logp.begin(), 0.0), w};
  };
}

// The loss and its gradient; with `wrong`, what a wrong trainer has instead.
template <class T>
Result gradient(const Config& c, Tensors<T>& weights, const TokenBatch& batch, const LossOf& loss_of,
                const Wrong& wrong = {}) {
  validate(c, batch);
  Tape tape;
  tape.wrong = wrong;
  Tensors<Number> copies = copy(tape, c, weights);
  const Array logits = model(tape, c, batch, copies);
  const Array logp = log_probability(tape, logits, batch.targets);
  const Array balance = balance_loss(tape, c.experts);

  Result result;
  for (Index t = 0; t < logp.rows; ++t) {
    result.logp.push_back(logp(t, 0).value);
    for (Index v = 0; v < logits.cols; ++v) result.logits.push_back(logits(t, v).value);
  }
  const Loss loss = loss_of(result.logp);
  result.loss = loss.value + c.balance() * balance(0, 0).value;
  balance(0, 0).grad = c.balance();
  for (Index t = 0; t < logp.rows; ++t) logp(t, 0).grad = loss.w.at(t);
  tape.backward();
  for (const Entry<Number>& e : table(c, copies)) {
    for (Index n = 0; n < e.matrix->size(); ++n) result.gradient[key(e.parameter)].push_back(e.matrix->data[n].grad);
  }
  return result;
}

}  // namespace streambp::oracle
