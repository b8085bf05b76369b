// The widest vectors of floats of one instruction set, for attention: `Wide`, of L lanes. Where nothing is
// wider than VF, it is VF.
#pragma once
#include "simd.h"

namespace pt {
namespace PT_ISA {
namespace {

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
inline void store(float* p, Wide v) { _mm512_storeu_ps(p, (__m512)v); }
inline Wide fma(Wide a, Wide b, Wide c) { return (Wide)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline Wide vmax(Wide a, Wide b) { return (Wide)_mm512_max_ps((__m512)a, (__m512)b); }  // b where one is NaN

// 2^x to about 1 ulp for x <= 0: 0 from -150 on; NaN stays NaN.
inline Wide power_of_two(Wide x) {
  x = vmax(spread(-200.0f), x);
  const Wide n = (Wide)_mm512_roundscale_ps((__m512)x, 0), r = x - n;
#else
constexpr int L = W;
typedef VF Wide;
typedef VI WideInt;

inline Wide spread(float x) { return set1(x); }
inline Wide wide(const float* p) { return load(p); }
inline Wide wide(const f16* p) { return load(p); }
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

// 2^x to about 1 ulp for x <= 0: 0 below -126; NaN stays NaN. The integer part comes from adding 1.5 * 2^23.
inline Wide power_of_two(Wide x) {
  const Wide magic = spread(12582912.0f), t = vmax(spread(-200.0f), x) + magic, r = x - (t - magic);
#endif
  Wide p = spread(1.534581242594868e-4f);
  p = fma(p, r, spread(1.3399930903688073e-3f));
  p = fma(p, r, spread(9.618489071726799e-3f));
  p = fma(p, r, spread(5.550328642129898e-2f));
  p = fma(p, r, spread(0.24022646248340607f));
  p = fma(p, r, spread(0.6931471824645996f));
  p = fma(p, r, spread(1.0f));
#if defined(PT_512)
  return (Wide)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const Wide y = (Wide)((VU)p + ((VU)t << 23));
  return x < -126.0f ? Wide{} : y;
#endif
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
