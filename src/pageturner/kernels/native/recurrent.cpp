// Recurrent layers. Each output is a chain of fused multiplications and additions in the order of tokens and
// of dimensions, in a lane of its own: how many rows or columns are computed at a time changes no bit.
#include "recurrent.h"

#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace pt {
namespace PT_ISA {
namespace {

// Vectors of as many columns as a register has. T is what a tail holds: f16, bf16 or float.
#if defined(PT_512)
constexpr int L = 16, kTile = 8, kMost = 4;  // rows of a tile, blocks of columns of a single row
typedef float VS __attribute__((vector_size(64)));
inline VS fma(VS a, VS b, VS c) { return (VS)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline VS wide(const float* p) { return (VS)_mm512_loadu_ps(p); }
inline VS wide(const f16* p) { return (VS)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline VS wide(const bf16* p) {
  return (VS)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
inline void put(float* p, VS v) { _mm512_storeu_ps(p, (__m512)v); }
#else
constexpr int L = W, kTile = 4, kMost = 2;
typedef VF VS;
template <class T>
VS wide(const T* p) {
  return load(p);
}
inline void put(float* p, VS v) { store(p, v); }
#endif
inline VS all(float x) { return x - VS{}; }

constexpr int kPairs = kStateColumns / L;  // vectors of a block of columns

// n numbers as a tail holds them, and what these are worth; n is a multiple of W.
template <class T>
void round_to(const float* x, int n, T* to, float* worth) {
  for (int i = 0; i < n; i += W) {
    T lanes[W];
    store(lanes, load(x + i));
    if (to) std::memcpy(to + i, lanes, sizeof lanes);
    store(worth + i, load(lanes));
  }
}

inline VF sigmoid(VF x) { return 1.0f / (1.0f + vexp(-x)); }

// f(vectors of n numbers at each of the places), the last few in vectors of their own.
template <class F>
void each_vector(int n, const F& f, const float* x, const float* y, float* out) {
  int i = 0;
  for (; i + W <= n; i += W) store(out + i, f(load(x + i), load(y + i)));
  if (i == n) return;
  float a[W] = {}, b[W] = {};
  std::memcpy(a, x + i, sizeof(float) * (n - i));
  std::memcpy(b, y + i, sizeof(float) * (n - i));
  store(a, f(load(a), load(b)));
  std::memcpy(out + i, a, sizeof(float) * (n - i));
}

// -- the convolution

template <class T>
void conv_columns(const ConvRows& c, const RecurrentSequence& s, int c0, int c1) {
  constexpr int kWidth = 512;
  const RecurrentView& v = c.view;
  const int before = v.kernel - 1, columns = v.channels;
  alignas(64) float lines[kMaxConv][kWidth];
  for (int at = c0; at < c1; at += kWidth) {
    const int n = std::min(kWidth, c1 - at);
    const ChunkRows& first = c.pieces[s.first];
    float* ring[kMaxConv];
    for (int t = 0; t < v.kernel; t++) {
      ring[t] = lines[t];
      const int p = first.offset - before + t;  // of the chunk
      const T* from = nullptr;
      if (t < before && p >= 0)
        from = (const T*)v.x(c.layer, first.block) + size_t(p) * columns;
      else if (t < before && s.read >= 0)
        from = (const T*)v.past(c.layer, s.read) + size_t(p + before) * columns;
      for (int i = 0; i < n; i += W) store(ring[t] + i, from ? load(from + at + i) : VF{});
    }
    for (int i = s.first; i < s.last; i++) {
      const ChunkRows& piece = c.pieces[i];
      for (int r = 0; r < piece.count; r++) {
        T* keep = piece.block < 0 ? nullptr
                                  : (T*)v.x(c.layer, piece.block) + size_t(piece.offset + r) * columns + at;
        round_to<T>(c.x.row(piece.row + r) + at, n, keep, ring[before]);
        float* out = c.out + size_t(piece.row + r) * columns + at;
        for (int j = 0; j < n; j += W) {
          VF y = {};
          for (int t = 0; t <= before; t++)
            y = fma(load(ring[t] + j), load(c.weight + size_t(t) * columns + at + j), y);
          if (c.bias) y = y + load(c.bias + at + j);
          store(out + j, c.silu ? y * sigmoid(y) : y);
        }
        std::rotate(ring, ring + 1, ring + v.kernel);
      }
      for (int t = 0; piece.write >= 0 && t < before; t++) {
        float same[kWidth];
        round_to<T>(ring[t], n, (T*)v.past(c.layer, piece.write) + size_t(t) * columns + at, same);
      }
    }
  }
}

// -- keys, queries and their products

// A row with all tokens up to it, whose keys lie in the tail; its own is put there.
template <class T>
void single_products(const Linear& l, const ChunkRows& p, int head) {
  const int dim = l.view.key_dim, row = p.offset, count = row / W + 1;
  float* key = l.work_of(p, head);
  float* products = key + (dim + 15) / 16 * 16;
  const float* q = l.q.row(p.row) + size_t(head) * dim;
  round_to<T>(l.k.row(p.row) + size_t(head) * dim, dim, nullptr, key);
  T* keys = (T*)l.view.k(l.layer, p.block, head);
  VF kk[kChunk / W] = {}, qk[kChunk / W] = {};
  const VF mine = lanes() + float(row / W * W);
  for (int d = 0; d < dim; d++) {
    const VF k1 = set1(key[d]), q1 = set1(q[d]);
    for (int t = 0; t < count; t++) {
      VF k = load(keys + d * kChunk + t * W);
      if (t == count - 1) k = mine == float(row) ? k1 : k;
      if (l.delta) kk[t] = fma(k, k1, kk[t]);
      qk[t] = fma(k, q1, qk[t]);
    }
  }
  for (int t = 0; t < count; t++) store(products + t * W, kk[t]), store(products + kChunk + t * W, qk[t]);
  for (int d = 0; d < dim; d += W) {
    T lanes[W];
    store(lanes, load(key + d));
    for (int j = 0; j < W; j++) keys[(d + j) * kChunk + row] = lanes[j];
  }
}

template <class T>
void many_products(const Linear& l, const ChunkRows& p, int head) {
  const int dim = l.view.key_dim, end = p.end();
  float* keys = l.work_of(p, head);
  float* queries = keys + dim * kChunk + 64;
  float* kk = queries + dim * kChunk + 64;
  float* qk = kk + kChunk * kChunk;
  T* tail = p.block < 0 ? nullptr : (T*)l.view.k(l.layer, p.block, head);
  std::fill(keys, kk, 0.0f);
  for (int d = 0; p.offset && d < dim; d++)
    for (int t = 0; t < p.offset; t += W) store(keys + d * kChunk + t, load(tail + d * kChunk + t));
  for (int r = 0; r < p.count; r++) {
    const float* q = l.q.row(p.row + r) + size_t(head) * dim;
    const float* k = l.k.row(p.row + r) + size_t(head) * dim;
    const int at = p.offset + r;
    for (int d = 0; d < dim; d += W) {
      T lanes[W];
      float worth[W];
      store(lanes, load(k + d));
      store(worth, load(lanes));
      for (int j = 0; j < W; j++) {
        keys[(d + j) * kChunk + at] = worth[j], queries[(d + j) * kChunk + at] = q[d + j];
        if (tail) tail[(d + j) * kChunk + at] = lanes[j];
      }
    }
  }
  // Row j: of token j with the rows behind it.
  for (int j0 = 0; j0 < end; j0 += 2)
    for (int t = std::max(j0, p.offset) / W * W; t < end; t += W) {
      VF k[2] = {}, q[2] = {};
      for (int d = 0; d < dim; d++) {
        const VF key = load(keys + d * kChunk + t), query = load(queries + d * kChunk + t);
        for (int j = 0; j < 2; j++) {
          const VF other = set1(keys[d * kChunk + j0 + j]);
          k[j] = fma(other, key, k[j]), q[j] = fma(other, query, q[j]);
        }
      }
      for (int j = 0; j < 2; j++)
        store(kk + (j0 + j) * kChunk + t, k[j]), store(qk + (j0 + j) * kChunk + t, q[j]);
    }
}

// -- rows and states

// Where one value head of a sequence stands.
struct Head {
  const Linear& l;
  const ChunkRows& p;
  int head;
  const float* state;  // before the chunk
  const float* next;
  float *kk, *qk;  // times the decays, as the products lie
  float* d;        // of each row
  float* g;        // of each token
  const float* row(const Strided& x, int r, int column) const {
    return x.row(p.row + r) + size_t(head) * l.view.value_dim + column;
  }
  float* out(int r, int column) const {
    return l.out + (size_t(p.row + r) * l.view.value_heads + head) * l.view.value_dim + column;
  }
  float beta(int r) const { return l.beta[size_t(p.row + r) * l.view.value_heads + head]; }
};

// The decay rates of the tokens of a chunk; `keeps` puts the new ones into the tail.
void take_decays(const Head& h, bool keeps) {
  const ChunkRows& p = h.p;
  const Linear& l = h.l;
  float* kept = p.block < 0 ? nullptr : l.view.g(l.layer, p.block, h.head);
  for (int j = 0; j < p.offset; j++) h.g[j] = kept[j];
  for (int r = 0; r < p.count; r++) {
    h.g[p.offset + r] = l.g[size_t(p.row + r) * l.view.value_heads + h.head];
    if (kept && keeps) kept[p.offset + r] = h.g[p.offset + r];
  }
}

void single_decays(const Head& h, const float* products) {
  const int row = h.p.offset;
  alignas(32) float s[kChunk] = {}, total = 0;
  for (int j = row; j >= 0; j--) s[j] = total, total += h.g[j];
  h.d[0] = exp1(total);
  for (int j = 0; j <= row; j += W) {
    const VF r = vexp(load(s + j));
    store(h.kk + j, load(products + j) * r), store(h.qk + j, load(products + kChunk + j) * r);
  }
}

void many_decays(const Head& h, const float* kk, const float* qk) {
  const int end = h.p.end();
  for (int t = h.p.offset / W * W; t < end; t += W) {
    const VF row = lanes() + float(t);
    VF s = {};
    for (int j = std::min(end, t + W) - 1; j >= 0; j--) {
      const VF r = vexp(s);
      store(h.kk + j * kRowStride + t, load(kk + j * kChunk + t) * r);
      store(h.qk + j * kRowStride + t, load(qk + j * kChunk + t) * r);
      s = row >= float(j) ? s + h.g[j] : s;
    }
    store(h.d + t, vexp(s));
  }
}

// B blocks of columns at once: their vectors, in states and where columns are neighbours.
template <int B>
struct Strip {
  static constexpr int N = B * kPairs;
  const size_t block;  // floats from one block of a state to the next
  explicit Strip(const RecurrentView& v) : block(size_t(v.key_dim) * kStateColumns) {}
  size_t at(int n) const { return n / kPairs * block + n % kPairs * L; }
};

// u of a row as the tail holds it, to `worth` and to the tail.
template <class T, int N>
void keep_values(const VS u[N], float* worth, T* tail) {
  alignas(64) float exact[N * L];
  PT_UNROLL
  for (int n = 0; n < N; n++) put(exact + n * L, u[n]);
  for (int c = 0; c < N * L; c += kStateColumns)
    round_to<T>(exact + c, kStateColumns, tail ? tail + c * kChunk : nullptr, worth + c);
}

// Vector n of the values of token j, from the first block of a strip on.
template <class T>
VS tail_values(const T* tail, int j, int n) {
  return wide(tail + n / kPairs * kChunk * kStateColumns + j * kStateColumns + n % kPairs * L);
}

template <class T, int B>
void single_strip(const Head& h, int block) {
  using S = Strip<B>;
  constexpr int N = S::N;
  const Linear& l = h.l;
  const int dim = l.view.key_dim, row = h.p.offset, column = block * kStateColumns;
  const S strip(l.view);
  const float* key = l.work_of(h.p, l.key_head(h.head));
  const float* q = l.q.row(h.p.row) + size_t(l.key_head(h.head)) * dim;
  const float* state = h.state + block * strip.block;
  const float* ahead =
      block * kStateColumns + B * kStateColumns < l.view.value_dim ? state + B * strip.block : h.next;
  T* tail = (T*)l.view.u(l.layer, h.p.block, h.head) + size_t(column) * kChunk;
  VS m[N] = {}, o[N] = {}, x[N] = {}, y[N] = {}, u[N];
  for (int d = 0; d < dim; d++) {
    const VS k1 = all(key[d]), q1 = all(q[d]);
    PT_UNROLL
    for (int b = 0; b < B; b++) __builtin_prefetch(ahead + (d * B + b) * kStateColumns, 0, 2);
    PT_UNROLL
    for (int n = 0; n < N; n++) {
      const VS s = wide(state + d * kStateColumns + strip.at(n));
      m[n] = fma(s, k1, m[n]), o[n] = fma(s, q1, o[n]);
    }
  }
  for (int j = 0; j < row; j++) {
    const VS a = all(h.kk[j]), b = all(h.qk[j]);
    PT_UNROLL
    for (int n = 0; n < N; n++) {
      const VS v = tail_values(tail, j, n);
      x[n] = fma(v, a, x[n]), y[n] = fma(v, b, y[n]);
    }
  }
  const VS decay = all(h.d[0]), beta = all(h.beta(0));
  PT_UNROLL
  for (int n = 0; n < N; n++) {
    const VS v = wide(h.row(l.v, 0, column) + n * L);
    u[n] = l.delta ? beta * (v - fma(decay, m[n], x[n])) : beta * v;
  }
  alignas(64) float worth[N * L];
  keep_values<T, N>(u, worth, tail + row * kStateColumns);
  PT_UNROLL
  for (int n = 0; n < N; n++) {
    VS out = fma(decay, o[n], fma(wide(worth + n * L), all(h.qk[row]), y[n]));
    if (l.skip) out = fma(all(l.skip[h.head]), wide(h.row(l.v, 0, column) + n * L), out);
    put(h.out(0, column) + n * L, out);
  }
}

// R rows times the columns of the state; rows are neighbours in `rows`.
template <int R, int B>
void read_state(const float* rows, const float* state, const Strip<B>& strip, int dim,
                VS (&out)[R][Strip<B>::N]) {
  constexpr int N = Strip<B>::N;
  VS total[R][N] = {};
  for (int d = 0; d < dim; d++) {
    VS s[N];
    PT_UNROLL
    for (int n = 0; n < N; n++) s[n] = wide(state + d * kStateColumns + strip.at(n));
    PT_UNROLL
    for (int r = 0; r < R; r++) {
      const VS x = all(rows[d * kChunk + r]);
      PT_UNROLL
      for (int n = 0; n < N; n++) total[r][n] = fma(s[n], x, total[r][n]);
    }
  }
  std::memcpy(out, total, sizeof total);
}

// Rows of a chunk, as many as a tile has at a time: tokens before the tile for all of them, then those of
// the tile one by one. u: [kChunk][columns], of the tokens before them.
template <class T, int B>
void many_strip(const Head& h, int block, float* u) {
  using S = Strip<B>;
  constexpr int N = S::N, R = kTile, kColumns = N * L;
  const Linear& l = h.l;
  const int dim = l.view.key_dim, column = block * kStateColumns;
  const S strip(l.view);
  const float* keys = l.work_of(h.p, l.key_head(h.head));
  const float* queries = keys + dim * kChunk + 64;
  const float* state = h.state + block * strip.block;
  T* tail = h.p.block < 0 ? nullptr : (T*)l.view.u(l.layer, h.p.block, h.head) + size_t(column) * kChunk;
  for (int j = 0; j < h.p.offset; j++)
    for (int n = 0; n < N; n++) put(u + j * kColumns + n * L, tail_values(tail, j, n));
  for (int i = h.p.offset; i < h.p.end(); i += R) {
    const int count = std::min(R, h.p.end() - i);
    VS m[R][N], x[R][N] = {};
    if (l.delta) {
      read_state<R, B>(keys + i, state, strip, dim, m);
      for (int j = 0; j < i; j++) PT_UNROLL
      for (int r = 0; r < R; r++) PT_UNROLL
      for (int n = 0; n < N; n++)
        x[r][n] = fma(wide(u + j * kColumns + n * L), all(h.kk[j * kRowStride + i + r]), x[r][n]);
    }
    for (int e = 0; e < count; e++) {
      const int at = e + i - h.p.offset;
      const VS beta = all(h.beta(at)), decay = all(h.d[i + e]);
      VS mine[N];
      PT_UNROLL
      for (int n = 0; n < N; n++) {
        const VS v = wide(h.row(l.v, at, column) + n * L);
        mine[n] = l.delta ? beta * (v - fma(decay, m[e][n], x[e][n])) : beta * v;
      }
      float* worth = u + (i + e) * kColumns;
      keep_values<T, N>(mine, worth, tail ? tail + (i + e) * kStateColumns : nullptr);
      for (int r = e + 1; l.delta && r < count; r++)
        for (int n = 0; n < N; n++)
          x[r][n] = fma(wide(worth + n * L), all(h.kk[(i + e) * kRowStride + i + r]), x[r][n]);
    }
    VS y[R][N] = {};
    for (int j = 0; j < i; j++) PT_UNROLL
    for (int r = 0; r < R; r++) PT_UNROLL
    for (int n = 0; n < N; n++)
      y[r][n] = fma(wide(u + j * kColumns + n * L), all(h.qk[j * kRowStride + i + r]), y[r][n]);
    for (int e = 0; e < count; e++)
      for (int r = e; r < count; r++)
        for (int n = 0; n < N; n++)
          y[r][n] =
              fma(wide(u + (i + e) * kColumns + n * L), all(h.qk[(i + e) * kRowStride + i + r]), y[r][n]);
    read_state<R, B>(queries + i, state, strip, dim, m);
    for (int r = 0; r < count; r++)
      for (int n = 0; n < N; n++) {
        const int at = r + i - h.p.offset;
        VS out = fma(all(h.d[i + r]), m[r][n], y[r][n]);
        if (l.skip) out = fma(all(l.skip[h.head]), wide(h.row(l.v, at, column) + n * L), out);
        put(h.out(at, column) + n * L, out);
      }
  }
}

// The keys of a whole chunk times what is left of each behind the last one; what is left of the state.
template <class T>
float weigh_keys(const Head& h, const T* keys, float* weighed) {
  alignas(32) float s[kChunk], total = 0;
  for (int j = kChunk - 1; j >= 0; j--) s[j] = total, total += h.g[j];
  VF w[kChunk / W];
  for (int t = 0; t < kChunk / W; t++) w[t] = vexp(load(s + t * W));
  for (int d = 0; d < h.l.view.key_dim; d++)
    for (int t = 0; t < kChunk / W; t++)
      store(weighed + d * kChunk + t * W, load(keys + d * kChunk + t * W) * w[t]);
  return exp1(total);
}

// The state behind a chunk; values of token j, vector n: value(j, n).
template <int B, class F>
void end_strip(const Head& h, int block, const float* weighed, float left, float* to, const F& value) {
  using S = Strip<B>;
  constexpr int N = S::N, R = kTile;
  const S strip(h.l.view);
  const float* state = h.state + block * strip.block;
  to += block * strip.block;
  for (int d = 0; d < h.l.view.key_dim; d += R) {
    VS s[R][N];
    for (int r = 0; r < 2 * R; r++)
      for (int b = 0; b < B; b++) __builtin_prefetch(to + (d + r) * kStateColumns + b * strip.block, 1);
    PT_UNROLL
    for (int r = 0; r < R; r++) PT_UNROLL
    for (int n = 0; n < N; n++) s[r][n] = wide(state + (d + r) * kStateColumns + strip.at(n)) * all(left);
    for (int j = 0; j < kChunk; j++) {
      VS u[N];
      PT_UNROLL
      for (int n = 0; n < N; n++) u[n] = value(j, n);
      PT_UNROLL
      for (int r = 0; r < R; r++) PT_UNROLL
      for (int n = 0; n < N; n++) s[r][n] = fma(u[n], all(weighed[(d + r) * kChunk + j]), s[r][n]);
    }
    PT_UNROLL
    for (int r = 0; r < R; r++) PT_UNROLL
    for (int n = 0; n < N; n++) put(to + (d + r) * kStateColumns + strip.at(n), s[r][n]);
  }
}

// f<B>(block) for the blocks of an item, as many at once as B says: `most`, 2 or 1.
template <int most, class F>
void each_strip(const LinearItem& item, const F& f) {
  int block = item.block0;
  for (; most > 2 && block + most <= item.block1; block += most)
    f(std::integral_constant<int, most>(), block);
  for (; block + 2 <= item.block1; block += 2) f(std::integral_constant<int, 2>(), block);
  if (block < item.block1) f(std::integral_constant<int, 1>(), block);
}

// One piece of a sequence; `to` gets the state behind the chunk, or is null.
template <class T>
void run_piece(Head& h, const LinearItem& item, float* weighed, float* to) {
  const Linear& l = h.l;
  const int key_head = l.key_head(h.head), dim = l.view.key_dim;
  const float* work = l.work_of(h.p, key_head);
  take_decays(h, item.block0 == 0);
  if (h.p.single()) {
    single_decays(h, work + (dim + 15) / 16 * 16);
    each_strip<kMost>(item, [&](auto blocks, int block) { single_strip<T, blocks.value>(h, block); });
    if (!to) return;
    const float left = weigh_keys(h, (const T*)l.view.k(l.layer, h.p.block, key_head), weighed);
    const T* tail = (const T*)l.view.u(l.layer, h.p.block, h.head);
    each_strip<2>(item, [&](auto blocks, int block) {
      const T* values = tail + size_t(block) * kStateColumns * kChunk;
      end_strip<blocks.value>(h, block, weighed, left, to,
                              [&](int j, int n) { return tail_values(values, j, n); });
    });
    return;
  }
  const float* products = work + 2 * (dim * kChunk + 64);
  many_decays(h, products, products + kChunk * kChunk);
  const float left = to ? weigh_keys(h, work, weighed) : 0;
  each_strip<2>(item, [&](auto blocks, int block) {
    constexpr int N = blocks.value * kPairs;
    alignas(64) float u[kChunk * N * L];
    many_strip<T, blocks.value>(h, block, u);
    if (to)
      end_strip<blocks.value>(h, block, weighed, left, to,
                              [&](int j, int n) { return wide(u + (j * N + n) * L); });
  });
}

// f<T>() for the type of a tail.
#define PT_STORED(type, call)             \
  switch (type) {                         \
    case KVType::F16: return call<f16>;   \
    case KVType::BF16: return call<bf16>; \
    default: return call<float>;          \
  }
decltype(&conv_columns<float>) conv_of(KVType type) { PT_STORED(type, &conv_columns) }
decltype(&single_products<float>) single_of(KVType type) { PT_STORED(type, &single_products) }
decltype(&many_products<float>) many_of(KVType type) { PT_STORED(type, &many_products) }
decltype(&run_piece<float>) piece_of(KVType type) { PT_STORED(type, &run_piece) }
#undef PT_STORED

}  // namespace

void conv(const ConvRows& c, const RecurrentSequence& s, int c0, int c1) { conv_of(c.type)(c, s, c0, c1); }

void linear_products(const Linear& l, const ChunkRows& p, int key_head) {
  (p.single() ? single_of(l.type) : many_of(l.type))(l, p, key_head);
}

void linear_rows(const Linear& l, const LinearItem& item, const LinearScratch& scratch) {
  alignas(64) float products[2 * kChunk * kRowStride + kRowStride], d[kRowStride], g[kChunk];
  const RecurrentSequence& s = item.sequence;
  const float* state = s.read < 0 ? l.zeros : l.view.state(l.layer, s.read, item.head);
  for (int i = s.first; i < s.last; i++) {
    const ChunkRows& p = l.pieces[i];
    float* to = nullptr;
    if (p.write >= 0)
      to = l.view.state(l.layer, p.write, item.head);
    else if (i + 1 < s.last)
      to = scratch.state;
    Head h{l, p, item.head, state, item.next, products, products + kChunk * kRowStride, d, g};
    piece_of(l.type)(h, item, scratch.weighed, to);
    state = to;
  }
}

void l2norm(const float* x, int n, float eps, float scale, float* out) {
  VF s[2] = {};
  int i = 0;
  for (; i + 2 * W <= n; i += 2 * W)
    for (int j = 0; j < 2; j++) s[j] = fma(load(x + i + j * W), load(x + i + j * W), s[j]);
  float total = sum(s[0] + s[1]);
  for (; i < n; i++) total = fma(x[i], x[i], total);
  const float factor = scale / __builtin_sqrtf(total + eps);
  for (i = 0; i < n; i++) out[i] = x[i] * factor;
}

// log(1 + exp(x)) as max(x, 0) + log(1 + t) with t = exp(-|x|), by the series of atanh of t / (2 + t).
void gates(const Gates& f, const float* a, const float* b, float* g, float* beta) {
  each_vector(
      f.heads,
      [&](VF x, VF bias) {
        x = x + bias;
        const VF t = vexp(-vabs(x)), s = t / (t + 2.0f), s2 = s * s;
        VF p = set1(1.0f / 15);
        PT_UNROLL
        for (int i = 13; i > 0; i -= 2) p = fma(p, s2, set1(1.0f / float(i)));
        VF dt = fma(s + s, p, vmax(x, VF{}));
        dt = dt < f.low ? set1(f.low) : dt;
        return dt > f.high ? set1(f.high) : dt;
      },
      a, f.dt_bias, beta);
  for (int i = 0; i < f.heads; i++) g[i] = f.decay[i] * beta[i];
  if (b) each_vector(f.heads, [](VF x, VF) { return sigmoid(x); }, b, b, beta);
}

void gate_mul(const float* x, const float* gate, int n, float* out) {
  each_vector(n, [](VF x, VF gate) { return x * sigmoid(gate); }, x, gate, out);
}

void gated_norm(const GatedNorm& f, const float* x, const float* gate, float* out) {
  const auto weigh = [&](const float* from) {
    if (!f.silu) return gate_mul(from, gate, f.columns, out);
    each_vector(f.columns, [](VF x, VF gate) { return x * (gate * sigmoid(gate)); }, from, gate, out);
  };
  if (f.gate_first) weigh(x);
  for (int c = 0; c < f.columns; c += f.group)
    norm((f.gate_first ? out : x) + c, f.weight + c % f.weights, f.eps, f.group, out + c);
  if (!f.gate_first) weigh(out);
}

}  // namespace PT_ISA
}  // namespace pt
