// A linear layer: y = x weightᵀ + bias. Weights are (outputs x inputs).
//
// It can have an adapter (LoRA), two thin matrices a (rank x inputs) and b (outputs x rank):
//
//   forward          y += low bᵀ                          low = scale x aᵀ
//   backward         db += dyᵀ low                        low is computed again, which is cheap
//                    da += dlowᵀ x                        dlow = scale dy b
//                    dx += dlow a
//
// In GPT-2's files q, k and v are one linear layer. Here they are three that share an a, so dlow = scale Σ dy b.
#pragma once

#include <initializer_list>
#include <span>
#include <utility>

#include "kernels/four_bits.cuh"
#include "kernels/matmul.cuh"

namespace streambp {

template <class T>
struct Adapter {
  Matrix<T> a, b;
  double scale = 0;
};

// The weights of a linear layer. Models without biases or adapters leave these empty; so does a gradient for all that is
// not trained. A weight that is quantised or in far memory is empty until memory/weights.h hands it out; on a CPU, one in
// blocks stays empty.
template <class T>
struct Linear {
  Matrix<T> weight, bias;
  Adapter<T> adapter = {};
  FourBits quantised = {};
  FarMatrix<T> far = {};

  Index outputs() const { return weight ? weight.rows : quantised.blocks.bytes.rows; }
};

// A linear layer in backward: dy is the gradient of its output, and dw is added to.
template <class T, class A>
struct LinearBackward {
  const Linear<A>& dw;
  Matrix<T> dy;
  const Linear<T>& w;
};

// scale x aᵀ, in memory of the caller's scope
template <class Device, class T>
Matrix<T> low_rank(Device& dev, Matrix<T> x, const Adapter<T>& adapter) {
  const auto low = allocate<T>(dev, x.rows, adapter.a.rows, Kind::chunk);
  matmul(dev, low, x, adapter.a);
  scale(dev, low, adapter.scale);
  return low;
}

// A weight that stays in blocks (kernels/base/blocks.cuh): calls f(rows, weight) with some of its rows at a time.
template <class Device, class T, class F>
void for_each_dequantised(Device& dev, const Linear<T>& w, Index cols, F&& f) {
  constexpr Index most_numbers = Index{1} << 24, unit = 64;
  const Blocks& blocks = w.quantised.blocks;
  const Index outputs = blocks.bytes.rows, at_once = std::clamp(most_numbers / cols / unit * unit, unit, Index{4096});
  for (Index i = 0; i < ceil_div(outputs, at_once); ++i) {
    auto scope = dev.scope();
    const Rows rows = piece(i, at_once, outputs);
    const auto weight = allocate<T>(dev, rows.size(), cols, Kind::chunk);
    dequantise(dev, weight, blocks.slice(rows));
    f(rows, weight);
  }
}

// y = x weightᵀ + bias + residual + low bᵀ. y may be the residual.
template <class Device, class Y, class T>
void linear(Device& dev, Matrix<Y> y, Matrix<T> x, const Linear<T>& w, Input<Y> residual = {}) {
  if (w.weight) {
    matmul<Device, Y, T>(dev, y, x, w.weight, w.bias, residual);
  } else {
    const auto of = [](auto m, Rows rows) { return m ? m.columns(rows) : m; };
    for_each_dequantised(dev, w, x.cols, [&](Rows rows, Matrix<T> weight) {
      matmul<Device, Y, T>(dev, y.columns(rows), x, weight, of(w.bias, rows), of(residual, rows));
    });
  }
  if (!w.adapter.b) return;
  auto scope = dev.scope();
  matmul<Device, Y, T>(dev, y, low_rank(dev, x, w.adapter), w.adapter.b, {}, y);
}

// Adds to da, db and dx of layers that share an a; what is empty is not computed.
template <class Device, class T, class A>
void adapter_backward(Device& dev, Matrix<T> dx, Matrix<T> x, std::span<const LinearBackward<T, A>> layers) {
  auto scope = dev.scope();
  const Adapter<T>& adapter = layers[0].w.adapter;
  const bool trained = !!layers[0].dw.adapter.b;
  const auto low = trained ? low_rank(dev, x, adapter) : Matrix<T>();
  const auto dlow = allocate<T>(dev, layers[0].dy.rows, adapter.a.rows, Kind::chunk);
  Update update = Update::assign;
  for (const auto& [dw, dy, w] : layers) {
    if (trained) matmul_backward_weight(dev, dw.adapter.b, {}, dy, low);
    matmul_backward_input(dev, dlow, dy, w.adapter.b, std::exchange(update, Update::add));
  }
  scale(dev, dlow, adapter.scale);
  if (trained) matmul_backward_weight(dev, layers[0].dw.adapter.a, {}, dlow, x);
  if (dx) matmul_backward_input(dev, dx, dlow, adapter.a, Update::add);
}

// dx = dy weight, or dx += dy weight, for a weight in blocks, with the bits of one product.
template <class Device, class T>
void backward_input_of_blocks(Device& dev, Matrix<T> dx, Matrix<T> dy, const Linear<T>& w, Update update) {
  using A = Accumulator<T>;
  auto scope = dev.scope();
  const Matrix<A> sums = std::is_same_v<T, A> ? Matrix<A>(reinterpret_cast<A*>(dx.data), dx.rows, dx.cols, dx.stride)
                                              : allocate<A>(dev, dx.rows, dx.cols, Kind::chunk);
  if (!std::is_same_v<T, A> && update == Update::add) convert(dev, sums, dx);
  for_each_dequantised(dev, w, dx.cols, [&](Rows rows, Matrix<T> weight) {
    matmul_backward_input<Device, A, T>(dev, sums, dy.columns(rows), weight, std::exchange(update, Update::add));
  });
  if (!std::is_same_v<T, A>) convert(dev, dx, sums);
}

// For layers with the same input x: dx = Σ dy weight, or dx += Σ dy weight; dweight += dyᵀ x, dbias += Σ_rows dy; and the
// same for adapters. A layer with a b but no a shares the a of the layer before. What is empty is not computed.
template <class Device, class T, class A>
void linear_backward(Device& dev, Matrix<T> dx, Matrix<T> x, std::initializer_list<LinearBackward<T, A>> layers,
                     Update update) {
  for (const auto& [dw, dy, w] : layers) {
    if (dx && !w.weight) {
      backward_input_of_blocks(dev, dx, dy, w, std::exchange(update, Update::add));
    } else if (dx) {
      matmul_backward_input(dev, dx, dy, w.weight, std::exchange(update, Update::add));
    }
    if (x) matmul_backward_weight(dev, dw.weight, dw.bias, dy, x);
  }
  for (auto first = layers.begin(); first != layers.end();) {
    auto next = first + 1;
    while (next != layers.end() && next->w.adapter.b && !next->w.adapter.a) ++next;
    if (first->w.adapter.b) adapter_backward<Device, T, A>(dev, dx, x, {first, next});
    first = next;
  }
}

}  // namespace streambp
