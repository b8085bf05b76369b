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

#if defined(PT_512)

// The integers of one term of a group, their sum in a.sum, times its scale.
inline void put_term(const Acts& a, size_t at, float scale, __m512i low, __m512i high) {
  const __m256i q = _mm256_set_m128i(_mm512_cvtsepi32_epi8(high), _mm512_cvtsepi32_epi8(low));
  _mm256_storeu_si256((__m256i*)(a.q8 + at * kGroup), q);
  __m256i sums = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), q);  // 4 and 4
  sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0b01001110));
  sums = _mm256_add_epi32(sums, _mm256_shuffle_epi32(sums, 0b10110001));
  const int first = _mm256_cvtsi256_si32(sums), whole = first + _mm256_extract_epi32(sums, 4);
  a.scale[at] = scale, a.sum[at] = scale * float(whole);
  a.offset[at] = whole * -128, a.half[at] = first * -128;
}

inline __m512i nearest(__m512 x) {  // half to even, within -127 .. 127
  return _mm512_cvtps_epi32(_mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-127.0f)), _mm512_set1_ps(127.0f)));
}

template <int Terms>
void quantise_group(const float* x, const Acts& a, size_t at) {
  // The peak as an integer, so that a NaN is more than infinity, and that more than all numbers.
  const __m512i rest = _mm512_set1_epi32(0x7fffffff);
  const __m512 v[2] = {_mm512_loadu_ps(x), _mm512_loadu_ps(x + kGroup / 2)};
  const __m512i m =
      _mm512_max_epi32(_mm512_and_si512((__m512i)v[0], rest), _mm512_and_si512((__m512i)v[1], rest));
  const Scaling s(bits_to_float(uint32_t(_mm512_reduce_max_epi32(m))));
  __m512 exact[2];
  __m512i q[2];
  for (int i = 0; i < 2; i++)
    exact[i] = _mm512_mul_ps(v[i], _mm512_set1_ps(s.factor)), q[i] = nearest(exact[i]);
  put_term(a, at, s.scale, q[0], q[1]);
  if constexpr (Terms == 2) {
    __m512i fine[2];
    for (int i = 0; i < 2; i++)
      fine[i] =
          nearest(_mm512_mul_ps(_mm512_sub_ps(exact[i], _mm512_cvtepi32_ps(q[i])), _mm512_set1_ps(256.0f)));
    put_term(a, at + a.rows, s.scale / 256, fine[0], fine[1]);
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

// The integers of one row in one term, from vectors of them.
struct Integers {
  const Acts& a;
  size_t at;
  VU total{}, first{};

  void put(int i, VU n) {
    if (i == kGroup / 2) first = total;
    total += n;
    if (a.q8) {
      const VB b = __builtin_convertvector((VI)n, VB);
      std::memcpy(a.q8 + at * kGroup + i, &b, sizeof b);
    }
    if (a.q16) {
      const VS s = __builtin_convertvector((VI)n, VS);
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
void quantise_group(const float* x, const Acts& a, size_t at) {
  VU most = {};  // as integers, so that a NaN is more than infinity, and that more than all numbers
  const auto larger = [](VU x, VU y) { return (VU)((VI)x > (VI)y ? (VI)x : (VI)y); };
  for (int i = 0; i < kGroup; i += W) most = larger((VU)vabs(load(x + i)), most);
  const Scaling s(bits_to_float(reduce(most, larger)));
  Integers coarse{a, at}, fine{a, at + a.rows};
  for (int i = 0; i < kGroup; i += W) {
    const VF v = load(x + i) * s.factor;
    const VU n = nearest(v);
    coarse.put(i, n);
    if constexpr (Terms == 2) fine.put(i, nearest((v - __builtin_convertvector((VI)n, VF)) * 256.0f));
  }
  const int32_t n = coarse.finish();
  a.scale[at] = s.scale, a.sum[at] = s.scale * float(n);
  if constexpr (Terms == 2) {
    const float step = s.scale / 256;
    a.scale[fine.at] = step, a.sum[fine.at] = step * float(fine.finish());
  }
}

#endif

}  // namespace

void quantise(const float* x, const Acts& a, int row, int col0, int col1) {
  for (int c = col0; c < col1; c += kGroup) {
    const size_t at = a.at(row, c / kGroup);
    a.terms == 2 ? quantise_group<2>(x, a, at) : quantise_group<1>(x, a, at);
    x += kGroup;
  }
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
// themselves. NaN counts as the least.
void route(const float* logits, int experts, int k, bool normalise, int32_t* ids, float* weights) {
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
  for (int i = 0; i < experts; i++) all += exp1(logits[i] - top);
  for (int j = 0; j < k; j++) chosen += weights[j] = exp1(logits[ids[j]] - top);
  for (int j = 0; j < k; j++) weights[j] /= normalise ? chosen : all;
}

void silu_mul(const float* gate, const float* up, int n, float* out) {
  int i = 0;
  for (; i + W <= n; i += W) {
    VF g = load(gate + i);
    store(out + i, g / (vexp(-g) + 1.0f) * load(up + i));
  }
  for (; i < n; i++) out[i] = gate[i] / (exp1(-gate[i]) + 1.0f) * up[i];
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
  for (int h = 0; h < kv.kv_heads; h++, k += d, v += d) {
    uint8_t *keys = kv.k(layer, block, h), *values = kv.v(layer, block, h);
    T* to = (T*)keys + (kv.transposed() ? at : size_t(at) * d);
    write_head<T>(k, d, to, kv.transposed() ? kv.block_size : 1, kv.scales(keys) + at);
    write_head<T>(v, d, (T*)values + size_t(at) * d, 1, kv.scales(values) + at);
  }
}

}  // namespace

void kv_write(const KVView& kv, int layer, int slot, const float* k, const float* v) {
  const auto write = kv.elem == 1   ? write_token<int8_t>
                     : kv.elem == 2 ? write_token<f16>
                                    : write_token<float>;
  write(kv, layer, slot, k, v);
}

#define PT_NAME_OF(x) #x
#define PT_NAME(x) PT_NAME_OF(x)
const Kernels kernels = {
    PT_NAME(PT_ISA), form,     panel_bytes, pack,         unpack_row, gemm,   hidden,     quantise, norm,
    layer_norm,      silu_mul, activate,    soft_cap,     add,        mul,    add_scaled, route,    rope,
    kv_write,        attend,   merge,       top_logprobs, best_of,    forbid, maxima_of,  sample};

}  // namespace PT_ISA
}  // namespace pt
