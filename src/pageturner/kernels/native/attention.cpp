// Causal attention over the paged KV, in place: one item is a run of tokens of one sequence and all query
// heads of one KV head, so that each K and V is loaded once for the group.
//
// A row is a (token, query head) pair. For every segment of 256 tokens counted from position 0: scores, their
// maximum, 2^(score - maximum), sum, and the weighted V; then the segment is merged into what came before it.
// Scores are in units of log(2). Within a segment each score is one chain over head_dim and each output one
// chain over tokens, however rows and tokens are tiled.
#include <algorithm>
#include <type_traits>

#include "attention_tiles.h"

namespace pt {
namespace PT_ISA {
namespace {

constexpr float kLog2e = 1.44269504088896341f;
constexpr int kValueChunk = 64;  // tokens of V that stay in the first-level cache for all rows of an item

// The state of a row: head_dim outputs, padded, then maximum and sum; a sum of 0 has seen nothing yet.
struct State {
  float* out;
  float *max, *sum;
  State(float* states, int row, int dim)
      : out(states + size_t(row) * state_floats(dim)), max(out + padded(dim)), sum(max + 1) {}
};

void ask_for_row(const float* row, int dim) {
  for (int d = 0; d < dim; d += 16) ask_for(row + d);
}

// What comes after a segment: a segment of an item, or nothing.
struct Ahead {
  const AttnItem* item;
  int segment;

  // The K of its token t, in its block: null if there is none. `at` becomes the token's place in the block.
  uint8_t* keys_of(const Attention& a, int t, int* at) const {
    const int token = segment * kSegment + t;
    if (!item || !a.kv.transposed() || token > a.positions[item->row0 + item->rows - 1]) return nullptr;
    *at = token % a.kv.block_size;
    const int block = a.table[size_t(item->seq) * a.table_width + token / a.kv.block_size];
    return a.kv.k(a.layer, block, item->head);
  }
};

// One segment of one item, for KV elements of type T.
template <class T>
struct Segment {
  static constexpr bool kScaled = std::is_same_v<T, int8_t>;
  const Attention& a;
  const AttnItem& item;
  const AttnScratch& s;
  int index, rows;
  const T *v[kSegment], *k[kSegment / L];  // of each token; of each vector of tokens
  const T *ahead_k[kSegment / kTokenTile], *ahead_v[kSegment / L];
  int begin = kSegment, limit = 0;  // all that any row sees of the segment
  alignas(64) float k_scale[kScaled ? kSegment : 1], v_scale[kScaled ? kSegment : 1];  // of each token

  Segment(const Attention& a, const AttnItem& item, const AttnScratch& s, int index)
      : a(a), item(item), s(s), index(index), rows(item.rows * a.group()) {}
  const KVView& kv() const { return a.kv; }
  int start() const { return index * kSegment; }
  const int32_t* table() const { return a.table + size_t(item.seq) * a.table_width; }

  // What each row sees of the segment. False: nothing.
  bool look() {
    for (int r = 0; r < rows; r++) {
      const int position = a.positions[item.row0 + r / a.group()];
      int &low = s.begins[r], &high = s.limits[r];
      low = std::max(a.shape.first_seen(position) - start(), 0);
      high = std::clamp(position + 1 - start(), 0, kSegment);
      if (low >= high)
        low = high = 0;
      else
        begin = std::min(begin, low), limit = std::max(limit, high);
    }
    return limit > 0;
  }

  // Where K and V of the tokens lie, and what is asked for ahead: V with the scores, then the K of `next`.
  void locate(const Ahead& next) {
    const bool tiles = kv().transposed();
    const int from = tiles ? begin / kTokenTile * kTokenTile : begin;
    const int to = tiles ? (limit + kTokenTile - 1) / kTokenTile * kTokenTile : limit;
    for (int t = from; t < to;) {
      const int b = (start() + t) / kv().block_size, o = (start() + t) % kv().block_size;
      const int n = std::min(kv().block_size - o, to - t);
      uint8_t *keys = kv().k(a.layer, table()[b], item.head),
              *values = kv().v(a.layer, table()[b], item.head);
      for (int i = 0; i < n; i++) v[t + i] = (const T*)values + size_t(o + i) * kv().head_dim;
      for (int i = 0; tiles && i < n; i += L) {
        k[(t + i) / L] = (const T*)keys + o + i;
        ahead_v[(t + i) / L] = v[t + i];
      }
      if constexpr (kScaled) {
        std::memcpy(k_scale + t, kv().scales(keys) + o, n * sizeof(float));
        std::memcpy(v_scale + t, kv().scales(values) + o, n * sizeof(float));
      }
      t += n;
    }
    for (int t = from / kTokenTile * kTokenTile; t < to; t += kTokenTile) {
      int at = 0;
      uint8_t* keys = next.keys_of(a, t, &at);
      ahead_k[t / kTokenTile] = keys ? (const T*)keys + size_t(at) * kv().head_dim : v[std::max(t, from)];
      if (!kScaled || !keys) continue;
      ask_for(kv().scales(keys) + at);
      ask_for(kv().scales(keys + kv().to_values()) + at);
    }
  }

  int tile_count() const { return (rows + kTileRows - 1) / kTileRows; }
  int tile_start(int i) const { return rows * i / tile_count(); }
  int max_limit(int row, int n) const { return *std::max_element(s.limits + row, s.limits + row + n); }
  int min_limit(int row, int n) const { return *std::min_element(s.limits + row, s.limits + row + n); }
  int max_begin(int row, int n) const { return *std::max_element(s.begins + row, s.begins + row + n); }

  // f(first row, rows) for tiles of nearly the same size.
  template <class F>
  void each_tile(const F& f) const {
    for (int i = 0; i < tile_count(); i++) f(tile_start(i), tile_start(i + 1) - tile_start(i));
  }

  void scores() const {
    constexpr int kChunk = 4 * kTokenTile;  // tokens whose K stays in the first-level cache for all rows
    const int first = begin / kTokenTile * kTokenTile, dim = kv().head_dim;
    if (!kv().transposed()) return gathered_scores(first);
    for (int t = first; t < limit; t += kChunk)
      each_tile([&](int r, int n) {
        const int seen = std::min(max_limit(r, n) - t, kChunk);
        if (seen > 0)
          kScoreRows<T>[n - 1](s.q + r* dim, k + t / L, ahead_v + t / L, (seen + L - 1) / L, kv().block_size,
                               dim, s.scores + r* kScoreStride + t);
      });
  }

  // The same where tokens of a block do not lie in vectors. Tokens that no row sees repeat one that is seen:
  // theirs are never read.
  void gathered_scores(int first) const {
    const int dim = kv().head_dim;
    const float* tile[kTokenTile / L];
    for (int i = 0; i < kTokenTile / L; i++) tile[i] = s.ktile + i * L;
    for (int t = first; t < limit; t += kTokenTile) {
      for (int j = 0; j < kTokenTile; j++) {
        const T* from = v[std::clamp(t + j, begin, limit - 1)] - kv().to_values() / sizeof(T);
        for (int d = 0; d < dim; d++) s.ktile[d * kTokenTile + j] = to_float(from[d]);
      }
      each_tile([&](int r, int n) {
        if (max_limit(r, n) > t)
          kScoreRows<float>[n - 1](s.q + r* dim, tile, tile, kTokenTile / L, kTokenTile, dim,
                                   s.scores + r* kScoreStride + t);
      });
    }
  }

  // Soft cap and distance.
  void bend(int row, int t0, int t1) const {
    const AttentionShape& shape = a.shape;
    float* p = s.scores + row * kScoreStride;
    const int group = a.group(), position = a.positions[item.row0 + row / group];
    const float slope = shape.slopes ? shape.slopes[item.head * group + row % group] * kLog2e : 0;
    for (int t = t0; t < t1; t += W) {
      VF x = load(p + t);
      if (shape.soft_cap > 0) x = vtanh(x / shape.soft_cap) * (shape.soft_cap * kLog2e);
      if (shape.slopes) x += (float(start() + t - position) + lanes()) * slope;
      store(p + t, x);
    }
  }

  // Scores become weights, times the scale of each V that has one. What a row does not see adds nothing to
  // the sum.
  void softmaxes() const {
    for (int r = 0; r < rows; r++) {
      const State state(s.partial, r, kv().head_dim);
      *state.sum = 0;
      if (s.limits[r] > 0) softmax(r, state.max, state.sum);
    }
  }

  void softmax(int row, float* max, float* total) const {
    float* p = s.scores + row * kScoreStride;
    const int b = s.begins[row], n = s.limits[row], first = b / L * L, end = (n + L - 1) / L * L;
    if constexpr (kScaled)
      for (int t = first; t < end; t += L) store(p + t, wide(p + t) * wide(k_scale + t));
    if (a.shape.soft_cap > 0 || a.shape.slopes) bend(row, first, end);
    hide(p, first, b, n), hide(p, end - L, b, n);
    Wide m = spread(-INFINITY), sum = {};
    for (int t = first; t < end; t += L) m = vmax(wide(p + t), m);
    *max = max_of(m);
    for (int t = first; t < end; t += L) {
      const Wide e = power_of_two(wide(p + t) - *max);
      sum += e;
      if constexpr (kScaled)
        store(p + t, e * wide(v_scale + t));
      else
        store(p + t, e);
    }
    *total = sum_of(sum);
  }

  // The scores of a vector outside of low .. high-1 become those of tokens that are not seen.
  void hide(float* p, int t, int low, int high) const {
    WideInt at;
    for (int i = 0; i < L; i++) at[i] = t + i;
    store(p + t, at >= low && at < high ? wide(p + t) : spread(-INFINITY));
  }

  // Each row takes exactly the tokens it sees, in order: those that all rows of a tile see together, what
  // lies before and behind one by one.
  void add_values(int row, int n, int t0, int t1) const {
    const int dim = padded(kv().head_dim);
    const int from = std::max(t0, max_begin(row, n)), to = std::min(t1, min_limit(row, n));
    const float* p = s.scores + row * kScoreStride;
    const int stride = state_floats(dim);
    float* out = s.partial + row * stride;
    const auto alone = [&](int r, int low, int high) {
      low = std::max(low, s.begins[row + r]), high = std::min(high, s.limits[row + r]);
      if (low < high)
        kValueRows<T>[0](p + r * kScoreStride, v, ahead_k, low, high, dim, stride, out + r * stride, 0);
    };
    if (from >= to) {
      for (int r = 0; r < n; r++) alone(r, t0, t1);
      return;
    }
    for (int r = 0; r < n; r++) alone(r, t0, from);
    kValueRows<T>[n - 1](p, v, ahead_k, from, to, dim, stride, out, 0);
    for (int r = 0; r < n; r++) alone(r, to, t1);
  }

  void values() const {
    const int dim = kv().head_dim;
    for (int r = 0; r < rows; r++) std::memset(State(s.partial, r, dim).out, 0, sizeof(float) * padded(dim));
    for (int t = begin; t < limit; t += kValueChunk)
      each_tile([&](int r, int n) { add_values(r, n, t, std::min(t + kValueChunk, limit)); });
  }
};

// Merges a later segment into a state.
void merge_one(const State& to, const State& from, int dim) {
  if (*from.sum == 0) return;
  if (*to.sum == 0) {  // the first segment of which the row sees anything
    std::memcpy(to.out, from.out, sizeof(float) * state_floats(dim));
    return;
  }
  const float m = std::max(*to.max, *from.max);
  const float a = power_of_two(*to.max - m), b = power_of_two(*from.max - m);
  *to.max = m;
  *to.sum = *to.sum * a + *from.sum * b;
  for (int d = 0; d < dim; d += L) store(to.out + d, wide(to.out + d) * a + wide(from.out + d) * b);
}

template <class T>
void run_segment(const Attention& a, const AttnItem& item, const AttnScratch& s, int index, const Ahead& next,
                 float* states) {
  const int dim = a.kv.head_dim;
  Segment<T> segment(a, item, s, index);
  if (!segment.look()) return;
  segment.locate(next);
  segment.scores();
  segment.softmaxes();
  segment.values();
  for (int r = 0; r < segment.rows; r++) merge_one(State(states, r, dim), State(s.partial, r, dim), dim);
}

void finish(const Attention& a, const AttnItem& item, float* states) {
  const int dim = a.kv.head_dim;
  for (int r = 0; r < item.rows * a.group(); r++) {
    const State from(states, r, dim);
    float* to = a.out + a.row_at(item, r);
    float inv = 1.0f / *from.sum;
    if (a.shape.sinks) {  // one more key, behind all others
      const float sink = a.shape.sinks[item.head * a.group() + r % a.group()] * kLog2e;
      const float most = std::max(*from.max, sink), kept = power_of_two(*from.max - most);
      inv = kept / (*from.sum * kept + power_of_two(sink - most));
    }
    for (int d = 0; d < dim; d += W) store(to + d, load(from.out + d) * inv);
  }
}

}  // namespace

void attend(const Attention& a, const AttnItem& item, const AttnItem* next, const AttnScratch& s) {
  const int dim = a.kv.head_dim, group = a.group(), rows = item.rows * group;
  const float scale = a.shape.scale * (a.shape.soft_cap > 0 ? 1.0f : kLog2e);
  for (int r = 0; r < rows; r++) {
    const float* q = a.q + a.row_at(item, r);
    for (int d = 0; d < dim; d += W) store(s.q + r * dim + d, load(q + d) * scale);
  }
  for (int r = 0; r < rows; r++) ask_for_row(a.out + a.row_at(item, r), dim);
  for (int r = 0; next && r < next->rows * group; r++) ask_for_row(a.q + a.row_at(*next, r), dim);
  float* states = item.partial ? item.partial : s.state;
  for (int r = 0; r < rows; r++) *State(states, r, dim).sum = 0;
  constexpr decltype(&run_segment<f16>) runs[] = {run_segment<int8_t>, run_segment<f16>, run_segment<float>,
                                                  run_segment<bf16>, run_segment<f8>};
  const auto run = runs[int(a.kv.type)];
  for (int i = item.seg0; i < item.seg1; i++)
    run(a, item, s, i, i + 1 < item.seg1 ? Ahead{&item, i + 1} : Ahead{next, next ? next->seg0 : 0}, states);
  if (!item.partial) finish(a, item, states);
}

// Items that hold the segments of the rows of `own`, in order: merged left to right as attend() would have
// done.
void merge(const Attention& a, const AttnItem* shared, int shared_count, const AttnItem* own, int count) {
  const int dim = a.kv.head_dim, group = a.group(), rows = own->rows * group;
  float* states = nullptr;
  const auto add = [&](float* more) {
    for (int r = 0; states && r < rows; r++) merge_one(State(states, r, dim), State(more, r, dim), dim);
    if (!states) states = more;
  };
  for (int i = 0; i < shared_count; i++)
    add(shared[i].partial + size_t(own->row0 - shared->row0) * group * state_floats(dim));
  for (int i = 0; i < count; i++) add(own[i].partial);
  finish(a, *own, states);
}

}  // namespace PT_ISA
}  // namespace pt
