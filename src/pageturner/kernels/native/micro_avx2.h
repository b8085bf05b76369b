// Register tiles of quantised weights by AVX2.
#pragma once
#include "vector256.h"

namespace pt {
namespace PT_ISA {
namespace {

constexpr int kQ8Step = 2;
constexpr uint8_t kQ8Zero = 0;
constexpr unsigned kQ8Form = kInt16;

// Unsigned nibbles, or five bits, times int8. The sums of pairs fit int16: of a whole group of nibbles
// 8 * 2 * 15 * 127 = 30,480, of half a group of five bits 4 * 2 * 31 * 127 = 31,496.
template <int R, Kind kind>
  requires(nibbles(kind))
void tile_rows(const uint8_t* p, int groups, const Acts& acts, int row, float* acc) {
  using S = Scale<kind>;
  constexpr int parts = five_bits(kind) ? 2 : 1, steps = 8 / parts;
  const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
  alignas(32) VF f[R][2] = {};
  for (int g = 0; g < groups; g++, p += group_bytes(kind)) {
    const size_t at = acts.at(row, g);
    const int8_t* x = acts.q8 + at * kGroup;
    const float *scale = acts.scale + at, *sum = acts.sum + at;
    __m256i a[R][2], total[R][2];
    PT_UNROLL
    for (int part = 0; part < parts; part++) {
      PT_UNROLL
      for (int s = part * steps; s < (part + 1) * steps; s++) {
        __m256i w0 = load_i(p + s / 2 * 64), w1 = load_i(p + s / 2 * 64 + 32);
        if (s & 1) w0 = _mm256_srli_epi16(w0, 4), w1 = _mm256_srli_epi16(w1, 4);
        w0 = _mm256_and_si256(w0, low), w1 = _mm256_and_si256(w1, low);
        if constexpr (five_bits(kind)) {
          w0 = _mm256_or_si256(w0, expand_bits(p + 256 + s * 8));
          w1 = _mm256_or_si256(w1, expand_bits(p + 256 + s * 8 + 4));
        }
        PT_UNROLL
        for (int r = 0; r < R; r++) {
          __m256i b = broadcast4(x + r * kGroup + s * 4);
          __m256i t0 = _mm256_maddubs_epi16(w0, b), t1 = _mm256_maddubs_epi16(w1, b);
          a[r][0] = s > part * steps ? _mm256_add_epi16(a[r][0], t0) : t0;
          PT_PIN(a[r][0]);
          a[r][1] = s > part * steps ? _mm256_add_epi16(a[r][1], t1) : t1;
          PT_PIN(a[r][1]);
        }
      }
      PT_UNROLL
      for (int r = 0; r < R; r++) PT_UNROLL
      for (int v = 0; v < 2; v++) {
        const __m256i wide = _mm256_madd_epi16(a[r][v], ones);
        total[r][v] = part ? _mm256_add_epi32(total[r][v], wide) : wide;
      }
    }
    const S* d = (const S*)(p + integer_bytes(kind));
    VF d0 = load(d), d1 = load(d + W), m0 = load(d + kPanel), m1 = load(d + kPanel + W);
    PT_UNROLL
    for (int r = 0; r < R; r++) {
      VF s = set1(scale[r]), c = set1(sum[r]);
      f[r][0] = fma(m0, c, fma((VF)_mm256_cvtepi32_ps(total[r][0]), d0 * s, f[r][0]));
      f[r][1] = fma(m1, c, fma((VF)_mm256_cvtepi32_ps(total[r][1]), d1 * s, f[r][1]));
    }
  }
  PT_UNROLL
  for (int r = 0; r < R; r++) PT_UNROLL
  for (int v = 0; v < 2; v++) store(acc + r * kPanel + v * W, f[r][v]);
}

// 8-bit: int8 weights widened to int16, times int16 activations, two at a time.
template <int R, Kind kind>
  requires(!nibbles(kind))
void tile_rows(const uint8_t* p, int groups, const Acts& acts, int row, float* acc) {
  using S = Scale<kind>;
  constexpr int parts = kind == Kind::Q8Half ? 2 : 1, steps = 16 / parts;
  alignas(32) VF f[R][2] = {};
  for (int g = 0; g < groups; g++, p += group_bytes(kind)) {
    const size_t at = acts.at(row, g);
    const int16_t* x = acts.q16 + at * kGroup;
    const float* scale = acts.scale + at;
    const S* d = (const S*)(p + 512);
    PT_UNROLL
    for (int part = 0; part < parts; part++) {
      __m256i a[R][2];
      PT_UNROLL
      for (int s = part * steps; s < (part + 1) * steps; s++) {
        __m256i w0 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + s * 32)));
        __m256i w1 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + s * 32 + 16)));
        PT_UNROLL
        for (int r = 0; r < R; r++) {
          __m256i b = broadcast4(x + r * kGroup + s * 2);
          __m256i t0 = _mm256_madd_epi16(w0, b), t1 = _mm256_madd_epi16(w1, b);
          a[r][0] = s > part * steps ? _mm256_add_epi32(a[r][0], t0) : t0;
          PT_PIN(a[r][0]);
          a[r][1] = s > part * steps ? _mm256_add_epi32(a[r][1], t1) : t1;
          PT_PIN(a[r][1]);
        }
      }
      VF d0 = load(d + part * kPanel), d1 = load(d + part * kPanel + W);
      PT_UNROLL
      for (int r = 0; r < R; r++) {
        VF s = set1(scale[r]);
        f[r][0] = fma((VF)_mm256_cvtepi32_ps(a[r][0]), d0 * s, f[r][0]);
        f[r][1] = fma((VF)_mm256_cvtepi32_ps(a[r][1]), d1 * s, f[r][1]);
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
