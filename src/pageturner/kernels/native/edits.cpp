// How the edits of one row are done, token by token.
#include "edits.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace pt {

void restrict_row(const EditsView& edits, const EditView& e, int words, uint64_t* bits, uint64_t* scratch) {
  const int32_t *ids = edits.ids + e.first, *end = ids + e.count;
  if (e.operation == Operation::Forbid) {
    for (; ids < end; ids++) bits[*ids / 64] &= ~(uint64_t(1) << (*ids % 64));
    return;
  }
  std::fill(scratch, scratch + words, 0);
  for (; ids < end; ids++) scratch[*ids / 64] |= uint64_t(1) << (*ids % 64);
  for (int w = 0; w < words; w++)  // what is forced may be chosen whatever was said before
    bits[w] = e.operation == Operation::Force ? scratch[w] : bits[w] & scratch[w];
}

ReadyEdit make_ready(const EditsView& edits, const EditView& e, int vocabulary, int32_t* ids, int32_t* times,
                     const EditScratch& s) {
  const int32_t* given = edits.ids + e.first;
  const float* values = edits.values + e.first_value;
  ReadyEdit ready{e.operation, e.count, 0, ids, times, nullptr};
  if (e.operation == Operation::Add) {
    std::vector<int> order(e.count);
    for (int i = 0; i < e.count; i++) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return given[a] < given[b]; });
    float* sorted = (float*)times;
    for (int i = 0; i < e.count; i++) ids[i] = given[order[i]], sorted[i] = values[order[i]];
    ready.values = sorted;
    return ready;
  }
  ready.value = *values;
  const int words = (vocabulary + 63) / 64;
  std::fill_n(s.seen, words, 0);
  for (int i = 0; i < e.count; i++) {  // counts of ids that were not seen yet are left from before
    const int id = given[i];
    uint64_t& word = s.seen[id / 64];
    const uint64_t bit = uint64_t(1) << (id % 64);
    s.counts[id] = word & bit ? s.counts[id] + 1 : 1;
    word |= bit;
  }
  ready.count = 0;
  for (int w = 0; w < words; w++)
    for (uint64_t word = s.seen[w]; word; word &= word - 1) {
      const int id = w * 64 + __builtin_ctzll(word);
      ids[ready.count] = id, times[ready.count++] = s.counts[id];
    }
  return ready;
}

int first_from(const ReadyEdit& e, int id) {
  return int(std::lower_bound(e.ids, e.ids + e.count, id) - e.ids);
}

void change_logits(const ReadyEdit& e, int first, int end, int& at, float* logits) {
  const auto each = [&](auto f) {
    while (at < e.count && e.ids[at] < first) at++;
    for (; e.is_due(at, end); at++) f(logits[e.ids[at] - first], at);
  };
  const float value = e.value;
  switch (e.operation) {
    case Operation::Force: return each([&](float& x, int) { x = value; });
    case Operation::Add: return each([&](float& x, int i) { x += e.values[i]; });
    case Operation::Repetition:
      return each([&](float& x, int) {  // both, so that nobody has to guess the sign
        const float less = x / value, more = x * value;
        x = x > 0 ? less : more;
      });
    case Operation::Frequency: return each([&](float& x, int i) { x -= value * float(e.times[i]); });
    case Operation::Presence: return each([&](float& x, int) { x -= value; });
    default: return;
  }
}

}  // namespace pt
