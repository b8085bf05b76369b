// The tile instructions of AMX that the kernels use, in two versions: those of the CPU, and (PT_AMX_EMULATED)
// what their definition says, in plain C++, by which the kernels are tested where no CPU has them.
//
// A product is the sum of R rows and 16 outputs, C[r][o] += sum over i of A[r][i] * B[i / 2][2 o + i % 2], of
// bf16 in fp32 (TDPBF16PS). Here all factors are integers, and so small that every sum is exact in whatever
// order.
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

constexpr int kTallRows = 12;  // rows of a tile: as many as leave registers for two panels

// What each tile is used for. `Rest` is the second term of activations.
enum Tile : int { kSums, kOtherSums, kRows, kRestRows, kWeights, kOtherWeights, kLast };

// What LDTILECFG reads: the palette, then bytes of a row and rows of each tile. A group is 32 bf16 of each
// row.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
  TileShapes() {
    for (int t = 0; t < kLast; t++) rows[t] = t >= kWeights ? 16 : kTallRows, bytes[t] = 64;
  }
};
static_assert(sizeof(TileShapes) == 64);

#if defined(PT_AMX_EMULATED)
struct Tiles {
  uint8_t data[kLast][16][64];
  int rows[kLast], bytes[kLast];

  void configure(const TileShapes& s) {  // which makes all tiles zero
    std::memset(data, 0, sizeof data);
    for (int t = 0; t < kLast; t++) rows[t] = s.rows[t], bytes[t] = s.bytes[t];
  }
  void release() {
    for (int t = 0; t < kLast; t++) rows[t] = bytes[t] = 0;
  }
  template <int t>
  void zero() {
    std::memset(data[t], 0, sizeof data[t]);
  }
  template <int t>
  void load(const void* from, size_t stride) {
    zero<t>();
    for (int r = 0; r < rows[t]; r++)
      std::memcpy(data[t][r], (const uint8_t*)from + size_t(r) * stride, size_t(bytes[t]));
  }
  static float number(const uint8_t* bf16) {
    float v = 0;
    std::memcpy((uint8_t*)&v + 2, bf16, 2);
    return v;
  }
  template <int c, int a, int b>
  void multiply() {
    for (int m = 0; m < rows[c]; m++)
      for (int n = 0; n < bytes[c] / 4; n++) {
        float sum;
        std::memcpy(&sum, data[c][m] + 4 * n, 4);
        for (int k = 0; k < bytes[a] / 2; k++)
          sum += number(data[a][m] + 2 * k) * number(data[b][k / 2] + 4 * n + k % 2 * 2);
        std::memcpy(data[c][m] + 4 * n, &sum, 4);
      }
  }
  template <int t>
  void store(void* to) const {
    for (int r = 0; r < rows[t]; r++) std::memcpy((uint8_t*)to + 64 * r, data[t][r], size_t(bytes[t]));
  }
};
#else
struct Tiles {  // by assembler: the intrinsics take no constants of templates, GCC's are macros
  void configure(const TileShapes& s) { asm volatile("ldtilecfg %0" ::"m"(s)); }
  void release() { _tile_release(); }
  template <int t>
  void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(t));
  }
  template <int t>
  void load(const void* from, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(t) : "memory");
  }
  template <int c, int a, int b>
  void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b));
  }
  template <int t>
  void store(void* to) const {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(size_t(64)), "i"(t) : "memory");
  }
};
#endif

// The tiles of this thread, and whether they have their shapes.
static thread_local Tiles tiles;
static thread_local bool tiles_shaped = false;

inline Tiles& shaped() {
  if (!tiles_shaped) tiles.configure(TileShapes());
  tiles_shaped = true;
  return tiles;
}
inline void release_tiles() {
  if (tiles_shaped) tiles.release();
  tiles_shaped = false;
}

}  // namespace
}  // namespace PT_ISA
}  // namespace pt
