// Register tiles of quantised weights by AVX-512 VNNI: a panel is one vector. Per group of 32 a row costs 8
// vpdpbusd and 3 more multiplications (scale times scale, that times the sum, and the min), all on the same
// two ports: 8 of 11 slots are products. More rows share the unpacking of the weights; tiles of two panels
// were no faster, and when they read memory in turns, half as fast.
//
// With two terms the integers of the first are multiplied by 256 when they are summed, those of the second
// are added to them, and both are scaled once.
#pragma once
#include "micro_float.h"

namespace pt {
namespace PT_ISA {
namespace {

constexpr int kTileRows = 8;
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

// Step s of 8 in a group: 16 outputs times 4 bytes, unsigned.
template <Kind kind>
inline __m512i weights_of(const uint8_t* p, int s) {
  if constexpr (!nibbles(kind)) return _mm512_loadu_si512(p + s * 64);
  __m512i w = _mm512_loadu_si512(p + s / 2 * 64);
  if (s & 1) w = _mm512_srli_epi16(w, 4);
  w = _mm512_and_si512(w, _mm512_set1_epi8(15));
  if constexpr (five_bits(kind))
    w = _mm512_mask_add_epi8(w, load_bits(p + 256 + s * 8), w, _mm512_set1_epi8(16));
  return w;
}

template <int R, int Terms, Kind kind>
void tile_quantised(const uint8_t* p, int groups, const Acts& acts, int row, float* acc) {
  using S = Scale<kind>;
  constexpr int parts = kind == Kind::Q8Half ? 2 : 1, steps = 8 / parts;
  const int second = acts.rows;  // what lies behind the first terms
  __m512 f[R];
  PT_UNROLL
  for (int r = 0; r < R; r++) f[r] = _mm512_setzero_ps();
  for (int g = 0; g < groups; g++, p += group_bytes(kind)) {
    const size_t at = acts.at(row, g);
    const int8_t* x = acts.q8 + at * kGroup;
    const float *scale = acts.scale + at + (Terms - 1) * second, *sum = acts.sum + at;
    const int32_t *offset = acts.offset + at, *half = acts.half + at;
    PT_UNROLL
    for (int part = 0; part < parts; part++) {
      __m512i a[R];
      PT_UNROLL
      for (int term = 0; term < Terms; term++) {
        PT_UNROLL
        for (int r = 0; r < R; r++) {
          __m512i start = _mm512_setzero_si512();
          if constexpr (!nibbles(kind)) {  // take back what the weights are too large
            const int i = term * second + r;
            const int32_t first = parts == 2 ? half[i] : offset[i];
            start = _mm512_set1_epi32(part ? offset[i] - first : first);
          }
          a[r] = term ? _mm512_add_epi32(_mm512_slli_epi32(a[r], 8), start) : start;
        }
        PT_UNROLL
        for (int s = part * steps; s < (part + 1) * steps; s++) {
          const __m512i w = weights_of<kind>(p, s);
          PT_UNROLL
          for (int r = 0; r < R; r++) {
            a[r] = _mm512_dpbusd_epi32(a[r], w, broadcast4(x + (term * second + r) * kGroup + s * 4));
            PT_PIN(a[r]);
          }
        }
      }
      const S* scales = (const S*)(p + integer_bytes(kind));
      const __m512 d = load16(scales + part * kPanel);
      PT_UNROLL
      for (int r = 0; r < R; r++) {
        const __m512 s = _mm512_set1_ps(scale[r]);
        f[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(a[r]), _mm512_mul_ps(d, s), f[r]);
        PT_PIN(f[r]);
      }
      if constexpr (nibbles(kind)) {
        const __m512 m = load16(scales + kPanel);
        PT_UNROLL
        for (int r = 0; r < R; r++) {
          float both = sum[r];
          if constexpr (Terms == 2) both += sum[second + r];
          f[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(both), f[r]);
          PT_PIN(f[r]);
        }
      }
    }
  }
  PT_UNROLL
  for (int r = 0; r < R; r++) _mm512_storeu_ps(acc + r * kPanel, f[r]);
}

}  // namespace
}  // namespace PT_ISA
}  // namespace pt
