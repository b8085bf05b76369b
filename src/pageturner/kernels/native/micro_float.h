// The register tile of float weights, by GCC's vectors alone, and what all tiles share.
#pragma once
#include <type_traits>

#include "wide.h"
#if defined(PT_AMX)
#include "amx.h"
#endif

namespace pt {
namespace PT_ISA {
namespace {

constexpr int kTileRows = 6;  // rows of the largest tile of vectors
#if defined(PT_AMX)
constexpr unsigned kWordsForm = kWords;
#else
constexpr int kTallRows = kTileRows;
constexpr unsigned kWordsForm = 0;
#endif

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

// The same of e4m3, whose groups of 32 have a scale: of each group the even and the odd inputs are summed,
// both sums are added, scaled and added to what came before. No weight is NaN: that is looked for when they
// are read.
constexpr int kF8Rows = L == 16 ? 6 : 3;
template <int R>
void tile_f8(const uint8_t* p, int groups, const float* x, int k, float* acc) {
  constexpr int V = kPanel / L;
  std::memset(acc, 0, sizeof(float) * R * kPanel);
  for (int g = 0; g < groups; g++, p += group_bytes(Kind::F8), x += kGroup) {
    Wide a[2][R][V] = {};
    const f8* w = (const f8*)p;
    for (int i = 0; i < kGroup; i += 2) {
      PT_UNROLL
      for (int odd = 0; odd < 2; odd++, w += kPanel) {
        Wide b[V];
        PT_UNROLL
        for (int v = 0; v < V; v++) b[v] = wide_256th(w + v * L);
        PT_UNROLL
        for (int r = 0; r < R; r++) {
          const Wide s = spread(x[size_t(r) * k + i + odd]);
          PT_UNROLL
          for (int v = 0; v < V; v++) {
            a[odd][r][v] = fma(b[v], s, a[odd][r][v]);
            PT_PIN(a[odd][r][v]);
          }
        }
      }
    }
    const float* scales = (const float*)(p + integer_bytes(Kind::F8));
    for (int r = 0; r < R; r++)
      for (int v = 0; v < V; v++) {
        float* to = acc + r * kPanel + v * L;
        store(to, fma(a[0][r][v] + a[1][r][v], wide(scales + v * L) * 256.0f, wide(to)));
      }
  }
}

// Asks for the weights that follow those at p, of both panels of a pair: tiles of one panel skip every second
// group, which the processor does not foresee. Into L1 for tiles of few rows; many are slower than memory in
// any case. Where L1 can wait for few lines at once (Zen with AVX2: one row reads 1.2 to 1.4 times as fast
// so) into L2, and for all tiles of up to kFewRows rows; from there into L1 what the processor does not
// foresee behind the heads of blocks.
#if defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512VNNI__)
constexpr int kFewRows = 128, kFarAhead = 12 * 1024, kLevel = 2, kNearAhead = 3 * 1024;
#else
constexpr int kFewRows = 0, kFarAhead = 10 * 1024, kLevel = 3, kNearAhead = 0;
#endif
template <int R, Kind kind>
inline void ask_ahead(const uint8_t* p, const Acts& acts) {
  if (R > 4 && acts.rows > kFewRows) return;
  for (size_t i = 0; i < 2 * group_bytes(kind); i += 64) {
    __builtin_prefetch(p + kFarAhead + i, 0, kLevel);
    if constexpr (kNearAhead > 0 && in_blocks(kind) && R <= 2) __builtin_prefetch(p + kNearAhead + i, 0, 3);
  }
}

// The type of the scales (and mins) of a quantised kind.
template <Kind kind>
using Scale = std::conditional_t<half_scales(kind), f16, float>;

template <class T>
inline VF small_floats(const T* p) {  // of int8 or uint8
#if defined(__AVX2__)
  const __m128i b = _mm_loadl_epi64((const __m128i*)p);
  return (VF)_mm256_cvtepi32_ps(std::is_signed_v<T> ? _mm256_cvtepi8_epi32(b) : _mm256_cvtepu8_epi32(b));
#else
  VF v;
  for (int i = 0; i < W; i++) v[i] = float(p[i]);
  return v;
#endif
}

// W scales from number i on, of a group whose scales lie at `scales` and whose block begins at `head`: 16,
// then those of the second half, where it has its own.
template <Kind kind>
inline VF scales_of(const uint8_t* scales, const uint8_t* head, int i) {
  if constexpr (kind == Kind::Q6K)
    return small_floats((const int8_t*)scales + i) * load((const f16*)head + i % kPanel);
  else if constexpr (in_blocks(kind))
    return small_floats(scales + i) * load((const f16*)head + i);
  else
    return load((const Scale<kind>*)scales + i);
}

// The same of its mins.
template <Kind kind>
inline VF mins_of(const uint8_t* scales, const uint8_t* head, int i) {
  if constexpr (symmetric(kind))
    return scales_of<kind>(scales, head, i) * (five_bits(kind) ? -16.0f : -8.0f);
  else if constexpr (in_blocks(kind))
    return small_floats(scales + kPanel + i) * load((const f16*)head + kPanel + i);
  else
    return load((const Scale<kind>*)scales + kPanel + i);
}

// Where a block begins, steps over the heads of its two panels. `head` is that of `panel`, of which p is
// where its groups would begin if there were no heads.
template <Kind kind>
inline void enter_block(int group, int panel, const uint8_t*& p, const uint8_t*& head) {
  if constexpr (in_blocks(kind)) {
    if (group % kBlock) return;
    head = p - panel * (group_bytes(kind) - head_bytes(kind));
    p += 2 * head_bytes(kind);
  }
}

}  // namespace
}  // namespace PT_ISA
}  // namespace pt
