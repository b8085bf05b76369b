// The head with the choice of tokens: edits, grammars and what is told, written down once more, plainly.
#include <functional>

#include "checks.h"

namespace check {
namespace {

constexpr int kRows = 24, kWords = 16, kVocabulary = 1003, kWidth = 64;

struct Edit {
  pt::Operation operation;
  std::vector<int32_t> ids;
  std::vector<float> values;
};
using Edits = std::vector<std::vector<Edit>>;

// Every operation, in rows of up to five; every fourth row has none.
Edits some_edits(plain::Random& dice) {
  Edits rows(kRows);
  for (int r = 0; r < kRows; r++)
    for (uint64_t i = 0; r % 4 && i < 1 + dice.bits() % 5; i++) {
      Edit e{pt::Operation(dice.bits() % pt::kOperations), {}, {}};
      const bool force = e.operation == pt::Operation::Force, allow = e.operation == pt::Operation::Allow;
      const uint64_t most = force ? 1 : allow ? 2500 : 300;
      for (uint64_t n = dice.bits() % most + force; n-- > 0;)
        e.ids.push_back(int32_t(dice.bits() % kVocabulary));
      for (size_t n = e.operation == pt::Operation::Add ? e.ids.size() : 1; n-- > 0;)
        e.values.push_back(0.5f + float(dice.uniform()));
      rows[r].push_back(e);
    }
  return rows;
}

// As one list for the engine.
struct Flat {
  std::vector<pt::EditView> list;
  std::vector<int32_t> starts{0}, ids;
  std::vector<float> values;
  explicit Flat(const Edits& rows) {
    for (const auto& row : rows) {
      for (const Edit& e : row) {
        list.push_back({e.operation, int(ids.size()), int(e.ids.size()), int(values.size())});
        ids.insert(ids.end(), e.ids.begin(), e.ids.end());
        values.insert(values.end(), e.values.begin(), e.values.end());
      }
      starts.push_back(int32_t(list.size()));
    }
  }
  pt::EditsView view() const {
    return {list.data(), starts.data(), ids.data(), values.data(), int(ids.size())};
  }
};

void edit(const std::vector<Edit>& edits, const uint64_t* bits, float* row) {
  std::vector<bool> may(kVocabulary);
  for (int t = 0; t < kVocabulary; t++) may[t] = bits[t / 64] >> t % 64 & 1;
  for (const Edit& e : edits) {
    std::vector<int> times(kVocabulary);
    for (int32_t id : e.ids) times[id]++;
    for (int t = 0; t < kVocabulary; t++) {
      const bool named = times[t] > 0;
      float& x = row[t];
      switch (e.operation) {
        case pt::Operation::Allow: may[t] = may[t] && named; break;
        case pt::Operation::Forbid: may[t] = may[t] && !named; break;
        case pt::Operation::Force: may[t] = named, x = named ? e.values[0] : x; break;
        case pt::Operation::Add:
          for (size_t i = 0; i < e.ids.size(); i++) x += e.ids[i] == t ? e.values[i] : 0.0f;
          break;
        case pt::Operation::Repetition:
          if (named) x = x > 0 ? x / e.values[0] : x * e.values[0];
          break;
        case pt::Operation::Frequency:
          if (named) x -= e.values[0] * float(times[t]);
          break;
        case pt::Operation::Presence:
          if (named) x -= e.values[0];
          break;
      }
    }
  }
  for (int t = 0; t < kVocabulary; t++)
    if (!may[t]) row[t] = -INFINITY;
}

int best(const float* row) { return int(std::max_element(row, row + kVocabulary) - row); }

}  // namespace

void choices(Report& report) {
  plain::Random dice(33);
  const plain::Weights weights(pt::Source::Q8_0, kVocabulary, kWidth, 34);
  const std::vector<float> x = dice.normals(size_t(kRows) * kWidth), norm = dice.normals(kWidth);
  const Edits edits = some_edits(dice);
  const Flat flat(edits);
  std::vector<uint64_t> bits(kRows * kWords, UINT64_MAX);
  for (int r = 0; r < kRows; r += 3)
    for (int w = 0; w < kWords; w++) bits[r * kWords + w] = r % 2 ? dice.bits() : w == r % kWords ? 255 : 0;
  std::vector<int32_t> top(kRows), candidates(kRows), top_k(kRows), ids(kRows);
  std::vector<float> temperature(kRows), top_p(kRows, 0.9f), min_p(kRows), uniform(kRows), values(kRows);
  for (int r = 0; r < kRows; r++) {
    top[r] = r % 5 == 1 ? 3 : -1, candidates[r] = r % 7 == 2 ? 6 : 0;
    temperature[r] = r % 2 ? 0.0f : 0.8f, uniform[r] = float(dice.uniform());
  }
  std::vector<int32_t> top_ids(kRows * 3), best_ids(kRows * 6), first;
  std::vector<float> lse(kRows), logprob(kRows), top_values(kRows * 3), best_values(kRows * 6);

  for (const float cap : {0.0f, 4.0f}) {
    bool equal = true, right = true, told = true;
    first.clear();
    for (auto& e : report.engines) {
      const auto head = fixture::packed(*e, weights);
      const pt::HeadView view{norm.data(),  cap > 0 ? norm.data() : nullptr, 1e-5f, cap, head->matrix,
                              head->longest};
      const pt::Rows rows{const_cast<float*>(x.data()), kRows, kWidth};
      std::vector<float> logits(size_t(kRows) * kVocabulary);
      e->logits(rows, view, logits.data());
      e->choose(rows, view,
                {{temperature.data(), top_p.data(), min_p.data(), uniform.data(), top_k.data()},
                 {bits.data(), kWords},
                 flat.view(),
                 {top.data(), candidates.data(), 3, 6, lse.data(), logprob.data(), top_ids.data(),
                  top_values.data(), best_ids.data(), best_values.data()},
                 ids.data(),
                 values.data()});
      if (first.empty()) first = ids;
      equal &= first == ids;
      for (int r = 0; r < kRows; r++) {
        float* row = logits.data() + size_t(r) * kVocabulary;
        if (top[r] >= 0) told &= top_ids[r * 3] == best(row) && top_values[r * 3] == row[best(row)] - lse[r];
        for (int t = 0; candidates[r] && t < kVocabulary; t++) row[t] -= lse[r];
        edit(edits[r], bits.data() + r * kWords, row);
        right &= values[r] == row[ids[r]];
        if ((temperature[r] == 0 || candidates[r]) && row[best(row)] > -INFINITY)
          right &= ids[r] == best(row);
        if (candidates[r]) told &= best_values[r * 6] == row[best(row)];
      }
    }
    const std::string name = cap > 0 ? ", with a soft cap" : "";
    report.equal("threads, tokens of edited logits" + name, equal);
    report.equal("tokens and logits behind edits" + name, right);
    report.equal("logprobs and candidates beside them" + name, told);
  }
}

}  // namespace check
