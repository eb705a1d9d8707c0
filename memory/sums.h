// Gradient sums: the gradient of one section of the parameter table (a layer, the head, the embedding), summed over the
// chunks of one micro-batch, then added to the gradient of the step. Frozen parameters have none: their tensors are empty.
//
// What a lane is. Floating-point sums depend on their order, and ranks that share a stream each sum over their own rows.
// So that one process can repeat the additions of several, the tiles of rows are dealt out in turn to lanes, and every lane
// sums only its own. Two ranks have the bits of one process with two lanes:
//
//   tile of rows          0    1    2    3    4    5
//   two ranks             r0   r1   r0   r1   r0   r1        each rank is one lane
//   one, --lanes 2        l0   l1   l0   l1   l0   l1        the same sums, in one process
//
//   gradient += lane 0 + lane 1
//
// The sums of a tensor in all lanes are one matrix, one lane below the other. Products and sums over rows know from its
// shape how many lanes there are (for_each_tile_of_lanes), and so the layers above them know nothing of lanes.
//
// A tied head is the embedding's table, and both add to its gradient. With one micro-batch and one lane they add to the same
// tensor. Otherwise the head's has a tensor for itself, head.weight, until the trainer adds it after the last
// micro-batch: so the order of additions does not depend on the number of ranks.
//
// Sums are in float32 at least. finish() adds the lanes in order, and the result to the gradient. With several ranks,
// every rank owns a shard of the gradient: some rows of each tensor. finish() sends the rows of the sums to their owners.
// The owner adds the streams of this round in the order of their micro-batches, and the lanes of each stream in order.
#pragma once

#include <map>
#include <memory>
#include <utility>

#include "kernels/elementwise.cuh"
#include "model/parameters.h"
#include "parallel/exchange.h"

namespace streambp {

// Micro-batch `number` of the `count` of a step. number >= count: this rank has none in the last round.
struct MicroBatch {
  Index number = 0, count = 1;

  Index round(const Ranks& ranks) const { return number / ranks.streams(); }
  // Streams with a micro-batch in this round.
  Index streams(const Ranks& ranks) const { return std::min(ranks.streams(), count - round(ranks) * ranks.streams()); }
  bool exists() const { return number < count; }
};

// The gradient of a step, and the micro-batch that is added to it.
template <class G>
struct StepGradient {
  Tensors<G>& tensors;
  MicroBatch micro_batch = {};
  Place place = Place::near;  // of the matrices of layers
};

// The sums of one section, in its tensors. The gradient's tensors are allocated and zeroed on first use. In the simplest
// case, the first micro-batch on one rank and one lane with a gradient in float32, chunks add to the gradient itself.
template <class Device, class G, class Section>
class SectionSums {
  using A = Accumulator<G>;

 public:
  // gradient: the section's table of the step's gradient. table_of(section): the same table of the sums.
  template <class TableOf>
  SectionSums(Device& dev, const Ranks& ranks, const StepGradient<G>& step, const Table<G>& gradient,
              const Section& empty, TableOf&& table_of)
      : section(empty),
        dev_(dev),
        ranks_(ranks),
        micro_batch_(step.micro_batch),
        scope_(dev.scope()),
        gradient_(trained(gradient)),
        sums_(trained(table_of(section))),
        direct_(std::is_same_v<G, A> && ranks.all.size == 1 && ranks.lanes == 1 && micro_batch_.number == 0 &&
                step.place == Place::near) {
    open_gradient(step.place);
    if constexpr (std::is_same_v<G, A>) {
      if (direct_)
        for (std::size_t i = 0; i < sums_.size(); ++i) *sums_[i].matrix = *gradient_[i].matrix;
    }
    if (direct_ || !micro_batch_.exists()) return;
    std::vector<Matrix<A>> all;
    for (const Entry<A>& e : sums_) {
      const Parameter& p = e.parameter;
      all.push_back(*e.matrix = allocate<A>(dev, ranks.lanes * p.rows, p.cols, Kind::sums));
    }
    zero(dev, all);
  }
  SectionSums(const SectionSums&) = delete;

  Section section;  // backward adds to its tensors

  // Call when all chunks of this micro-batch have been added.
  void finish() {
    if (direct_) return;
    for (Index lane = 1; lane < ranks_.lanes && micro_batch_.exists(); ++lane) add_each(sums_of(0), sums_of(lane));
    add_in_order(ranks_.all.size > 1 ? exchanged_shards() : std::vector<Matrices>{sums_of(0)});
  }

 private:
  using Matrices = std::vector<Matrix<A>>;  // of each tensor

  static Matrix<A> lane_of(const Entry<A>& e, Index lane = 0) { return e.matrix->lane(lane, e.parameter.rows); }
  Matrices sums_of(Index lane) const {
    Matrices sums;
    for (const Entry<A>& e : sums_) sums.push_back(lane_of(e, lane));
    return sums;
  }

  // On first use: this rank's shards of the tensors of the gradient.
  void open_gradient(Place place) {
    std::vector<Matrix<G>> opened;
    for (const Entry<G>& e : gradient_) {
      const Index rows = shard(e.parameter.rows, ranks_.all).size(), cols = e.parameter.cols;
      const bool far = place == Place::far && e.far, first = far && !e.is_far();
      first_.push_back(first);
      if (first) *e.far = allocate_far<G>(dev_, rows, cols, Kind::gradients, End::top);
      if (far) continue;
      if (e.wide && !*e.wide) zero(dev_, *e.wide = allocate<A>(dev_, rows, cols, Kind::gradients, End::top));
      if (!e.wide && !*e.matrix) opened.push_back(*e.matrix = allocate<G>(dev_, rows, cols, Kind::gradients, End::top));
    }
    zero(dev_, opened);
  }

  // What each rank has summed of this rank's shards.
  std::vector<Matrices> exchanged_shards() {
    Transfers transfers;
    const Group& all = ranks_.all;
    const Index computing = micro_batch_.streams(ranks_) * ranks_.sequence.size;
    std::vector<Matrices> of_ranks(static_cast<std::size_t>(computing));
    for (const Entry<A>& e : sums_) {
      const Parameter& p = e.parameter;
      const Rows mine = shard(p.rows, all);
      for (Index rank = 0; rank < all.size; ++rank) {
        const bool me = rank == all.rank;
        if (!me && micro_batch_.exists()) transfers.send(rank, lane_of(e).slice(shard(p.rows, all, rank)));
        if (rank >= computing) continue;
        const auto sum = me ? lane_of(e).slice(mine) : allocate<A>(dev_, mine.size(), p.cols, Kind::sums);
        of_ranks[static_cast<std::size_t>(rank)].push_back(sum);
        if (!me) transfers.receive(rank, sum);
      }
    }
    exchange(dev_, "share gradients", all, transfers);
    return of_ranks;
  }

  // For each stream: gradient += (lane 0 + lane 1 + ...). Ranks that share a stream are its lanes.
  void add_in_order(const std::vector<Matrices>& of_ranks) {
    const auto lanes_of_stream = static_cast<std::size_t>(ranks_.sequence.size);
    for (std::size_t rank = 0; rank < of_ranks.size(); rank += lanes_of_stream) {
      for (std::size_t lane = 1; lane < lanes_of_stream; ++lane) add_each(of_ranks[rank], of_ranks[rank + lane]);
      std::vector<Operands<G, A>> near;
      for (std::size_t i = 0; i < gradient_.size(); ++i)
        if (!gradient_[i].is_far() && !gradient_[i].wide) near.push_back({*gradient_[i].matrix, of_ranks[rank][i]});
      add(dev_, near);
      for (std::size_t i = 0; i < gradient_.size(); ++i)
        if (gradient_[i].wide) add(dev_, *gradient_[i].wide, of_ranks[rank][i]);
    }
    for (std::size_t i = 0; i < gradient_.size(); ++i) {
      if (!gradient_[i].is_far()) continue;
      in_near_memory(i, [&](Matrix<G> gradient) {
        for (std::size_t rank = 0; rank < of_ranks.size(); rank += lanes_of_stream)
          add(dev_, gradient, of_ranks[rank][i]);
      });
    }
  }

  // y += x for each tensor
  void add_each(const Matrices& y, const Matrices& x) {
    std::vector<Operands<A, A>> all;
    for (std::size_t i = 0; i < y.size(); ++i) all.push_back({y[i], x[i]});
    add(dev_, all);
  }

  // Calls add with the gradient's matrix i, which comes from far memory and returns there.
  template <class Add>
  void in_near_memory(std::size_t i, Add&& add) {
    auto inner = dev_.scope();
    const FarMatrix<G> far = *gradient_[i].far;
    const auto near = allocate<G>(dev_, far.rows, far.cols, Kind::gradients);
    if (first_[i]) {
      zero(dev_, near);
    } else {
      dev_.get(near, far).wait();
    }
    add(near);
    dev_.put(far, near).wait();
  }

  Device& dev_;
  const Ranks& ranks_;
  const MicroBatch micro_batch_;
  decltype(std::declval<Device&>().scope()) scope_;
  const Table<G> gradient_;
  const Table<A> sums_;      // of `section`
  const bool direct_;        // chunks add to the gradient itself
  std::vector<bool> first_;  // of each tensor: nothing has been added to its gradient in far memory
};

// Which sections have sums at a time: the one that is computed, or all layers and the head.
enum class OpenSums { one, all };

// The sums of each section of a step's gradient. Those of a section are open while it is computed. If several blocks of rows
// add to each of them, those of all layers and of the head are open until finish().
template <class Device, class G>
class GradientSums {
  using A = Accumulator<G>;

 public:
  // lowest: the lowest layer that backward reaches
  GradientSums(Device& dev, const Config& config, const Ranks& ranks, const StepGradient<G>& step, OpenSums open,
               Index lowest)
      : dev_(dev), c_(config), ranks_(ranks), step_(step) {
    if (open == OpenSums::one) return;
    head_.reset(new OtherSums(of_head()));
    for (Index l = c_.layers; l-- > lowest;) layers_.emplace(l, new LayerSums(of_layer(l)));
  }

  // Calls add(section) with the sums of a section.
  template <class F>
  void layer(Index l, F&& add) {
    if (const auto open = layers_.find(l); open != layers_.end()) return add(open->second->section);
    auto sum = of_layer(l);
    add(sum.section);
    sum.finish();
  }
  template <class F>
  void head(F&& add) {
    if (head_) return add(head_->section);
    auto sum = of_head();
    add(sum.section);
    sum.finish();
  }
  template <class F>
  void embedding(F&& add) {
    auto sum = near([&](auto& section) { return embedding_table(c_, section); });
    add(sum.section);
    sum.finish();
  }
  // Finishes the sums that are open: the head, then the layers, last to first.
  void finish() {
    if (head_) head_->finish();
    for (auto& [l, sum] : layers_) sum->finish();
  }

 private:
  using LayerSums = SectionSums<Device, G, Layer<A>>;
  using OtherSums = SectionSums<Device, G, Tensors<A>>;

  LayerSums of_layer(Index l) const {
    return {dev_,       ranks_,
            step_,      layer_table(c_, l, step_.tensors.layers[static_cast<std::size_t>(l)]),
            Layer<A>{}, [&](Layer<A>& section) { return layer_table(c_, l, section); }};
  }
  OtherSums of_head() const {
    const bool several_additions = step_.micro_batch.count > 1 || ranks_.lanes * ranks_.sequence.size > 1;
    const TiedHead tied = several_additions ? TiedHead::apart : TiedHead::with_embedding;
    return near([&](auto& section) { return head_gradient_table(c_, section, tied); });
  }
  template <class TableOf>
  OtherSums near(TableOf&& table_of) const {
    StepGradient<G> step = step_;
    step.place = Place::near;
    return {dev_, ranks_, step, table_of(step.tensors), Tensors<A>(c_), table_of};
  }

  Device& dev_;
  const Config& c_;
  const Ranks& ranks_;
  const StepGradient<G> step_;
  std::unique_ptr<OtherSums> head_;
  std::map<Index, std::unique_ptr<LayerSums>, std::greater<>> layers_;
};

}  // namespace streambp
