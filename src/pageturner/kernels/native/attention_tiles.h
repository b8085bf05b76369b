// Register tiles of attention: scores of up to kTileRows rows against some vectors of tokens, and weighted
// sums of V. Each score is one chain over head_dim, each output one chain over tokens. K and V are converted
// where they are read: beside this many multiplications that costs nothing.
//
// What is wanted later is asked for a line at a time, with AVX-512 into L1 (64 sequences on Zen 5: a step
// takes 5 % less), with less into L2: the first-level cache of those CPUs can wait for far fewer lines at
// once (KV in random blocks: 7-9 GB/s into L1, 14-16 into L2).
#pragma once
#include <algorithm>

#include "wide.h"

namespace pt {
namespace PT_ISA {
namespace {

constexpr int kTileRows = 6;  // rows of the largest tile

#if defined(PT_512)
inline void ask_for(const void* p) { __builtin_prefetch(p, 0, 3); }
#else
inline void ask_for(const void* p) { __builtin_prefetch(p, 0, 2); }
#endif

// Whether 16 registers hold all sums of R rows by N vectors, a number for each row, and one vector: the
// vectors come one by one then.
template <int R, int N>
constexpr bool kOneByOne = L == 8 && R < N;

// Sums of R rows by N vectors: to each is added what vector(n) gives times number(r).
template <int R, int N, class V, class S>
[[gnu::always_inline]] inline void add_products(Wide (&a)[R][N], const V& vector, const S& number) {
  if constexpr (kOneByOne<R, N>) {
    Wide s[R];
    PT_UNROLL
    for (int r = 0; r < R; r++) s[r] = spread(number(r));
    PT_UNROLL
    for (int n = 0; n < N; n++) {
      const Wide b = vector(n);
      PT_UNROLL
      for (int r = 0; r < R; r++) {
        a[r][n] = fma(b, s[r], a[r][n]);
        PT_PIN(a[r][n]);
      }
    }
    return;
  }
  Wide b[N];
  PT_UNROLL
  for (int n = 0; n < N; n++) b[n] = vector(n);
  PT_UNROLL
  for (int r = 0; r < R; r++) {
    const Wide s = spread(number(r));
    PT_UNROLL
    for (int n = 0; n < N; n++) {
      a[r][n] = fma(b[n], s, a[r][n]);
      PT_PIN(a[r][n]);
    }
  }
}

// Scores of R rows against N vectors of tokens; element (d, token) of vector n is at k[n][d * ld + token].
// ahead[n] is a run of as many bytes as a vector of tokens has.
template <int R, int N, class T>
void score_tile(const float* q, const T* const* k, const T* const* ahead, size_t ld, int dim, float* out) {
  Wide a[R][N] = {};
  constexpr int wanted = 64 / sizeof(T) / L;  // steps whose run ahead is one line
  constexpr int line = kOneByOne<R, N> ? std::max(wanted, 1) : 1;
  for (int first = 0; first < dim; first += line) {
    PT_UNROLL
    for (int n = 0; n < N; n++)
      for (int i = 0; i < line * L; i += 64 / sizeof(T)) ask_for(ahead[n] + first * L + i);
    PT_UNROLL
    for (int d = first; d < first + line; d++)
      add_products<R, N>(
          a, [&](int n) { return wide(k[n] + d * ld); }, [&](int r) { return q[r * dim + d]; });
  }
  PT_UNROLL
  for (int r = 0; r < R; r++) PT_UNROLL
  for (int n = 0; n < N; n++) store(out + r * kScoreStride + n * L, a[r][n]);
}

// Vectors of a tile of R rows: as many as keep the multipliers busy and fit the registers, of which AVX-512
// and NEON have 32.
constexpr int score_vectors(int rows) { return L != 8 || rows <= 3 ? 4 : 2; }
constexpr int value_vectors(int rows) { return (L != 8 ? 2 : 1) * (rows >= 4 ? 2 : 4); }

template <int R, class T, int N = score_vectors(R)>
void score_rows(const float* q, const T* const* k, const T* const* ahead, int vectors, size_t ld, int dim,
                float* out) {
  for (; vectors >= N; vectors -= N, k += N, ahead += N, out += N * L)
    score_tile<R, N, T>(q, k, ahead, ld, dim, out);
  if constexpr (N > 1) score_rows<R, T, N / 2>(q, k, ahead, vectors, ld, dim, out);
}

// out[R][C * L] += weights times V of tokens t0 .. t1-1, from column `col` on; `stride` lies between rows of
// out. ahead[i] is a run of as many bytes as V has for tokens 16 i .. 16 i + 15.
template <int R, int C, class T>
void value_tile(const float* p, const T* const* v, const T* const* ahead, int t0, int t1, int col, int dim,
                int stride, float* out) {
  Wide a[R][C];
  PT_UNROLL
  for (int r = 0; r < R; r++) PT_UNROLL
  for (int c = 0; c < C; c++) a[r][c] = wide(out + r * stride + col + c * L);
  for (int t = t0; t < t1; t++) {
    const T* next = ahead[t / kTokenTile] + t % kTokenTile * dim + col;
    for (size_t i = 0; i < C * L; i += 64 / sizeof(T)) ask_for(next + i);
    add_products<R, C>(
        a, [&](int c) { return wide(v[t] + col + c * L); }, [&](int r) { return p[r * kScoreStride + t]; });
  }
  PT_UNROLL
  for (int r = 0; r < R; r++) PT_UNROLL
  for (int c = 0; c < C; c++) store(out + r * stride + col + c * L, a[r][c]);
}

template <int R, class T, int C = value_vectors(R)>
void value_rows(const float* p, const T* const* v, const T* const* ahead, int t0, int t1, int dim, int stride,
                float* out, int col = 0) {
  for (; col + C * L <= dim; col += C * L) value_tile<R, C, T>(p, v, ahead, t0, t1, col, dim, stride, out);
  if constexpr (C > 1) value_rows<R, T, C / 2>(p, v, ahead, t0, t1, dim, stride, out, col);
}

template <class T>
using ScoreRows = void (*)(const float*, const T* const*, const T* const*, int, size_t, int, float*);
template <class T>
using ValueRows = void (*)(const float*, const T* const*, const T* const*, int, int, int, int, float*, int);

template <class T>
constexpr ScoreRows<T> kScoreRows[kTileRows] = {score_rows<1, T>, score_rows<2, T>, score_rows<3, T>,
                                                score_rows<4, T>, score_rows<5, T>, score_rows<6, T>};
template <class T>
constexpr ValueRows<T> kValueRows[kTileRows] = {value_rows<1, T>, value_rows<2, T>, value_rows<3, T>,
                                                value_rows<4, T>, value_rows<5, T>, value_rows<6, T>};

}  // namespace
}  // namespace PT_ISA
}  // namespace pt
