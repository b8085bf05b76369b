// Tiles of rows in one term or two from tiles of rows in one, for the instruction sets that do not sum the
// terms as integers. Included behind theirs. Activations of 16 bits hold both terms: one product does.
#pragma once
#include "simd.h"

namespace pt {
namespace PT_ISA {
namespace {

constexpr unsigned kTwelveForm = kFifteen;  // nothing is cheaper here than two terms

// R rows in one term by the two panels from p on: acc[2][kTallRows][16].
template <int R, Kind kind>
inline void tile_term(const uint8_t* p, int groups, const Acts& acts, int row, float* acc) {
  if constexpr (R <= kPairRows<kind>) {
    pair_rows<R, kind>(p, groups, acts, row, acc);
  } else {
    for (int i = 0; i < 2; i++)
      tile_rows<R, kind>(p + i * group_bytes(kind), i, groups, acts, row, acc + i * kTallRows * kPanel);
  }
}

// The same in all terms.
template <int R, int bits, Kind kind>
void tile_quantised(const uint8_t* p, int groups, const Acts& acts, int row, float* acc) {
  constexpr bool words = kQ8Form == kInt16 && (kind == Kind::Q8 || kind == Kind::Q8Half);
  tile_term<R, kind>(p, groups, acts, bits != 8 && words ? acts.rows + row : row, acc);
  if constexpr (bits == 8 || words) return;
  alignas(32) float second[2 * kTallRows * kPanel];
  tile_term<R, kind>(p, groups, acts, acts.rows + row, second);
  for (int i = 0; i < 2; i++)
    for (int j = i * kTallRows * kPanel, end = j + R * kPanel; j < end; j += W)
      store(acc + j, load(acc + j) + load(second + j));
}

}  // namespace
}  // namespace PT_ISA
}  // namespace pt
