// Register tiles of quantised weights by AVX-512 VNNI: two panels of 16 outputs, whose groups lie in turns,
// so that four activations are spread over a vector once for both. Per group of 32 a row costs each panel 8
// vpdpbusd and 3 more multiplications (scale times scale, that times the sum, and the min), all on the same
// two ports: 8 of 11 slots are products.
//
// Activations of 12 bits (see Acts) cost nibbles 4 more products and not 8: a byte of weights as it lies in
// memory is first + 16 * second, which is what its rest is to be multiplied with. Others multiply the rests
// with each weight. In two terms the integers of the first are multiplied by 256 when they are summed, those
// of the second are added to them.
#pragma once
#include "micro_float.h"

namespace pt {
namespace PT_ISA {
namespace {

constexpr int kQ8Step = 4;
constexpr uint8_t kQ8Zero = 0x80;  // weights are stored 128 too large: vpdpbusd wants them unsigned
constexpr unsigned kQ8Form = kInt8 | kOffsets;
constexpr unsigned kTwelveForm = kTwelve;
constexpr int kAhead = 10 * 1024;  // bytes: weights are asked for so early that they come in time from memory

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
  if constexpr (kind == Kind::Q8 || kind == Kind::Q8Half) return _mm512_loadu_si512(p + s * 64);
  __m512i w = _mm512_loadu_si512(p + s / 2 * 64);
  if (s & 1) w = _mm512_srli_epi16(w, 4);
  w = _mm512_and_si512(w, _mm512_set1_epi8(15));
  if constexpr (kind == Kind::Table4)
    w = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)(p + 256))), w);
  if constexpr (kind == Kind::Q6K) {  // the two upper bits of steps 0 to 3, then of 4 to 7
    __m512i high = _mm512_loadu_si512(p + 256 + s / 4 * 64);
    high = s % 4 < 2 ? _mm512_slli_epi16(high, 4 - s % 4 * 2) : _mm512_srli_epi16(high, s % 4 * 2 - 4);
    w = _mm512_or_si512(w, _mm512_and_si512(high, _mm512_set1_epi8(0x30)));
  }
  if constexpr (five_bits(kind))
    w = _mm512_mask_add_epi8(w, load_bits(p + 256 + s * 8), w, _mm512_set1_epi8(16));
  return w;
}

inline __m512 small16(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline __m512 small16(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}

// All scales and mins of a group, as scales_of and mins_of have them.
template <Kind kind>
inline __m512 scales16(const uint8_t* scales, const uint8_t* head, int part) {
  if constexpr (kind == Kind::Q6K)
    return _mm512_mul_ps(small16((const int8_t*)scales + part * kPanel), load16((const f16*)head));
  else if constexpr (in_blocks(kind))
    return _mm512_mul_ps(small16(scales), load16((const f16*)head));
  else
    return load16((const Scale<kind>*)scales + part * kPanel);
}
template <Kind kind>
inline __m512 mins16(const uint8_t* scales, const uint8_t* head) {
  if constexpr (symmetric(kind))
    return _mm512_mul_ps(load16((const f16*)scales), _mm512_set1_ps(five_bits(kind) ? -16.0f : -8.0f));
  else if constexpr (in_blocks(kind))
    return _mm512_mul_ps(small16(scales + kPanel), load16((const f16*)head + kPanel));
  else
    return load16((const Scale<kind>*)scales + kPanel);
}

// A pointer that GCC cannot tell from others: it would else keep what it has loaded, and spill the sums.
template <class T>
inline const T* apart(const T* p) {
  asm("" : "+r"(p));
  return p;
}

// The sums of R rows by two panels.
template <int R>
using Sums = __m512i[R][2];

// Adds the products of weights w0 and w1 with four bytes of each row; rows lie a group apart.
template <int R>
[[gnu::always_inline]] inline void multiply(Sums<R>& a, __m512i w0, __m512i w1, const int8_t* x) {
  PT_UNROLL
  for (int r = 0; r < R; r++) {
    const __m512i b = broadcast4(x + r * kGroup);
    a[r][0] = _mm512_dpbusd_epi32(a[r][0], w0, b);
    PT_PIN(a[r][0]);
    a[r][1] = _mm512_dpbusd_epi32(a[r][1], w1, b);
    PT_PIN(a[r][1]);
  }
}
// Steps s0, s0 + step, ... below s1, each by four bytes of x.
template <int R, Kind kind, int s0, int s1, int step>
[[gnu::always_inline]] inline void multiply_steps(Sums<R>& a, const uint8_t* p, const int8_t* x) {
  if constexpr (s0 < s1) {
    const uint8_t* q = nibbles(kind) ? p : apart(p);
    multiply<R>(a, weights_of<kind>(q, s0), weights_of<kind>(q + group_bytes(kind), s0), x);
    multiply_steps<R, kind, s0 + step, s1, step>(a, p, x + 4);
  }
}
template <int R>
[[gnu::always_inline]] inline void shift(Sums<R>& a, int bits) {
  PT_UNROLL
  for (int r = 0; r < R; r++) PT_UNROLL
  for (int i = 0; i < 2; i++) a[r][i] = _mm512_slli_epi32(a[r][i], bits);
}
// Takes back what the weights are too large: `whole` less `less`, if there is one, for each row.
// All of it is shifted to the right by `down`, which leaves no remainder.
template <int R, bool two, int down>
[[gnu::always_inline]] inline void add_each(Sums<R>& a, const int32_t* whole, const int32_t* less) {
  PT_UNROLL
  for (int r = 0; r < R; r++) {
    __m512i v = _mm512_set1_epi32(whole[r]);
    if constexpr (two) v = _mm512_sub_epi32(v, _mm512_set1_epi32(less[r]));
    if constexpr (down > 0) v = _mm512_srai_epi32(v, down);
    PT_UNROLL
    for (int i = 0; i < 2; i++) {
      a[r][i] = _mm512_add_epi32(a[r][i], v);
      PT_PIN(a[r][i]);
    }
  }
}

// The integer sums of one part of `parts` of a group; `second`: rows up to what lies behind the first.
template <int R, int bits, Kind kind, int parts, int part>
[[gnu::always_inline]] inline void sum_part(Sums<R>& a, const uint8_t* p, const Acts& acts, size_t at,
                                            int second) {
  constexpr int steps = 8 / parts, s0 = part * steps, s1 = s0 + steps;
  const int8_t *x = acts.q8 + at * kGroup, *rest = apart(x + second * kGroup);
  // 128 of each weight, of Q6K 32; of the second part what the first leaves of all
  const auto take_back = [&](size_t at) {
    if constexpr (!nibbles(kind))
      add_each<R, part == 1, kind == Kind::Q6K ? 2 : 0>(
          a, (parts == 2 && part == 0 ? acts.half : acts.offset) + at, acts.half + at);
  };
  PT_UNROLL
  for (int r = 0; r < R; r++) a[r][0] = a[r][1] = _mm512_setzero_si512();
  multiply_steps<R, kind, s0, s1, 1>(a, p, x + s0 * 4);
  if constexpr (bits == 15) {
    take_back(at);
    shift<R>(a, 8);
    multiply_steps<R, kind, s0, s1, 1>(a, apart(p), rest + s0 * 4);
    take_back(at + second);
  } else if constexpr (bits == 12 && nibbles(kind) && !five_bits(kind)) {
    p = apart(p);
    shift<R>(a, 8);
    PT_UNROLL
    for (int t = s0 / 2; t < s1 / 2; t++)
      multiply<R>(a, _mm512_loadu_si512(p + t * 64), _mm512_loadu_si512(p + group_bytes(kind) + t * 64),
                  rest + t * 4);
  } else if constexpr (bits == 12) {
    shift<R>(a, 4);
    multiply_steps<R, kind, s0 + 1, s1, 2>(a, p, rest + s0 * 2);
    shift<R>(a, 4);
    multiply_steps<R, kind, s0, s1, 2>(a, p, rest + s0 * 2);
    take_back(at);
  } else {
    take_back(at);
  }
}

// Adds one part of a group to f. head: that of its block.
template <int R, int bits, Kind kind, int parts, int part>
[[gnu::always_inline]] inline void add_part(__m512 (&f)[R][2], const uint8_t* p, const uint8_t* head,
                                            const Acts& acts, size_t at) {
  const int second = acts.rows;
  const float *scale = acts.scale + at + (bits == 15 ? second : 0), *sum = acts.sum + at;
  Sums<R> a;
  sum_part<R, bits, kind, parts, part>(a, p, acts, at, second);
  const uint8_t *scales = p + integer_bytes(kind), *others = scales + group_bytes(kind);
  const uint8_t* other_head = head + head_bytes(kind);
  const __m512 d[2] = {scales16<kind>(scales, head, part), scales16<kind>(others, other_head, part)};
  PT_UNROLL
  for (int r = 0; r < R; r++) {
    const __m512 s = _mm512_set1_ps(scale[r]);
    PT_UNROLL
    for (int i = 0; i < 2; i++) {
      f[r][i] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(a[r][i]), _mm512_mul_ps(d[i], s), f[r][i]);
      PT_PIN(f[r][i]);
    }
  }
  if constexpr (nibbles(kind)) {
    const __m512 m[2] = {mins16<kind>(scales, head), mins16<kind>(others, other_head)};
    PT_UNROLL
    for (int r = 0; r < R; r++) {
      float both = sum[r];
      if constexpr (bits == 15) both += sum[second + r];
      PT_UNROLL
      for (int i = 0; i < 2; i++) {
        f[r][i] = _mm512_fmadd_ps(m[i], _mm512_set1_ps(both), f[r][i]);
        PT_PIN(f[r][i]);
      }
    }
  }
}

// R rows by the two panels from p on: acc[2][kTallRows][16].
template <int R, int bits, Kind kind>
void tile_quantised(const uint8_t* p, int groups, const Acts& acts, int row, float* acc) {
  __m512 f[R][2];
  PT_UNROLL
  for (int r = 0; r < R; r++) f[r][0] = f[r][1] = _mm512_setzero_ps();
  const uint8_t* head = nullptr;
  for (int g = 0; g < groups; g++, p += 2 * group_bytes(kind)) {
    enter_block<kind>(g, 0, p, head);
    for (size_t i = 0; i < 2 * group_bytes(kind);
         i += 64)  // few rows wait for memory, and L1 holds too little
      _mm_prefetch((const char*)p + kAhead + i, R <= 2 ? _MM_HINT_T1 : _MM_HINT_T0);
    const size_t at = acts.at(row, g);
    if constexpr (two_scales(kind)) {
      add_part<R, bits, kind, 2, 0>(f, p, head, acts, at);
      add_part<R, bits, kind, 2, 1>(f, p, head, acts, at);
    } else {
      add_part<R, bits, kind, 1, 0>(f, p, head, acts, at);
    }
  }
  PT_UNROLL
  for (int r = 0; r < R; r++) PT_UNROLL
  for (int i = 0; i < 2; i++) _mm512_storeu_ps(acc + (i * kTallRows + r) * kPanel, f[r][i]);
}

}  // namespace
}  // namespace PT_ISA
}  // namespace pt
