// Register tiles of quantised weights by AVX-512 VNNI.
#pragma once
#include "micro_float.h"

namespace pt {
namespace PT_ISA {
namespace {

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

}  // namespace
}  // namespace PT_ISA
}  // namespace pt
