// Tiles for activations of PT_BITS: 8, 12 or 15.
#include "tiles.h"

#include <array>
#include <utility>

#include "micro.h"
#if defined(PT_AMX)
#include "tiles_amx.h"
#endif

namespace pt {
namespace PT_ISA {
namespace {

// R rows of e4m3 weights, as many at a time as registers hold.
template <int R>
void tile_f8_rows(const uint8_t* p, int groups, const float* x, int k, float* acc) {
  constexpr int first = R < kF8Rows ? R : kF8Rows;
  tile_f8<first>(p, groups, x, k, acc);
  if constexpr (R > first) tile_f8_rows<R - first>(p, groups, x + size_t(first) * k, k, acc + first * kPanel);
}

// R rows by the two panels from `panel` on, which is even: acc[2][kTallRows][16].
template <int R, int bits, Kind kind>
void low_tile(const Matrix& m, int, const Acts& x, int row, int panel, float* acc) {
  if constexpr (kind == Kind::F8) {
    for (int i = 0; i < 2; i++)
      tile_f8_rows<R>(m.panel(panel + i), m.k / kGroup, x.f32 + size_t(row) * x.k, x.k,
                      acc + i * kTallRows * kPanel);
  } else if constexpr (kind < Kind::Q8) {
    using T = std::conditional_t<kind == Kind::F32, float, std::conditional_t<kind == Kind::F16, f16, bf16>>;
    for (int i = 0; i < 2; i++)
      tile_float<R>((const T*)m.panel(panel + i), m.k, x.f32 + size_t(row) * x.k,
                    acc + i * kTallRows * kPanel);
  } else {
    tile_quantised<R, bits, kind>(m.panel(panel), m.k / kGroup, x, row, acc);
  }
}

// Tiles of so many rows less one; between low and tall ones there are none.
template <int bits, Kind kind>
const RowsTile* tiles_of_kind() {
  static constexpr std::array<RowsTile, kTallRows> list = [] {
    std::array<RowsTile, kTallRows> all{};
    [&]<int... R>(std::integer_sequence<int, R...>) {
      ((all[R] = low_tile<R + 1, bits, kind>), ...);
    }(std::make_integer_sequence<int, kTileRows>());
#if defined(PT_AMX)
    if constexpr (nibbles(kind)) all[kTallRows - 1] = tall_tile<bits, kind>;
#endif
    return all;
  }();
  return list.data();
}

template <int bits>
const RowsTile* tiles_of_floats(Kind kind) {
  switch (kind) {
    case Kind::F32: return tiles_of_kind<bits, Kind::F32>();
    case Kind::F16: return tiles_of_kind<bits, Kind::F16>();
    case Kind::BF16: return tiles_of_kind<bits, Kind::BF16>();
    default: return tiles_of_kind<bits, Kind::F8>();
  }
}

template <int bits>
const RowsTile* tiles_of_integers(Kind kind) {
  switch (kind) {
    case Kind::Q8: return tiles_of_kind<bits, Kind::Q8>();
    case Kind::Q8Half: return tiles_of_kind<bits, Kind::Q8Half>();
    case Kind::Q6K: return tiles_of_kind<bits, Kind::Q6K>();
    case Kind::Table4: return tiles_of_kind<bits, Kind::Table4>();
    case Kind::Q4: return tiles_of_kind<bits, Kind::Q4>();
    case Kind::Q4Wide: return tiles_of_kind<bits, Kind::Q4Wide>();
    case Kind::Q4Sym: return tiles_of_kind<bits, Kind::Q4Sym>();
    case Kind::Q4K: return tiles_of_kind<bits, Kind::Q4K>();
    case Kind::Q5: return tiles_of_kind<bits, Kind::Q5>();
    case Kind::Q5Sym: return tiles_of_kind<bits, Kind::Q5Sym>();
    case Kind::Q5K: return tiles_of_kind<bits, Kind::Q5K>();
    default: __builtin_unreachable();
  }
}

// Those that are asked for: floats have the same tiles for all activations, and 12 bits may be as good as 15.
template <int bits>
const RowsTile* all_tiles(Kind kind) {
  if constexpr (bits == 8)
    if (kind < Kind::Q8) return tiles_of_floats<bits>(kind);
  if constexpr (bits != 12 || kTwelveForm == kTwelve) return tiles_of_integers<bits>(kind);
  __builtin_unreachable();
}

}  // namespace

template <>
const RowsTile* tiles_of<PT_BITS>(Kind kind) {
  return all_tiles<PT_BITS>(kind);
}

template <>
void end_tiles<PT_BITS>() {
#if defined(PT_AMX)
  release_tiles();
  forget_weights();
#endif
}

}  // namespace PT_ISA
}  // namespace pt
