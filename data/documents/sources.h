// The training loop's view of the data: micro-batches for training, and held-out batches for evaluation. Batches hold
// bytes of a text, or packed documents. For preferences, documents 2i and 2i + 1 of a batch are a pair, the chosen one
// first.
#pragma once

#include "data/documents/mixture.h"
#include "data/documents/text.h"

namespace streambp {

struct Source {
  std::string description, fingerprint;
  std::function<Batch(Index step, Index micro_batch)> batch;
  std::vector<Batch> evaluation;
};

constexpr Index kEvaluationBatches = 8;

// Micro-batches of `documents` documents of `length` bytes.
inline Source text_source(std::shared_ptr<const Text> text, const std::string& name, std::uint64_t seed,
                          Index documents, Index length) {
  Source source{name, text->fingerprint(), {}, {}};
  source.batch = [=](Index step, Index i) { return text->batch(seed, step, i, documents, length); };
  for (Index i = 0; i < kEvaluationBatches && text->holds_out(); ++i) {
    source.evaluation.push_back(text->evaluation_batch(i, kEvaluationBatches, documents, length));
  }
  return source;
}

struct DocumentSettings {
  double evaluation_fraction;
  Index length;   // rows of a stream, which a document or a pair must fit into
  Index longest;  // tokens in a piece of a document
  Index packs, micro_batches;
  std::uint64_t seed;
  TooLong too_long;    // but texts (TokenPart::is_text) are always split
  bool scaled = true;  // divide advantages by the standard deviation of their group
  Index pack = 0;      // rows that a pack is filled to; a longer document or pair is a pack alone; 0: `length`
  // What to do about documents of up to so many tokens, for the message that refuses them.
  std::function<std::string(Index tokens)> remedy = {};
  DocumentLayout layout = {};
};

class Documents {
 public:
  Documents(TokenFile file, const DocumentSettings& s) : file(std::move(file)), settings(s) {
    const Index together = this->file.together();
    const auto unit = [&](const PackedPiece& piece) { return piece.document / together; };
    count_too_long();
    const auto pieces = pieces_with_targets();
    left_out = this->file.documents() / together - (s.too_long == TooLong::drop ? too_long : 0);
    for (std::size_t i = 0; i < pieces.size(); ++i) left_out -= i == 0 || unit(pieces[i]) != unit(pieces[i - 1]);
    auto is_held_out = [&](const PackedPiece& piece) {
      if (this->file.held_out > 0) return piece.document >= this->file.training_documents();
      return Random(s.seed, 0xe7a1).uniform(holdout_key(piece.document)) < s.evaluation_fraction;
    };
    std::vector<PackedPiece> training, evaluation;
    for (const PackedPiece& piece : pieces) (is_held_out(piece) ? evaluation : training).push_back(piece);
    if (training.empty() && this->file.held_out == 0) std::swap(training, evaluation);
    packing.emplace(parts_of(training), s.seed);
    if (!evaluation.empty()) held_out.emplace(evaluation, s.length, s.seed, together, s.layout);
    evaluate();
  }

  // Adds the reference model's log-prob of each token's target to all batches, held-out ones included. Completions
  // without old log-probs are treated as sampled by the reference model.
  void attach(std::span<const float> reference) {
    require(std::cmp_equal(reference.size(), file.token_count()), file.name(), ": has ", file.token_count(),
            " tokens, but there are ", reference.size(), " reference log-probs");
    this->reference.assign(reference.begin(), reference.end());
    evaluate();
  }

  // The steps of so many epochs.
  double steps(double epochs = 1) { return packing->packs(epochs) / packs_of_step(); }
  double tokens_per_step() { return packing->tokens() / steps(); }
  // Whether most documents share a pack with others.
  bool share_packs() { return 2 * packing->packs() < static_cast<double>(file.documents() / file.together()); }

  // Steps count from one. Each step takes the next packs.
  Batch batch(Index step, Index micro_batch) {
    const Index first = ((step - 1) * settings.micro_batches + micro_batch) * settings.packs;
    Batch batch;
    for (Index n = first; n < first + settings.packs; ++n) append(batch, file, packing->pack(n), known());
    return batch;
  }

  // How a part of data with weights is used: its share of an epoch's tokens, and how often an epoch uses its documents.
  double share(std::size_t part) const { return packing->share(part); }
  double passes(std::size_t part) const { return packing->passes(part); }

  const TokenFile file;
  const DocumentSettings settings;
  std::vector<Batch> evaluation;
  Index evaluation_tokens = 0;
  Index cut_off = 0;   // documents that lose their end
  Index too_long = 0;  // documents, pairs or completions that are split, truncated or dropped, but not texts
  Index left_out;      // of the others, those without a target after cutting, and pairs that are equal after cutting

 private:
  double packs_of_step() const { return static_cast<double>(settings.packs * settings.micro_batches); }

  Known known() const {
    const bool sampled_by_it = file.groups() && file.old().empty();
    return {reference, sampled_by_it ? std::span<const float>(reference) : file.old(), settings.scaled};
  }

  // Documents with the same key are held out together: the two of a pair, and all completions of a prompt.
  std::uint64_t holdout_key(Index document) const {
    if (!file.groups()) return static_cast<std::uint64_t>(document / file.together());
    const auto learn = file.learn(document);
    std::uint64_t hash = 0;
    for (std::size_t t = 0; t == 0 || !learn[t]; ++t) {
      hash = mix(hash ^ static_cast<std::uint64_t>(file.tokens(document)[t]));
    }
    return hash;
  }

  // One part, unless the file has weights.
  std::vector<Mixture::Part> parts_of(const std::vector<PackedPiece>& pieces) const {
    std::vector<Mixture::Part> parts;
    auto next = pieces.begin();
    Index end = file.mixes() ? 0 : file.training_documents();
    for (const TokenPart& part : std::span(file.parts).first(file.parts.size() - file.held_out)) {
      if (file.mixes()) end += part.documents;
      const auto begin = next;
      while (next != pieces.end() && next->document < end) ++next;
      require(begin != next, part.name,
              ": none of its documents has a target within --length, or all are held out; use ",
              "a larger --length or a smaller --eval-fraction");
      const Index pack = settings.pack > 0 ? settings.pack : settings.length;
      parts.push_back({Packing({begin, next}, pack, settings.seed + parts.size(), file.together(), settings.layout),
                       file.mixes() ? part.weight : 1});
      if (!file.mixes()) break;
    }
    return parts;
  }

  // The tokens of a document or a pair, at most.
  Index length_of_unit() const { return settings.layout.tokens_that_fit(settings.length, file.together()); }

  // Counts what does not fit, and refuses it unless the settings say what to do with it.
  void count_too_long() {
    const Index together = file.together();
    Index longest = 0, document = 0;
    for (const TokenPart& part : file.parts) {
      const Index end = document + part.documents;
      for (; document < end; document += together) {
        Index all = 0, most = 0;
        for (Index i = 0; i < together; ++i)
          all += file.length(document + i), most = std::max(most, file.length(document + i));
        const bool fits = all <= length_of_unit() && most <= settings.longest;
        if (!fits && !part.is_text()) ++too_long, longest = std::max(longest, all);
      }
    }
    const bool splits = settings.too_long == TooLong::split && file.kind() == DataKind::documents;
    if (too_long == 0 || splits || settings.too_long == TooLong::truncate || settings.too_long == TooLong::drop) return;
    const std::string remedy = settings.remedy ? settings.remedy(longest + settings.layout.most_unused(together)) : "";
    fail(file.name(), ": ", too_long, " of ", file.documents() / together, " ",
         kDataUnits[static_cast<int>(file.kind())], "s ", too_long == 1 ? "is" : "are", " longer than the ",
         file.preferences() ? length_of_unit() : settings.longest, " tokens of a stream, the longest has ", longest,
         "; ", remedy, remedy.empty() ? "" : ", or ", "say with --too-long what to do with them: ",
         file.kind() == DataKind::documents ? "split, truncate or drop" : "truncate or drop");
  }

  // The pieces of all documents.
  std::vector<PackedPiece> all_pieces() const {
    const std::vector<Index> lengths = file.lengths();
    if (file.preferences()) return cut_pairs(lengths, length_of_unit(), settings.longest, settings.too_long);
    std::vector<PackedPiece> all;
    Index first = 0;
    for (const TokenPart& part : file.parts) {
      const auto of_part = std::span(lengths).subspan(first, part.documents);
      for (const PackedPiece& piece :
           cut(of_part, settings.longest, part.is_text() ? TooLong::split : settings.too_long))
        all.push_back({first + piece.document, piece.begin, piece.length});
      first += part.documents;
    }
    return all;
  }

  std::vector<PackedPiece> pieces_with_targets() {
    const std::vector<PackedPiece> all = all_pieces();
    const auto ends = [&](const PackedPiece& piece) {
      return piece.begin + piece.length == file.length(piece.document);
    };
    const Index dropped = settings.too_long == TooLong::drop ? too_long * file.together() : 0;
    cut_off = file.documents() - dropped - std::ranges::count_if(all, ends);
    std::vector<PackedPiece> pieces;
    for (auto unit = all.begin(); unit != all.end(); unit += file.together()) {
      const auto next = unit + file.together();
      const bool differ = !file.preferences() || !std::ranges::equal(seen(unit[0]), seen(unit[1]));
      if (differ && std::all_of(unit, next, [&](auto& piece) { return has_target(piece); })) {
        pieces.insert(pieces.end(), unit, next);
      }
    }
    require(!pieces.empty(), "no document has a target within --length; use a larger --length");
    return pieces;
  }

  // The end of the tokens that the piece reads or predicts.
  Index reach(const PackedPiece& piece) const {
    return std::min(piece.begin + piece.length + 1, file.length(piece.document));
  }
  std::span<const std::int32_t> seen(const PackedPiece& piece) const {
    return file.tokens(piece.document).first(reach(piece));
  }
  bool has_target(const PackedPiece& piece) const {
    const auto learn = file.learn(piece.document);
    return std::any_of(learn.begin() + piece.begin + 1, learn.begin() + std::max(reach(piece), piece.begin + 1),
                       [](std::uint8_t mark) { return mark; });
  }

  void evaluate() {
    evaluation.clear(), evaluation_tokens = 0;
    // Data that is given for it is evaluated as a whole.
    const Index most = file.held_out > 0 ? INT64_MAX : kEvaluationBatches * settings.packs;
    for (Index n = 0; held_out && n < std::min(held_out->packs(), most); ++n) {
      if (n % settings.packs == 0) evaluation.emplace_back();
      append(evaluation.back(), file, held_out->pack(n), known());
      for (const PackedPiece& piece : held_out->pack(n)) evaluation_tokens += piece.length;
    }
  }

  std::optional<Mixture> packing;
  std::optional<Packing> held_out;
  std::vector<float> reference;  // empty: unknown
};

inline Source document_source(std::shared_ptr<Documents> documents, const std::string& description,
                              const std::string& fingerprint) {
  return {description, fingerprint, [=](Index step, Index i) { return documents->batch(step, i); },
          documents->evaluation};
}

}  // namespace streambp
