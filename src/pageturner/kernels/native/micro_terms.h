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
  constexpr bool one = bits == 8 || words, few = !one && 2 * R <= kTallRows;
  constexpr int size = kTallRows * kPanel, own = R * kPanel;
  alignas(32) float apart[one ? 1 : 2 * size];
  const float* second = apart;
  if (few && acts.rows == R) {  // second terms lie behind the first: both are rows of one tile
    tile_term<few ? 2 * R : R, kind>(p, groups, acts, row, acc);
    second = acc + own;
  } else {
    tile_term<R, kind>(p, groups, acts, bits != 8 && words ? acts.rows + row : row, acc);
    if constexpr (one) return;
    tile_term<R, kind>(p, groups, acts, acts.rows + row, apart);
  }
  for (int i = 0; i < 2; i++)
    for (int j = i * size; j < i * size + own; j += W) store(acc + j, load(acc + j) + load(second + j));
}

}  // namespace
}  // namespace PT_ISA
}  // namespace pt
