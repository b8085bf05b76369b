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
template <Kind>
constexpr int kPairRows = 0;  // see micro_avx2.h

// Sums of products to floats, with the scales from number `first` on.
template <Kind kind>
void scale_add(const int32_t* sums, const uint8_t* scales, const uint8_t* head, int first, float s,
               float* acc) {
  for (int o = 0; o < kPanel; o += W) {
    const VF d = scales_of<kind>(scales, head, first + o);
    for (int i = 0; i < W; i++) acc[o + i] = fma(float(sums[o + i]), d[i] * s, acc[o + i]);
  }
}
template <Kind kind>
void min_add(const uint8_t* scales, const uint8_t* head, float c, float* acc) {
  for (int o = 0; o < kPanel; o += W) {
    const VF m = mins_of<kind>(scales, head, o);
    for (int i = 0; i < W; i++) acc[o + i] = fma(m[i], c, acc[o + i]);
  }
}

template <int R, Kind kind>
  requires(nibbles(kind))
void tile_rows(const uint8_t* p, int panel, int groups, const Acts& acts, int row, float* acc) {
  std::memset(acc, 0, sizeof(float) * R * kPanel);
  const uint8_t* head = nullptr;
  for (int g = 0; g < groups; g++, p += 2 * group_bytes(kind)) {
    enter_block<kind>(g, panel, p, head);
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
      const uint8_t* scales = p + integer_bytes(kind);
      scale_add<kind>(a, scales, head, 0, acts.scale[at], acc + r * kPanel);
      min_add<kind>(scales, head, acts.sum[at], acc + r * kPanel);
    }
  }
}

template <int R, Kind kind>
  requires(kind == Kind::Q6K)
void tile_rows(const uint8_t* p, int panel, int groups, const Acts& acts, int row, float* acc) {
  std::memset(acc, 0, sizeof(float) * R * kPanel);
  const uint8_t* head = nullptr;
  for (int g = 0; g < groups; g++, p += 2 * group_bytes(kind)) {
    enter_block<kind>(g, panel, p, head);
    for (int r = 0; r < R; r++) {
      const size_t at = acts.at(row + r, g);
      const int8_t* x = acts.q8 + at * kGroup;
      int32_t a[2][kPanel] = {};
      for (int s = 0; s < 8; s++)
        for (int o = 0; o < kPanel; o++)
          for (int j = 0; j < 4; j++) {
            const int nibble = p[s / 2 * 64 + o * 4 + j] >> s % 2 * 4 & 15;
            const int high = p[256 + s / 4 * 64 + o * 4 + j] >> s % 4 * 2 & 3;
            a[s / 4][o] += ((nibble | high << 4) - 32) * x[4 * s + j];
          }
      for (int part = 0; part < 2; part++)
        scale_add<kind>(a[part], p + integer_bytes(kind), head, part * kPanel, acts.scale[at],
                        acc + r * kPanel);
    }
  }
}

template <int R, Kind kind>
  requires(kind == Kind::Table4)
void tile_rows(const uint8_t* p, int, int groups, const Acts& acts, int row, float* acc) {
  std::memset(acc, 0, sizeof(float) * R * kPanel);
  for (int g = 0; g < groups; g++, p += 2 * group_bytes(kind))
    for (int r = 0; r < R; r++) {
      int32_t a[kPanel] = {};
      const size_t at = acts.at(row + r, g);
      const int8_t *x = acts.q8 + at * kGroup, *table = (const int8_t*)p + 256;
      for (int s = 0; s < 8; s++)
        for (int o = 0; o < kPanel; o++)
          for (int j = 0; j < 4; j++)
            a[o] += table[p[s / 2 * 64 + o * 4 + j] >> s % 2 * 4 & 15] * x[4 * s + j];
      scale_add<kind>(a, p + integer_bytes(kind), nullptr, 0, acts.scale[at], acc + r * kPanel);
    }
}

template <int R, Kind kind>
  requires(kind == Kind::Q8 || kind == Kind::Q8Half)
void tile_rows(const uint8_t* p, int, int groups, const Acts& acts, int row, float* acc) {
  constexpr int parts = kind == Kind::Q8Half ? 2 : 1, steps = 16 / parts;
  std::memset(acc, 0, sizeof(float) * R * kPanel);
  for (int g = 0; g < groups; g++, p += 2 * group_bytes(kind))
    for (int r = 0; r < R; r++) {
      const size_t at = acts.at(row + r, g);
      const int16_t* x = acts.q16 + at * kGroup;
      for (int part = 0; part < parts; part++) {
        int32_t a[kPanel] = {};
        for (int s = part * steps; s < (part + 1) * steps; s++)
          for (int o = 0; o < kPanel; o++) {
            const int8_t* w = (const int8_t*)p + s * 32 + o * 2;
            a[o] += w[0] * x[2 * s] + w[1] * x[2 * s + 1];
          }
        scale_add<kind>(a, p + integer_bytes(kind), nullptr, part * kPanel, acts.scale[at], acc + r * kPanel);
      }
    }
}

}  // namespace
}  // namespace PT_ISA
}  // namespace pt
