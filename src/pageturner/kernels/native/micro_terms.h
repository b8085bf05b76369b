// Tiles of rows in one term or two from tiles of rows in one, for the instruction sets that do not sum the
// terms as integers. Included behind theirs.
#pragma once
#include "simd.h"

namespace pt {
namespace PT_ISA {
namespace {

constexpr int kTileRows = 6;

template <int R, int Terms, Kind kind>
void tile_quantised(const uint8_t* p, int groups, const Acts& acts, int row, float* acc) {
  tile_rows<R, kind>(p, groups, acts, row, acc);
  if constexpr (Terms == 2) {
    alignas(32) float second[R * kPanel];
    tile_rows<R, kind>(p, groups, acts, acts.rows + row, second);
    for (int i = 0; i < R * kPanel; i += W) store(acc + i, load(acc + i) + load(second + i));
  }
}

}  // namespace
}  // namespace PT_ISA
}  // namespace pt
