// The widest vectors of floats of one instruction set, for attention: `Wide`, of L lanes. Where nothing is
// wider than VF, it is VF.
#pragma once
#include "simd.h"

namespace pt {
namespace PT_ISA {
namespace {

inline float to_float(int8_t x) { return x; }

#if defined(PT_512)
constexpr int L = 16;
typedef float Wide __attribute__((vector_size(L * 4)));
typedef int32_t WideInt __attribute__((vector_size(L * 4)));

inline Wide spread(float x) { return (Wide)_mm512_set1_ps(x); }
inline Wide wide(const float* p) { return (Wide)_mm512_loadu_ps(p); }
inline Wide wide(const f16* p) { return (Wide)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline Wide wide(const int8_t* p) {
  return (Wide)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline Wide wide(const bf16* p) {
  const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return (Wide)_mm512_slli_epi32(bits, 16);
}
// A 256th of them, where none is NaN.
inline Wide wide_256th(const f8* p) {
  const __m256i h = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
  return (Wide)_mm512_cvtph_ps(_mm256_and_si256(h, _mm256_set1_epi16(int16_t(0xbfff))));
}
inline Wide wide(const f8* p) {
  const __m128i raw = _mm_loadu_si128((const __m128i*)p);
  const __m256i h = _mm256_slli_epi16(_mm256_cvtepi8_epi16(raw), 7);
  const __m512 v = _mm512_cvtph_ps(_mm256_and_si256(h, _mm256_set1_epi16(int16_t(0xbfff))));
  const __mmask16 numbers =
      _mm_cmpneq_epi8_mask(_mm_or_si128(raw, _mm_set1_epi8(int8_t(0x80))), _mm_set1_epi8(-1));
  return (Wide)_mm512_mask_mul_ps(_mm512_set1_ps(NAN), numbers, v, _mm512_set1_ps(256.0f));
}
inline void store(float* p, Wide v) { _mm512_storeu_ps(p, (__m512)v); }
inline Wide fma(Wide a, Wide b, Wide c) { return (Wide)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline Wide vmax(Wide a, Wide b) { return (Wide)_mm512_max_ps((__m512)a, (__m512)b); }  // b where one is NaN

// x - floor(x); 0 for -infinity. p * 2^floor(x), 0 where that is too small for a float.
inline Wide fraction(Wide x) { return (Wide)_mm512_reduce_ps((__m512)x, 1); }
inline Wide scaled(Wide p, Wide x) { return (Wide)_mm512_scalef_ps((__m512)p, (__m512)x); }
#else
constexpr int L = W;
typedef VF Wide;
typedef VI WideInt;

inline Wide spread(float x) { return set1(x); }
inline Wide wide(const float* p) { return load(p); }
inline Wide wide(const f16* p) { return load(p); }
inline Wide wide(const bf16* p) { return load(p); }
inline Wide wide(const f8* p) { return load(p); }
#if defined(__AVX2__)
// A 256th of them, where none is NaN.
inline Wide wide_256th(const f8* p) {
  const __m128i h = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p)), 7);
  return (Wide)_mm256_cvtph_ps(_mm_and_si128(h, _mm_set1_epi16(int16_t(0xbfff))));
}
#else
inline Wide wide_256th(const f8* p) { return load(p) * (1.0f / 256); }
#endif
#if defined(__AVX2__)
inline Wide wide(const int8_t* p) {
  return (Wide)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
#elif defined(__ARM_FEATURE_DOTPROD)
inline Wide wide(const int8_t* p) {
  uint32_t four;
  std::memcpy(&four, p, 4);
  return (Wide)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four)))));
}
#else
inline Wide wide(const int8_t* p) {
  Wide v;
  for (int i = 0; i < L; i++) v[i] = float(p[i]);
  return v;
}
#endif

// The same for -10^6 < x <= 0 and -infinity, by adding 1.5 * 2^23; `fraction` may be 1 where x is a whole
// number, and `scaled` is 0 below -126.
inline Wide whole(Wide x) { return vmax(spread(-1e6f), x) - 0.5f + 12582912.0f; }
inline Wide fraction(Wide x) { return vmax(spread(-1e6f), x) - (whole(x) - 12582912.0f); }
inline Wide scaled(Wide p, Wide x) { return x < -126.0f ? Wide{} : (Wide)((VU)p + ((VU)whole(x) << 23)); }
#endif

// 2^x to about 1 ulp for x <= 0; NaN stays NaN.
inline Wide power_of_two(Wide x) {
  const Wide r = fraction(x);
  Wide p = spread(2.161291631637141e-4f);
  p = fma(p, r, spread(1.2467845808714628e-3f));
  p = fma(p, r, spread(9.675451554358006e-3f));
  p = fma(p, r, spread(5.5485282093286514e-2f));
  p = fma(p, r, spread(0.2402293086051941f));
  p = fma(p, r, spread(0.6931470632553101f));
  p = fma(p, r, spread(1.0f));
  return scaled(p, x);
}
inline float power_of_two(float x) { return power_of_two(spread(x))[0]; }

// The sum of the lanes, always in the same order; their maximum.
#if defined(PT_512)
inline float sum_of(Wide v) { return _mm512_reduce_add_ps((__m512)v); }
inline float max_of(Wide v) { return _mm512_reduce_max_ps((__m512)v); }
#else
inline float sum_of(Wide v) { return sum(v); }
inline float max_of(Wide v) { return hmax(v); }
#endif

}  // namespace
}  // namespace PT_ISA
}  // namespace pt
