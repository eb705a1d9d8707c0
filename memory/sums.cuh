// Gradient sums: the gradient of one section of the parameter table (a layer, the head, the embedding), summed over the
// chunks of one micro-batch, then added to the gradient of the step. Frozen parameters have none: their tensors are empty.
//
// Every lane has its own sums, in float32 at least. finish() adds the lanes in order, and the result to the gradient:
//
//   gradient += (lane 0 + lane 1 + ...)
//
// With several ranks, every rank owns a shard of the gradient: some rows of each tensor. finish() sends the rows of the
// sums to their owners. The owner adds the streams of this round in the order of their micro-batches, and the lanes of
// each stream, one per rank, in order. So the bits are those of one process.
#pragma once

#include <utility>

#include "kernels/elementwise.cuh"
#include "model/parameters.cuh"
#include "parallel/exchange.cuh"

namespace streambp {

// Micro-batch `number` of the `count` of a step. A rank without one in the last round has a number of at least `count`.
struct MicroBatch {
  Index number = 0, count = 1;

  Index round(const Ranks& ranks) const { return number / ranks.streams(); }
  // Streams with a micro-batch in this round.
  Index streams(const Ranks& ranks) const { return std::min(ranks.streams(), count - round(ranks) * ranks.streams()); }
  bool exists() const { return number < count; }
};

// The gradient's tensors are allocated and zeroed on first use. In the simplest case, the first micro-batch on one rank
// and one lane with a gradient in float32, chunks add to the gradient itself.
template <class Device, class Gradient, class Section, class TableOf>
class Sums {
  template <class T>
  static T type_of(const Table<T>&);  // never called; names the type of a table's tensors
  using GradientTable = std::invoke_result_t<TableOf, Gradient&>;
  using SectionTable = std::invoke_result_t<TableOf, Section&>;
  using G = decltype(type_of(std::declval<GradientTable&>()));
  using A = decltype(type_of(std::declval<SectionTable&>()));

 public:
  // place: where the gradient's matrices are that can be far
  Sums(Device& dev, const Ranks& ranks, MicroBatch micro_batch, Gradient& gradient, Place place, const Section& empty,
       TableOf table_of)
      : dev(dev),
        ranks(ranks),
        micro_batch(micro_batch),
        scope(dev.scope()),
        gradient(trained(table_of(gradient))),
        sections(static_cast<std::size_t>(micro_batch.exists() ? ranks.lanes : 0), empty) {
    for (auto& e : this->gradient) {
      const Index rows = shard(e.parameter.rows, ranks.all).size();
      if (place == Place::far && e.far) {
        first.push_back(!e.is_far());
        if (first.back()) *e.far = allocate_far<G>(dev, rows, e.parameter.cols, Kind::gradients, End::top);
        continue;
      }
      first.push_back(false);
      if (!*e.matrix) *e.matrix = zeros<G>(rows, e, Kind::gradients, End::top);
    }
    const bool direct = std::is_same_v<G, A> && ranks.all.size == 1 && ranks.lanes == 1 && micro_batch.number == 0 &&
                        place == Place::near;
    for (Section& section : sections) {
      lanes.push_back(trained(table_of(section)));
      for (std::size_t i = 0; i < lanes.back().size(); ++i) {
        auto& e = lanes.back()[i];
        if constexpr (std::is_same_v<G, A>) {
          if (direct) *e.matrix = *this->gradient[i].matrix;
        }
        if (!direct) *e.matrix = zeros<A>(e.parameter.rows, e, Kind::sums, End::bottom);
      }
    }
    added = direct;
  }
  Sums(const Sums&) = delete;

  // The sums of each lane.
  std::span<Section> of_lanes() { return sections; }
  Section& of_lane(Index lane) { return sections[static_cast<std::size_t>(lane)]; }

  // Call when all chunks of this micro-batch have been added.
  void finish() {
    if (added) return;
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      for (std::size_t lane = 1; lane < lanes.size(); ++lane) add(dev, *lanes[0][i].matrix, *lanes[lane][i].matrix);
    }
    if (ranks.all.size > 1) return exchange_shards();
    for (std::size_t i = 0; i < gradient.size(); ++i)
      add_to_gradient(i, [&](Matrix<G> m) { add(dev, m, *lanes[0][i].matrix); });
  }

 private:
  template <class T, class E>
  Matrix<T> zeros(Index rows, const E& entry, Kind kind, End end) {
    const auto matrix = allocate<T>(dev, rows, entry.parameter.cols, kind, end);
    zero(dev, matrix);
    return matrix;
  }

  // Calls add with the gradient's matrix i. From far memory it is fetched for that.
  template <class Add>
  void add_to_gradient(std::size_t i, Add&& add) {
    if (!gradient[i].is_far()) return add(*gradient[i].matrix);
    auto inner = dev.scope();
    const FarMatrix<G> far = *gradient[i].far;
    const auto near = allocate<G>(dev, far.rows, far.cols, Kind::gradients);
    if (first[i]) {
      zero(dev, near);
    } else {
      dev.get(near, far).wait();
    }
    add(near);
    dev.put(far, near).wait();
  }

  void exchange_shards() {
    Transfers transfers;
    std::vector<std::vector<Matrix<A>>> shards;  // of each tensor: what each rank has summed
    const Index computing = micro_batch.streams(ranks) * ranks.sequence.size;
    for (std::size_t i = 0; i < gradient.size(); ++i) {
      const Parameter& p = gradient[i].parameter;
      const Rows mine = shard(p.rows, ranks.all);
      shards.emplace_back();
      for (Index rank = 0; rank < ranks.all.size; ++rank) {
        const bool me = rank == ranks.all.rank;
        if (!me && micro_batch.exists())
          transfers.send(rank, lanes[0][i].matrix->slice(shard(p.rows, ranks.all, rank)));
        if (rank >= computing) continue;
        shards[i].push_back(me ? lanes[0][i].matrix->slice(mine) : allocate<A>(dev, mine.size(), p.cols, Kind::sums));
        if (!me) transfers.receive(rank, shards[i].back());
      }
    }
    exchange(dev, "share gradients", ranks.all, transfers);
    for (std::size_t i = 0; i < gradient.size(); ++i)
      add_to_gradient(i, [&](Matrix<G> m) { add_in_order(m, shards[i]); });
  }

  // For each stream: gradient += (lane 0 + lane 1 + ...)
  void add_in_order(Matrix<G> gradient, const std::vector<Matrix<A>>& of_ranks) {
    const auto lanes_of_stream = static_cast<std::size_t>(ranks.sequence.size);
    for (std::size_t rank = 0; rank < of_ranks.size(); rank += lanes_of_stream) {
      for (std::size_t lane = 1; lane < lanes_of_stream; ++lane) add(dev, of_ranks[rank], of_ranks[rank + lane]);
      add(dev, gradient, of_ranks[rank]);
    }
  }

  Device& dev;
  const Ranks& ranks;
  const MicroBatch micro_batch;
  decltype(std::declval<Device&>().scope()) scope;
  GradientTable gradient;
  std::vector<Section> sections;    // of each lane
  std::vector<SectionTable> lanes;  // their tables
  std::vector<bool> first;          // of each tensor: nothing has been added to its gradient in far memory
  bool added = false;               // chunks add to the gradient itself
};

}  // namespace streambp
