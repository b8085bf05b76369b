// The tile instructions of AMX that the kernels use, in two versions: those of the CPU, and (PT_AMX_EMULATED)
// what their definition says, in plain C++, by which the kernels are tested where no CPU has them.
//
// A pass is two sums of R rows and 16 outputs, C[r][o] = sum over i of A[r][i] * B[i / 4][4 o + i % 4], with
// A signed and B unsigned (TDPBSUD). Sums are exact: the products of a group of 32 do not overflow an int32.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#if !defined(PT_AMX_EMULATED)
#include <immintrin.h>
#endif

namespace pt {
namespace PT_ISA {
namespace {

// What LDTILECFG reads: the palette, then bytes of a row and rows of each tile. Tiles 0 and 1 are sums, 2 is
// rows of activations, 3 and 4 are weights of two panels.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  TileShapes(int count, int steps) {
    for (int t : {0, 1}) rows[t] = uint8_t(count), bytes[t] = 64;
    rows[2] = uint8_t(count), bytes[2] = uint16_t(4 * steps);
    for (int t : {3, 4}) rows[t] = uint8_t(steps), bytes[t] = 64;
  }
};
static_assert(sizeof(TileShapes) == 64);

#if defined(PT_AMX_EMULATED)
struct Tiles {
  uint8_t data[5][16][64];
  int rows[5], bytes[5];

  void configure(const TileShapes& s) {  // which makes all tiles zero
    std::memset(data, 0, sizeof data);
    for (int t = 0; t < 5; t++) rows[t] = s.rows[t], bytes[t] = s.bytes[t];
  }
  void release() {
    for (int t = 0; t < 5; t++) rows[t] = bytes[t] = 0;
  }
  void zero() { std::memset(data, 0, sizeof data[0] * 2); }
  void load(int t, const void* from, size_t stride) {
    std::memset(data[t], 0, sizeof data[t]);
    for (int r = 0; r < rows[t]; r++)
      std::memcpy(data[t][r], (const uint8_t*)from + size_t(r) * stride, size_t(bytes[t]));
  }
  void load_rows(const void* x, size_t stride) { load(2, x, stride); }
  void load_weights(const void* first, const void* second) { load(3, first, 64), load(4, second, 64); }
  void multiply(int c, int b) {
    for (int m = 0; m < rows[c]; m++)
      for (int k = 0; k < bytes[2] / 4; k++)
        for (int n = 0; n < bytes[c] / 4; n++) {
          int32_t sum;
          std::memcpy(&sum, data[c][m] + 4 * n, 4);
          for (int i = 0; i < 4; i++) sum += int8_t(data[2][m][4 * k + i]) * int(data[b][k][4 * n + i]);
          std::memcpy(data[c][m] + 4 * n, &sum, 4);
        }
  }
  void multiply() { multiply(0, 3), multiply(1, 4); }
  void store(int t, void* to) const {
    for (int r = 0; r < rows[t]; r++) std::memcpy((uint8_t*)to + 64 * r, data[t][r], size_t(bytes[t]));
  }
  void store(void* first, void* second) const { store(0, first), store(1, second); }
};
#else
struct Tiles {
  void configure(const TileShapes& s) { _tile_loadconfig(&s); }
  void release() { _tile_release(); }
  void zero() {
    _tile_zero(0);
    _tile_zero(1);
  }
  void load_rows(const void* x, size_t stride) { _tile_loadd(2, x, stride); }
  void load_weights(const void* first, const void* second) {
    _tile_loadd(3, first, 64);
    _tile_loadd(4, second, 64);
  }
  void multiply() {
    _tile_dpbsud(0, 2, 3);
    _tile_dpbsud(1, 2, 4);
  }
  void store(void* first, void* second) const {
    _tile_stored(0, first, 64);
    _tile_stored(1, second, 64);
  }
};
#endif

// The tiles of this thread, and the shapes that they have: rows * 16 + steps, 0 when they are released.
static thread_local Tiles tiles;
static thread_local int tile_shapes = 0;

inline Tiles& shaped(int rows, int steps) {
  if (tile_shapes != rows * 16 + steps) {
    tiles.configure(TileShapes(rows, steps));
    tile_shapes = rows * 16 + steps;
  }
  return tiles;
}
inline void release_tiles() {
  if (tile_shapes) tiles.release();
  tile_shapes = 0;
}

}  // namespace
}  // namespace PT_ISA
}  // namespace pt
