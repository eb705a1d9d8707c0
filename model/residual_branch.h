// A residual branch around a mixer or a feed-forward. In most models y = residual + inside(norm(x)); in general:
//
//   input  = norm(x), or x
//   output = inside(input), back at the width of the residual stream
//   y      = residual + scale · norm(output), or without that norm
//
//   backward         doutput = norm_backward(scale · dy)        dy is also the gradient of the residual
//                    dinput  = inside_backward(doutput)
//                    dx     += norm_backward(dinput)
//
// In parallel models both branches begin at the same norm(x), so the gradients of their inputs are added first.
#pragma once

#include "kernels/norm.cuh"
#include "model/config.h"

namespace streambp {

// Memory for the gradient of the second branch's input in parallel models; empty in others.
template <class T, class Device>
Matrix<T> allocate_shared_gradient(Device& dev, const Config& c, Matrix<T> dx) {
  return c.parallel ? allocate<T>(dev, dx.rows, dx.cols, Kind::chunk) : Matrix<T>();
}

template <class Device, class T>
class ResidualBranch {
 public:
  using A = Accumulator<T>;

  ResidualBranch(Device& dev, const Config& c, Index layer, const NormWeights<T>& before, const NormWeights<T>& after)
      : dev_(dev), c_(c), layer_(layer), before_(before), after_(after) {}

  // input = norm(x), or x
  void begin(Matrix<T> input, Matrix<T> x) {
    c_.has_pre_norms(layer_) ? norm(dev_, input, normed(x, before_)) : dev_.copy(input, x);
  }
  void begin_backward(Matrix<T> dx, const NormWeights<A>& g, Matrix<T> dinput, Matrix<T> x) {
    c_.has_pre_norms(layer_) ? norm_backward(dev_, dx, g, dinput, normed(x, before_), Update::add)
                             : add(dev_, dx, dinput);
  }

  // y = residual + inside's output. Where a norm follows, only `output` is computed: its input, which backward reads.
  template <class Inside, class Activations>
  void compute_output(Matrix<T> y, Matrix<T> output, Matrix<T> residual, Inside& inside, const Activations& a) {
    if (c_.has_post_norms(layer_)) return inside.output(output, a);
    const bool scaled = c_.residual_scale != 1;
    inside.output(y, a, scaled ? Input<T>() : Input<T>(residual));
    if (scaled) add_scaled(y, residual);
  }
  // The output alone, where backward reads it.
  template <class Inside, class Activations>
  void recompute_output(Matrix<T> output, Inside& inside, const Activations& a) {
    if (c_.has_post_norms(layer_)) inside.output(output, a);
  }
  // y = residual + norm(output), where there is this norm
  void end(Matrix<T> y, Matrix<T> output, Matrix<T> residual) {
    if (!c_.has_post_norms(layer_)) return;
    norm(dev_, y, normed(output, after_));
    add_scaled(y, residual);
  }
  // Returns doutput, which is dy or in the caller's scope.
  Matrix<T> end_backward(const NormWeights<A>& g, Matrix<T> dy, Matrix<T> output) {
    if (!c_.has_post_norms(layer_) && c_.residual_scale == 1) return dy;
    const auto doutput = allocate<T>(dev_, dy.rows, dy.cols, Kind::chunk);
    if (c_.residual_scale != 1) {
      dev_.copy(doutput, dy);
      scale(dev_, doutput, c_.residual_scale);
      dy = doutput;
    }
    if (c_.has_post_norms(layer_)) norm_backward(dev_, doutput, g, dy, normed(output, after_), Update::assign);
    return doutput;
  }

 private:
  NormInput<T> normed(Matrix<T> x, const NormWeights<T>& weights) const { return {x, weights, c_.norm_style()}; }
  void add_scaled(Matrix<T> y, Matrix<T> residual) {
    if (c_.residual_scale != 1) scale(dev_, y, c_.residual_scale);
    add(dev_, y, residual);
  }

  Device& dev_;
  const Config& c_;
  const Index layer_;
  const NormWeights<T>& before_;
  const NormWeights<T>& after_;
};

}  // namespace streambp
