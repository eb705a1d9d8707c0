// StreamBP in one file: exact backpropagation through a transformer, in little memory.
//
//   g++ -std=c++20 -O2 docs/lesson.cpp -o lesson && ./lesson
//
// Backpropagation through a layer needs the layer's activations. full_memory() keeps those of all layers. streambp()
// keeps only the input of each layer and recomputes the rest, one chunk of rows (tokens) at a time. That works because
// rows meet in one place only: a row attends to the keys and values, K and V, of earlier rows and of itself. So
//
//   - K, V and their gradients dK, dV exist for all rows, but for one layer at a time;
//   - all other activations exist for one layer and one chunk at a time;
//   - backward visits the chunks from the LAST to the FIRST. Only later rows attend to a row, and they are done, so the
//     dK and dV of a chunk are complete when backward leaves the attention of that chunk.
//
// Nothing is approximated. Both sum over rows from the last row to the first, so their gradients agree in every bit.
// The appendix, chunk_by_chunk(), takes the same steps in another order, and keeps other things.
//
// The method is from Luo, Li, Zhao, Li: StreamBP: Memory-Efficient Exact Backpropagation for Long Sequence Training of
// LLMs, arXiv 2506.03077 (2025). lesson.html, beside this file, explains it with pictures and exercises.
//
// To keep the loops short, attention has one head, norms have no weights, and positions are not encoded.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

// --- Matrices that count the memory they take ---

struct Rows {
  int begin, end;
  int size() const { return end - begin; }
};

struct View {  // of rows that a Matrix owns; a const View is writable, too
  double* data;
  int rows, cols;
  int size() const { return rows * cols; }
  double* operator[](int row) const { return data + row * cols; }
  View operator[](Rows r) const { return {data + r.begin * cols, r.size(), cols}; }
};

struct Matrix : View {
  static inline long live = 0, peak = 0;  // numbers in memory
  std::unique_ptr<double[]> memory;
  Matrix(int rows, int cols) : View{new double[rows * cols](), rows, cols}, memory(data) {
    peak = std::max(peak, live += size());
  }
  Matrix(Matrix&&) = default;
  ~Matrix() { live -= memory ? size() : 0; }
};

// --- Operations on rows. All but softmax ADD to their result; a new matrix is zero ---

void add(View y, View x) {
  for (int i = 0; i < x.size(); ++i) y.data[i] += x.data[i];
}

void linear(View y, View x, View w) {  // y = x wᵀ
  for (int r = 0; r < x.rows; ++r)
    for (int o = 0; o < w.rows; ++o)
      for (int i = 0; i < w.cols; ++i) y[r][o] += x[r][i] * w[o][i];
}

void linear_backward(View dx, View dw, View dy, View x, View w) {  // dx = dy w, dw = dyᵀ x
  for (int r = x.rows - 1; r >= 0; --r)                            // last row first: the order of the sum in dw
    for (int o = 0; o < w.rows; ++o)
      for (int i = 0; i < w.cols; ++i) {
        dx[r][i] += dy[r][o] * w[o][i];
        dw[o][i] += dy[r][o] * x[r][i];
      }
}

double dot(const double* a, const double* b, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

void norm(View y, View x) {  // RMSNorm: y = x / rms(x)
  for (int r = 0; r < x.rows; ++r) {
    const double rms = std::sqrt(dot(x[r], x[r], x.cols) / x.cols + 1e-6);
    for (int i = 0; i < x.cols; ++i) y[r][i] += x[r][i] / rms;
  }
}

void norm_backward(View dx, View dy, View x) {  // dx = (dy - x mean(dy x) / rms²) / rms
  for (int r = 0; r < x.rows; ++r) {
    const double rms = std::sqrt(dot(x[r], x[r], x.cols) / x.cols + 1e-6), mean = dot(dy[r], x[r], x.cols) / x.cols;
    for (int i = 0; i < x.cols; ++i) dx[r][i] += (dy[r][i] - x[r][i] * mean / (rms * rms)) / rms;
  }
}

void activation(View y, View x) {  // y = max(0, x)²
  for (int i = 0; i < x.size(); ++i) y.data[i] += std::pow(std::max(0.0, x.data[i]), 2);
}

void activation_backward(View dx, View dy, View x) {
  for (int i = 0; i < x.size(); ++i) dx.data[i] += dy.data[i] * 2 * std::max(0.0, x.data[i]);
}

void softmax(double* x, int n) {
  const double max = *std::max_element(x, x + n);
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += x[i] = std::exp(x[i] - max);
  for (int i = 0; i < n; ++i) x[i] /= sum;
}

// --- The model ---

constexpr int kTokens = 512, kVocab = 128, kHidden = 32, kHead = 8, kMlp = 128, kLayers = 6;

struct Layer {
  Matrix q{kHead, kHidden}, k{kHead, kHidden}, v{kHead, kHidden}, o{kHidden, kHead};
  Matrix up{kMlp, kHidden}, down{kHidden, kMlp};
};

struct Model {
  Matrix embedding{kVocab, kHidden};  // of the tokens, and of the logits
  std::vector<Layer> layers = std::vector<Layer>(kLayers);
};

struct Gradient : Model {
  double loss = 0;
};

struct KeysValues {  // of one layer, for all rows; also dK and dV
  Matrix k{kTokens, kHead}, v{kTokens, kHead};
};

struct Activations {  // of one layer, for some rows
  Rows rows;
  View x;  // the layer's input
  int n = rows.size();
  Matrix normed{n, kHidden}, q{n, kHead}, attended{n, kHead}, middle{n, kHidden};
  Matrix mlp_input{n, kHidden}, up{n, kMlp}, activated{n, kMlp};
};

// --- Causal attention: row r of the stream attends to rows 0 ... r ---
//
//   forward    p[r][j] = softmax over j of q[r]·k[j] / √d      y[r] = Σ_j p[r][j] v[j]             over rows j ≤ r
//   backward   dp[r][j] = dy[r]·v[j]                           da[r][j] = p[r][j] (dp[r][j] - Σ_j p dp) / √d
//              dq[r] = Σ_j da[r][j] k[j]                                                           over rows j ≤ r
//              dk[j] = Σ_r da[r][j] q[r]                       dv[j] = Σ_r p[r][j] dy[r]           over rows r ≥ j
//
// Backward recomputes p, as FlashAttention does. Σ_j p dp of a row equals dy[r]·y[r].

Matrix attention_weights(const double* q, View k, int count) {  // p = softmax(q Kᵀ / √d) over the first `count` keys
  Matrix p(1, count);
  for (int j = 0; j < count; ++j) p.data[j] = dot(q, k[j], k.cols) / std::sqrt(k.cols);
  softmax(p.data, count);
  return p;
}

void attention(const Activations& a, const KeysValues& kv) {  // attended = p V
  for (int r = 0; r < a.rows.size(); ++r) {
    const Matrix p = attention_weights(a.q[r], kv.k, a.rows.begin + r + 1);
    for (int j = 0; j < p.cols; ++j)
      for (int i = 0; i < kHead; ++i) a.attended[r][i] += p.data[j] * kv.v[j][i];
  }
}

void attention_backward(View dq, const KeysValues& dkv, View dy, const Activations& a, const KeysValues& kv) {
  for (int r = a.rows.size() - 1; r >= 0; --r) {
    const Matrix p = attention_weights(a.q[r], kv.k, a.rows.begin + r + 1);
    const double mean = dot(dy[r], a.attended[r], kHead);  // Σ p dp
    for (int j = 0; j < p.cols; ++j) {
      const double dp = dot(dy[r], kv.v[j], kHead), dscore = p.data[j] * (dp - mean) / std::sqrt(kHead);
      for (int i = 0; i < kHead; ++i) {
        dq[r][i] += dscore * kv.k[j][i];
        dkv.k[j][i] += dscore * a.q[r][i];  // of this row and of all earlier rows
        dkv.v[j][i] += p.data[j] * dy[r][i];
      }
    }
  }
}

// --- One layer: middle = x + attention(norm(x)), y = middle + MLP(norm(middle)) ---

void keys_values(const KeysValues& kv, View x, const Layer& w, Rows rows) {  // x: of these rows
  Matrix normed(rows.size(), kHidden);
  norm(normed, x);
  linear(kv.k[rows], normed, w.k);
  linear(kv.v[rows], normed, w.v);
}

Activations layer_forward(View x, const KeysValues& kv, const Layer& w, Rows rows) {
  Activations a{rows, x};
  norm(a.normed, a.x);
  linear(a.q, a.normed, w.q);
  attention(a, kv);
  add(a.middle, a.x);
  linear(a.middle, a.attended, w.o);
  norm(a.mlp_input, a.middle);
  linear(a.up, a.mlp_input, w.up);
  activation(a.activated, a.up);
  return a;
}

void layer_output(View y, const Activations& a, const Layer& w) {
  add(y, a.middle);
  linear(y, a.activated, w.down);
}

// Turns dx from the gradient of the layer's output into the gradient of its input, in place. The residual connections
// make that an addition: MLP and attention add their part to what flows past them.
void layer_backward(View dx, const Layer& dw, const KeysValues& dkv, const Activations& a, const KeysValues& kv,
                    const Layer& w) {
  Matrix dactivated(a.n, kMlp), dup(a.n, kMlp), dmlp_input(a.n, kHidden);
  linear_backward(dactivated, dw.down, dx, a.activated, w.down);
  activation_backward(dup, dactivated, a.up);
  linear_backward(dmlp_input, dw.up, dup, a.mlp_input, w.up);
  norm_backward(dx, dmlp_input, a.middle);

  Matrix dattended(a.n, kHead), dq(a.n, kHead), dnormed(a.n, kHidden);
  linear_backward(dattended, dw.o, dx, a.attended, w.o);
  attention_backward(dq, dkv, dattended, a, kv);
  linear_backward(dnormed, dw.q, dq, a.normed, w.q);
  linear_backward(dnormed, dw.k, dkv.k[a.rows], a.normed, w.k);  // dK and dV of these rows are complete now
  linear_backward(dnormed, dw.v, dkv.v[a.rows], a.normed, w.v);
  norm_backward(dx, dnormed, a.x);
}

// --- Embedding and head ---

using Tokens = std::vector<int>;  // kTokens + 1 of them: each token predicts the next

void embed(View x, const Model& m, const Tokens& tokens, Rows rows) {
  for (int r = 0; r < rows.size(); ++r) std::copy_n(m.embedding[tokens[rows.begin + r]], kHidden, x[r]);
}

void embed_backward(const Gradient& g, View dx, const Tokens& tokens) {
  for (int t = kTokens - 1; t >= 0; --t)
    for (int i = 0; i < kHidden; ++i) g.embedding[tokens[t]][i] += dx[t][i];
}

// Adds these rows' share of the mean cross-entropy to the loss, and the gradient of their hidden state x to dx.
void head(View dx, Gradient& g, View x, const Model& m, const Tokens& tokens, Rows rows) {
  Matrix normed(rows.size(), kHidden), dnormed(rows.size(), kHidden), logits(rows.size(), kVocab);
  norm(normed, x);
  linear(logits, normed, m.embedding);
  for (int r = rows.size() - 1; r >= 0; --r) {
    const int target = tokens[rows.begin + r + 1];
    softmax(logits[r], kVocab);
    g.loss -= std::log(logits[r][target]) / kTokens;
    logits[r][target] -= 1;
    std::transform(logits[r], logits[r] + kVocab, logits[r], [](double p) { return p / kTokens; });
  }
  const View dlogits = logits;  // (softmax(logits) - onehot(target)) / n, in the same memory
  linear_backward(dnormed, g.embedding, dlogits, normed, m.embedding);
  norm_backward(dx, dnormed, x);
}

// --- Two ways to one gradient ---

void full_memory(Gradient& g, const Model& m, const Tokens& tokens) {
  const Rows all{0, kTokens};
  std::vector<Matrix> x;  // the input of each layer, and the output of the last
  std::vector<KeysValues> kv(kLayers);
  std::vector<Activations> a;
  embed(x.emplace_back(kTokens, kHidden), m, tokens, {0, kTokens});
  for (int l = 0; l < kLayers; ++l) {
    keys_values(kv[l], x[l], m.layers[l], all);
    a.push_back(layer_forward(x[l], kv[l], m.layers[l], all));
    layer_output(x.emplace_back(kTokens, kHidden), a[l], m.layers[l]);
  }
  Matrix dx(kTokens, kHidden);
  head(dx, g, x[kLayers], m, tokens, all);
  for (int l = kLayers - 1; l >= 0; --l) {
    const KeysValues dkv;
    layer_backward(dx, g.layers[l], dkv, a[l], kv[l], m.layers[l]);
  }
  embed_backward(g, dx, tokens);
}

std::vector<Rows> chunks_of(int size) {
  std::vector<Rows> chunks;
  for (int begin = 0; begin < kTokens; begin += size) chunks.push_back({begin, std::min(begin + size, kTokens)});
  return chunks;
}

void streambp(Gradient& g, const Model& m, const Tokens& tokens, int chunk) {
  const std::vector<Rows> chunks = chunks_of(chunk), last_to_first(chunks.rbegin(), chunks.rend());

  std::vector<Matrix> x;  // the input of each layer, and the output of the last
  embed(x.emplace_back(kTokens, kHidden), m, tokens, {0, kTokens});
  for (int l = 0; l < kLayers; ++l) {
    const KeysValues kv;
    x.emplace_back(kTokens, kHidden);
    for (Rows rows : chunks) {
      keys_values(kv, x[l][rows], m.layers[l], rows);
      layer_output(x[l + 1][rows], layer_forward(x[l][rows], kv, m.layers[l], rows), m.layers[l]);
    }
  }
  Matrix dx(kTokens, kHidden);
  for (Rows rows : last_to_first) head(dx[rows], g, x[kLayers][rows], m, tokens, rows);
  for (int l = kLayers - 1; l >= 0; --l) {
    const KeysValues kv, dkv;
    for (Rows rows : chunks) keys_values(kv, x[l][rows], m.layers[l], rows);
    for (Rows rows : last_to_first) {
      const Activations a = layer_forward(x[l][rows], kv, m.layers[l], rows);
      layer_backward(dx[rows], g.layers[l], dkv, a, kv, m.layers[l]);
    }
  }
  embed_backward(g, dx, tokens);
}

// --- The proof ---

void chunk_by_chunk(Gradient& g, const Model& m, const Tokens& tokens, int chunk);  // the appendix

std::vector<View> tensors(const Model& m) {
  std::vector<View> all = {m.embedding};
  for (const Layer& l : m.layers) all.insert(all.end(), {l.q, l.k, l.v, l.o, l.up, l.down});
  return all;
}

bool same_bits(const Gradient& a, const Gradient& b) {
  const auto same = [](View x, View y) { return std::memcmp(x.data, y.data, sizeof(double) * x.size()) == 0; };
  const std::vector<View> x = tensors(a), y = tensors(b);
  return std::equal(x.begin(), x.end(), y.begin(), same) && a.loss == b.loss;
}

long peak_of(auto&& compute) {  // in numbers, without weights and gradients
  const long before = Matrix::peak = Matrix::live;
  compute();
  return Matrix::peak - before;
}

int main() {
  std::mt19937 random(1);
  std::normal_distribution<double> normal(0, 0.2);
  Model model;
  for (View w : tensors(model)) std::generate_n(w.data, w.size(), [&] { return normal(random); });
  Tokens tokens(kTokens + 1);
  std::generate(tokens.begin(), tokens.end(), [&] { return random() % kVocab; });

  std::printf("%d layers, %d tokens\n\n%41s   gradient\n", kLayers, kTokens, "peak memory");
  Gradient full;
  std::printf("%-26s%7ld numbers\n", "full memory", peak_of([&] { full_memory(full, model, tokens); }));
  bool good = true;
  const auto compare = [&](auto&& gradient, const char* order, int chunk) {
    Gradient g;
    const long peak = peak_of([&] { gradient(g, model, tokens, chunk); });
    const bool equal = same_bits(g, full);
    std::printf("%s, %-*d%7ld numbers   %s\n", order, 24 - int(std::strlen(order)), chunk, peak,
                equal ? "equal" : "DIFFERENT");
    good = good && equal;
  };
  for (int chunk : {kTokens, 64, 10, 1}) compare(streambp, "layer by layer", chunk);  // first: gradient checkpointing
  for (int chunk : {64, 10, 1}) compare(chunk_by_chunk, "chunk by chunk", chunk);
  // One finite difference: a key weight of the first layer, at the far end of backward.
  double& weight = model.layers[0].k[3][5];
  const double before = weight, step = 1e-5, slope = full.layers[0].k[3][5];
  auto loss_at = [&](double value) {
    Gradient g;
    weight = value;
    full_memory(g, model, tokens);
    return g.loss;
  };
  const double measured = (loss_at(before + step) - loss_at(before - step)) / (2 * step);
  std::printf("\nd loss / d weight: %.12f by backpropagation, %.12f by finite difference\n", slope, measured);
  return good && std::abs(measured - slope) < 1e-6 * std::abs(slope) ? 0 : 1;
}

// --- Appendix: chunk by chunk ---
//
// A chunk goes through all layers before the next one does. Backward of a chunk in a layer needs the layer above, the
// later chunks of the same layer, and K and V of earlier rows; this order gives it all three. What stays for all
// rows: K, V, dK, dV of every layer and one dx, instead of the layers' inputs.
void chunk_by_chunk(Gradient& g, const Model& m, const Tokens& tokens, int chunk) {
  const std::vector<Rows> chunks = chunks_of(chunk), last_to_first(chunks.rbegin(), chunks.rend());
  const std::vector<KeysValues> kv(kLayers), dkv(kLayers);
  const auto forward = [&](Rows rows, auto&& before_layer) {  // returns the inputs of the layers, and the last output
    std::vector<Matrix> x;
    embed(x.emplace_back(rows.size(), kHidden), m, tokens, rows);
    for (int l = 0; l < kLayers; ++l) {
      before_layer(l, x[l]);
      x.emplace_back(rows.size(), kHidden);
      layer_output(x[l + 1], layer_forward(x[l], kv[l], m.layers[l], rows), m.layers[l]);
    }
    return x;
  };
  for (Rows rows : chunks) forward(rows, [&](int l, View x) { keys_values(kv[l], x, m.layers[l], rows); });
  Matrix dx(kTokens, kHidden);
  for (Rows rows : last_to_first) {
    const std::vector<Matrix> x = forward(rows, [](int, View) {});
    head(dx[rows], g, x[kLayers], m, tokens, rows);
    for (int l = kLayers - 1; l >= 0; --l) {
      const Activations a = layer_forward(x[l], kv[l], m.layers[l], rows);
      layer_backward(dx[rows], g.layers[l], dkv[l], a, kv[l], m.layers[l]);
    }
  }
  embed_backward(g, dx, tokens);
}
