// Register tiles of quantised weights in plain C++.
#pragma once
#include "micro_float.h"

namespace pt {
namespace PT_ISA {
namespace {

// Portable: the same sums (integer sums are exact, so only the missing FMA makes a difference).
constexpr int kQ8Step = 2;
constexpr uint8_t kQ8Zero = 0;
constexpr unsigned kQ8Form = kInt16;

template <class S>
void scale_add(const int32_t* sums, const S* d, float s, float* acc) {
  for (int o = 0; o < kPanel; o++) acc[o] = fma(float(sums[o]), to_float(d[o]) * s, acc[o]);
}
template <class S>
void min_add(const S* m, float c, float* acc) {
  for (int o = 0; o < kPanel; o++) acc[o] = fma(to_float(m[o]), c, acc[o]);
}

template <int R, Kind kind>
  requires(nibbles(kind))
void tile_rows(const uint8_t* p, int groups, const Acts& acts, int row, float* acc) {
  std::memset(acc, 0, sizeof(float) * R * kPanel);
  for (int g = 0; g < groups; g++, p += group_bytes(kind))
    for (int r = 0; r < R; r++) {
      int32_t a[kPanel] = {};
      const size_t at = acts.at(row + r, g);
      const int8_t* x = acts.q8 + at * kGroup;
      for (int s = 0; s < 8; s++)
        for (int o = 0; o < kPanel; o++) {
          const int fifth = five_bits(kind) ? p[256 + s * 8 + o / 2] >> o % 2 * 4 : 0;
          for (int j = 0; j < 4; j++) {
            const int nibble = p[s / 2 * 64 + o * 4 + j] >> s % 2 * 4 & 15;
            a[o] += (nibble | (fifth >> j & 1) << 4) * x[4 * s + j];
          }
        }
      const auto* d = (const Scale<kind>*)(p + integer_bytes(kind));
      scale_add(a, d, acts.scale[at], acc + r * kPanel);
      min_add(d + kPanel, acts.sum[at], acc + r * kPanel);
    }
}

template <int R, Kind kind>
  requires(!nibbles(kind))
void tile_rows(const uint8_t* p, int groups, const Acts& acts, int row, float* acc) {
  constexpr int parts = kind == Kind::Q8Half ? 2 : 1, steps = 16 / parts;
  std::memset(acc, 0, sizeof(float) * R * kPanel);
  for (int g = 0; g < groups; g++, p += group_bytes(kind))
    for (int r = 0; r < R; r++) {
      const size_t at = acts.at(row + r, g);
      const int16_t* x = acts.q16 + at * kGroup;
      const auto* d = (const Scale<kind>*)(p + 512);
      for (int part = 0; part < parts; part++) {
        int32_t a[kPanel] = {};
        for (int s = part * steps; s < (part + 1) * steps; s++)
          for (int o = 0; o < kPanel; o++) {
            const int8_t* w = (const int8_t*)p + s * 32 + o * 2;
            a[o] += w[0] * x[2 * s] + w[1] * x[2 * s + 1];
          }
        scale_add(a, d + part * kPanel, acts.scale[at], acc + r * kPanel);
      }
    }
}

}  // namespace
}  // namespace PT_ISA
}  // namespace pt
