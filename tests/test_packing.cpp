// Packing: pieces of documents share token streams.
#include <set>

#include "tests/data_files.h"

namespace streambp {
namespace {

std::vector<std::vector<Index>> packs_of(Packing& packing, Index from, Index count) {
  std::vector<std::vector<Index>> all;
  for (Index n = from; n < from + count; ++n) {
    auto& pack = all.emplace_back();
    for (const PackedPiece& p : packing.pack(n)) pack.insert(pack.end(), {p.document, p.begin, p.length});
  }
  return all;
}

// Packs that best fit makes of the longest pieces first: the fullest packs, and the worst order to learn from.
Index packs_if_sorted(std::vector<Index> lengths, Index length) {
  std::ranges::sort(lengths, std::greater());
  std::multiset<Index> rooms;
  for (const Index need : lengths) {
    const auto found = rooms.lower_bound(need);
    const Index room = found == rooms.end() ? length : *found;
    if (found != rooms.end()) rooms.erase(found);
    rooms.insert(room - need);
  }
  return std::ssize(rooms);
}

TEST(Packing, UsesEveryTokenOncePerEpochAndFillsThePacks) {
  const std::vector<Index> lengths = natural_lengths(20'000);
  constexpr Index length = 2048;
  const auto pieces = cut(lengths, length, TooLong::split);
  Packing packing(pieces, length, 3);
  for (const Index epoch : {0, 1, 2}) {
    std::vector<Index> next(lengths.size(), 0);
    std::vector<std::vector<std::pair<Index, Index>>> spans(lengths.size());
    for (Index n = packing.packs(epoch); n < packing.packs(epoch + 1); ++n) {
      Index sum = 0;
      for (const PackedPiece& piece : packing.pack(n)) {
        sum += piece.length;
        spans[static_cast<std::size_t>(piece.document)].push_back({piece.begin, piece.length});
      }
      ASSERT_LE(sum, length);
      ASSERT_GT(sum, 0);
    }
    for (std::size_t d = 0; d < lengths.size(); ++d) {
      std::sort(spans[d].begin(), spans[d].end());
      Index end = 0;
      for (const auto& [begin, n] : spans[d]) {
        ASSERT_EQ(begin, end);
        end += n;
      }
      ASSERT_EQ(end, lengths[d]);
    }
  }
  std::vector<Index> cut_lengths;
  for (const PackedPiece& piece : pieces) cut_lengths.push_back(piece.length);
  EXPECT_LE(static_cast<double>(packing.packs()), 1.015 * static_cast<double>(packs_if_sorted(cut_lengths, length)));
}

// Packs of equal documents would make every step one of short or of long documents.
TEST(Packing, MixesLengths) {
  std::vector<Index> lengths(5000);
  for (std::size_t i = 0; i < lengths.size(); ++i) lengths[i] = 20 + static_cast<Index>(i * 280 / lengths.size());
  Packing packing(cut(lengths, 2048, TooLong::refuse), 2048, 1);
  double mean = 0, all = 0, between = 0;
  for (const Index length : lengths) mean += static_cast<double>(length) / static_cast<double>(lengths.size());
  for (Index n = 0; n < packing.packs(); ++n) {
    double sum = 0;
    const auto pack = packing.pack(n);
    for (const PackedPiece& piece : pack) {
      const double length = static_cast<double>(piece.length);
      sum += length - mean, all += (length - mean) * (length - mean);
    }
    between += sum * sum / static_cast<double>(pack.size());
  }
  EXPECT_LT(between / all, 0.2);  // 0.88 if the longest come first
  RecordProperty("between", std::to_string(between / all));
}

TEST(Packing, IsAFunctionOfItsArguments) {
  const std::vector<Index> lengths = natural_lengths(1000);
  const auto pieces = cut(lengths, 1000, TooLong::split);
  Packing packing(pieces, 1000, 3), again(pieces, 1000, 3), other(pieces, 1000, 4);
  const auto epoch = [](Packing& p, Index e) { return packs_of(p, p.packs(e), p.packs(e + 1) - p.packs(e)); };
  const auto all = packs_of(packing, 0, packing.packs(3));
  const Index late = packing.packs() + 7;
  EXPECT_EQ(packs_of(again, late, 30), std::vector(all.begin() + late, all.begin() + late + 30));  // a resumed run
  EXPECT_EQ(packs_of(packing, 0, 50), std::vector(all.begin(), all.begin() + 50));                 // then back again
  EXPECT_NE(epoch(other, 0), epoch(packing, 0));
  std::set<std::vector<Index>> first;  // packs of several pieces
  Index same = 0;
  for (const auto& pack : epoch(packing, 0))
    if (pack.size() > 3) first.insert(pack);
  for (const auto& pack : epoch(packing, 1)) same += first.contains(pack);
  EXPECT_GT(first.size(), 100u);
  EXPECT_LT(same, 10);
}

// The number of packs differs from epoch to epoch, and a run counts them all.
TEST(Packing, CountsThePacksOfEveryEpoch) {
  const auto pieces = cut(natural_lengths(1000), 1000, TooLong::split);
  Packing packing(pieces, 1000, 3);
  std::set<Index> sizes;
  for (Index e = 0; e < 20; ++e) sizes.insert(packing.packs(e + 1) - packing.packs(e));
  EXPECT_GT(sizes.size(), 1u);
  Mixture mixture({{Packing(pieces, 1000, 3), 1}}, 3);
  EXPECT_EQ(mixture.packs(20), static_cast<double>(packing.packs(20)));
  EXPECT_EQ(mixture.packs(2.5), 0.5 * static_cast<double>(packing.packs(2) + packing.packs(3)));
  EXPECT_NEAR(mixture.packs(1e9), 1e6 * mixture.packs(1000), 1);  // without counting them all
  for (const Index n : {packing.packs(19), packing.packs(), Index{3}})
    EXPECT_TRUE(
        std::ranges::equal(mixture.pack(n), packing.pack(n), {}, &PackedPiece::document, &PackedPiece::document));
}

TEST(Packing, SplitsTruncatesOrRefusesLongDocuments) {
  const std::vector<Index> lengths = {25, 10, 3};
  const auto count = [&](TooLong choice) { return Packing(cut(lengths, 10, choice), 10, 1).tokens(); };
  EXPECT_EQ(count(TooLong::split), 38);
  EXPECT_EQ(count(TooLong::truncate), 23);
  EXPECT_EQ(count(TooLong::drop), 13);
  EXPECT_ERROR(count(TooLong::refuse), "document 1 has 25 tokens, more than 10");
  EXPECT_ERROR(Packing({}, 10, 1), "no documents");
  EXPECT_ERROR(Packing({{0, 0, 0}}, 10, 1), "a piece has no tokens");
  EXPECT_ERROR(cut(lengths, 0, TooLong::split), "into pieces of 0 tokens");
}

// Packs may be filled to less than the longest document has.
TEST(Packing, GivesALongDocumentAPackAlone) {
  Packing packing(cut(std::vector<Index>{3, 25, 4, 2, 11}, 25, TooLong::refuse), 10, 1);
  std::multiset<std::multiset<Index>> packs;
  for (Index n = 0; n < packing.packs(); ++n) {
    std::multiset<Index> pack;
    for (const PackedPiece& piece : packing.pack(n)) pack.insert(piece.length);
    packs.insert(pack);
  }
  EXPECT_EQ(packs, (std::multiset<std::multiset<Index>>{{2, 3, 4}, {11}, {25}}));
}

TEST(Packing, OfLongPairsCutsTheLongerSide) {
  using Lengths = std::vector<Index>;
  const auto cut_to = [](const Lengths& pair, Index length, Index longest, TooLong choice = TooLong::truncate) {
    Lengths lengths;
    for (const PackedPiece& piece : cut_pairs(pair, length, longest, choice)) {
      EXPECT_EQ(piece.document, static_cast<Index>(lengths.size()));
      EXPECT_EQ(piece.begin, 0);
      lengths.push_back(piece.length);
    }
    return lengths;
  };
  EXPECT_EQ(cut_to({6, 4}, 10, 10, TooLong::refuse), (Lengths{6, 4}));
  EXPECT_EQ(cut_to({6, 4}, 10, 10, TooLong::split), (Lengths{6, 4}));
  EXPECT_EQ(cut_to({20, 4}, 10, 10), (Lengths{6, 4}));
  EXPECT_EQ(cut_to({4, 20}, 10, 10), (Lengths{4, 6}));
  EXPECT_EQ(cut_to({6, 5}, 10, 10), (Lengths{5, 5}));
  EXPECT_EQ(cut_to({20, 30}, 11, 11), (Lengths{5, 5}));
  EXPECT_EQ(cut_to({20, 4}, 20, 8), (Lengths{8, 4}));
  EXPECT_EQ(cut_to({20, 30}, 20, 8), (Lengths{8, 8}));
  for (const TooLong choice : {TooLong::refuse, TooLong::split}) {
    EXPECT_ERROR(cut_to({1, 1, 6, 5}, 10, 10, choice), "pair 2 has 11 tokens, more than 10 in all");
    EXPECT_ERROR(cut_to({9, 5}, 20, 8, choice), "more than 20 in all or 8 in a document");
  }
  EXPECT_EQ(cut_to({6, 4}, 10, 10, TooLong::drop), (Lengths{6, 4}));
  EXPECT_EQ(cut_to({6, 5}, 10, 10, TooLong::drop), (Lengths{}));
}

}  // namespace
}  // namespace streambp
