// Causal attention over the paged KV, in place: one item is a run of tokens of one sequence and all query
// heads of one KV head, so that each K and V is loaded once for the group.
//
// A row is a (token, query head) pair. For every segment of 256 tokens counted from position 0: scores, their
// maximum, exp, sum, and the weighted V; then the segment is merged into what came before it. Within a
// segment each score is one chain over head_dim and each output one chain over tokens, however rows and
// tokens are tiled.
#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace pt {
namespace PT_ISA {
namespace {

constexpr int kTileVecs = kTokenTile / W;

// Scores of R rows against N tiles of 16 tokens; element (d, token) of tile n is at k[n][d * ld + token]. In
// fp16 storage what is wanted next is asked for a line at a time: k[kTiles + n] is a tile of K to come, k[2 *
// kTiles + n] the V of this tile's tokens.
constexpr int kTiles = 4;

template <int R, int N, class T>
void score_tile(const float* q, const T* const* k, size_t ld, int dim, float* out) {
  VF a[R][N * kTileVecs] = {};
  for (int d = 0; d < dim; d++) PT_UNROLL
  for (int n = 0; n < N; n++) {
    if constexpr (std::is_same_v<T, f16>) {
      __builtin_prefetch(k[kTiles + n] + d * ld);
      __builtin_prefetch(k[2 * kTiles + n] + d * kTokenTile);
    }
    VF b[kTileVecs];
    PT_UNROLL
    for (int v = 0; v < kTileVecs; v++) b[v] = load(k[n] + d * ld + v * W);
    PT_UNROLL
    for (int r = 0; r < R; r++) {
      const VF s = set1(q[r * dim + d]);
      PT_UNROLL
      for (int v = 0; v < kTileVecs; v++) {
        VF& c = a[r][n * kTileVecs + v];
        c = fma(b[v], s, c);
        PT_PIN(c);
      }
    }
  }
  PT_UNROLL
  for (int r = 0; r < R; r++) PT_UNROLL
  for (int v = 0; v < N * kTileVecs; v++) store(out + r * kSegment + v * W, a[r][v]);
}

// out[R][C * W] += weights times V of tokens t0 .. t1-1.
template <int R, int C, class T>
void value_tile(const float* p, const T* const* v, int t0, int t1, int col, int dim, float* out) {
  VF a[R][C];
  PT_UNROLL
  for (int r = 0; r < R; r++) PT_UNROLL
  for (int c = 0; c < C; c++) a[r][c] = load(out + r * dim + col + c * W);
  for (int t = t0; t < t1; t++) {
    VF b[C];
    PT_UNROLL
    for (int c = 0; c < C; c++) b[c] = load(v[t] + col + c * W);
    PT_UNROLL
    for (int r = 0; r < R; r++) {
      const VF s = set1(p[r * kSegment + t]);
      PT_UNROLL
      for (int c = 0; c < C; c++) {
        a[r][c] = fma(b[c], s, a[r][c]);
        PT_PIN(a[r][c]);
      }
    }
  }
  PT_UNROLL
  for (int r = 0; r < R; r++) PT_UNROLL
  for (int c = 0; c < C; c++) store(out + r * dim + col + c * W, a[r][c]);
}

// How many columns of W a tile of R rows takes, so that about 12 sums are in flight.
constexpr int columns(int rows) { return rows >= 4 ? 2 : rows >= 2 ? 4 : 8; }

template <int R, class T, int C = columns(R)>
void value_rows(const float* p, const T* const* v, int t0, int t1, int col, int dim, float* out) {
  for (; col + C * W <= dim; col += C * W) value_tile<R, C, T>(p, v, t0, t1, col, dim, out);
  if constexpr (C > 1) value_rows<R, T, C / 2>(p, v, t0, t1, col, dim, out);
}

template <class T>
using ScoreTile = void (*)(const float*, const T* const*, size_t, int, float*);
template <class T>
using ValueRows = void (*)(const float*, const T* const*, int, int, int, int, float*);

template <class T>
constexpr ScoreTile<T> kScoreOne[kRowTile] = {score_tile<1, 1, T>, score_tile<2, 1, T>, score_tile<3, 1, T>,
                                              score_tile<4, 1, T>, score_tile<5, 1, T>, score_tile<6, 1, T>};
template <class T>
constexpr ValueRows<T> kValueRows[kRowTile] = {value_rows<1, T>, value_rows<2, T>, value_rows<3, T>,
                                               value_rows<4, T>, value_rows<5, T>, value_rows<6, T>};

template <class T>
void scores_of(int rows, const float* q, const T* const* k, int tiles, size_t ld, int dim, float* out) {
  if (tiles == 4 && rows == 1) return score_tile<1, 4, T>(q, k, ld, dim, out);
  if (tiles >= 2 && rows <= 3) {
    constexpr ScoreTile<T> two[3] = {score_tile<1, 2, T>, score_tile<2, 2, T>, score_tile<3, 2, T>};
    two[rows - 1](q, k, ld, dim, out);
    k += 2, out += 2 * kTokenTile, tiles -= 2;
    if (tiles == 2) return two[rows - 1](q, k, ld, dim, out);
  }
  for (int i = 0; i < tiles; i++) kScoreOne<T>[rows - 1](q, k + i, ld, dim, out + i* kTokenTile);
}

// One segment of one item, for KV elements of type T.
template <class T>
struct Segment {
  const Attention& a;
  const AttnItem& item;
  const AttnScratch& s;
  const int32_t* table;
  int start, rows, begin, limit;  // first token; (token, head) pairs; all that any row sees of the segment

  const KVView& kv() const { return a.kv; }
  const T* k_at(int token) const {
    const int t = start + token, b = t / kv().block_size, o = t % kv().block_size;
    const T* base = (const T*)kv().k(a.layer, table[b], item.head);
    return kv().transposed() ? base + o : base + size_t(o) * kv().head_dim;
  }
  const T* v_at(int token) const {
    const int t = start + token, b = t / kv().block_size, o = t % kv().block_size;
    return (const T*)kv().v(a.layer, table[b], item.head) + size_t(o) * kv().head_dim;
  }

  // A tile of K as fp32 [dim][16]. Tokens that no row sees repeat one that is seen: theirs are never read.
  void load_tile(int token) const {
    const int dim = kv().head_dim;
    if (kv().transposed()) {
      const T* k = k_at(token);
      for (int d = 0; d < dim; d++)
        for (int v = 0; v < kTokenTile; v += W)
          store(s.ktile + d * kTokenTile + v, load(k + size_t(d) * kv().block_size + v));
      return;
    }
    for (int j = 0; j < kTokenTile; j++) {
      const T* k = k_at(std::clamp(token + j, begin, limit - 1));
      for (int d = 0; d < dim; d += W) {
        VF x = load(k + d);
        for (int i = 0; i < W; i++) s.ktile[(d + i) * kTokenTile + j] = x[i];
      }
    }
  }

  int max_limit(int row, int n) const { return *std::max_element(s.limits + row, s.limits + row + n); }
  int min_limit(int row, int n) const { return *std::min_element(s.limits + row, s.limits + row + n); }
  int max_begin(int row, int n) const { return *std::max_element(s.begins + row, s.begins + row + n); }
  int tile_rows(int row) const { return rows - row < kRowTile ? rows - row : kRowTile; }

  void scores() const {
    const int dim = kv().head_dim, first = begin / kTokenTile * kTokenTile;
    if (kv().transposed() && rows <= kRowTile) {  // few rows: straight from the blocks
      const T* k[3 * kTiles];
      for (int t = first; t < limit; t += kTiles * kTokenTile) {
        int n = 0;
        for (; n < kTiles && t + n * kTokenTile < limit; n++) {
          const int at = t + n * kTokenTile, next = at + kTiles * kTokenTile;
          k[n] = k_at(at);
          k[kTiles + n] = k_at(next < limit ? next : at);
          k[2 * kTiles + n] = v_at(at);
        }
        scores_of<T>(rows, s.q, k, n, kv().block_size, dim, s.scores + t);
      }
      return;
    }
    const float* k = s.ktile;
    for (int t = first; t < limit; t += kTokenTile) {
      load_tile(t);
      for (int r = 0; r < rows; r += kRowTile)
        if (max_limit(r, tile_rows(r)) > t)
          scores_of<float>(tile_rows(r), s.q + r * dim, &k, 1, kTokenTile, dim, s.scores + r * kSegment + t);
    }
  }

  // Soft cap and distance.
  void bend(int row, int t0, int t1) const {
    const AttentionShape& shape = a.shape;
    float* p = s.scores + row * kSegment;
    const int group = a.group(), position = a.positions[item.row0 + row / group];
    const float slope = shape.slopes ? shape.slopes[item.head * group + row % group] : 0;
    for (int t = t0; t < t1; t += W) {
      VF x = load(p + t);
      if (shape.soft_cap > 0) x = vtanh(x / shape.soft_cap) * shape.soft_cap;
      if (shape.slopes) x += (float(start + t - position) + VF{0, 1, 2, 3, 4, 5, 6, 7}) * slope;
      store(p + t, x);
    }
  }

  // Scores become weights; returns their maximum and sum. What the row does not see is 0, which adds nothing.
  void softmax(int row, float* max, float* total) const {
    float* p = s.scores + row * kSegment;
    const int b = s.begins[row], n = s.limits[row], first = b / W * W, padded = (n + W - 1) / W * W;
    if (a.shape.soft_cap > 0 || a.shape.slopes) bend(row, first, padded);
    for (int t = first; t < b; t++) p[t] = -INFINITY;
    for (int t = n; t < padded; t++) p[t] = -INFINITY;
    VF m = set1(-INFINITY), l = {};
    for (int t = first; t < padded; t += W) m = vmax(load(p + t), m);
    *max = hmax(m);
    for (int t = first; t < padded; t += W) {
      VF e = vexp(load(p + t) - *max);
      l += e;
      store(p + t, e);
    }
    *total = sum(l);
  }

  // Each row takes exactly the tokens it sees, in order: those that all rows of a tile see together, what
  // lies before and behind one by one.
  template <class U>
  void add_values(int row, const U* const* v, int t0, int t1) const {
    const int n = tile_rows(row), dim = kv().head_dim;
    const int from = std::max(t0, max_begin(row, n)), to = std::min(t1, min_limit(row, n));
    const float* p = s.scores + row * kSegment;
    float* out = s.partial + row * dim;
    const auto alone = [&](int r, int low, int high) {
      low = std::max(low, s.begins[row + r]), high = std::min(high, s.limits[row + r]);
      if (low < high) value_rows<1, U>(p + r * kSegment, v, low, high, 0, dim, out + r * dim);
    };
    if (from >= to) {
      for (int r = 0; r < n; r++) alone(r, t0, t1);
      return;
    }
    for (int r = 0; r < n; r++) alone(r, t0, from);
    kValueRows<U>[n - 1](p, v, from, to, 0, dim, out);
    for (int r = 0; r < n; r++) alone(r, to, t1);
  }

  void values() const {
    const int dim = kv().head_dim;
    std::memset(s.partial, 0, sizeof(float) * rows * dim);
    if (rows <= kRowTile) {
      const T* v[kSegment];
      for (int t = begin; t < limit; t++) v[t] = v_at(t);
      return add_values(0, v, begin, limit);
    }
    const float* v[kSegment];
    for (int t0 = begin; t0 < limit; t0 += kVChunk) {
      const int t1 = t0 + kVChunk < limit ? t0 + kVChunk : limit;
      for (int t = t0; t < t1; t++) {
        const T* src = v_at(t);
        float* dst = s.vtile + (t - t0) * dim;
        for (int d = 0; d < dim; d += W) store(dst + d, load(src + d));
        v[t] = dst;
      }
      for (int r = 0; r < rows; r += kRowTile) add_values(r, v, t0, t1);
    }
  }
};

// Merges (max, total, outputs) of a later segment into state = {max, total, outputs...}.
void merge_one(float* state, float max, float total, const float* out, int dim) {
  const float m = max > state[0] ? max : state[0];
  const float a = exp1(state[0] - m), b = exp1(max - m);
  state[0] = m;
  state[1] = state[1] * a + total * b;
  for (int d = 0; d < dim; d += W) store(state + 2 + d, load(state + 2 + d) * a + load(out + d) * b);
}

template <class T>
void run_segment(const Attention& a, const AttnItem& item, const AttnScratch& s, int segment, float* state) {
  const int dim = a.kv.head_dim, group = a.group(), rows = item.rows * group;
  Segment<T> seg{a,    item,     s, a.table + size_t(item.seq) * a.table_width, segment * kSegment,
                 rows, kSegment, 0};
  for (int r = 0; r < rows; r++) {
    const int position = a.positions[item.row0 + r / group];
    s.begins[r] = std::max(a.shape.first_seen(position) - seg.start, 0);
    s.limits[r] = std::clamp(position + 1 - seg.start, 0, kSegment);
    if (s.begins[r] >= s.limits[r]) {
      s.begins[r] = s.limits[r] = 0;
      continue;
    }
    seg.begin = std::min(seg.begin, s.begins[r]), seg.limit = std::max(seg.limit, s.limits[r]);
  }
  if (seg.limit == 0) return;
  seg.scores();
  float max[2], *total = max + 1;
  float* out = s.partial;
  for (int r = 0; r < rows; r++) {
    if (s.limits[r] == 0) continue;
    seg.softmax(r, max, total);
    s.stats[2 * r] = max[0], s.stats[2 * r + 1] = *total;
  }
  seg.values();
  for (int r = 0; r < rows; r++) {
    float* to = state + size_t(r) * (2 + dim);
    if (s.limits[r] == 0) continue;
    if (to[1] == 0) {  // the first segment of which the row sees anything
      to[0] = s.stats[2 * r], to[1] = s.stats[2 * r + 1];
      std::memcpy(to + 2, out + r * dim, sizeof(float) * dim);
    } else {
      merge_one(to, s.stats[2 * r], s.stats[2 * r + 1], out + r * dim, dim);
    }
  }
}

void finish(const Attention& a, const AttnItem& item, const float* state) {
  const int dim = a.kv.head_dim, group = a.group();
  for (int r = 0; r < item.rows * group; r++) {
    const float* from = state + size_t(r) * (2 + dim);
    float* to = a.out + (size_t(item.row0 + r / group) * a.heads() + item.head * group + r % group) * dim;
    const float inv = 1.0f / from[1];
    for (int d = 0; d < dim; d += W) store(to + d, load(from + 2 + d) * inv);
  }
}

}  // namespace

void attend(const Attention& a, const AttnItem& item, const AttnScratch& s) {
  const int dim = a.kv.head_dim, group = a.group(), rows = item.rows * group;
  for (int r = 0; r < rows; r++) {
    const float* q = a.q + (size_t(item.row0 + r / group) * a.heads() + item.head * group + r % group) * dim;
    for (int d = 0; d < dim; d += W) store(s.q + r * dim + d, load(q + d) * a.shape.scale);
  }
  float* state = item.partial ? item.partial : s.state;
  for (int r = 0; r < rows; r++) state[size_t(r) * (2 + dim) + 1] = 0;  // sees nothing yet
  for (int i = item.seg0; i < item.seg1; i++)
    a.kv.elem == 2 ? run_segment<f16>(a, item, s, i, state) : run_segment<float>(a, item, s, i, state);
  if (!item.partial) finish(a, item, state);
}

// Items that hold one segment each, of the same rows, in order: merged left to right as attend() would have
// done.
void merge(const Attention& a, const AttnItem* items, int count, const AttnScratch& s) {
  const int dim = a.kv.head_dim, rows = items[0].rows * a.group();
  const size_t stride = 2 + dim;
  std::memcpy(s.state, items[0].partial, sizeof(float) * rows * stride);
  for (int i = 1; i < count; i++)
    for (int r = 0; r < rows; r++) {
      const float* p = items[i].partial + r * stride;
      float* to = s.state + r * stride;
      if (p[1] == 0) continue;
      if (to[1] == 0)
        std::memcpy(to, p, sizeof(float) * stride);
      else
        merge_one(to, p[0], p[1], p + 2, dim);
    }
  finish(a, items[0], s.state);
}

}  // namespace PT_ISA
}  // namespace pt
