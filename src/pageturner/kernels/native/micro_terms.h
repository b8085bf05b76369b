// Tiles of rows in one term or two from tiles of rows in one, for the instruction sets that do not sum the
// terms as integers. Included behind theirs. Activations of 16 bits hold both terms: one product does.
#pragma once
#include "simd.h"

namespace pt {
namespace PT_ISA {
namespace {

constexpr unsigned kTwelveForm = kFifteen;  // nothing is cheaper here than two terms

// R rows by the two panels from p on, one after the other: acc[2][kTallRows][16].
template <int R, int bits, Kind kind>
void tile_quantised(const uint8_t* p, int groups, const Acts& acts, int row, float* acc) {
  constexpr bool words = kQ8Form == kInt16 && (kind == Kind::Q8 || kind == Kind::Q8Half);
  const int first = bits != 8 && words ? acts.rows + row : row;
  for (int i = 0; i < 2; i++, p += group_bytes(kind), acc += kTallRows * kPanel) {
    tile_rows<R, kind>(p, i, groups, acts, first, acc);
    if constexpr (bits == 8 || words) continue;
    alignas(32) float second[R * kPanel];
    tile_rows<R, kind>(p, i, groups, acts, acts.rows + row, second);
    for (int j = 0; j < R * kPanel; j += W) store(acc + j, load(acc + j) + load(second + j));
  }
}

}  // namespace
}  // namespace PT_ISA
}  // namespace pt
