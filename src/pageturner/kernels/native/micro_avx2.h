// Register tiles of quantised weights by AVX2.
#pragma once
#include "vector256.h"

namespace pt {
namespace PT_ISA {
namespace {

constexpr int kQ8Step = 2;
constexpr uint8_t kQ8Zero = 0;
constexpr unsigned kQ8Form = kInt16;

// Few rows wait for the weights, which come fastest when they are read once from the first to the last: so
// many rows are made with both panels at once.
template <Kind kind>
constexpr int kPairRows = kind == Kind::Q8 || kind == Kind::Q8Half ? 4
                          : nibbles(kind)                          ? 3
                                                                   : 0;

// Half of step s of 8 in a group: 8 outputs times 4 nibbles or five bits.
template <Kind kind>
inline __m256i weights_of(const uint8_t* p, int s, int half) {
  __m256i w = load_i(p + s / 2 * 64 + half * 32);
  if (s & 1) w = _mm256_srli_epi16(w, 4);
  w = _mm256_and_si256(w, _mm256_set1_epi8(15));
  return five_bits(kind) ? _mm256_or_si256(w, expand_bits(p + 256 + s * 8 + half * 4)) : w;
}

// Half of step s of 16: 8 outputs times two int8, as int16.
inline __m256i words_of(const uint8_t* p, int s, int half) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + s * 32 + half * 16)));
}

template <int R>
inline void store_pair(const VF (&f)[R][4], float* acc) {
  PT_UNROLL
  for (int r = 0; r < R; r++) PT_UNROLL
  for (int v = 0; v < 4; v++) store(acc + (v / 2 * kTallRows + r) * kPanel + v % 2 * W, f[r][v]);
}

// Unsigned nibbles, or five bits, times int8. The sums of pairs fit int16: of a whole group of nibbles
// 8 * 2 * 15 * 127 = 30,480, of half a group of five bits 4 * 2 * 31 * 127 = 31,496.
template <int R, Kind kind>
  requires(nibbles(kind))
void tile_rows(const uint8_t* p, int panel, int groups, const Acts& acts, int row, float* acc) {
  constexpr int parts = five_bits(kind) ? 2 : 1, steps = 8 / parts;
  const __m256i ones = _mm256_set1_epi16(1);
  alignas(32) VF f[R][2] = {};
  const uint8_t* head = nullptr;
  for (int g = 0; g < groups; g++, p += 2 * group_bytes(kind)) {
    enter_block<kind>(g, panel, p, head);
    ask_ahead<R, kind>(p, acts);
    const size_t at = acts.at(row, g);
    const int8_t* x = acts.q8 + at * kGroup;
    const float *scale = acts.scale + at, *sum = acts.sum + at;
    __m256i a[R][2], total[R][2];
    PT_UNROLL
    for (int part = 0; part < parts; part++) {
      PT_UNROLL
      for (int s = part * steps; s < (part + 1) * steps; s++) {
        const __m256i w0 = weights_of<kind>(p, s, 0), w1 = weights_of<kind>(p, s, 1);
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
    const uint8_t* scales = p + integer_bytes(kind);
    const VF d0 = scales_of<kind>(scales, head, 0), d1 = scales_of<kind>(scales, head, W);
    const VF m0 = mins_of<kind>(scales, head, 0), m1 = mins_of<kind>(scales, head, W);
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

// The same by both panels: acc[2][kTallRows][16].
template <int R, Kind kind>
  requires(nibbles(kind))
void pair_rows(const uint8_t* p, int groups, const Acts& acts, int row, float* acc) {
  constexpr int parts = five_bits(kind) ? 2 : 1, steps = 8 / parts;
  const __m256i ones = _mm256_set1_epi16(1);
  alignas(32) VF f[R][4] = {};
  const uint8_t* head = nullptr;
  for (int g = 0; g < groups; g++, p += 2 * group_bytes(kind)) {
    enter_block<kind>(g, 0, p, head);
    ask_ahead<R, kind>(p, acts);
    const size_t at = acts.at(row, g);
    const int8_t* x = acts.q8 + at * kGroup;
    const float *scale = acts.scale + at, *sum = acts.sum + at;
    __m256i a[R][4], total[R][4];
    PT_UNROLL
    for (int part = 0; part < parts; part++) {
      PT_UNROLL
      for (int s = part * steps; s < (part + 1) * steps; s++) {
        __m256i b[R];
        PT_UNROLL
        for (int r = 0; r < R; r++) b[r] = broadcast4(x + r * kGroup + s * 4);
        PT_UNROLL
        for (int v = 0; v < 4; v++) {
          const __m256i w = weights_of<kind>(p + v / 2 * group_bytes(kind), s, v % 2);
          PT_UNROLL
          for (int r = 0; r < R; r++) {
            const __m256i t = _mm256_maddubs_epi16(w, b[r]);
            a[r][v] = s > part * steps ? _mm256_add_epi16(a[r][v], t) : t;
            PT_PIN(a[r][v]);
          }
        }
      }
      PT_UNROLL
      for (int r = 0; r < R; r++) PT_UNROLL
      for (int v = 0; v < 4; v++) {
        const __m256i wide = _mm256_madd_epi16(a[r][v], ones);
        total[r][v] = part ? _mm256_add_epi32(total[r][v], wide) : wide;
      }
    }
    PT_UNROLL
    for (int v = 0; v < 4; v++) {
      const uint8_t* scales = p + v / 2 * group_bytes(kind) + integer_bytes(kind);
      const uint8_t* own = in_blocks(kind) ? head + v / 2 * head_bytes(kind) : nullptr;
      const VF d = scales_of<kind>(scales, own, v % 2 * W), m = mins_of<kind>(scales, own, v % 2 * W);
      PT_UNROLL
      for (int r = 0; r < R; r++)
        f[r][v] = fma(m, set1(sum[r]), fma((VF)_mm256_cvtepi32_ps(total[r][v]), d * scale[r], f[r][v]));
    }
  }
  store_pair<R>(f, acc);
}

// Nibbles that stand for int8: the size of a weight times the activation with the weight's sign. Sums of
// pairs are at most 2 * 127 * 127 = 32,258 (no table has -128).
template <int R, Kind kind>
  requires(kind == Kind::Table4)
void tile_rows(const uint8_t* p, int, int groups, const Acts& acts, int row, float* acc) {
  const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
  alignas(32) VF f[R][2] = {};
  for (int g = 0; g < groups; g++, p += 2 * group_bytes(kind)) {
    ask_ahead<R, kind>(p, acts);
    const size_t at = acts.at(row, g);
    const int8_t* x = acts.q8 + at * kGroup;
    const __m256i table = load_table(p + 256);
    const float* d = (const float*)(p + integer_bytes(kind));
    PT_UNROLL
    for (int v = 0; v < 2; v++) {
      __m256i total[R];
      PT_UNROLL
      for (int s = 0; s < 8; s++) {
        __m256i w = load_i(p + s / 2 * 64 + v * 32);
        w = _mm256_and_si256(s & 1 ? _mm256_srli_epi16(w, 4) : w, low);
        w = _mm256_shuffle_epi8(table, w);
        const __m256i size = _mm256_abs_epi8(w);
        PT_UNROLL
        for (int r = 0; r < R; r++) {
          const __m256i b = _mm256_sign_epi8(broadcast4(x + r * kGroup + s * 4), w);
          const __m256i t = _mm256_madd_epi16(_mm256_maddubs_epi16(size, b), ones);
          total[r] = s ? _mm256_add_epi32(total[r], t) : t;
          PT_PIN(total[r]);
        }
      }
      PT_UNROLL
      for (int r = 0; r < R; r++)
        f[r][v] = fma((VF)_mm256_cvtepi32_ps(total[r]), load(d + v * W) * acts.scale[at + r], f[r][v]);
    }
  }
  PT_UNROLL
  for (int r = 0; r < R; r++) PT_UNROLL
  for (int v = 0; v < 2; v++) store(acc + r * kPanel + v * W, f[r][v]);
}

// Six bits, 32 too large: sums of two pairs are at most 2 * 2 * 63 * 127 = 32,004.
template <int R, Kind kind>
  requires(kind == Kind::Q6K)
void tile_rows(const uint8_t* p, int panel, int groups, const Acts& acts, int row, float* acc) {
  const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
  alignas(32) VF f[R][2] = {};
  const uint8_t* head = nullptr;
  for (int g = 0; g < groups; g++, p += 2 * group_bytes(kind)) {
    enter_block<kind>(g, panel, p, head);
    ask_ahead<R, kind>(p, acts);
    const size_t at = acts.at(row, g);
    const int8_t* x = acts.q8 + at * kGroup;
    PT_UNROLL
    for (int part = 0; part < 2; part++) PT_UNROLL
    for (int v = 0; v < 2; v++) {
      __m256i total[R];
      PT_UNROLL
      for (int r = 0; r < R; r++) {
        const int32_t first = acts.half[at + r], start = part ? acts.offset[at + r] - first : first;
        total[r] = _mm256_set1_epi32(start >> 2);
      }
      PT_UNROLL
      for (int s = part * 4; s < part * 4 + 4; s += 2) {  // both nibbles of the same bytes
        const __m256i both = load_i(p + s / 2 * 64 + v * 32);
        const uint8_t* high = p + 256 + v * 32;
        const __m256i w0 = _mm256_or_si256(_mm256_and_si256(both, low), two_bits(high, s));
        const __m256i w1 =
            _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(both, 4), low), two_bits(high, s + 1));
        PT_UNROLL
        for (int r = 0; r < R; r++) {
          const int8_t* b = x + r * kGroup + s * 4;
          const __m256i t0 = _mm256_maddubs_epi16(w0, broadcast4(b));
          const __m256i t1 = _mm256_maddubs_epi16(w1, broadcast4(b + 4));
          total[r] = _mm256_add_epi32(total[r], _mm256_madd_epi16(_mm256_add_epi16(t0, t1), ones));
          PT_PIN(total[r]);
        }
      }
      const VF d = scales_of<kind>(p + integer_bytes(kind), head, part * kPanel + v * W);
      PT_UNROLL
      for (int r = 0; r < R; r++)
        f[r][v] = fma((VF)_mm256_cvtepi32_ps(total[r]), d * acts.scale[at + r], f[r][v]);
    }
  }
  PT_UNROLL
  for (int r = 0; r < R; r++) PT_UNROLL
  for (int v = 0; v < 2; v++) store(acc + r * kPanel + v * W, f[r][v]);
}

// 8-bit: int8 weights widened to int16, times int16 activations, two at a time.
template <int R, Kind kind>
  requires(kind == Kind::Q8 || kind == Kind::Q8Half)
void tile_rows(const uint8_t* p, int, int groups, const Acts& acts, int row, float* acc) {
  using S = Scale<kind>;
  constexpr int parts = kind == Kind::Q8Half ? 2 : 1, steps = 16 / parts;
  alignas(32) VF f[R][2] = {};
  for (int g = 0; g < groups; g++, p += 2 * group_bytes(kind)) {
    ask_ahead<R, kind>(p, acts);
    const size_t at = acts.at(row, g);
    const int16_t* x = acts.q16 + at * kGroup;
    const float* scale = acts.scale + at;
    const S* d = (const S*)(p + 512);
    PT_UNROLL
    for (int part = 0; part < parts; part++) {
      __m256i a[R][2];
      PT_UNROLL
      for (int s = part * steps; s < (part + 1) * steps; s++) {
        const __m256i w0 = words_of(p, s, 0), w1 = words_of(p, s, 1);
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

// The same by both panels: acc[2][kTallRows][16].
template <int R, Kind kind>
  requires(kind == Kind::Q8 || kind == Kind::Q8Half)
void pair_rows(const uint8_t* p, int groups, const Acts& acts, int row, float* acc) {
  using S = Scale<kind>;
  constexpr int parts = kind == Kind::Q8Half ? 2 : 1, steps = 16 / parts;
  alignas(32) VF f[R][4] = {};
  for (int g = 0; g < groups; g++, p += 2 * group_bytes(kind)) {
    ask_ahead<R, kind>(p, acts);
    const size_t at = acts.at(row, g);
    const int16_t* x = acts.q16 + at * kGroup;
    const float* scale = acts.scale + at;
    PT_UNROLL
    for (int part = 0; part < parts; part++) {
      __m256i a[R][4];
      PT_UNROLL
      for (int s = part * steps; s < (part + 1) * steps; s++) {
        __m256i b[R];
        PT_UNROLL
        for (int r = 0; r < R; r++) b[r] = broadcast4(x + r * kGroup + s * 2);
        PT_UNROLL
        for (int v = 0; v < 4; v++) {
          const __m256i w = words_of(p + v / 2 * group_bytes(kind), s, v % 2);
          PT_UNROLL
          for (int r = 0; r < R; r++) {
            const __m256i t = _mm256_madd_epi16(w, b[r]);
            a[r][v] = s > part * steps ? _mm256_add_epi32(a[r][v], t) : t;
            PT_PIN(a[r][v]);
          }
        }
      }
      PT_UNROLL
      for (int v = 0; v < 4; v++) {
        const S* scales = (const S*)(p + v / 2 * group_bytes(kind) + 512);
        const VF d = load(scales + part * kPanel + v % 2 * W);
        PT_UNROLL
        for (int r = 0; r < R; r++) f[r][v] = fma((VF)_mm256_cvtepi32_ps(a[r][v]), d * scale[r], f[r][v]);
      }
    }
  }
  store_pair<R>(f, acc);
}

}  // namespace
}  // namespace PT_ISA
}  // namespace pt
