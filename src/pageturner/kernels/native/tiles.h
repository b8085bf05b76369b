// The tiles of a product as a list for each kind of weights, by their number of rows. tiles.cpp makes those
// of one precision of activations and is compiled once for each, side by side: all of them take a compiler
// half a minute.
#pragma once
#include "isa.h"

namespace pt {
namespace PT_ISA {

// Rows row, row + 1, ... by two panels. slot: of what a thread keeps between tiles, 0 or 1.
using RowsTile = void (*)(const Matrix&, int slot, const Acts&, int row, int panel, float* acc);

// Tiles of so many rows less one, for activations of `bits`; floats and e4m3 have the same for all.
template <int bits>
const RowsTile* tiles_of(Kind kind);
// What they leave in this thread.
template <int bits>
void end_tiles();

#define PT_TILES(bits)                       \
  template <>                                \
  const RowsTile* tiles_of<bits>(Kind kind); \
  template <>                                \
  void end_tiles<bits>();
PT_TILES(8)
PT_TILES(12)
PT_TILES(15)
#undef PT_TILES

}  // namespace PT_ISA
}  // namespace pt
