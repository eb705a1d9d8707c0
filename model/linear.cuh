// A linear layer: y = x weightᵀ + bias. Weights are (outputs x inputs).
#pragma once

#include "kernels/matmul.cuh"

namespace streambp {

// The weights of a linear layer.
template <class T>
struct Linear {
  Matrix<T> weight, bias;  // models without biases leave the bias empty
};

// What the backward pass of a linear layer reads: its input and its weights.
template <class T>
struct LinearInput {
  Matrix<T> x;
  Linear<T> weights;
};

// y = x weightᵀ + bias + residual
template <class Device, class T>
void linear(Device& dev, Matrix<T> y, Matrix<T> x, const Linear<T>& w, Input<T> residual = {}) {
  matmul(dev, y, x, w.weight, w.bias, residual);
}

// dx = dy weight, or dx += dy weight; dweight += dyᵀ x, dbias += Σ_rows dy
template <class Device, class T, class A>
void linear_backward(Device& dev, Matrix<T> dx, const Linear<A>& dw, Matrix<T> dy,
                     const std::type_identity_t<LinearInput<T>>& input, Update update) {
  matmul_backward_input(dev, dx, dy, input.weights.weight, update);
  matmul_backward_weight(dev, dw.weight, dw.bias, dy, input.x);
}

}  // namespace streambp
