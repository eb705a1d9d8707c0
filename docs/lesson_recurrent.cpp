// StreamBP beyond attention, in one file: exact backpropagation through a recurrent layer, in little memory.
//
//   g++ -std=c++20 -O2 docs/lesson_recurrent.cpp -o lesson_recurrent && ./lesson_recurrent
//
// In attention, a row (token) reads the keys and values of all earlier rows. In a recurrent layer it reads one matrix,
// the state S. The gated delta rule, in most layers of Qwen3.5, keeps in S what it has seen: values v under keys k.
//
//   S = e^g S                  forget a little                  g ≤ 0
//   u = β (v - Sᵀ k)           what S has wrong about this key  0 < β < 1: how much of it to mend
//   S = S + k uᵀ               write
//   o = Sᵀ q                   read
//
// Backward of a row needs the state before it. full_memory() keeps the states of all rows. streamed() keeps the state
// at the first row of each chunk and recomputes the rest, one chunk at a time:
//
//   - forward, first chunk to last: a chunk begins with the state that the chunk before it ended with;
//   - backward, LAST chunk to first: a chunk begins with the gradient of the state that it ended with. Only later rows
//     read that state, and they are done. The chunk ends with the gradient of the state that it began with, and hands
//     it to the chunk before.
//
// Long chunks recompute many states at once, short ones keep many: the least memory is near chunks of √rows.
//
// Why the bits are equal: a row computes the same numbers in the same order from its input and from the state before
// it, wherever its chunk begins. The gradient of a weight is a sum over rows, added one by one, last row to first,
// whatever the chunk. So is that of the state. (The program adds tiles of 256 rows, and its chunks are whole tiles.)
//
// beyond-attention.md, beside this file, says for which other layers this works, and derives the form that the program
// computes, which takes a block of 64 rows at once. lesson.cpp is the same lesson for attention.
//
// To keep the loops short there is one head, and no convolution, norm or gate around the delta rule.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

// --- Matrices that count the memory they take, as in lesson.cpp ---

struct Rows {
  int begin, end;
};

struct View {  // of rows that a Matrix owns; a const View is writable, too
  double* data;
  int rows, cols;
  int size() const { return rows * cols; }
  double* operator[](int row) const { return data + row * cols; }
  View operator[](Rows r) const { return {data + r.begin * cols, r.end - r.begin, cols}; }
};

struct Matrix : View {
  static inline long live = 0, peak = 0;  // numbers in memory
  std::unique_ptr<double[]> memory;
  Matrix(int rows, int cols) : View{new double[rows * cols](), rows, cols}, memory(data) {
    peak = std::max(peak, live += size());
  }
  explicit Matrix(View v) : Matrix(v.rows, v.cols) { std::copy_n(v.data, v.size(), data); }
  Matrix(Matrix&&) = default;
  ~Matrix() { live -= memory ? size() : 0; }
};

// --- Operations. All ADD to their result; a new matrix is zero ---

void add(double* y, double factor, const double* x, int n) {
  for (int i = 0; i < n; ++i) y[i] += factor * x[i];
}

double dot(const double* a, const double* b, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

void linear(View y, View x, View w) {  // y = x wᵀ
  for (int r = 0; r < x.rows; ++r)
    for (int o = 0; o < w.rows; ++o) y[r][o] += dot(x[r], w[o], w.cols);
}

void linear_backward(View dx, View dw, View dy, View x, View w) {  // dx = dy w, dw = dyᵀ x
  for (int r = x.rows - 1; r >= 0; --r)                            // last row first: the order of the sum in dw
    for (int o = 0; o < w.rows; ++o) {
      add(dx[r], dy[r][o], w[o], w.cols);
      add(dw[o], dy[r][o], x[r], w.cols);
    }
}

void normalise(View y, View x) {  // y = x / |x|
  for (int r = 0; r < x.rows; ++r) add(y[r], 1 / std::sqrt(dot(x[r], x[r], x.cols) + 1e-6), x[r], x.cols);
}

void normalise_backward(View dx, View dy, View x) {  // dx = (dy - y (y·dy)) / |x|
  for (int r = 0; r < x.rows; ++r) {
    const double scale = 1 / std::sqrt(dot(x[r], x[r], x.cols) + 1e-6);
    add(dx[r], scale, dy[r], x.cols);
    add(dx[r], -std::pow(scale, 3) * dot(x[r], dy[r], x.cols), x[r], x.cols);
  }
}

// --- The layer: y = x + delta_rule(q, k, v, β, g) outᵀ ---

constexpr int kRows = 1024, kHidden = 32, kKey = 16, kValue = 16, kState = kValue * kKey;

struct Layer {
  Matrix q{kKey, kHidden}, k{kKey, kHidden}, v{kValue, kHidden}, beta{1, kHidden}, g{1, kHidden};
  Matrix out{kHidden, kValue};
};

struct Gradient : Layer {
  Matrix x{kRows, kHidden};  // of the layer's output, then in its place of the layer's input
  double loss = 0;
};

struct Inputs {  // of the delta rule, for n rows; also their gradients
  int n;
  Matrix q{n, kKey}, k{n, kKey}, v{n, kValue}, beta{n, 1}, g{n, 1};
};

struct Activations : Inputs {
  View x;                                 // the layer's input
  Matrix raw_q{n, kKey}, raw_k{n, kKey};  // before they are normalised
  Matrix states{n + 1, kState}, o{n, kValue};
  View state(int r) const { return {states[r], kValue, kKey}; }  // before row r, as Sᵀ: a row of keys for each value
};

void delta_rule(const Activations& a) {
  for (int r = 0; r < a.n; ++r)
    for (int i = 0; i < kValue; ++i) {
      const double *before = a.state(r)[i], decay = std::exp(a.g[r][0]);
      double* s = a.state(r + 1)[i];
      add(s, decay, before, kKey);
      add(s, a.beta[r][0] * (a.v[r][i] - dot(s, a.k[r], kKey)), a.k[r], kKey);
      a.o[r][i] += dot(s, a.q[r], kKey);
    }
}

// Each line of forward, in reverse. Turns dstate from the gradient of the last state into that of the first, in place.
void delta_rule_backward(const Inputs& d, View dstate, View dout, const Activations& a) {
  for (int r = a.n - 1; r >= 0; --r)
    for (int i = 0; i < kValue; ++i) {
      const double decay = std::exp(a.g[r][0]), beta = a.beta[r][0];
      const double error = a.v[r][i] - decay * dot(a.state(r)[i], a.k[r], kKey);
      double* ds = dstate[i];
      // Read
      add(ds, dout[r][i], a.q[r], kKey);
      add(d.q[r], dout[r][i], a.state(r + 1)[i], kKey);
      // Write
      const double du = dot(ds, a.k[r], kKey);
      add(d.k[r], beta * error, ds, kKey);
      d.beta[r][0] += error * du;
      d.v[r][i] += beta * du;
      add(d.k[r], -beta * du * decay, a.state(r)[i], kKey);
      add(ds, -beta * du, a.k[r], kKey);
      // Forget
      d.g[r][0] += decay * dot(ds, a.state(r)[i], kKey);
      for (int j = 0; j < kKey; ++j) ds[j] *= decay;
    }
}

Activations layer_forward(View x, View state, const Layer& w) {
  Activations a{{x.rows}, x};
  linear(a.raw_q, x, w.q);
  linear(a.raw_k, x, w.k);
  linear(a.v, x, w.v);
  linear(a.beta, x, w.beta);
  linear(a.g, x, w.g);
  normalise(a.q, a.raw_q);
  normalise(a.k, a.raw_k);
  for (int r = 0; r < a.n; ++r) {
    a.beta[r][0] = 1 / (1 + std::exp(-a.beta[r][0]));  // sigmoid
    a.g[r][0] = -std::log1p(std::exp(a.g[r][0]));      // -softplus
  }
  std::copy_n(state.data, kState, a.states[0]);
  delta_rule(a);
  return a;
}

void layer_backward(View dx, View dstate, const Layer& dw, const Activations& a, const Layer& w) {
  Matrix dout(a.n, kValue), draw_q(a.n, kKey), draw_k(a.n, kKey);
  const Inputs d{a.n};
  linear_backward(dout, dw.out, dx, a.o, w.out);
  delta_rule_backward(d, dstate, dout, a);
  for (int r = 0; r < a.n; ++r) {
    d.beta[r][0] *= a.beta[r][0] * (1 - a.beta[r][0]);
    d.g[r][0] *= std::exp(a.g[r][0]) - 1;
  }
  normalise_backward(draw_q, d.q, a.raw_q);
  normalise_backward(draw_k, d.k, a.raw_k);
  linear_backward(dx, dw.q, draw_q, a.x, w.q);
  linear_backward(dx, dw.k, draw_k, a.x, w.k);
  linear_backward(dx, dw.v, d.v, a.x, w.v);
  linear_backward(dx, dw.beta, d.beta, a.x, w.beta);
  linear_backward(dx, dw.g, d.g, a.x, w.g);
}

struct Data {
  Matrix x{kRows, kHidden}, target{kRows, kHidden};
};

// Adds these rows' share of the loss, half the mean of (y - target)², and writes the gradient of the layer's output y.
void loss(View dy, Gradient& g, const Activations& a, View target, const Layer& w) {
  Matrix y(a.x);
  linear(y, a.o, w.out);
  for (int i = 0; i < y.size(); ++i) {
    dy.data[i] = (y.data[i] - target.data[i]) / (kRows * kHidden);
    g.loss += dy.data[i] * (y.data[i] - target.data[i]) / 2;
  }
}

// --- Two ways to one gradient ---

void full_memory(Gradient& g, const Layer& w, const Data& data) {
  const Matrix first(kValue, kKey);  // zero: nothing has been seen
  const Activations a = layer_forward(data.x, first, w);
  loss(g.x, g, a, data.target, w);
  const Matrix dlast(kValue, kKey);  // zero: nothing reads the last state
  layer_backward(g.x, dlast, g, a, w);
}

void streamed(Gradient& g, const Layer& w, const Data& data, int chunk) {
  std::vector<Rows> chunks;
  for (int begin = 0; begin < kRows; begin += chunk) chunks.push_back({begin, std::min(begin + chunk, kRows)});

  std::vector<Matrix> state;  // at the first row of each chunk
  state.emplace_back(kValue, kKey);
  for (Rows rows : chunks) {
    const Activations a = layer_forward(data.x[rows], state.back(), w);
    loss(g.x[rows], g, a, data.target[rows], w);
    state.emplace_back(a.state(a.n));  // all else about this chunk is forgotten
  }
  const Matrix dstate(kValue, kKey);  // handed from chunk to chunk
  while (!chunks.empty()) {
    state.pop_back();
    const Rows rows = chunks.back();
    const Activations a = layer_forward(data.x[rows], state.back(), w);  // the same bits again
    layer_backward(g.x[rows], dstate, g, a, w);
    chunks.pop_back();
  }
}

// --- The proof ---

std::vector<View> tensors(const Layer& w) { return {w.q, w.k, w.v, w.beta, w.g, w.out}; }

bool same_bits(const Gradient& a, const Gradient& b) {
  const auto same = [](View x, View y) { return std::memcmp(x.data, y.data, sizeof(double) * x.size()) == 0; };
  const std::vector<View> x = tensors(a), y = tensors(b);
  return std::equal(x.begin(), x.end(), y.begin(), same) && same(a.x, b.x) && a.loss == b.loss;
}

long peak_of(auto&& compute) {  // in numbers, without data, weights and gradients
  const long before = Matrix::peak = Matrix::live;
  compute();
  return Matrix::peak - before;
}

int main() {
  std::mt19937 random(1);
  std::normal_distribution<double> normal(0, 1);
  Layer layer;
  Data data;
  for (View w : tensors(layer)) std::generate_n(w.data, w.size(), [&] { return 0.2 * normal(random); });
  for (View x : std::vector<View>{data.x, data.target})
    std::generate_n(x.data, x.size(), [&] { return normal(random); });

  std::printf("%d rows of width %d, a state of %d x %d\n\n%41s   gradient\n", kRows, kHidden, kKey, kValue,
              "peak memory");
  Gradient full;
  std::printf("%-26s%7ld numbers\n", "full memory", peak_of([&] { full_memory(full, layer, data); }));
  bool good = true;
  for (int chunk : {kRows, 256, 64, 32, 10, 1}) {  // first: checkpointing; last: every row's state is kept
    Gradient g;
    const long peak = peak_of([&] { streamed(g, layer, data, chunk); });
    const bool equal = same_bits(g, full);
    std::printf("streamed, chunks of %-6d%7ld numbers   %s\n", chunk, peak, equal ? "equal" : "DIFFERENT");
    good = good && equal;
  }
  // Finite differences: one weight of each tensor. Bits can be equal and wrong.
  const auto loss_at = [&](double& weight, double value) {
    Gradient g;
    const double before = std::exchange(weight, value);
    full_memory(g, layer, data);
    weight = before;
    return g.loss;
  };
  std::printf("\nd loss / d weight by backpropagation, and by finite difference:\n");
  for (std::size_t t = 0; t < tensors(layer).size(); ++t) {
    double& weight = tensors(layer)[t][0][5];
    const double step = 1e-4, slope = tensors(full)[t][0][5];
    const double measured = (loss_at(weight, weight + step) - loss_at(weight, weight - step)) / (2 * step);
    const char* name[] = {"q", "k", "v", "beta", "g", "out"};
    std::printf("  %-5s%17.12f%17.12f\n", name[t], slope, measured);
    good = good && std::abs(measured - slope) < 1e-5 * std::abs(slope);
  }
  return good ? 0 : 1;
}
