// How a gradient is computed: one walk over the layers of a model and the chunks of its token stream.
//
// Full-memory backpropagation, gradient checkpointing and StreamBP are this one walk with two settings:
//
//                  chunk           kept between forward and backward
//   full           whole stream    all activations of every layer
//   checkpoint     whole stream    the input of every layer
//   stream         C rows          the input of every layer
//
// A row of a layer's output depends on other rows only through their keys and values. So a layer's backward pass can go
// chunk by chunk, from the last to the first, and recompute for each chunk only that chunk's activations:
//
//   recompute K, V of the layer for all rows               with dK, dV the only things of a layer as long as the stream
//   for each chunk, last to first:
//     recompute the chunk's activations from the saved layer input
//     go back through MLP, output projection, attention    this adds to dK, dV of all rows up to the chunk's end
//     dK, dV of the chunk's own rows are now complete      only later rows see them, and those are done
//     go back through the Q, K, V projections              the layer's input gradient replaces the output's, in place
//
// All modes give the same bits: every operation works in tiles of kTile rows and adds up tiles from the last to the
// first, and chunks are multiples of the tile, visited from the last to the first.
//
// One policy for memory: activations are assigned; gradients of weights and of the residual stream are added to. The
// gradient of the residual stream lives where the last layer's output was, and every layer replaces it in place.
#pragma once

#include <functional>
#include <vector>

#include "kernels/activation.cuh"
#include "kernels/attention.cuh"
#include "kernels/base/device.cuh"
#include "kernels/embedding.cuh"
#include "kernels/head.cuh"
#include "kernels/matmul.cuh"
#include "kernels/norm.cuh"
#include "kernels/rope.cuh"
#include "memory/schedule.cuh"
#include "memory/sums.cuh"
#include "model/activations.cuh"
#include "model/parameters.cuh"
#include "model/stream.cuh"

namespace streambp {

template <class Device, class T>
class Walk {
 public:
  using A = Accumulator<T>;

  Walk(Device& dev, const Model<T>& model, const Stream& stream, Schedule schedule)
      : dev(dev), model(model), c(model.config), stream(stream), schedule(schedule) {
    require(schedule.keep == Keep::nothing || schedule.chunk % dev.tile == 0 || schedule.chunk >= stream.size(),
            "chunks of ", schedule.chunk, " rows are no multiple of the ", dev.tile,
            " rows whose weight gradients this device adds up at a time");
    if (c.positions == Positions::learned) return;
    frequencies = local_frequencies = rope_frequencies(c.head_dim, c.rope_theta, c.rope_scaling);
    if (c.local_rope_theta > 0) local_frequencies = rope_frequencies(c.head_dim, c.local_rope_theta, {});
  }

  // Adds the gradient of the loss to `gradient`, whose tensors are allocated when they are born: w[t] is d loss / d
  // logp[t]. Writes logp. Where weights follow from the log-probabilities of other tokens, `weigh` is called when all of
  // them are there; then the head computes its logits twice.
  template <class G>
  void gradient(Tensors<G>& gradient, const TokenWeights<A>& w, Matrix<A> logp,
                const std::function<void()>& weigh = {}) {
    auto scope = dev.scope();
    Saved<T> saved = forward();
    if (weigh) head_forward(saved.output, logp), weigh();
    head_backward(gradient, saved.output, w, logp);
    for (Index l = c.layers - 1; l >= 0; --l) {
      layer_backward(gradient, l, saved.layers[index(l)], saved.output);
      dev.arena.release(saved.layers[index(l)].mark);
    }
    Sums sums(dev, gradient, Tensors<A>(c), [&](auto& t) { return embedding_table(c, t); });
    embedding_backward(dev, EmbeddingTables<A>{sums->embedding, sums->positions},
                       {stream.tokens, stream.positions, stream.rows_by_token, stream.rows_by_position}, saved.output,
                       c.embedding_scale);
  }

  // The log-probabilities of the targets, without a gradient.
  void evaluate(Matrix<A> logp) {
    auto scope = dev.scope();
    head_forward(forward().output, logp);
  }

  Saved<T> forward() {
    Saved<T> saved;
    saved.output = dev.template allocate<T>(stream.size(), c.hidden, Kind::saved);
    Matrix<T> x = open_layer(saved);
    embed(x, {0, stream.size()});
    for (Index l = 0; l < c.layers; ++l) {
      const typename Saved<T>::OfLayer kept = saved.layers.back();
      const Matrix<T> y = l + 1 < c.layers ? open_layer(saved) : saved.output;
      auto scope = dev.scope();
      const KeysValues<T> kv = schedule.keep == Keep::activations ? kept.keys_values : allocate_keys_values<T>();
      for (Rows rows : chunks(stream.size(), schedule.chunk)) {
        auto chunk_scope = dev.scope();
        const auto a = schedule.keep == Keep::activations ? kept.activations : allocate_activations(rows.size());
        layer_forward(l, y.slice(rows), x.slice(rows), kv, a, rows);
      }
      x = y;
    }
    return saved;
  }

  // The input of the first layer.
  void embed(Matrix<T> x, Rows rows) {
    embedding(dev, x, {tokens(rows), positions(rows)}, {model.weights.embedding, model.weights.positions},
              c.embedding_scale);
  }

  // One layer for the rows of a chunk. kv holds the keys and values of earlier rows and takes those of these rows.
  // y may be x.
  void layer_forward(Index l, Matrix<T> y, Matrix<T> x, KeysValues<T> kv, const Activations<T>& a, Rows rows) {
    begin_layer(l, x, kv, a, rows);
    attend(l, kv, a, rows);
    finish_layer(l, y, x, a);
  }

  // Its three parts: up to the keys, values and queries; attention; and what follows.
  void begin_layer(Index l, Matrix<T> x, KeysValues<T> kv, const Activations<T>& a, Rows rows) {
    attention_norm(layer(l), a, x);
    keys_values(l, kv, a, rows);
    queries(l, a, rows);
  }
  void attend(Index l, KeysValues<T> kv, const Activations<T>& a, Rows rows) {
    attention(dev, AttentionOutput<T>{a.attended, a.lse}, {a.q, kv.k, kv.v}, span(l, rows));
  }
  void finish_layer(Index l, Matrix<T> y, Matrix<T> x, const Activations<T>& a) {
    const Layer<T>& w = layer(l);
    add_attention(w, x, a);
    feed_forward(w, a);
    add_to_residual(y, a.activated, w.down, w.down_bias, a.middle, w.post_mlp_norm, a.mlp_output);
  }

  // The logits of some rows of the last layer's output.
  Matrix<T> logits(Matrix<T> x) {
    const Matrix<T> normed = dev.template allocate<T>(x.rows, c.hidden, Kind::chunk);
    final_norm(normed, x);
    return logits_of_normed(normed);
  }

  template <class U>
  KeysValues<U> allocate_keys_values() {
    auto matrix = [&] { return dev.template allocate<U>(stream.size(), c.kv_width(), Kind::keys_values); };
    return {matrix(), matrix()};
  }

  Activations<T> allocate_activations(Index rows) {
    auto matrix = [&](Index cols) { return dev.template allocate<T>(rows, cols, Kind::chunk); };
    Activations<T> a = allocate_key_value_activations(rows);
    if (c.qk_norm) a.q_projected = matrix(c.q_width());
    a.q = matrix(c.q_width());
    a.attended = matrix(c.q_width());
    a.lse = dev.template allocate<A>(rows, c.heads, Kind::chunk);
    if (c.post_norms) a.attention_output = matrix(c.hidden), a.mlp_output = matrix(c.hidden);
    a.middle = matrix(c.hidden);
    a.mlp_input = matrix(c.hidden);
    if (c.gated()) a.gate = matrix(c.mlp);
    a.up = matrix(c.mlp);
    a.activated = matrix(c.mlp);
    return a;
  }

 private:
  static std::size_t index(Index i) { return static_cast<std::size_t>(i); }
  const Layer<T>& layer(Index l) const { return model.weights.layers[index(l)]; }
  AttentionSpan span(Index l, Rows rows) const {
    return {{stream.key_begin, stream.document_begin}, rows, c.attention(l)};
  }
  Matrix<std::int32_t> tokens(Rows rows) const { return stream.tokens.columns(rows.begin, rows.size()); }
  Matrix<std::int32_t> targets(Rows rows) const { return stream.targets.columns(rows.begin, rows.size()); }
  Matrix<std::int32_t> positions(Rows rows) const { return stream.positions.columns(rows.begin, rows.size()); }

  // Room for the input of the next layer, and for its activations where they are kept. When nothing is kept, every
  // layer works in the place of the output.
  Matrix<T> open_layer(Saved<T>& saved) {
    typename Saved<T>::OfLayer kept{saved.output, {}, {}, dev.arena.mark()};
    if (schedule.keep != Keep::nothing) kept.input = dev.template allocate<T>(stream.size(), c.hidden, Kind::saved);
    if (schedule.keep == Keep::activations) {
      kept.keys_values = allocate_keys_values<T>();
      kept.activations = allocate_activations(stream.size());
    }
    saved.layers.push_back(kept);
    return kept.input;
  }

  Activations<T> allocate_key_value_activations(Index rows) {
    Activations<T> a;
    a.attention_input = dev.template allocate<T>(rows, c.hidden, Kind::chunk);
    if (c.qk_norm) a.k_projected = dev.template allocate<T>(rows, c.kv_width(), Kind::chunk);
    return a;
  }

  void norm_heads(Matrix<T> y, Matrix<T> x, Matrix<T> weight) {
    norm(dev, y.reshape(c.head_dim), {x.reshape(c.head_dim), {weight, {}}, c.head_norm_style()});
  }

  void turn(Index l, Matrix<T> x, Rows rows, Direction direction) {
    if (c.positions == Positions::learned) return;
    rope(dev, x, positions(rows), c.is_local(l) ? local_frequencies : frequencies, direction);
  }

  void keys_values(Index l, KeysValues<T> kv, const Activations<T>& a, Rows rows) {
    const Layer<T>& w = layer(l);
    const Matrix<T> k = kv.k.slice(rows);
    matmul(dev, c.qk_norm ? a.k_projected : k, a.attention_input, w.k, w.k_bias);
    if (c.qk_norm) norm_heads(k, a.k_projected, w.k_norm);
    turn(l, k, rows, Direction::forward);
    matmul(dev, kv.v.slice(rows), a.attention_input, w.v, w.v_bias);
  }

  void attention_norm(const Layer<T>& w, const Activations<T>& a, Matrix<T> x) {
    norm(dev, a.attention_input, {x, {w.attention_norm, w.attention_norm_bias}, c.norm_style()});
  }

  void queries(Index l, const Activations<T>& a, Rows rows) {
    const Layer<T>& w = layer(l);
    matmul(dev, c.qk_norm ? a.q_projected : a.q, a.attention_input, w.q, w.q_bias);
    if (c.qk_norm) norm_heads(a.q, a.q_projected, w.q_norm);
    turn(l, a.q, rows, Direction::forward);
  }

  void add_attention(const Layer<T>& w, Matrix<T> x, const Activations<T>& a) {
    add_to_residual(a.middle, a.attended, w.o, w.o_bias, x, w.post_attention_norm, a.attention_output);
  }

  // From the middle of the layer to the input of its last projection.
  void feed_forward(const Layer<T>& w, const Activations<T>& a) {
    norm(dev, a.mlp_input, {a.middle, {w.mlp_norm, w.mlp_norm_bias}, c.norm_style()});
    if (c.gated()) matmul(dev, a.gate, a.mlp_input, w.gate, w.gate_bias);
    matmul(dev, a.up, a.mlp_input, w.up, w.up_bias);
    activation(dev, c.mlp_kind, a.activated, a.gate, a.up);
  }

  // y = residual + x wᵀ + bias, or y = residual + norm(x wᵀ + bias), then with the norm's input in `projected`
  void add_to_residual(Matrix<T> y, Matrix<T> x, Matrix<T> w, Matrix<T> bias, Matrix<T> residual, Matrix<T> post_norm,
                       Matrix<T> projected) {
    if (!c.post_norms) return matmul(dev, y, x, w, bias, residual);
    matmul(dev, projected, x, w, bias);
    norm(dev, y, {projected, {post_norm, {}}, c.norm_style()});
    add(dev, y, residual);
  }

  // Forward again for a chunk, with the keys and values there already, up to what backward needs.
  Activations<T> recompute(Index l, Matrix<T> x, KeysValues<T> kv, Rows rows) {
    const Layer<T>& w = layer(l);
    const Activations<T> a = allocate_activations(rows.size());
    attention_norm(w, a, x);
    if (c.qk_norm) matmul(dev, a.k_projected, a.attention_input, w.k, w.k_bias);
    queries(l, a, rows);
    attend(l, kv, a, rows);
    add_attention(w, x, a);
    feed_forward(w, a);
    if (c.post_norms) matmul(dev, a.mlp_output, a.activated, w.down, w.down_bias);
    return a;
  }

  KeysValues<T> recompute_keys_values(Index l, Matrix<T> x) {
    const KeysValues<T> kv = allocate_keys_values<T>();
    for (Rows rows : chunks(stream.size(), schedule.chunk)) {
      auto scope = dev.scope();
      const Activations<T> a = allocate_key_value_activations(rows.size());
      attention_norm(layer(l), a, x.slice(rows));
      keys_values(l, kv, a, rows);
    }
    return kv;
  }

  // dx: the gradient of the layer's output, replaced by the gradient of its input.
  template <class G>
  void layer_backward(Tensors<G>& gradient, Index l, const typename Saved<T>::OfLayer& kept, Matrix<T> dx) {
    Sums sums(dev, gradient.layers[index(l)], Layer<A>{}, [&](auto& t) { return layer_table(c, l, t); });
    auto scope = dev.scope();
    const bool all_kept = schedule.keep == Keep::activations;
    const KeysValues<T> kv = all_kept ? kept.keys_values : recompute_keys_values(l, kept.input);
    const KeysValues<A> dkv = allocate_keys_values<A>();
    zero(dev, dkv.k);
    zero(dev, dkv.v);
    for (Rows rows : last_to_first(chunks(stream.size(), schedule.chunk))) {
      auto chunk_scope = dev.scope();
      const Matrix<T> x = kept.input.slice(rows);
      const Activations<T> a = all_kept ? kept.activations : recompute(l, x, kv, rows);
      chunk_backward(l, *sums, a, kv, dkv, x, dx.slice(rows), rows);
    }
  }

  void chunk_backward(Index l, Layer<A>& g, const Activations<T>& a, KeysValues<T> kv, KeysValues<A> dkv, Matrix<T> x,
                      Matrix<T> dx, Rows rows) {
    const Layer<T>& w = layer(l);
    auto matrix = [&](Index cols) { return dev.template allocate<T>(rows.size(), cols, Kind::chunk); };
    const Matrix<T> dnormed = matrix(c.hidden);
    {  // y = middle + activated downᵀ
      auto scope = dev.scope();
      const Matrix<T> dactivated = matrix(c.mlp),
                      dprojected = through_post_norm(g.post_mlp_norm, dx, a.mlp_output, w.post_mlp_norm);
      linear_backward(dactivated, g.down, g.down_bias, dprojected, a.activated, w.down);
      const auto [dgate, dup] = activation_backward(dev, c.mlp_kind, a.gate, a.up, dactivated);
      linear_backward(dnormed, g.up, g.up_bias, dup, a.mlp_input, w.up);
      if (c.gated()) linear_backward(dnormed, g.gate, g.gate_bias, dgate, a.mlp_input, w.gate, Update::add);
      norm_backward(dev, dx, NormWeights<A>{g.mlp_norm, g.mlp_norm_bias}, dnormed,
                    {a.middle, {w.mlp_norm, {}}, c.norm_style()}, Update::add);
    }
    // middle = x + attended oᵀ
    const Matrix<T> dattended = matrix(c.q_width()), dq = matrix(c.q_width());
    linear_backward(dattended, g.o, g.o_bias,
                    through_post_norm(g.post_attention_norm, dx, a.attention_output, w.post_attention_norm), a.attended,
                    w.o);
    attention_backward(dev, AttentionGradient<T>{dq, dkv.k, dkv.v}, dattended, {a.q, kv.k, kv.v}, {a.attended, a.lse},
                       span(l, rows));
    const Matrix<T> dk = in_type_of_activations(dkv.k.slice(rows)), dv = in_type_of_activations(dkv.v.slice(rows));
    turn(l, dq, rows, Direction::backward);
    turn(l, dk, rows, Direction::backward);
    if (c.qk_norm) {
      norm_heads_backward(dq, g.q_norm, a.q_projected, w.q_norm);
      norm_heads_backward(dk, g.k_norm, a.k_projected, w.k_norm);
    }
    linear_backward(dnormed, g.q, g.q_bias, dq, a.attention_input, w.q);
    linear_backward(dnormed, g.k, g.k_bias, dk, a.attention_input, w.k, Update::add);
    linear_backward(dnormed, g.v, g.v_bias, dv, a.attention_input, w.v, Update::add);
    norm_backward(dev, dx, NormWeights<A>{g.attention_norm, g.attention_norm_bias}, dnormed,
                  {x, {w.attention_norm, {}}, c.norm_style()}, Update::add);
  }

  // The head streams too: logits exist for one chunk only.
  void head_forward(Matrix<T> x, Matrix<A> logp) {
    for (Rows rows : chunks(stream.size(), schedule.head_chunk)) {
      auto scope = dev.scope();
      log_probabilities(dev, logp.columns(rows.begin, rows.size()), logits(x.slice(rows)), targets(rows));
    }
  }

  // x becomes its gradient.
  template <class G>
  void head_backward(Tensors<G>& gradient, Matrix<T> x, const TokenWeights<A>& w, Matrix<A> logp) {
    Sums sums(dev, gradient, Tensors<A>(c), [&](auto& t) {
      auto rows = head_table(c, t);
      if (c.tied) rows.push_back(embedding_table(c, t).front());
      return rows;
    });
    for (Rows rows : last_to_first(chunks(stream.size(), schedule.head_chunk))) {
      auto scope = dev.scope();
      const Matrix<T> normed = dev.template allocate<T>(rows.size(), c.hidden, Kind::chunk);
      final_norm(normed, x.slice(rows));
      const Matrix<T> dlogits = log_probabilities_backward(dev, logp.columns(rows.begin, rows.size()),
                                                           logits_of_normed(normed), targets(rows), w.columns(rows));
      const Matrix<T> dnormed = dev.template allocate<T>(rows.size(), c.hidden, Kind::chunk);
      linear_backward(dnormed, c.tied ? sums->embedding : sums->head, {}, dlogits, normed, model.head());
      norm_backward(dev, x.slice(rows), NormWeights<A>{sums->norm, sums->norm_bias}, dnormed,
                    {x.slice(rows), {model.weights.norm, {}}, c.norm_style()}, Update::assign);
    }
  }

  void final_norm(Matrix<T> y, Matrix<T> x) {
    norm(dev, y, {x, {model.weights.norm, model.weights.norm_bias}, c.norm_style()});
  }

  Matrix<T> logits_of_normed(Matrix<T> normed) {
    const Matrix<T> result = dev.template allocate<T>(normed.rows, c.vocab, Kind::logits);
    matmul(dev, result, normed, model.head());
    return result;
  }

  void linear_backward(Matrix<T> dx, Matrix<A> dw, Matrix<A> dbias, Matrix<T> dy, Matrix<T> x, Matrix<T> w,
                       Update update = Update::assign) {
    matmul_backward_input(dev, dx, dy, w, update);
    matmul_backward_weight(dev, dw, dbias, dy, x);
  }

  // The gradient of what a post-norm reads, from that of what it writes; without one they are the same.
  Matrix<T> through_post_norm(Matrix<A> dweight, Matrix<T> dy, Matrix<T> x, Matrix<T> weight) {
    if (!c.post_norms) return dy;
    const Matrix<T> dx = dev.template allocate<T>(dy.rows, dy.cols, Kind::chunk);
    norm_backward(dev, dx, NormWeights<A>{dweight, {}}, dy, {x, {weight, {}}, c.norm_style()}, Update::assign);
    return dx;
  }

  void norm_heads_backward(Matrix<T> dx, Matrix<A> dweight, Matrix<T> x, Matrix<T> weight) {
    const Matrix<T> heads = dx.reshape(c.head_dim);
    norm_backward(dev, heads, NormWeights<A>{dweight, {}}, heads,
                  {x.reshape(c.head_dim), {weight, {}}, c.head_norm_style()}, Update::assign);
  }

  Matrix<T> in_type_of_activations(Matrix<A> m) {
    if constexpr (std::is_same_v<T, A>) {
      return m;
    } else {
      const auto converted = dev.template allocate<T>(m.rows, m.cols, Kind::chunk);
      convert(dev, converted, m);
      return converted;
    }
  }

  Device& dev;
  const Model<T>& model;
  const Config& c;
  const Stream& stream;
  const Schedule schedule;
  std::vector<double> frequencies, local_frequencies;
};

}  // namespace streambp
