// Vectors of floats for one instruction set. Included by kernel files only, which are compiled once per set
// with PT_ISA naming the namespace. GCC's vector types give + - * / and comparisons; the rest is here.
#pragma once
#include <cmath>
#include <cstring>

#include "isa.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && !defined(PT_256_BITS)
#define PT_512  // vectors of 512 bits, where they are worth it
#endif
#define PT_UNROLL _Pragma("GCC unroll 16")

namespace pt {
namespace PT_ISA {
namespace {

#if defined(__ARM_FEATURE_DOTPROD)
constexpr int W = 4;  // GCC keeps vectors wider than a register in memory
#else
constexpr int W = 8;
#endif
typedef float VF __attribute__((vector_size(W * 4)));
typedef int32_t VI __attribute__((vector_size(W * 4)));
typedef uint32_t VU __attribute__((vector_size(W * 4)));  // for arithmetic on bits, which may wrap
constexpr int kPanelVecs = kPanel / W;

// Keeps GCC from computing all products first and spilling them: the value must exist, in a register, here.
#if defined(__AVX2__)
#define PT_PIN(v) asm("" : "+v"(v))
#elif defined(__ARM_FEATURE_DOTPROD)
#define PT_PIN(v) asm("" : "+w"(v))
#else
#define PT_PIN(v) (void)(v)
#endif

inline VF set1(float x) { return x - VF{}; }
inline VF lanes() {  // 0, 1, 2, ...
  VF v;
  for (int i = 0; i < W; i++) v[i] = float(i);
  return v;
}
inline VF load(const float* p) {
  VF v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, VF v) { std::memcpy(p, &v, sizeof v); }
inline VF vmax(VF a, VF b) { return a > b ? a : b; }  // b where either is NaN
inline VF vabs(VF a) { return (VF)((VI)a & 0x7fffffff); }

inline float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint32_t float_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

#if defined(__AVX2__)
inline VF fma(VF a, VF b, VF c) { return (VF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline VF load(const f16* p) { return (VF)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline void store(f16* p, VF v) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, 0)); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float to_float(f16 h) { return _cvtsh_ss(h.bits); }
inline f16 to_f16(float x) { return {(uint16_t)_cvtss_sh(x, 0)}; }
inline VF load(const f8* p) {
  __m128i h = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p)), 7);
  h = _mm_and_si128(h, _mm_set1_epi16(int16_t(0xbfff)));
  const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(h, _mm_set1_epi16(0x3fff)), _mm_set1_epi16(0x3f80));
  h = _mm_or_si128(h, _mm_and_si128(nan, _mm_set1_epi16(0x4000)));
  return (VF)_mm256_cvtph_ps(h) * 256.0f;
}
#elif defined(__ARM_FEATURE_DOTPROD)
inline VF fma(VF a, VF b, VF c) { return (VF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
inline VF load(const f16* p) {
  float16x4_t h;
  std::memcpy(&h, p, sizeof h);
  return (VF)vcvt_f32_f16(h);
}
inline void store(f16* p, VF v) {
  const float16x4_t h = vcvt_f16_f32((float32x4_t)v);
  std::memcpy(p, &h, sizeof h);
}
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float to_float(f16 h) {
  __fp16 x;
  std::memcpy(&x, &h, 2);
  return float(x);
}
inline f16 to_f16(float x) {
  const __fp16 h = __fp16(x);
  f16 out;
  std::memcpy(&out, &h, 2);
  return out;
}
inline VF load(const f8* p) {
  uint32_t four;
  std::memcpy(&four, p, 4);
  uint16x4_t h = vreinterpret_u16_s16(vget_low_s16(vmovl_s8(vcreate_s8(four))));
  h = vand_u16(vshl_n_u16(h, 7), vdup_n_u16(0xbfff));
  const uint16x4_t nan = vceq_u16(vand_u16(h, vdup_n_u16(0x3fff)), vdup_n_u16(0x3f80));
  h = vorr_u16(h, vand_u16(nan, vdup_n_u16(0x4000)));
  return (VF)vcvt_f32_f16(vreinterpret_f16_u16(h)) * 256.0f;
}
#else
inline VF fma(VF a, VF b, VF c) { return a * b + c; }
inline float fma(float a, float b, float c) { return a * b + c; }
inline float to_float(f16 h) {
  uint32_t sign = uint32_t(h.bits & 0x8000) << 16, rest = h.bits & 0x7fff;
  if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest < 0x400) return bits_to_float(sign | float_to_bits(float(rest) * 0x1p-24f));
  return bits_to_float(sign | ((rest << 13) + 0x38000000));
}
inline f16 to_f16(float x) {  // rounds half to even
  uint32_t u = float_to_bits(x), a = u & 0x7fffffff;
  uint16_t sign = uint16_t(u >> 16 & 0x8000);
  if (a > 0x7f800000) return {uint16_t(sign | 0x7e00)};
  if (a >= 0x477ff000) return {uint16_t(sign | 0x7c00)};
  if (a < 0x38800000) return {uint16_t(sign | (float_to_bits(bits_to_float(a) + 0.5f) - 0x3f000000))};
  return {uint16_t(sign | ((a + 0xfff + (a >> 13 & 1) - 0x38000000) >> 13))};
}
inline VF load(const f16* p) {
  VF v;
  for (int i = 0; i < W; i++) v[i] = to_float(p[i]);
  return v;
}
inline void store(f16* p, VF v) {
  for (int i = 0; i < W; i++) p[i] = to_f16(v[i]);
}
inline float to_float(f8 h);
inline VF load(const f8* p) {
  VF v;
  for (int i = 0; i < W; i++) v[i] = to_float(p[i]);
  return v;
}
#endif

inline float to_float(float x) { return x; }
inline float to_float(bf16 h) { return bits_to_float(uint32_t(h.bits) << 16); }
// The bits of an e4m3 are those of an fp16 that is 256 times smaller, but for its NaN.
inline float to_float(f8 h) {
  const uint32_t rest = h.bits & 0x7f, bits = uint32_t(h.bits & 0x80) << 8 | rest << 7;
  return to_float(f16{uint16_t(rest == 0x7f ? bits | 0x4000 : bits)}) * 256.0f;
}
inline VF load(const bf16* p) {
  typedef uint16_t VH __attribute__((vector_size(W * 2)));
  VH h;
  std::memcpy(&h, p, sizeof h);
  return (VF)(__builtin_convertvector(h, VI) << 16);
}

// Rounded half to even. A NaN stays one.
inline void store(bf16* p, VF v) {
  typedef uint16_t VH __attribute__((vector_size(W * 2)));
  const VU u = (VU)v, rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16, quiet = u >> 16 | 0x40;
  const VH h = __builtin_convertvector(v == v ? rounded : quiet, VH);
  std::memcpy(p, &h, sizeof h);
}
// The same; what is beyond the largest, 448, becomes that. Below 2^-6 steps are 2^-9, those of floats at
// 2^14.
inline void store(f8* p, VF v) {
  typedef uint8_t VB __attribute__((vector_size(W)));
  const VU u = (VU)v, size = u & 0x7fffffff, most = VU{} + 0x43e00000u;
  const VU a = size > most ? most : size;
  const VU normal = ((a + 0x7ffff + (a >> 20 & 1)) >> 20) - (120u << 3);
  const VU small = (VU)((VF)a + 16384.0f) - float_to_bits(16384.0f);
  VU bits = a < 0x3c800000u ? small : normal;
  bits = size > 0x7f800000u ? VU{} + 0x7fu : bits;
  const VB b = __builtin_convertvector(bits | (u >> 24 & 0x80), VB);
  std::memcpy(p, &b, sizeof b);
}

// The four lanes of v, or f of its two halves.
typedef float Four __attribute__((vector_size(16)));
template <class F>
Four folded(VF v, const F& f) {
  Four parts[W / 4];
  std::memcpy(parts, &v, sizeof v);
  return W == 4 ? parts[0] : f(parts[0], parts[W / 4 - 1]);
}
inline float sum(VF v) {  // lanes added pairwise, always in this order
  const Four t = folded(v, [](Four a, Four b) { return a + b; });
  return (t[0] + t[2]) + (t[1] + t[3]);
}
inline float hmax(VF v) {  // of no NaN
  const Four t = folded(v, [](Four a, Four b) { return a > b ? a : b; });
  const float a = t[0] > t[2] ? t[0] : t[2], b = t[1] > t[3] ? t[1] : t[3];
  return a > b ? a : b;
}

// exp to about 1 ulp; 0 below -87.3, exp(88) above 88; NaN stays NaN. The integer part comes from adding 1.5
// * 2^23.
inline VF vexp(VF x) {
  const VF magic = set1(12582912.0f);
  x = x > 88.0f ? set1(88.0f) : x;
  VF t = fma(x, set1(1.44269504088896341f), magic);
  VF n = t - magic;
  VF r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  VF p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + 1.0f);
  VF y = (VF)((VU)p + ((VU)t << 23));
  return x < -87.3f ? VF{} : y;
}
inline float exp1(float x) { return vexp(set1(x))[0]; }

// tanh to about 2 ulp: a polynomial near 0 (Cephes), else 1 - 2 / (exp(2|x|) + 1).
inline VF vtanh(VF x) {
  const VF a = vabs(x), z = x * x;
  VF p = set1(-5.70498872745e-3f);
  p = fma(p, z, set1(2.06390887954e-2f));
  p = fma(p, z, set1(-5.37397155531e-2f));
  p = fma(p, z, set1(1.33314422036e-1f));
  p = fma(p, z, set1(-3.33332819422e-1f));
  const VF y = 1.0f - 2.0f / (vexp(a + a) + 1.0f);
  return a < 0.625f ? fma(p * z, x, x) : x < 0.0f ? -y : y;
}

// 1 - erf(x) to a relative 2e-7 (Numerical Recipes, erfcc): the tail keeps its digits.
inline VF verfc(VF x) {
  const VF a = vabs(x), t = 1.0f / fma(a, set1(0.5f), set1(1.0f));
  constexpr float c[] = {0.17087277f,  -0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f,
                         -0.18628806f, 0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
  VF p = set1(c[0]);
  for (int i = 1; i < 10; i++) p = fma(p, t, set1(c[i]));
  const VF y = t * vexp(p - a * a);
  return x < 0.0f ? 2.0f - y : y;
}

// Natural logarithm by the series of atanh, in double: about 1e-15, and the same on every libm.
inline double log1(double x) {
  int e;
  double m = std::frexp(x, &e);
  if (m < 0.70710678118654752) m *= 2, e--;
  double s = (m - 1) / (m + 1), s2 = s * s, p = 0;
  for (int i = 21; i >= 1; i -= 2) p = p * s2 + 1.0 / i;
  return 2 * s * p + e * 0.69314718055994531;
}

}  // namespace
}  // namespace PT_ISA
}  // namespace pt
