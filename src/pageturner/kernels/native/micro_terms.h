// Tiles of rows in one term or two from tiles of rows in one, for the instruction sets that do not sum the
// terms as integers. Included behind theirs.
#pragma once
#include "simd.h"

namespace pt {
namespace PT_ISA {
namespace {

constexpr int kTileRows = 6;

// Two terms are two rows, which are added at the end.
template <int R, int Terms, Kind kind>
void tile_quantised(const uint8_t* p, int groups, const Acts& acts, int row, float* acc) {
  if constexpr (R * Terms > kTileRows) {
    tile_quantised<R / 2, Terms, kind>(p, groups, acts, row, acc);
    tile_quantised<R - R / 2, Terms, kind>(p, groups, acts, row + R / 2, acc + R / 2 * kPanel);
  } else {
    alignas(32) float sums[R * Terms * kPanel];
    if constexpr (nibbles(kind))
      tile_nibbles<R * Terms, kind>(p, groups, acts, row * Terms, sums);
    else
      tile_q8<R * Terms, kind>(p, groups, acts, row * Terms, sums);
    for (int r = 0; r < R; r++)
      for (int c = 0; c < kPanel; c += W) {
        const float* s = sums + r * Terms * kPanel + c;
        store(acc + r * kPanel + c, Terms == 2 ? load(s) + load(s + kPanel) : load(s));
      }
  }
}

}  // namespace
}  // namespace PT_ISA
}  // namespace pt
