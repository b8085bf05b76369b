// The register tiles of the matrix product: R rows by one panel of 16 outputs, over the whole of k.
// acc[R][16] receives the sums. This is the only file with a version per instruction set.
#pragma once
#include <type_traits>

#include "simd.h"

namespace pt {
namespace PT_ISA {
namespace {

template <int R, class T>
void tile_float(const T* w, int k, const float* x, float* acc) {
  VF a[R][kPanelVecs] = {};
  for (int i = 0; i < k; i++, w += kPanel) {
    VF b[kPanelVecs];
    PT_UNROLL
    for (int v = 0; v < kPanelVecs; v++) b[v] = load(w + v * W);
    PT_UNROLL
    for (int r = 0; r < R; r++) {
      VF s = set1(x[size_t(r) * k + i]);
      PT_UNROLL
      for (int v = 0; v < kPanelVecs; v++) {
        a[r][v] = fma(b[v], s, a[r][v]);
        PT_PIN(a[r][v]);
      }
    }
  }
  PT_UNROLL
  for (int r = 0; r < R; r++) PT_UNROLL
  for (int v = 0; v < kPanelVecs; v++) store(acc + r * kPanel + v * W, a[r][v]);
}

// The type of the scales (and mins) of a quantised kind.
template <Kind kind>
using Scale = std::conditional_t<half_scales(kind), f16, float>;

#if defined(__AVX512VNNI__)

constexpr int kQ8Step = 4;
constexpr uint8_t kQ8Zero = 0x80;  // weights are stored 128 too large: vpdpbusd wants them unsigned
constexpr unsigned kQ8Form = kInt8;

inline __m512i broadcast4(const void* p) {  // four bytes into every lane
  int32_t v;
  std::memcpy(&v, p, 4);
  return _mm512_set1_epi32(v);
}
inline __m512 load16(const f16* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline __m512 load16(const float* p) { return _mm512_loadu_ps(p); }
inline __mmask64 load_bits(const void* p) {
  uint64_t bits;
  std::memcpy(&bits, p, 8);
  return bits;
}

// Four products per lane and instruction, summed in int32: the 16 outputs of a panel are one vector.
template <int R, Kind kind>
void tile_nibbles(const uint8_t* p, int groups, const Acts& acts, int row, float* acc) {
  using S = Scale<kind>;
  const size_t ld = size_t(groups) * kGroup, at = size_t(row) * groups;
  const int8_t* x = acts.q8 + row * ld;
  const float *scale = acts.scale + at, *sum = acts.sum + at;
  const __m512i low = _mm512_set1_epi8(15), sixteen = _mm512_set1_epi8(16);
  __m512 f[R];
  PT_UNROLL
  for (int r = 0; r < R; r++) f[r] = _mm512_setzero_ps();
  for (int g = 0; g < groups; g++, p += group_bytes(kind), x += kGroup) {
    __m512i a[R];
    PT_UNROLL
    for (int r = 0; r < R; r++) a[r] = _mm512_setzero_si512();
    PT_UNROLL
    for (int s = 0; s < 8; s++) {
      __m512i w = _mm512_loadu_si512(p + s / 2 * 64);
      if (s & 1) w = _mm512_srli_epi16(w, 4);
      w = _mm512_and_si512(w, low);
      if constexpr (five_bits(kind)) w = _mm512_mask_add_epi8(w, load_bits(p + 256 + s * 8), w, sixteen);
      PT_UNROLL
      for (int r = 0; r < R; r++) {
        a[r] = _mm512_dpbusd_epi32(a[r], w, broadcast4(x + r * ld + s * 4));
        PT_PIN(a[r]);
      }
    }
    const S* scales = (const S*)(p + integer_bytes(kind));
    const __m512 d = load16(scales), m = load16(scales + kPanel);
    PT_UNROLL
    for (int r = 0; r < R; r++) {
      const __m512 s = _mm512_set1_ps(scale[r * groups + g]), c = _mm512_set1_ps(sum[r * groups + g]);
      f[r] = _mm512_fmadd_ps(m, c, _mm512_fmadd_ps(_mm512_cvtepi32_ps(a[r]), _mm512_mul_ps(d, s), f[r]));
    }
  }
  PT_UNROLL
  for (int r = 0; r < R; r++) _mm512_storeu_ps(acc + r * kPanel, f[r]);
}

template <int R, Kind kind>
void tile_q8(const uint8_t* p, int groups, const Acts& acts, int row, float* acc) {
  using S = Scale<kind>;
  constexpr int parts = kind == Kind::Q8Half ? 2 : 1, steps = 8 / parts;
  const size_t ld = size_t(groups) * kGroup, at = size_t(row) * groups;
  const int8_t* x = acts.q8 + row * ld;
  const float* scale = acts.scale + at;
  const int32_t *offset = acts.offset + at, *half = acts.half + at;
  __m512 f[R];
  PT_UNROLL
  for (int r = 0; r < R; r++) f[r] = _mm512_setzero_ps();
  for (int g = 0; g < groups; g++, p += group_bytes(kind), x += kGroup) {
    PT_UNROLL
    for (int part = 0; part < parts; part++) {
      __m512i a[R];
      PT_UNROLL
      for (int r = 0; r < R; r++) {
        const int32_t whole = offset[r * groups + g], first = parts == 2 ? half[r * groups + g] : whole;
        a[r] = _mm512_set1_epi32(part ? whole - first : first);
      }
      PT_UNROLL
      for (int s = part * steps; s < (part + 1) * steps; s++) {
        const __m512i w = _mm512_loadu_si512(p + s * 64);
        PT_UNROLL
        for (int r = 0; r < R; r++) {
          a[r] = _mm512_dpbusd_epi32(a[r], w, broadcast4(x + r * ld + s * 4));
          PT_PIN(a[r]);
        }
      }
      const __m512 d = load16((const S*)(p + 512) + part * kPanel);
      PT_UNROLL
      for (int r = 0; r < R; r++) {
        const __m512 s = _mm512_set1_ps(scale[r * groups + g]);
        f[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(a[r]), _mm512_mul_ps(d, s), f[r]);
      }
    }
  }
  PT_UNROLL
  for (int r = 0; r < R; r++) _mm512_storeu_ps(acc + r * kPanel, f[r]);
}

#elif defined(__AVX2__)

constexpr int kQ8Step = 2;
constexpr uint8_t kQ8Zero = 0;
constexpr unsigned kQ8Form = kInt16;

inline __m256i load_i(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline __m256i broadcast4(const void* p) {  // four bytes into every lane
  int32_t v;
  std::memcpy(&v, p, 4);
  return _mm256_set1_epi32(v);
}

// 32 bits as bytes of 16 or 0.
inline __m256i expand_bits(const uint8_t* p) {
  const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201));
  const __m256i byte = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i spread = _mm256_and_si256(_mm256_shuffle_epi8(broadcast4(p), byte), bit);
  return _mm256_and_si256(_mm256_cmpeq_epi8(spread, bit), _mm256_set1_epi8(16));
}

// Unsigned nibbles, or five bits, times int8. The sums of pairs fit int16: of a whole group of nibbles
// 8 * 2 * 15 * 127 = 30,480, of half a group of five bits 4 * 2 * 31 * 127 = 31,496.
template <int R, Kind kind>
void tile_nibbles(const uint8_t* p, int groups, const Acts& acts, int row, float* acc) {
  using S = Scale<kind>;
  constexpr int parts = five_bits(kind) ? 2 : 1, steps = 8 / parts;
  const size_t ld = size_t(groups) * kGroup, at = size_t(row) * groups;
  const int8_t* x = acts.q8 + row * ld;
  const float *scale = acts.scale + at, *sum = acts.sum + at;
  const __m256i ones = _mm256_set1_epi16(1), low = _mm256_set1_epi8(15);
  alignas(32) VF f[R][2] = {};
  for (int g = 0; g < groups; g++, p += group_bytes(kind), x += kGroup) {
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
          __m256i b = broadcast4(x + r * ld + s * 4);
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
      VF s = set1(scale[r * groups + g]), c = set1(sum[r * groups + g]);
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
void tile_q8(const uint8_t* p, int groups, const Acts& acts, int row, float* acc) {
  using S = Scale<kind>;
  constexpr int parts = kind == Kind::Q8Half ? 2 : 1, steps = 16 / parts;
  const size_t ld = size_t(groups) * kGroup, at = size_t(row) * groups;
  const int16_t* x = acts.q16 + row * ld;
  const float* scale = acts.scale + at;
  alignas(32) VF f[R][2] = {};
  for (int g = 0; g < groups; g++, p += group_bytes(kind), x += kGroup) {
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
          __m256i b = broadcast4(x + r * ld + s * 2);
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
        VF s = set1(scale[r * groups + g]);
        f[r][0] = fma((VF)_mm256_cvtepi32_ps(a[r][0]), d0 * s, f[r][0]);
        f[r][1] = fma((VF)_mm256_cvtepi32_ps(a[r][1]), d1 * s, f[r][1]);
      }
    }
  }
  PT_UNROLL
  for (int r = 0; r < R; r++) PT_UNROLL
  for (int v = 0; v < 2; v++) store(acc + r * kPanel + v * W, f[r][v]);
}

#else

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
void tile_nibbles(const uint8_t* p, int groups, const Acts& acts, int row, float* acc) {
  std::memset(acc, 0, sizeof(float) * R * kPanel);
  for (int g = 0; g < groups; g++, p += group_bytes(kind))
    for (int r = 0; r < R; r++) {
      int32_t a[kPanel] = {};
      const size_t at = size_t(row + r) * groups + g;
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
void tile_q8(const uint8_t* p, int groups, const Acts& acts, int row, float* acc) {
  constexpr int parts = kind == Kind::Q8Half ? 2 : 1, steps = 16 / parts;
  std::memset(acc, 0, sizeof(float) * R * kPanel);
  for (int g = 0; g < groups; g++, p += group_bytes(kind))
    for (int r = 0; r < R; r++) {
      const size_t at = size_t(row + r) * groups + g;
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

#endif

}  // namespace
}  // namespace PT_ISA
}  // namespace pt
