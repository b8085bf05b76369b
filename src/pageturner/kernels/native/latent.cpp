// Attention over a latent KV (MLA): the latent and one rotary key of a token are all that is kept, and all
// heads share them. What would make keys and values of it is multiplied with queries and with what heads
// mixed.
#include <algorithm>

#include "ops.h"

namespace pt {

// out[h * rows + r] [n] = matrix of head h times row r's columns of it, which begin at x + r * row_stride + h
// * head_stride.
void Engine::head_products(const float* x, int rows, size_t row_stride, size_t head_stride,
                           const std::vector<const Matrix*>& heads, float* out) {
  const int count = int(heads.size()), n = heads[0]->n, panels = heads[0]->panels(), threads = pool_.size();
  unsigned forms = 0;
  for (const Matrix* m : heads) forms |= kernels_.form(*m);
  const Acts in = take_acts(count * rows, heads[0]->k, forms);
  pool_.split(count * rows, grain_of(count * rows, threads), [&](int i0, int i1, int) {
    for (int i = i0; i < i1; i++) activate(in, i, x + i % rows * row_stride + i / rows * head_stride);
  });
  const int grain = 2 * std::max(1, panels / 2 / threads), pieces = (panels + grain - 1) / grain;
  pool_.split(count * pieces, 1, [&](int i, int, int) {
    const int h = i / pieces, p0 = i % pieces * grain, p1 = std::min(p0 + grain, panels);
    kernels_.gemm(*heads[h], in, h * rows, (h + 1) * rows, p0, p1, {out, n});
  });
}

void Engine::head_linear(Rows x, const std::vector<const Matrix*>& heads, float* out) {
  std::lock_guard lock(one_call_);
  arena_.reset();
  const int count = int(heads.size()), n = heads[0]->n, k = heads[0]->k;
  float* apart = arena_.take<float>(size_t(count) * x.count * n);
  head_products(x.data, x.count, x.cols, k, heads, apart);
  each_head(x.count, count, [&](int r, int h) {
    std::copy_n(apart + (size_t(h) * x.count + r) * n, n, out + (size_t(r) * count + h) * n);
  });
}

// With `only` the KV is that of all rows, the rest is done for the wanted ones.
void Engine::attend_latent(Rows x, const LayerView& l, const KVView& kv, int index, const BatchView& b,
                           const Wanted* only) {
  arena_.reset();
  const LatentView& m = l.latent;
  const BatchView& mine = only ? only->batch : b;
  const Rows to{only ? only->out : x.data, mine.tokens, x.cols};
  const int rows = x.count, kept = to.count, threads = pool_.size(), heads = l.shape.heads;
  const int rank = l.k->n, turned = m.k_rope->n, width = rank + turned;
  const int plain = m.k_up[0]->k, value = m.v_up[0]->n, q_cols = heads * plain, o_cols = heads * value;
  const unsigned q_forms = kernels_.form(*l.q) | kernels_.form(*m.q_rope);
  const unsigned kv_forms = kernels_.form(*l.k) | kernels_.form(*m.k_rope);
  const Acts in = take_acts(rows, x.cols, only ? kv_forms : kv_forms | q_forms);
  const Acts q_in = only ? take_acts(kept, x.cols, q_forms) : in;
  const Acts mid = take_acts(kept, o_cols, kernels_.form(*l.o));
  const auto floats = [&](int count, int cols) { return arena_.take<float>(size_t(count) * cols); };
  float *q = floats(kept, q_cols), *q_rope = floats(kept, heads * turned);
  float *k = floats(rows, rank), *k_rope = floats(rows, turned), *keys = floats(rows, width);
  float *absorbed = floats(kept, heads * rank), *queries = floats(kept, heads * width);
  float *mixed = floats(kept, heads * width), *apart = floats(kept, o_cols), *line = floats(threads, o_cols);
  float* before = floats(threads, x.cols);
  const bool added_later = l.attn_post_norm || l.residual != 1;
  float* behind = added_later ? floats(kept, x.cols) : nullptr;
  const Product list[] = {{l.q, {q, q_cols}},
                          {m.q_rope, {q_rope, heads * turned}},
                          {l.k, {k, rank}},
                          {m.k_rope, {k_rope, turned}}};

  const auto prepare = [&](Rows from, const Acts& acts) {
    take_normed(from, l.attn_norm, l.attn_norm_bias, l.eps, before, acts);
  };
  const auto rotate = [&](float* at, int count, int position) {
    const size_t p = size_t(position) * l.rope_half;
    kernels_.rope(at, count, turned, l.cos + p, l.sin + p, l.rope_half, l.interleaved);
  };
  prepare(x, in);
  if (only) prepare(to, q_in), products(q_in, kept, list, 2);
  products(in, rows, list + (only ? 2 : 0), only ? 2 : 4);
  pool_.split(rows + kept, grain_of(rows + kept, threads), [&](int i0, int i1, int) {
    for (int i = i0; i < i1; i++) {
      if (i < kept) {
        rotate(q_rope + size_t(i) * heads * turned, heads, mine.positions[i]);
        continue;
      }
      const int r = i - kept;
      float *key = keys + size_t(r) * width, *rope = k_rope + size_t(r) * turned;
      kernels_.norm(k + size_t(r) * rank, m.norm, l.eps, rank, key);
      rotate(rope, 1, b.positions[r]);
      std::copy_n(rope, turned, key + rank);
      if (b.slots[r] >= 0) kernels_.kv_write(kv, index, b.slots[r], key, nullptr);
    }
  });
  if (kept == 0) return;
  head_products(q, kept, q_cols, plain, m.k_up, absorbed);
  each_head(kept, heads, [&](int r, int h) {
    float* query = queries + (size_t(r) * heads + h) * width;
    std::copy_n(absorbed + (size_t(h) * kept + r) * rank, rank, query);
    std::copy_n(q_rope + (size_t(r) * heads + h) * turned, turned, query + rank);
  });
  const Attention a{kv, index, l.shape, mine.table_width, queries, mixed, mine.positions, mine.table};
  plan_attention(plan_, a, mine);
  run_attention(plan_, a);
  head_products(mixed, kept, size_t(heads) * width, width, m.v_up, apart);
  pool_.split(kept, grain_of(kept, threads), [&](int r0, int r1, int thread) {
    float* row = line + size_t(thread) * o_cols;
    for (int r = r0; r < r1; r++) {
      for (int h = 0; h < heads; h++)
        std::copy_n(apart + (size_t(h) * kept + r) * value, value, row + h * value);
      activate(mid, r, row);
    }
  });
  const Product back{l.o, {behind ? behind : to.data, x.cols, l.o_bias, behind ? Write::Store : Write::Add}};
  products(mid, kept, &back, 1);
  if (behind) add_behind(to, behind, l.attn_post_norm, l);
}

}  // namespace pt
