// How the edits of one row are done, token by token.
#include "edits.h"

#include <algorithm>

#include "kernels.h"

namespace pt {

static_assert(kMaxBlock == 64);  // a block of ids is a word of bits

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

void change_row(const EditsView& edits, const EditView& e, const uint64_t* bits, float* row, int32_t* counts,
                uint64_t* touched) {
  const int32_t* ids = edits.ids + e.first;
  const float* values = edits.values + e.first_value;
  const float value = e.operation == Operation::Add ? 0.0f : *values;
  const auto each = [&](auto f) {
    for (int i = 0; i < e.count; i++)
      if (!bits || is_set(bits, ids[i])) f(i, row[ids[i]], counts[ids[i]]);
  };
  // The same for each different id, with the number of times that it is there. No memory needs to be zero
  // before: only the counts of these ids are looked at.
  const auto once = [&](auto f) {
    each([](int, float&, int32_t& n) { n = 0; });
    each([](int, float&, int32_t& n) { n++; });
    each([&](int, float& x, int32_t& n) {
      if (n) f(x, n);
      n = 0;
    });
  };
  for (int i = 0; i < e.count; i++) {
    const int block = ids[i] / kMaxBlock;
    touched[block / 64] |= uint64_t(1) << (block % 64);
  }
  switch (e.operation) {
    case Operation::Force: return each([&](int, float& x, int32_t&) { x = value; });
    case Operation::Add: return each([&](int i, float& x, int32_t&) { x += values[i]; });
    case Operation::Repetition: return once([&](float& x, int) { x = x > 0 ? x / value : x * value; });
    case Operation::Frequency: return once([&](float& x, int n) { x -= value * float(n); });
    case Operation::Presence: return once([&](float& x, int) { x -= value; });
    default: return;
  }
}

}  // namespace pt
