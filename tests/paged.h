// A cache of keys and values with its pages in another order than the tokens.
#pragma once

#include "kernels/attention_shape.h"

namespace streambp {

struct ShuffledPages {
  Index sequences, of_sequence;  // pages of each sequence
  std::vector<std::int32_t> tables;

  ShuffledPages(Index sequences, Index room) : sequences(sequences), of_sequence(ceil_div(room, kPage)) {
    for (Index s = 0; s < sequences; ++s) {
      for (Index p = 0; p < of_sequence; ++p)
        tables.push_back(static_cast<std::int32_t>(sequences * of_sequence - 1 - (p * sequences + s)));
    }
  }
  Index rows() const { return sequences * of_sequence * kPage; }
  Pages of(Index sequence) const { return {tables.data() + sequence * of_sequence}; }
  Index row(Index sequence, Index token) const { return token + of(sequence).shift(token); }

  // Copies the first tokens of a sequence out of the cache.
  template <class Device, class T>
  void gather(Device& dev, Matrix<T> tokens, Matrix<T> cache, Index sequence) const {
    for (Index page = 0; page < ceil_div(tokens.rows, kPage); ++page) {
      const Rows rows = piece(page, kPage, tokens.rows);
      const Index begin = row(sequence, rows.begin);
      dev.copy(tokens.slice(rows), cache.slice({begin, begin + rows.size()}));
    }
  }
};

}  // namespace streambp
