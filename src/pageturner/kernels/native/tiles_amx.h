// Tiles of 12 rows by AMX, of weights of 4 and 5 bits. Such weights and the integers that activations are
// made of are products whose sums over a group of 32 stay below 2^24: as bf16, activations in two terms, they
// are exact in the fp32 of a tile. So a tile has the very integers that vpdpbusd would have summed, already
// as floats, and what follows is what micro_avx512.h does, in the same order: a row has the same bits in a
// tile of either sort.
//
// A group of a panel takes two products, a store a row of sums out of the tile, and three vector instructions
// a row, where vpdpbusd takes 15 or 19. As integers (TDPBUSD) the terms leave in tiles of their own, are
// shifted, added and converted, and nothing is won. Weights of 8 bits have too large sums.
#pragma once
#include <vector>

#include "amx.h"
#include "micro_avx512.h"

namespace pt {
namespace PT_ISA {
namespace {

// What a weight is taken for: those of 5 bits less 16, which is given back as 16 times the sum of the
// activations.
constexpr int offset_of(Kind kind) { return five_bits(kind) ? 16 : 0; }

// The bf16 of 32 small integers, from -offset on.
struct WordTable {
  alignas(64) uint16_t words[32];
  constexpr explicit WordTable(int offset) : words() {
    for (int i = 0; i < 32; i++) {
      const int n = i - offset, size = n < 0 ? -n : n;
      int exponent = 0;
      while (size >> exponent > 1) exponent++;
      if (size) words[i] = uint16_t((n < 0) << 15 | (127 + exponent) << 7 | (size << 7 >> exponent & 127));
    }
  }
};

// The weights of two panels as bf16 [group][2][16 pairs of inputs][16 outputs][2], while rows pass over them.
// What is kept of another product must be forgotten: matrices come and go at the same place.
struct WeightWords {
  std::vector<__m512i> words;
  const uint8_t* of = nullptr;

  template <Kind kind>
  const __m512i* get(const uint8_t* pair, int groups) {
    if (of == pair) return words.data();
    if (words.size() < size_t(groups) * 32) words.resize(size_t(groups) * 32);
    static constexpr WordTable table(offset_of(kind));
    const __m512i numbers = _mm512_load_si512(table.words);
    const __m512i first = _mm512_set4_epi32(0x800d800c, 0x80098008, 0x80058004, 0x80018000);
    const __m512i second = _mm512_add_epi8(first, _mm512_set1_epi32(0x00020002));
    __m512i* to = words.data();
    for (int g = 0; g < groups; g++)
      for (int which = 0; which < 2; which++) {
        const uint8_t* p = pair + group_at(kind, g, which);
        for (size_t i = 0; i < group_bytes(kind); i += 64)
          _mm_prefetch((const char*)pair + 2 * groups * group_bytes(kind) +
                           (to - words.data()) / 16 * group_bytes(kind) + i,
                       _MM_HINT_T0);
        PT_UNROLL
        for (int s = 0; s < 8; s++) {
          const __m512i w = weights_of<kind>(p, s);
          *to++ = _mm512_permutexvar_epi16(_mm512_shuffle_epi8(w, first), numbers);
          *to++ = _mm512_permutexvar_epi16(_mm512_shuffle_epi8(w, second), numbers);
        }
      }
    of = pair;
    return words.data();
  }
};
static thread_local WeightWords weight_words[2];  // of an up and a gate

inline void forget_weights() {
  for (WeightWords& w : weight_words) w.of = nullptr;
}

struct alignas(64) TileSums {
  float of[2][kTallRows][kPanel];
};

// kTallRows rows by the two panels from `panel` on: acc[2][kTallRows][16]. slot: which of weight_words to
// use.
template <int bits, Kind kind>
void tall_tile(const Matrix& m, int slot, const Acts& acts, int row, int panel, float* acc) {
  constexpr int R = kTallRows;
  const uint8_t* pair = m.panel(panel);
  const int groups = m.k / kGroup;
  const __m512i* words = weight_words[slot].get<kind>(pair, groups);
  Tiles& t = shaped();
  TileSums sums[2];
  const auto begin = [&](int g) {
    const uint16_t* x = acts.words + acts.words_at(row, g);
    TileSums& to = sums[g & 1];
    t.load<kRows>(x, acts.word_bytes());
    if constexpr (bits > 8) t.load<kRestRows>(x + kGroup, acts.word_bytes());
    t.zero<kSums>();
    t.load<kWeights>(words + g * 32, 64);
    t.multiply<kSums, kRows, kWeights>();
    if constexpr (bits > 8) t.multiply<kSums, kRestRows, kWeights>();
    t.store<kSums>(to.of[0]);
    t.zero<kOtherSums>();
    t.load<kOtherWeights>(words + g * 32 + 16, 64);
    t.multiply<kOtherSums, kRows, kOtherWeights>();
    if constexpr (bits > 8) t.multiply<kOtherSums, kRestRows, kOtherWeights>();
    t.store<kOtherSums>(to.of[1]);
  };
  __m512 f[R], other[R];
  PT_UNROLL
  for (int r = 0; r < R; r++) f[r] = other[r] = _mm512_setzero_ps();
  begin(0);
  for (int g = 0; g < groups; g++) {
    if (g + 1 < groups) begin(g + 1);
    const TileSums& from = sums[g & 1];
    const size_t at = acts.at(row, g);
    const float *scale = acts.scale + at + (bits == 15 ? acts.rows : 0), *sum = acts.sum + at;
    const uint8_t *first = pair + group_at(kind, g, 0) + integer_bytes(kind),
                  *second = first + group_bytes(kind);
    const uint8_t *head = pair + head_at(kind, g, 0), *other_head = head + head_bytes(kind);
    const __m512 d0 = scales16<kind>(first, head, 0), d1 = scales16<kind>(second, other_head, 0);
    const __m512 m0 = mins16<kind>(first, head), m1 = mins16<kind>(second, other_head);
    PT_UNROLL
    for (int r = 0; r < R; r++) {
      float both = sum[r];
      if constexpr (bits == 15) both += sum[acts.rows + r];
      const __m512 s = _mm512_set1_ps(scale[r]), v = _mm512_set1_ps(both);
      __m512 a = _mm512_load_ps(from.of[0][r]), b = _mm512_load_ps(from.of[1][r]);
      if constexpr (offset_of(kind) > 0) {
        const __m512 back =
            _mm512_mul_ps(_mm512_set1_ps(acts.whole[at + r]), _mm512_set1_ps(float(offset_of(kind))));
        a = _mm512_add_ps(a, back), b = _mm512_add_ps(b, back);
      }
      f[r] = _mm512_fmadd_ps(m0, v, _mm512_fmadd_ps(a, _mm512_mul_ps(d0, s), f[r]));
      other[r] = _mm512_fmadd_ps(m1, v, _mm512_fmadd_ps(b, _mm512_mul_ps(d1, s), other[r]));
    }
  }
  PT_UNROLL
  for (int r = 0; r < R; r++) {
    _mm512_store_ps(acc + r * kPanel, f[r]);
    _mm512_store_ps(acc + (kTallRows + r) * kPanel, other[r]);
  }
}

}  // namespace
}  // namespace PT_ISA
}  // namespace pt
