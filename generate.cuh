// Sampling: the forward pass of the walk, one token at a time, with the keys and values of all layers kept.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "streambp.cuh"

namespace streambp {

// Reads a text token by token; what it has read stays as keys and values.
template <class Device, class T>
class Generator {
 public:
  Generator(Device& dev, const Model<T>& model, Index max_length)
      : dev(dev),
        model(model),
        scope(dev.scope()),
        stream(allocate_stream(dev, max_length)),
        walk(dev, model, stream, Schedule{Keep::nothing, kTile, kTile}) {
    for (Index l = 0; l < model.config.layers; ++l) cache.push_back(walk.template allocate_keys_values<T>());
    x = dev.template allocate<T>(1, model.config.hidden, Kind::chunk);
    activations = walk.allocate_activations(1);
  }

  // Reads the next token (null on Plan) and puts the logits of the one after it into `logits`.
  void read(const std::int32_t* token, std::vector<T>& logits) {
    const Rows row = {length, length + 1};
    require(length < stream.size(), "the text is longer than the ", stream.size(), " tokens it was given room for");
    if (token) {
      const auto position = static_cast<std::int32_t>(length), begin = 0;
      dev.upload(stream.tokens.columns(length, 1), token);
      dev.upload(stream.positions.columns(length, 1), &position);
      dev.upload(stream.key_begin.columns(length, 1), &begin);
    }
    embedding(dev, x, stream.tokens.columns(length, 1), stream.positions.columns(length, 1), model.weights.embedding,
              model.weights.positions, model.config.embedding_scale);
    for (std::size_t l = 0; l < cache.size(); ++l) {
      walk.layer_forward(static_cast<Index>(l), x, x, cache[l], activations, row);
    }
    auto logits_scope = dev.scope();
    const Matrix<T> row_logits = walk.logits(x);
    if (token) logits = to_host(dev, row_logits);
    ++length;
  }

 private:
  Device& dev;
  const Model<T>& model;
  decltype(std::declval<Device&>().scope()) scope;
  Stream stream;
  Walk<Device, T> walk;
  std::vector<KeysValues<T>> cache;
  Matrix<T> x;
  Activations<T> activations;
  Index length = 0;
};

// Draws from softmax(logits / temperature); temperature 0 takes the largest.
template <class T>
std::int32_t draw(const std::vector<T>& logits, double temperature, double uniform) {
  const auto largest = std::max_element(logits.begin(), logits.end());
  if (temperature <= 0) return static_cast<std::int32_t>(largest - logits.begin());
  std::vector<double> p;
  double sum = 0;
  for (T x : logits)
    sum += p.emplace_back(std::exp((static_cast<double>(x) - static_cast<double>(*largest)) / temperature));
  double left = uniform * sum;
  std::size_t token = 0;
  while (token + 1 < p.size() && (left -= p[token]) > 0) ++token;
  return static_cast<std::int32_t>(token);
}

}  // namespace streambp
