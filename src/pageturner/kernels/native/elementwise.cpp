// Everything that works on single rows: quantising activations, norms, activations, rotary embedding,
// choosing experts, writing KV. Also the table that collects the kernels of this instruction set.
#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace pt {
namespace PT_ISA {

namespace {

// One group of 32: scale = max|x| / 127, integers x * (127 / max|x|) rounded half to even; as a second term,
// 256 times what that left. A NaN or infinity in x makes scale NaN, so that it is not lost in the integers.
// With 12 bits 119 in place of 127: what the bytes that are shared add to an integer may take 8.
struct Scaling {
  float scale, factor;
  explicit Scaling(float peak)
      : scale(peak / 127.0f + peak * 0.0f), factor(peak > 0 ? 127.0f / peak : 0.0f) {}
};

// f(lane) for each lane.
template <class F>
VI each_lane(const F& f) {
  VI v;
  PT_UNROLL
  for (int i = 0; i < W; i++) v[i] = f(i);
  return v;
}

// Where a group of a row goes.
struct Place {
  int row, group;
};

#if defined(PT_512)

// The lanes of each of four vectors, reduced by f: four lanes.
template <class F>
__m128i reduce(const __m512i v[4], const F& f) {
  const __m512i a = f(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
  const __m512i b = f(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
  __m512i c = f(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  c = f(c, _mm512_shuffle_i64x2(c, c, 0b01001110));
  c = f(c, _mm512_shuffle_i64x2(c, c, 0b10110001));
  return _mm512_castsi512_si128(c);
}
inline __m512i larger(__m512i a, __m512i b) { return _mm512_max_epi32(a, b); }
inline __m512i both(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }

// Half to even. Only what is no number, and infinity, leaves -127 .. 127.
inline __m512i nearest(__m512 x) {
  return _mm512_cvtps_epi32(_mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-127.0f)), _mm512_set1_ps(127.0f)));
}

// Integers that lie in bytes, and the sums of four groups' halves.
inline void put(int8_t* to, __m512i low, __m512i high) {
  _mm_storeu_si128((__m128i*)to, _mm512_cvtsepi32_epi8(low));
  _mm_storeu_si128((__m128i*)(to + 16), _mm512_cvtsepi32_epi8(high));
}

// Integers of up to 16 bits as bf16 words (Acts::words), the second term if there are more than 8.
inline void put_words(uint16_t* to, __m512i low, __m512i high, bool terms) {
  const auto put = [](uint16_t* to, __m512i v) {
    const __m512i bits = _mm512_srli_epi32((__m512i)_mm512_cvtepi32_ps(v), 16);
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16(bits));
  };
  if (!terms) return put(to, low), put(to + 16, high);
  const auto upper = [](__m512i v) {
    return _mm512_and_si512(_mm512_add_epi32(v, _mm512_set1_epi32(128)), _mm512_set1_epi32(-256));
  };
  const __m512i l = upper(low), h = upper(high);
  put(to, l), put(to + 16, h);
  put(to + 32, _mm512_sub_epi32(low, l)), put(to + 48, _mm512_sub_epi32(high, h));
}

// Sums of four groups, and of their first halves, times their scales, to the places `at`.
inline void put_sums(const Acts& a, const size_t at[4], const float scale[4], const __m512i low[4],
                     const __m512i high[4]) {
  __m512i all[4];
  for (int i = 0; i < 4; i++) all[i] = _mm512_add_epi32(low[i], high[i]);
  alignas(16) int32_t whole[4], first[4] = {};
  _mm_store_si128((__m128i*)whole, reduce(all, both));
  if (a.offset) _mm_store_si128((__m128i*)first, reduce(low, both));
  for (int i = 0; i < 4; i++) {
    a.scale[at[i]] = scale[i], a.sum[at[i]] = scale[i] * float(whole[i]);
    if (a.offset) a.offset[at[i]] = whole[i] * -128, a.half[at[i]] = first[i] * -128;
  }
}

// What 12 bits make of 32 elements in 16ths of a step: `first` of each four, `second` of the next four. Each
// element of `second` is rounded to 16ths, n; its lowest four bits are those of the shared byte, c, and count
// a 256th in the first elements, which are rounded with them; the other bits of c are what these lack.
inline void put_twelve(const Acts& a, size_t at, __m512 first, __m512 second, __m512i& one, __m512i& two) {
  const __m512i eight = _mm512_set1_epi32(8), fifteen = _mm512_set1_epi32(15);
  const auto low_bits = [&](__m512i n) {  // -8 .. 7
    return _mm512_sub_epi32(_mm512_and_si512(_mm512_add_epi32(n, eight), fifteen), eight);
  };
  const __m512i n2 = _mm512_cvtps_epi32(second), l = low_bits(n2);
  const __m512i n1 =
      _mm512_cvtps_epi32(_mm512_sub_ps(first, _mm512_mul_ps(_mm512_cvtepi32_ps(l), _mm512_set1_ps(0.0625f))));
  __m512i h = low_bits(n1);  // -8 with less than nothing below it is no byte, and 8 is the same
  const __mmask16 under = _mm512_cmplt_epi32_mask(l, _mm512_setzero_si512());
  h = _mm512_mask_mov_epi32(h, under & _mm512_cmpeq_epi32_mask(h, _mm512_set1_epi32(-8)), eight);
  const __m128i p1 = _mm512_cvtsepi32_epi8(_mm512_srai_epi32(_mm512_sub_epi32(n1, h), 4));
  const __m128i p2 =
      _mm512_cvtsepi32_epi8(_mm512_sub_epi32(_mm512_srai_epi32(_mm512_sub_epi32(n2, l), 4), h));
  int8_t* to = a.q8 + at * kGroup;
  _mm_storeu_si128((__m128i*)to, _mm_unpacklo_epi32(p1, p2));
  _mm_storeu_si128((__m128i*)(to + 16), _mm_unpackhi_epi32(p1, p2));
  const __m512i c = _mm512_add_epi32(_mm512_slli_epi32(h, 4), l);
  _mm_storeu_si128((__m128i*)(to + size_t(a.rows) * kGroup), _mm512_cvtsepi32_epi8(c));
  one = _mm512_add_epi32(_mm512_slli_epi32(n1, 4), l), two = _mm512_slli_epi32(n2, 4);
}

// Words of four groups, and their sums.
inline void put_all_words(const Acts& a, const Place place[4], const __m512i low[4], const __m512i high[4]) {
  __m512i all[4];
  for (int i = 0; i < 4; i++) {
    put_words(a.words + a.words_at(place[i].row, place[i].group), low[i], high[i], a.bits > 8);
    all[i] = _mm512_add_epi32(low[i], high[i]);
  }
  alignas(16) float whole[4];
  _mm_store_ps(whole, _mm_cvtepi32_ps(reduce(all, both)));
  for (int i = 0; i < 4; i++) a.whole[a.at(place[i].row, place[i].group)] = whole[i];
}

// Four groups at once, from x[i] to their places; some of them may be the same.
template <int bits>
void quantise_four(const float* const x[4], const Acts& a, const Place place[4]) {
  size_t at[4];
  for (int i = 0; i < 4; i++) at[i] = a.at(place[i].row, place[i].group);
  // The peak as an integer, so that a NaN is more than infinity, and that more than all numbers.
  const __m512i rest = _mm512_set1_epi32(0x7fffffff);
  __m512 v[4][2];
  __m512i peaks[4], low[4], high[4];
  for (int i = 0; i < 4; i++) {
    for (int j = 0; j < 2; j++) v[i][j] = _mm512_loadu_ps(x[i] + j * 16);
    peaks[i] = larger(_mm512_and_si512((__m512i)v[i][0], rest), _mm512_and_si512((__m512i)v[i][1], rest));
  }
  const __m128 peak = (__m128)reduce(peaks, larger), most = _mm_set1_ps(bits == 12 ? 119.0f : 127.0f);
  alignas(16) float scale[4], factor[4];
  _mm_store_ps(scale, _mm_add_ps(_mm_div_ps(peak, most), _mm_mul_ps(peak, _mm_setzero_ps())));
  const __m128 ratio = _mm_div_ps(most, peak);
  _mm_store_ps(factor, _mm_and_ps(ratio, _mm_cmpgt_ps(peak, _mm_setzero_ps())));
  for (int i = 0; i < 4; i++) {
    const __m512 f = _mm512_set1_ps(bits == 12 ? factor[i] * 16.0f : factor[i]);
    __m512 exact[2] = {_mm512_mul_ps(v[i][0], f), _mm512_mul_ps(v[i][1], f)};
    if constexpr (bits == 12) {
      scale[i] /= 256;
      __m512i one, two;
      put_twelve(a, at[i], _mm512_shuffle_f32x4(exact[0], exact[1], 0b10001000),
                 _mm512_shuffle_f32x4(exact[0], exact[1], 0b11011101), one, two);
      // as in x: quarters of both in turns
      low[i] = _mm512_permutex2var_epi64(one, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), two);
      high[i] = _mm512_permutex2var_epi64(one, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), two);
    } else {
      low[i] = nearest(exact[0]), high[i] = nearest(exact[1]);
      put(a.q8 + at[i] * kGroup, low[i], high[i]);
    }
    v[i][0] = exact[0], v[i][1] = exact[1];
  }
  put_sums(a, at, scale, low, high);
  if (bits < 15 && a.words) put_all_words(a, place, low, high);
  if constexpr (bits == 15) {
    size_t behind[4];
    __m512i first[2][4];
    for (int i = 0; i < 4; i++) first[0][i] = low[i], first[1][i] = high[i];
    for (int i = 0; i < 4; i++) {
      behind[i] = at[i] + a.rows, scale[i] /= 256;
      const auto left = [](__m512 x, __m512i n) {
        return nearest(_mm512_mul_ps(_mm512_sub_ps(x, _mm512_cvtepi32_ps(n)), _mm512_set1_ps(256.0f)));
      };
      low[i] = left(v[i][0], low[i]), high[i] = left(v[i][1], high[i]);
      put(a.q8 + behind[i] * kGroup, low[i], high[i]);
    }
    put_sums(a, behind, scale, low, high);
    if (!a.words) return;
    for (int i = 0; i < 4; i++) {
      low[i] = _mm512_add_epi32(low[i], _mm512_slli_epi32(first[0][i], 8));
      high[i] = _mm512_add_epi32(high[i], _mm512_slli_epi32(first[1][i], 8));
    }
    put_all_words(a, place, low, high);
  }
}

// `count` groups, four at a time: group i lies at x + 32 i, and goes to place(i).
template <class F>
void quantise_groups(const float* x, const Acts& a, int count, const F& place) {
  for (int i = 0; i < count; i += 4) {
    const float* from[4];
    Place to[4];
    for (int j = 0; j < 4; j++) {
      const int k = std::min(i + j, count - 1);
      from[j] = x + k * kGroup, to[j] = place(k);
    }
    a.bits == 15   ? quantise_four<15>(from, a, to)
    : a.bits == 12 ? quantise_four<12>(from, a, to)
                   : quantise_four<8>(from, a, to);
  }
}

#else

// f over the lanes of v, pairwise.
template <class F, int step = W / 2>
uint32_t reduce(VU v, const F& f) {
  if constexpr (step == 0)
    return v[0];
  else
    return reduce<F, step / 2>(f(v, __builtin_shuffle(v, (VU)each_lane([](int i) { return i ^ step; }))), f);
}

typedef int8_t VB __attribute__((vector_size(W)));
typedef int16_t VS __attribute__((vector_size(W * 2)));

// The integers of one row in one term, from vectors of them. words: what 16 bits hold of them, which is the
// whole of both terms in the second one's place.
struct Integers {
  const Acts& a;
  size_t at;
  VU total{}, first{};

  void put(int i, VU n, VU words) {
    if (i == kGroup / 2) first = total;
    total += n;
    if (a.q8) {
      const VB b = __builtin_convertvector((VI)n, VB);
      std::memcpy(a.q8 + at * kGroup + i, &b, sizeof b);
    }
    if (a.q16) {
      const VS s = __builtin_convertvector((VI)words, VS);
      std::memcpy(a.q16 + at * kGroup + i, &s, sizeof s);
    }
  }
  int32_t finish() const {  // their sum
    const uint32_t whole = reduce(total, [](VU x, VU y) { return x + y; });
    if (a.offset) {
      const uint32_t half = reduce(first, [](VU x, VU y) { return x + y; });
      a.offset[at] = int32_t(whole * -128u), a.half[at] = int32_t(half * -128u);
    }
    return int32_t(whole);
  }
};

inline VU nearest(VF x) {  // half to even, within -127 .. 127
  x = x > 127.0f ? set1(127.0f) : x;
  x = x < -127.0f ? set1(-127.0f) : x;
  return (VU)(x + 12582912.0f) - 0x4B400000u;
}

template <int Terms>
void quantise_one(const float* x, const Acts& a, size_t at) {
  VU most = {};  // as integers, so that a NaN is more than infinity, and that more than all numbers
  const auto larger = [](VU x, VU y) { return (VU)((VI)x > (VI)y ? (VI)x : (VI)y); };
  for (int i = 0; i < kGroup; i += W) most = larger((VU)vabs(load(x + i)), most);
  const Scaling s(bits_to_float(reduce(most, larger)));
  Integers coarse{a, at}, fine{a, at + a.rows};
  for (int i = 0; i < kGroup; i += W) {
    const VF v = load(x + i) * s.factor;
    const VU n = nearest(v);
    coarse.put(i, n, n);
    if constexpr (Terms == 2) {
      const VU left = nearest((v - __builtin_convertvector((VI)n, VF)) * 256.0f);
      fine.put(i, left, n * 256u + left);
    }
  }
  const int32_t n = coarse.finish();
  a.scale[at] = s.scale, a.sum[at] = s.scale * float(n);
  if constexpr (Terms == 2) {
    const float step = s.scale / 256;
    a.scale[fine.at] = step, a.sum[fine.at] = step * float(fine.finish());
  }
}

// `count` groups: group i lies at x + 32 i, and goes to place(i).
template <class F>
void quantise_groups(const float* x, const Acts& a, int count, const F& place) {
  for (int i = 0; i < count; i++, x += kGroup) {
    const auto [row, group] = place(i);
    a.bits == 8 ? quantise_one<1>(x, a, a.at(row, group)) : quantise_one<2>(x, a, a.at(row, group));
  }
}

#endif

}  // namespace

void quantise(const float* x, const Acts& a, int row, int col0, int col1) {
  const int first = col0 / kGroup;
  quantise_groups(x, a, (col1 - col0) / kGroup, [&](int i) { return Place{row, first + i}; });
}

void quantise_group(const float* x, const Acts& a, int row, int rows, int group) {
  quantise_groups(x, a, rows, [&](int i) { return Place{row + i, group}; });
}

void norm(const float* x, const float* weight, float eps, int n, float* out) {
  VF s[4] = {};
  int i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int j = 0; j < 4; j++) {
      VF v = load(x + i + j * W);
      s[j] = fma(v, v, s[j]);
    }
  float total = sum((s[0] + s[1]) + (s[2] + s[3]));
  for (; i < n; i++) total = fma(x[i], x[i], total);
  const float inv = 1.0f / __builtin_sqrtf(total / float(n) + eps);
  for (i = 0; i + W <= n; i += W) store(out + i, load(x + i) * inv * load(weight + i));
  for (; i < n; i++) out[i] = x[i] * inv * weight[i];
}

namespace {

// The sum of term(v) over a row, in a fixed order of lanes.
template <class F>
float total(const float* x, int n, const F& term) {
  VF s[4] = {};
  int i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int j = 0; j < 4; j++) s[j] += term(load(x + i + j * W));
  float t = sum((s[0] + s[1]) + (s[2] + s[3]));
  for (; i < n; i++) t += term(set1(x[i]))[0];
  return t;
}

// out = f(x) for each element, the last few in a vector of their own.
template <class F>
void map(const float* x, int n, float* out, const F& f) {
  int i = 0;
  for (; i + W <= n; i += W) store(out + i, f(load(x + i)));
  if (i == n) return;
  float rest[W] = {};
  std::memcpy(rest, x + i, sizeof(float) * (n - i));
  store(rest, f(load(rest)));
  std::memcpy(out + i, rest, sizeof(float) * (n - i));
}

}  // namespace

// Two passes: the mean first, then the squares of what is left.
void layer_norm(const float* x, const float* weight, const float* bias, float eps, int n, float* out) {
  const float mean = total(x, n, [](VF v) { return v; }) / float(n);
  const float squares = total(x, n, [&](VF v) { return (v - mean) * (v - mean); });
  const float inv = 1.0f / __builtin_sqrtf(squares / float(n) + eps);
  for (int i = 0; i < n; i++) out[i] = (x[i] - mean) * inv * weight[i] + bias[i];
}

// gelu_tanh: x/2 * (1 + tanh(u)) = x / (1 + exp(-2u)), which keeps its digits where tanh is near -1.
void activate(Act act, const float* x, int n, float* out) {
  switch (act) {
    case Act::Silu: return map(x, n, out, [](VF v) { return v / (vexp(-v) + 1.0f); });
    case Act::Gelu: return map(x, n, out, [](VF v) { return v * 0.5f * verfc(v * -0.70710678118654752f); });
    case Act::GeluTanh:
      return map(x, n, out, [](VF v) {
        const VF u = v * 0.79788456080286536f * fma(v * v, set1(0.044715f), set1(1.0f));
        return v / (vexp(u * -2.0f) + 1.0f);
      });
    case Act::Relu: return map(x, n, out, [](VF v) { return v < 0.0f ? VF{} : v; });
    case Act::ClampedSwiglu: return;  // is none of one number
    case Act::SquaredRelu:
      return map(x, n, out, [](VF v) {
        const VF positive = v < 0.0f ? VF{} : v;
        return positive * positive;
      });
  }
}

void soft_cap(const float* x, float cap, int n, float* out) {
  map(x, n, out, [&](VF v) { return vtanh(v / cap) * cap; });
}

void mul(const float* x, const float* y, size_t n, float* out) {
  for (size_t i = 0; i < n; i++) out[i] = x[i] * y[i];
}

void add_scaled(const float* x, float factor, size_t n, float* to) {
  for (size_t i = 0; i < n; i++) to[i] += factor * x[i];
}

// The k best by (logit descending, id ascending), put in order of id, and their softmax over all, or over
// themselves, or their sigmoids. NaN counts as the least.
void route(const float* logits, int experts, int k, bool normalise, bool sigmoid, int32_t* ids,
           float* weights) {
  const auto value = [&](int i) { return logits[i] == logits[i] ? logits[i] : -INFINITY; };
  for (int j = 0; j < k; j++) {
    const int last = j ? ids[j - 1] : -1;
    int best = -1;
    for (int i = 0; i < experts; i++) {
      const bool after = !j || value(i) < value(last) || (value(i) == value(last) && i > last);
      if (after && (best < 0 || value(i) > value(best))) best = i;
    }
    ids[j] = best;
  }
  const float top = logits[ids[0]];
  std::sort(ids, ids + k);
  float all = 0, chosen = 0;
  for (int i = 0; i < experts && !sigmoid; i++) all += exp1(logits[i] - top);
  for (int j = 0; j < k; j++) {
    const float logit = logits[ids[j]];
    chosen += weights[j] = sigmoid ? 1.0f / (exp1(-logit) + 1.0f) : exp1(logit - top);
  }
  if (sigmoid) all = 1;
  for (int j = 0; j < k; j++) weights[j] /= normalise ? chosen : all;
}

#if defined(PT_512)
namespace {

// What vexp does, in vectors twice as wide: the same bits.
inline __m512 exp512(__m512 x) {
  const auto c = [](float v) { return _mm512_set1_ps(v); };
  x = _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(x, c(88.0f), _CMP_GT_OS), c(88.0f));
  const __m512 t = _mm512_fmadd_ps(x, c(1.44269504088896341f), c(12582912.0f));
  const __m512 n = _mm512_sub_ps(t, c(12582912.0f));
  __m512 r = _mm512_fmadd_ps(n, c(-0.693359375f), x);
  r = _mm512_fmadd_ps(n, c(2.12194440e-4f), r);
  __m512 p = c(1.9875691500e-4f);
  for (const float a :
       {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = _mm512_fmadd_ps(p, r, c(a));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, c(1.0f)));
  const __m512i y = _mm512_add_epi32((__m512i)p, _mm512_slli_epi32((__m512i)t, 23));
  return _mm512_mask_mov_ps((__m512)y, _mm512_cmp_ps_mask(x, c(-87.3f), _CMP_LT_OS), _mm512_setzero_ps());
}

}  // namespace
#endif

void silu_mul(const float* gate, const float* up, int n, float* out) {
  int i = 0;
#if defined(PT_512)
  for (; i + 16 <= n; i += 16) {
    const __m512 g = _mm512_loadu_ps(gate + i), one = _mm512_set1_ps(1.0f);
    const __m512 e = exp512(_mm512_sub_ps(_mm512_setzero_ps(), g));
    _mm512_storeu_ps(out + i,
                     _mm512_mul_ps(_mm512_div_ps(g, _mm512_add_ps(e, one)), _mm512_loadu_ps(up + i)));
  }
#endif
  for (; i + W <= n; i += W) {
    VF g = load(gate + i);
    store(out + i, g / (vexp(-g) + 1.0f) * load(up + i));
  }
  for (; i < n; i++) out[i] = gate[i] / (exp1(-gate[i]) + 1.0f) * up[i];
}

// With g = min(gate, 7) and u = up within -7 .. 7: g / (1 + exp(-1.702 g)) * (u + 1) (gpt-oss).
void clamped_swiglu(const float* gate, const float* up, int n, float* out) {
  constexpr float kLimit = 7, kSharpness = -1.702f;
  const auto of = [](VF g, VF u) {
    g = g > kLimit ? set1(kLimit) : g;
    u = u > kLimit ? set1(kLimit) : u < -kLimit ? set1(-kLimit) : u;
    return g / (vexp(g * kSharpness) + 1.0f) * (u + 1.0f);
  };
  int i = 0;
  for (; i + W <= n; i += W) store(out + i, of(load(gate + i), load(up + i)));
  for (; i < n; i++) out[i] = of(set1(gate[i]), set1(up[i]))[0];
}

void add(const float* x, const float* y, size_t n, float* out) {
  for (size_t i = 0; i < n; i++) out[i] = x[i] + y[i];
}

namespace {

// The pair (a, b) turned by an angle.
template <class V>
void turn(V& a, V& b, V cos, V sin) {
  const V x = a * cos - b * sin;
  b = a * sin + b * cos, a = x;
}

// W pairs that lie beside each other, from p on.
void turn_beside(float* p, const float* cos, const float* sin) {
  const VF low = load(p), high = load(p + W);
  VF a = __builtin_shuffle(low, high, each_lane([](int i) { return 2 * i; }));
  VF b = __builtin_shuffle(low, high, each_lane([](int i) { return 2 * i + 1; }));
  turn(a, b, load(cos), load(sin));
  store(p, __builtin_shuffle(a, b, each_lane([](int i) { return i / 2 + i % 2 * W; })));
  store(p + W, __builtin_shuffle(a, b, each_lane([](int i) { return (i + W) / 2 + i % 2 * W; })));
}

// W pairs whose halves lie at p and q.
void turn_apart(float* p, float* q, const float* cos, const float* sin) {
  VF a = load(p), b = load(q);
  turn(a, b, load(cos), load(sin));
  store(p, a), store(q, b);
}

}  // namespace

// Rotates pairs of each head, (2i, 2i+1) or (i, i + half); dimensions from 2 * half on stay as they are.
void rope(float* x, int heads, int head_dim, const float* cos, const float* sin, int half, bool interleaved) {
  const int step = interleaved ? 2 : 1, other = interleaved ? 1 : half;
  for (int h = 0; h < heads; h++, x += head_dim) {
    int i = 0;
    for (; i + W <= half; i += W)
      interleaved ? turn_beside(x + 2 * i, cos + i, sin + i)
                  : turn_apart(x + i, x + i + half, cos + i, sin + i);
    for (; i < half; i++) turn(x[i * step], x[i * step + other], cos[i], sin[i]);
  }
}

namespace {

// How the head_dim values of one head become elements of type T.
template <class T>
struct Rounding {
  explicit Rounding(const float*, int) {}
  void operator()(VF x, T* out) const { store(out, x); }
};

// scale = max|x| / 127, integers x * (127 / max|x|) rounded half to even. A NaN or infinity in x makes scale
// NaN, so that it is not lost in the integers.
template <>
struct Rounding<int8_t> {
  float scale, factor;
  Rounding(const float* x, int n) {
    VF peak = {}, odd = {};
    for (int i = 0; i < n; i += W) {
      const VF v = load(x + i);
      peak = vmax(vabs(v), peak);
      odd += v * 0.0f;
    }
    const float most = hmax(peak);
    scale = most / 127.0f + sum(odd);
    factor = most > 0 ? 127.0f / most : 0.0f;
  }
  void operator()(VF x, int8_t* out) const {
    VF y = x * factor;
    y = y > 127.0f ? set1(127.0f) : y;
    y = y < -127.0f ? set1(-127.0f) : y;
    const VU n = (VU)(y + set1(12582912.0f)) - 0x4B400000u;
    for (int i = 0; i < W; i++) out[i] = int8_t(n[i]);
  }
};

// One head's K or V of one token: element i goes to out[i * step], the scale, if there is one, to `scale`.
template <class T>
void write_head(const float* x, int n, T* out, size_t step, float* scale) {
  const Rounding<T> round(x, n);
  if constexpr (std::is_same_v<T, int8_t>) *scale = round.scale;
  for (int i = 0; i < n; i += W) {
    T lanes[W];
    round(load(x + i), lanes);
    for (int j = 0; j < W; j++) out[(i + j) * step] = lanes[j];
  }
}

template <class T>
void write_token(const KVView& kv, int layer, int slot, const float* k, const float* v) {
  const int block = slot / kv.block_size, at = slot % kv.block_size, d = kv.head_dim;
  for (int h = 0; h < kv.kv_heads; h++, k += d, v += kv.latent ? 0 : d) {
    uint8_t *keys = kv.k(layer, block, h), *values = kv.v(layer, block, h);
    T* to = (T*)keys + (kv.transposed() ? at : size_t(at) * d);
    write_head<T>(k, d, to, kv.transposed() ? kv.block_size : 1, kv.scales(keys) + at);
    if (!kv.latent) write_head<T>(v, d, (T*)values + size_t(at) * d, 1, kv.scales(values) + at);
  }
}

}  // namespace

void kv_write(const KVView& kv, int layer, int slot, const float* k, const float* v) {
  switch (kv.type) {
    case KVType::Int8: return write_token<int8_t>(kv, layer, slot, k, v);
    case KVType::F16: return write_token<f16>(kv, layer, slot, k, v);
    case KVType::F32: return write_token<float>(kv, layer, slot, k, v);
    case KVType::BF16: return write_token<bf16>(kv, layer, slot, k, v);
    case KVType::F8: return write_token<f8>(kv, layer, slot, k, v);
  }
}

#define PT_NAME_OF(x) #x
#define PT_NAME(x) PT_NAME_OF(x)
const Kernels kernels = {
    PT_NAME(PT_ISA), form,        panel_bytes,  pack,       unpack_row, lengths,        gemm,
    hidden,          quantise,    norm,         layer_norm, silu_mul,   clamped_swiglu, activate,
    soft_cap,        add,         mul,          add_scaled, route,      rope,           kv_write,
    attend,          merge,       top_logprobs, best_of,    forbid,     maxima_of,      sample,
    lora_first,      lora_second, conv,         l2norm,     gates,      gated_norm,     gate_mul,
    linear_products, linear_rows};

}  // namespace PT_ISA
}  // namespace pt
