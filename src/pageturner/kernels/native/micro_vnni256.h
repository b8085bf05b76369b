// Register tiles of quantised weights by 256-bit VNNI. One source for two instruction sets: avxvnni (the VEX
// form, of CPUs without AVX-512) and avx512vnni256 (the EVEX form), so that where only one of them can run
// its tests hold for the other.
#pragma once
#include "vector256.h"

namespace pt {
namespace PT_ISA {
namespace {

constexpr int kQ8Step = 4;
constexpr uint8_t kQ8Zero = 0x80;  // weights are stored 128 too large: vpdpbusd wants them unsigned
constexpr unsigned kQ8Form = kInt8 | kOffsets;
template <Kind>
constexpr int kPairRows = 0;  // see micro_avx2.h

// Unsigned w times signed x, four products per lane, added to the sum.
inline __m256i dot(__m256i sum, __m256i w, __m256i x) {
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(sum, w, x);
#else
  return _mm256_dpbusd_epi32(sum, w, x);
#endif
}

// Half of step s of 8 in a group: 8 outputs times 4 bytes, unsigned.
template <Kind kind>
inline __m256i weights_of(const uint8_t* p, int s, int half) {
  if constexpr (kind == Kind::Q8 || kind == Kind::Q8Half) return load_i(p + s * 64 + half * 32);
  __m256i w = load_i(p + s / 2 * 64 + half * 32);
  if (s & 1) w = _mm256_srli_epi16(w, 4);
  w = _mm256_and_si256(w, _mm256_set1_epi8(15));
  if constexpr (kind == Kind::Table4) return _mm256_shuffle_epi8(load_table(p + 256), w);
  if constexpr (kind == Kind::Q6K) return _mm256_or_si256(w, two_bits(p + 256 + half * 32, s));
  return five_bits(kind) ? _mm256_or_si256(w, expand_bits(p + 256 + s * 8 + half * 4)) : w;
}

// What the sum of a product starts at: the 128 of each weight, taken back.
template <Kind kind>
inline int32_t start_of(const Acts& acts, size_t group, int part) {
  if constexpr (nibbles(kind)) return 0;
  if constexpr (!two_scales(kind)) return acts.offset[group];
  const int32_t start = part ? acts.offset[group] - acts.half[group] : acts.half[group];
  return kind == Kind::Q6K ? start >> 2 : start;  // 32 of each
}

template <int R, Kind kind>
void tile_rows(const uint8_t* p, int panel, int groups, const Acts& acts, int row, float* acc) {
  constexpr int parts = two_scales(kind) ? 2 : 1, steps = 8 / parts;
  alignas(32) VF f[R][2] = {};
  const uint8_t* head = nullptr;
  for (int g = 0; g < groups; g++, p += 2 * group_bytes(kind)) {
    enter_block<kind>(g, panel, p, head);
    ask_ahead<R, kind>(p, acts);
    const size_t at = acts.at(row, g);
    const int8_t* x = acts.q8 + at * kGroup;
    const float *scale = acts.scale + at, *sum = acts.sum + at;
    const uint8_t* scales = p + integer_bytes(kind);
    PT_UNROLL
    for (int part = 0; part < parts; part++) {
      __m256i a[R][2];
      PT_UNROLL
      for (int r = 0; r < R; r++) a[r][0] = a[r][1] = _mm256_set1_epi32(start_of<kind>(acts, at + r, part));
      PT_UNROLL
      for (int s = part * steps; s < (part + 1) * steps; s++) {
        const __m256i w0 = weights_of<kind>(p, s, 0), w1 = weights_of<kind>(p, s, 1);
        PT_UNROLL
        for (int r = 0; r < R; r++) {
          const __m256i b = broadcast4(x + r * kGroup + s * 4);
          a[r][0] = dot(a[r][0], w0, b);
          PT_PIN(a[r][0]);
          a[r][1] = dot(a[r][1], w1, b);
          PT_PIN(a[r][1]);
        }
      }
      PT_UNROLL
      for (int v = 0; v < 2; v++) {
        const VF d = scales_of<kind>(scales, head, part * kPanel + v * W);
        VF m{};
        if constexpr (nibbles(kind)) m = mins_of<kind>(scales, head, v * W);
        PT_UNROLL
        for (int r = 0; r < R; r++) {
          f[r][v] = fma((VF)_mm256_cvtepi32_ps(a[r][v]), d * scale[r], f[r][v]);
          if constexpr (nibbles(kind)) f[r][v] = fma(m, set1(sum[r]), f[r][v]);
        }
      }
    }
  }
  PT_UNROLL
  for (int r = 0; r < R; r++) PT_UNROLL
  for (int v = 0; v < 2; v++) store(acc + r * kPanel + v * W, f[r][v]);
}

}  // namespace
}  // namespace PT_ISA
}  // namespace pt
