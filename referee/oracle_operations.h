// The operations of the oracle, on arrays that know their gradient.
//
// Every operation is one function: its formula, the forward loops, and the backward loops. Forward records the backward
// loops on a tape, which then runs in reverse. The backward loops of an operation read the gradient of its output and
// add to the gradients of its inputs. dy means d loss / d y.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numbers>
#include <vector>

#include "model/stream.h"
#include "referee/wrong.h"

namespace streambp::oracle {

// ---- Arrays and the tape ----

// A value of the computation, and d loss / d value.
struct Number {
  double value = 0, grad = 0;
};

// A view of a matrix. A transpose, a range of columns and a repeated row are views of the same values and need no
// backward. A tensor that the model does not have is an array without rows.
struct Array {
  Number* data = nullptr;
  Index rows = 0, cols = 0, row_stride = 0, col_stride = 0;

  Array() = default;
  Array(Number* data, Index rows, Index cols, Index row_stride, Index col_stride)
      : data(data), rows(rows), cols(cols), row_stride(row_stride), col_stride(col_stride) {}
  Array(const Matrix<Number>& m) : Array(m.data, m.rows, m.cols, m.stride, 1) {}

  Number& operator()(Index i, Index j) const { return data[i * row_stride + j * col_stride]; }
};

inline Array transpose(Array a) { return {a.data, a.cols, a.rows, a.col_stride, a.row_stride}; }
inline Array columns(Array a, Index begin, Index count) {
  return {&a(0, begin), a.rows, count, a.row_stride, a.col_stride};
}
inline Array repeat(Array row, Index rows) { return {row.data, rows, row.cols, 0, row.col_stride}; }

// Owns the values, and runs backward from the last operation to the first.
struct Tape {
  std::vector<std::vector<Number>> numbers;
  std::vector<std::function<void()>> steps;
  Wrong wrong = {};  // the oracle is right unless it is asked not to be
  Index layer = -1;  // in which operations are recorded
  std::vector<std::array<Array, 2>> routers =
      {};  // of each layer with experts: logits, and 1 where an expert is chosen

  Array zeros(Index rows, Index cols) {
    return {numbers.emplace_back(static_cast<std::size_t>(rows * cols)).data(), rows, cols, cols, 1};
  }
  Array constant(Index rows, Index cols, double value) {
    const Array one = zeros(1, 1);
    one.data->value = value;
    return {one.data, rows, cols, 0, 0};
  }
  void on_the_way_back(std::function<void()> step) { steps.push_back(step); }
  void backward() {
    for (auto step = steps.rbegin(); step != steps.rend(); ++step) (*step)();
  }
};

// ---- Operations ----

// y = a + b        da += dy        db += dy
inline Array add(Tape& tape, Array a, Array b) {
  const Array y = tape.zeros(a.rows, a.cols);
  for (Index t = 0; t < y.rows; ++t) {
    for (Index i = 0; i < y.cols; ++i) y(t, i).value = a(t, i).value + b(t, i).value;
  }
  tape.on_the_way_back([=] {
    for (Index t = 0; t < y.rows; ++t) {
      for (Index i = 0; i < y.cols; ++i) {
        a(t, i).grad += y(t, i).grad;
        b(t, i).grad += y(t, i).grad;
      }
    }
  });
  return y;
}

// y = a * b, elementwise        da += dy * b        db += dy * a
inline Array multiply(Tape& tape, Array a, Array b) {
  const Array y = tape.zeros(a.rows, a.cols);
  for (Index t = 0; t < y.rows; ++t) {
    for (Index i = 0; i < y.cols; ++i) y(t, i).value = a(t, i).value * b(t, i).value;
  }
  tape.on_the_way_back([=] {
    for (Index t = 0; t < y.rows; ++t) {
      for (Index i = 0; i < y.cols; ++i) {
        a(t, i).grad += y(t, i).grad * b(t, i).value;
        b(t, i).grad += y(t, i).grad * a(t, i).value;
      }
    }
  });
  return y;
}

// y = x        dx += dy, in a wrong trainer a multiple of it
inline Array branch(Tape& tape, const char* name, Array x) {
  const double factor = 1 - tape.wrong.strength_of(name, tape.layer);
  if (factor == 1 || x.rows == 0) return x;
  const Array y = tape.zeros(x.rows, x.cols);
  for (Index t = 0; t < y.rows; ++t)
    for (Index i = 0; i < y.cols; ++i) y(t, i).value = x(t, i).value;
  tape.on_the_way_back([=] {
    for (Index t = 0; t < y.rows; ++t)
      for (Index i = 0; i < y.cols; ++i) x(t, i).grad += factor * y(t, i).grad;
  });
  return y;
}

// y = a b, the matrix product: y[i,j] = Σ_k a[i,k] b[k,j]        da += dy bᵀ        db += aᵀ dy
inline Array product(Tape& tape, Array a, Array b) {
  const Array y = tape.zeros(a.rows, b.cols);
#pragma omp parallel for
  for (Index i = 0; i < y.rows; ++i) {
    for (Index j = 0; j < y.cols; ++j) {
      double sum = 0;
      for (Index k = 0; k < a.cols; ++k) sum += a(i, k).value * b(k, j).value;
      y(i, j).value = sum;
    }
  }
  tape.on_the_way_back([=] {
#pragma omp parallel for
    for (Index i = 0; i < y.rows; ++i) {
      for (Index j = 0; j < y.cols; ++j) {
        const double dy = y(i, j).grad;
        for (Index k = 0; k < a.cols; ++k) a(i, k).grad += dy * b(k, j).value;
      }
    }
#pragma omp parallel for
    for (Index j = 0; j < y.cols; ++j) {
      for (Index i = 0; i < y.rows; ++i) {
        const double dy = y(i, j).grad;
        for (Index k = 0; k < a.cols; ++k) b(k, j).grad += dy * a(i, k).value;
      }
    }
  });
  return y;
}

// y[t] = table[row[t]]        dtable[row[t]] += dy[t]
inline Array look_up(Tape& tape, Array table, const std::vector<std::int32_t>& row) {
  const Array y = tape.zeros(static_cast<Index>(row.size()), table.cols);
  for (Index t = 0; t < y.rows; ++t) {
    for (Index i = 0; i < y.cols; ++i) y(t, i).value = table(row[t], i).value;
  }
  tape.on_the_way_back([=] {
    for (Index t = 0; t < y.rows; ++t) {
      for (Index i = 0; i < y.cols; ++i) table(row[t], i).grad += y(t, i).grad;
    }
  });
  return y;
}

// For each row: y = (x - μ) / σ with σ = sqrt(mean((x - μ)²) + ε). LayerNorm: μ = mean(x). RMSNorm: μ = 0.
// dx += (dy - mean(dy) - y mean(dy * y)) / σ, without mean(dy) in RMSNorm
inline Array standardise(Tape& tape, Norm kind, double epsilon, Array x) {
  const Array y = tape.zeros(x.rows, x.cols), sigma = tape.zeros(x.rows, 1);
  const double n = static_cast<double>(x.cols), kept = 1 - tape.wrong.strength_of("branch-norms", tape.layer);
  for (Index t = 0; t < x.rows; ++t) {
    double mu = 0, variance = 0;
    for (Index i = 0; i < x.cols; ++i) mu += kind == Norm::layer ? x(t, i).value / n : 0;
    for (Index i = 0; i < x.cols; ++i) variance += std::pow(x(t, i).value - mu, 2) / n;
    sigma(t, 0).value = std::sqrt(variance + epsilon);
    for (Index i = 0; i < x.cols; ++i) y(t, i).value = (x(t, i).value - mu) / sigma(t, 0).value;
  }
  tape.on_the_way_back([=] {
    for (Index t = 0; t < x.rows; ++t) {
      double mean_dy = 0, mean_dy_y = 0;
      for (Index i = 0; i < x.cols; ++i) mean_dy += kind == Norm::layer ? y(t, i).grad / n : 0;
      for (Index i = 0; i < x.cols; ++i) mean_dy_y += kept * y(t, i).grad * y(t, i).value / n;
      for (Index i = 0; i < x.cols; ++i) {
        x(t, i).grad += (y(t, i).grad - mean_dy - y(t, i).value * mean_dy_y) / sigma(t, 0).value;
      }
    }
  });
  return y;
}

// The frequency of pair i: f = θ^(-2i/dim). Models with a longer context than in pretraining (L) divide it by a factor:
//   linear    all
//   llama3    the slow ones; with the wavelength λ = 2π / f and s = (L/λ - low) / (high - low), those between become
//             (1 - s) f / factor + s f
//   yarn      those after pair b, with b = dim log(L / (2π β)) / (2 log θ) for β = beta_slow; those before a, for
//             β = beta_fast, stay, and between, the share (i - a) / (b - a) is divided
//   longrope  all, each by its own factor: a short one if no document is longer than L, else a long one
// Dynamic NTK has a larger θ if the longest document has n > L tokens: log θ grows by log(1 + factor (n / L - 1)) times
// dim / (dim - 2), so that the slowest pair is as slow as if it were divided.
// Local layers with their own θ are not scaled.
inline double rope_frequency(const Config& c, bool local, Index i, Index pairs) {
  const double dim = 2 * static_cast<double>(pairs), pair = static_cast<double>(i);
  if (local && c.local_rope_theta > 0) return std::pow(c.local_rope_theta, -2 * pair / dim);
  const double f = std::pow(c.rope_theta, -2 * pair / dim);
  const RopeScaling& r = c.rope_scaling;
  const double n = static_cast<double>(r.longest);
  if (r.type == RopeType::plain) return f;
  if (r.type == RopeType::proportional) return pair < std::floor(r.share * static_cast<double>(pairs)) ? f : 0;
  if (r.type == RopeType::dynamic) {
    const double growth = n > r.original_length ? std::log(1 + r.factor * (n / r.original_length - 1)) : 0;
    return std::exp(-2 * pair / dim * (std::log(c.rope_theta) + growth * dim / (dim - 2)));
  }
  if (r.type == RopeType::longrope)
    return f / (n <= r.original_length ? r.short_factors : r.long_factors)[static_cast<std::size_t>(i)];
  if (r.type == RopeType::linear) return f / r.factor;
  if (r.type == RopeType::yarn) {
    double a = dim * std::log(r.original_length / (2 * std::numbers::pi * r.beta_fast)) / std::log(c.rope_theta) / 2;
    double b = dim * std::log(r.original_length / (2 * std::numbers::pi * r.beta_slow)) / std::log(c.rope_theta) / 2;
    if (r.ends == RopeScaling::Ends::whole) a = std::floor(a), b = std::ceil(b);
    a = std::max(a, 0.0), b = std::min(b, dim - 1);
    if (pair <= a) return f;
    return pair >= b ? f / r.factor : f - (pair - a) / (b - a) * (f - f / r.factor);
  }
  const double wavelength = 2 * std::numbers::pi / f;
  if (wavelength < r.original_length / r.high_freq_factor) return f;
  if (wavelength > r.original_length / r.low_freq_factor) return f / r.factor;
  const double s = (r.original_length / wavelength - r.low_freq_factor) / (r.high_freq_factor - r.low_freq_factor);
  return (1 - s) * f / r.factor + s * f;
}

// Rotates the pairs (a, b) = (x[i], x[i + dim/2]) by the angle α = position * frequency of the pair:
//   y[i] = a cos α - b sin α        y[i + dim/2] = a sin α + b cos α
// In some models the pairs are (x[2i], x[2i + 1]). Numbers after the first dim stay.
// Some models rotate by -α. YaRN and longrope multiply y by a constant m. dx is dy rotated by -α, times m:
//   da += dy[i] cos α + dy[i + dim/2] sin α        db += -dy[i] sin α + dy[i + dim/2] cos α
// Some models multiply queries by a number that grows with the position.
inline Array rope(Tape& tape, const Config& c, bool local, const std::vector<std::int32_t>& positions, Array x,
                  double beta = 0) {
  const Array y = tape.zeros(x.rows, x.cols);
  const bool wide = c.global_head_dim > 0 && !local;
  const Index half = wide ? c.global_head_dim / 2 : c.rotary_dim() / 2;
  const int turn = c.rope_reversed ? -1 : 1;
  const auto first = [=, &c](Index i) { return c.rope_pairs == RopePairs::interleaved ? 2 * i : i; };
  const auto second = [=, &c](Index i) { return c.rope_pairs == RopePairs::interleaved ? 2 * i + 1 : i + half; };
  const double factor = local && c.local_rope_theta > 0 ? 1 : c.rope_scaling.attention_factor;
  const auto m_at = [=, length = c.rope_scaling.original_length](double position) {
    return beta > 0 ? factor * (1 + beta * std::log(1 + std::floor(position / length))) : factor;
  };
  for (Index t = 0; t < x.rows; ++t) {
    for (Index i = 0; i < half; ++i) {
      const double alpha = turn * positions[t] * rope_frequency(c, local, i, half), m = m_at(positions[t]);
      const double a = x(t, first(i)).value, b = x(t, second(i)).value;
      y(t, first(i)).value = m * (a * std::cos(alpha) - b * std::sin(alpha));
      y(t, second(i)).value = m * (a * std::sin(alpha) + b * std::cos(alpha));
    }
    for (Index i = 2 * half; i < x.cols; ++i) y(t, i).value = x(t, i).value;
  }
  tape.on_the_way_back([=] {
    for (Index t = 0; t < x.rows; ++t) {
      for (Index i = 0; i < half; ++i) {
        const double alpha = turn * positions[t] * rope_frequency(c, local, i, half), m = m_at(positions[t]);
        const double da = y(t, first(i)).grad, db = y(t, second(i)).grad;
        x(t, first(i)).grad += m * (da * std::cos(alpha) + db * std::sin(alpha));
        x(t, second(i)).grad += m * (-da * std::sin(alpha) + db * std::cos(alpha));
      }
      for (Index i = 2 * half; i < x.cols; ++i) x(t, i).grad += y(t, i).grad;
    }
  });
  return y;
}

// log Σ_j exp x[t,j], with the maximum of x subtracted to avoid overflow
inline double log_sum_exp(Array x, Index t) {
  double largest = x(t, 0).value, sum = 0;
  for (Index j = 0; j < x.cols; ++j) largest = std::max(largest, x(t, j).value);
  for (Index j = 0; j < x.cols; ++j) sum += std::exp(x(t, j).value - largest);
  return largest + std::log(sum);
}

// Does token i attend to token j? Not to the future, other documents, or tokens outside the window.
inline bool visible(const Config& c, bool local, const TokenBatch& batch, Index i, Index j, Wrong::Sees sees) {
  const bool future = sees == Wrong::Sees::everything || (sees == Wrong::Sees::next && j == i + 1);
  const bool hidden = sees == Wrong::Sees::before && j == i && i > batch.key_begin[i];
  return batch.key_begin[i] == batch.key_begin[j] && (j <= i || future) && !hidden && (!local || i - j < c.window);
}

// y[t] = x[t - k], 0 before the document's first row        dx[t - k] += dy[t]
inline Array delayed(Tape& tape, const TokenBatch& batch, Array x, Index k) {
  const Array y = tape.zeros(x.rows, x.cols);
  std::vector<Index> first(batch.key_begin.begin(), batch.key_begin.end());
  for (Index t = 0; t < x.rows; ++t) {
    if (tape.wrong.convolution_leaks) first[t] = 0;
    if (tape.wrong.what == "convolution-reset") first[t] = std::max(first[t], t - t % tape.wrong.chunk);
  }
  const auto for_each_number = [=](auto&& f) {
    for (Index t = k; t < x.rows; ++t)
      for (Index i = 0; i < x.cols && t - k >= first[t]; ++i) f(y(t, i), x(t - k, i));
  };
  for_each_number([](Number& to, Number& from) { to.value = from.value; });
  tape.on_the_way_back([=] { for_each_number([](Number& to, Number& from) { from.grad += to.grad; }); });
  return y;
}

// y = f(x), elementwise        dx += dy f'(x)
template <class F, class Slope>
Array map(Tape& tape, Array x, F&& f, Slope&& slope) {
  const Array y = tape.zeros(x.rows, x.cols);
  for (Index t = 0; t < x.rows; ++t) {
    for (Index i = 0; i < x.cols; ++i) y(t, i).value = f(x(t, i).value);
  }
  tape.on_the_way_back([=] {
    for (Index t = 0; t < x.rows; ++t) {
      for (Index i = 0; i < x.cols; ++i) x(t, i).grad += y(t, i).grad * slope(x(t, i).value);
    }
  });
  return y;
}

// cap tanh(x / cap)
inline Array soft_cap(Tape& tape, Array x, double cap) {
  return map(
      tape, x, [=](double x) { return cap * std::tanh(x / cap); },
      [=](double x) { return 1 - std::pow(std::tanh(x / cap), 2); });
}

// What scores are divided by.
inline double score_root(const Config& c) {
  return c.score_scale > 0 ? 1 / c.score_scale : std::sqrt(static_cast<double>(c.head_dim));
}

// p[i] = softmax(s[i] / sqrt(dim)) over the visible j, else 0         (some models replace 1 / sqrt(dim))
// ds[i,j] += p[i,j] (dp[i,j] - Σ_k p[i,k] dp[i,k]) / sqrt(dim)
// A sink is one more score, which takes a share: dsink -= share Σ_k p[i,k] dp[i,k].
inline Array attention_softmax(Tape& tape, const Config& c, bool local, const TokenBatch& batch, Array s,
                               Array sink = {}) {
  const Array p = tape.zeros(s.rows, s.cols), share = tape.zeros(s.rows, 1);
  const double root = score_root(c);
  const double scale = tape.wrong.sinks == Wrong::Sinks::scaled ? 1 / root : 1;
  constexpr double never = -std::numeric_limits<double>::infinity();
  for (Index i = 0; i < s.rows; ++i) {
    for (Index j = 0; j < s.cols; ++j)
      p(i, j).value = visible(c, local, batch, i, j, tape.wrong.sees) ? s(i, j).value / root : never;
    double total = log_sum_exp(p, i);
    if (sink.rows) {
      const double x = sink(0, 0).value * scale, most = std::max(total, x);
      total = most + std::log(std::exp(total - most) + std::exp(x - most));
      share(i, 0).value = std::exp(x - total);
    }
    for (Index j = 0; j < s.cols; ++j) p(i, j).value = std::exp(p(i, j).value - total);
  }
  tape.on_the_way_back([=] {
    for (Index i = 0; i < s.rows; ++i) {
      double sum = 0;
      for (Index k = 0; k < s.cols; ++k) sum += p(i, k).value * p(i, k).grad;
      for (Index j = 0; j < s.cols; ++j) s(i, j).grad += p(i, j).value * (p(i, j).grad - sum) / root;
      if (sink.rows) sink(0, 0).grad -= share(i, 0).value * sum * scale;
    }
  });
  return p;
}

// logp[t] = log softmax(logits[t])[target]        dlogits[t,v] += dlogp[t] ([v = target] - softmax(logits[t])[v])
// A token without a target (-1) has logp 0 and no gradient.
inline Array log_probability(Tape& tape, Array logits, const std::vector<std::int32_t>& target) {
  const Array logp = tape.zeros(logits.rows, 1);
  for (Index t = 0; t < logits.rows; ++t) {
    if (target[t] >= 0) logp(t, 0).value = logits(t, target[t]).value - log_sum_exp(logits, t);
  }
  const double smoothed = tape.wrong.strength_of("label-smoothing"), z = tape.wrong.strength_of("z-loss"),
               every = smoothed / static_cast<double>(logits.cols);
  tape.on_the_way_back([=] {
    for (Index t = 0; t < logits.rows; ++t) {
      if (target[t] < 0) continue;
      const double total = log_sum_exp(logits, t);
      for (Index v = 0; v < logits.cols; ++v) {
        const double softmax = std::exp(logits(t, v).value - total);
        const double wanted = (v == target[t] ? 1 - smoothed : 0) + every;
        logits(t, v).grad += logp(t, 0).grad * (wanted - softmax - 2 * z * total * softmax);
      }
    }
  });
  return logp;
}

// SiLU: f(x) = x σ(x)        GELU: f(x) = x/2 (1 + tanh u) with u = sqrt(2/π) (x + 0.044715 x³)        relu²: max(x, 0)²
// Clamped SiLU: y σ(1.702 y) with y = min(x, 7)
constexpr double kClamp = 7, kClampedSlope = 1.702;
inline double f(Mlp kind, double x, double limit = kClamp) {
  if (kind == Mlp::relu2) return std::pow(std::max(x, 0.0), 2);
  if (kind == Mlp::swiglu) return x / (1 + std::exp(-x));
  if (kind == Mlp::clamped_swiglu) return std::min(x, limit) / (1 + std::exp(-kClampedSlope * std::min(x, limit)));
  const double u = std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x);
  return x / 2 * (1 + std::tanh(u));
}

// SiLU: f'(x) = σ + x σ (1 - σ)        GELU: f'(x) = (1 + tanh u) / 2 + x/2 (1 - tanh² u) du/dx
inline double f_slope(Mlp kind, double x, double limit = kClamp) {
  if (kind == Mlp::relu2) return 2 * std::max(x, 0.0);
  if (kind == Mlp::clamped_swiglu) {
    const double s = 1 / (1 + std::exp(-kClampedSlope * x));
    return x <= limit ? s * (1 + kClampedSlope * x * (1 - s)) : 0;
  }
  const double sigma = 1 / (1 + std::exp(-x));
  if (kind == Mlp::swiglu) return sigma + x * sigma * (1 - sigma);
  const double u = std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x);
  const double du = std::sqrt(2 / std::numbers::pi) * (1 + 3 * 0.044715 * x * x);
  return (1 + std::tanh(u)) / 2 + x / 2 * (1 - std::pow(std::tanh(u), 2)) * du;
}

inline double limit(const Tape& tape) { return tape.wrong.clamps ? kClamp : std::numeric_limits<double>::infinity(); }
inline Array activation(Tape& tape, Mlp kind, Array x) {
  const double most = limit(tape);
  return map(
      tape, x, [=](double x) { return f(kind, x, most); }, [=](double x) { return f_slope(kind, x, most); });
}

// A half of the columns gate, up, gate, up, ...
inline Array half_of_turns(Tape& tape, Array gate, Array up, Index first) {
  const Array y = tape.zeros(gate.rows, gate.cols);
  const auto number = [=](Index t, Index i) -> Number& { return ((first + i) % 2 ? up : gate)(t, (first + i) / 2); };
  const auto for_each = [=](auto&& f) {
    for (Index t = 0; t < y.rows; ++t)
      for (Index i = 0; i < y.cols; ++i) f(y(t, i), number(t, i));
  };
  for_each([](Number& y, const Number& x) { y.value = x.value; });
  tape.on_the_way_back([=] { for_each([](const Number& y, Number& x) { x.grad += y.grad; }); });
  return y;
}

}  // namespace streambp::oracle
