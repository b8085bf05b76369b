#include "ops.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

namespace pt {
namespace {

// Rows of the widest product (the MLP) whose intermediate results are kept at once.
constexpr int kRowSlice = 512;
// The same of experts, of which each has a few of the rows; and how many pairs of a row and an expert.
constexpr int kExpertRows = 2048, kPairs = 4096;
constexpr size_t kAsked = 10 * 1024;  // bytes of weights: the kernels themselves ask for those behind

// Pieces of panels, of which some kernels take two.
int panel_grain(int panels, int threads) { return 2 * grain_of(panels / 2, threads); }

}  // namespace

Engine::Engine(int threads, const std::string& isa) : kernels_(kernels_of(isa)), pool_(threads) {}

// -- storage
// --------------------------------------------------------------------------------------------------

std::unique_ptr<Weight> Engine::pack(Source source, const uint8_t* data, int n, int k, int bits,
                                     const int32_t* order) {
  const Kind kind = kSources[int(source)].kind;
  auto w = std::make_unique<Weight>();
  w->matrix = {kind, bits, n, k, kernels_.panel_bytes(kind, k), nullptr};
  const int panels = w->matrix.panels(), grain = grain_of(panels, pool_.size());
  std::lock_guard lock(one_call_);
  w->take(weights_, order != nullptr);
  if (order) std::memcpy(w->memory.data + w->matrix.panel_bytes * panels, order, sizeof(int32_t) * k);
  pool_.split(panels, grain,
              [&](int p0, int p1, int) { kernels_.pack(source, data, n, k, p0, p1, w->memory.data); });
  return w;
}

void Engine::copy_blocks(const KVView& kv, const int32_t* pairs, int count) {
  std::lock_guard lock(one_call_);
  pool_.split(kv.layers, 1, [&](int layer, int, int) {
    for (int i = 0; i < count; i++)
      std::memcpy(kv.block(layer, pairs[2 * i + 1]), kv.block(layer, pairs[2 * i]), kv.block_bytes());
  });
}

// -- primitives
// -----------------------------------------------------------------------------------------------

void Engine::embed(const Matrix& table, const int32_t* tokens, Rows out) {
  std::lock_guard lock(one_call_);
  pool_.split(out.count, grain_of(out.count, pool_.size()), [&](int t0, int t1, int) {
    for (int t = t0; t < t1; t++) kernels_.unpack_row(table, tokens[t], out.data + size_t(t) * out.cols);
  });
}

void Engine::norm(Rows x, const float* weight, float eps, float* out) {
  std::lock_guard lock(one_call_);
  each_row(
      x, [&](int r, const float* row) { kernels_.norm(row, weight, eps, x.cols, out + size_t(r) * x.cols); });
}

void Engine::layer_norm(Rows x, const float* weight, const float* bias, float eps, float* out) {
  std::lock_guard lock(one_call_);
  each_row(x, [&](int r, const float* row) {
    kernels_.layer_norm(row, weight, bias, eps, x.cols, out + size_t(r) * x.cols);
  });
}

Acts Engine::take_acts(int rows, int k, unsigned forms, const int32_t* order) {
  Acts a;
  a.k = k, a.order = order;
  a.bits = forms & kFifteen ? 15 : forms & kTwelve ? 12 : 8;
  a.rows = rows, a.stride = (rows * a.terms() + 1) / 4 * 4 + 2;
  if (forms & kFloat) a.f32 = arena_.take<float>(size_t(rows) * k);
  const size_t places = size_t(a.stride) * (k / kGroup);
  if (forms & kInt8) a.q8 = arena_.take<int8_t>(places * kGroup);
  if (forms & kInt16) a.q16 = arena_.take<int16_t>(places * kGroup);
  if (forms & (kInt8 | kInt16)) {
    a.scale = arena_.take<float>(places);
    a.sum = arena_.take<float>(places);
    if (forms & kOffsets) a.offset = arena_.take<int32_t>(places), a.half = arena_.take<int32_t>(places);
    if (forms & kWords && rows >= kWordsFrom) {
      a.words = arena_.take<uint16_t>(a.words_at(0, k / kGroup));
      a.whole = arena_.take<float>(places);
    }
  }
  return a;
}

// Row x (fp32) in every form that `a` has room for.
void Engine::activate(const Acts& a, int row, const float* x) const {
  float* f = a.f32 ? const_cast<float*>(a.f32) + size_t(row) * a.k : nullptr;
  if (f && f != x) std::memcpy(f, x, sizeof(float) * a.k);
  if (!a.scale) return;
  if (!a.order) return kernels_.quantise(x, a, row, 0, a.k);
  alignas(64) float part[16 * kGroup];
  for (int c0 = 0; c0 < a.k; c0 += 16 * kGroup) {
    const int c1 = std::min(c0 + 16 * kGroup, a.k);
    for (int c = c0; c < c1; c++) part[c - c0] = x[a.order[c]];
    kernels_.quantise(part, a, row, c0, c1);
  }
}

// Products of the same rows with several matrices, as one phase: pieces of panels times blocks of rows,
// behind those of adapters that are listed.
void Engine::products(const Acts& x, int rows, const Product* list, int count) {
  int panels = 0;
  for (int i = 0; i < count; i++) panels += list[i].w->panels();
  const int grain = panel_grain(panels, pool_.size()), pieces = (panels + grain - 1) / grain;
  const int each = order_items(), before = (int(items_.size()) + each - 1) / each;
  pool_.split(before + pieces, 1, [&](int i, int, int) {
    if (i < before) return run_piece(i, each);
    int p0 = piece_of(i - before, pieces, rows, pool_.size()) * grain, p1 = std::min(p0 + grain, panels);
    for (int m = 0; m < count && p0 < p1; m++) {
      const int n = list[m].w->panels(), end = std::min(p1, n);
      if (p0 < end) kernels_.gemm(*list[m].w, x, 0, rows, p0, end, list[m].to);
      p0 = std::max(p0 - n, 0), p1 -= n;
    }
  });
  items_.clear();
}

void Engine::linear(Rows x, const Matrix& w, const float* bias, float* out) {
  std::lock_guard lock(one_call_);
  arena_.reset();
  const unsigned form = kernels_.form(w);
  Acts a = take_acts(x.count, x.cols, form & ~kFloat);
  if (form & kFloat) a.f32 = x.data;
  a.order = w.order;
  const Product product{&w, {out, w.n, bias, Write::Store}};
  if (a.scale)
    pool_.split(x.count, grain_of(x.count, pool_.size()), [&](int r0, int r1, int) {
      for (int r = r0; r < r1; r++) activate(a, r, x.data + size_t(r) * x.cols);
    });
  products(a, x.count, &product, 1);
}

void Engine::rope(Rows x, const int32_t* positions, const LayerView& s) {
  std::lock_guard lock(one_call_);
  pool_.split(x.count, grain_of(x.count, pool_.size()), [&](int r0, int r1, int) {
    for (int r = r0; r < r1; r++) {
      const size_t at = size_t(positions[r]) * s.rope_half;
      kernels_.rope(x.data + size_t(r) * x.cols, x.cols / s.head_dim, s.head_dim, s.cos + at, s.sin + at,
                    s.rope_half, s.interleaved);
    }
  });
}

void Engine::kv_write(const KVView& kv, int layer, Rows k, const float* v, const int32_t* slots) {
  std::lock_guard lock(one_call_);
  pool_.split(k.count, grain_of(k.count, pool_.size()), [&](int r0, int r1, int) {
    for (int r = r0; r < r1; r++)
      if (slots[r] >= 0)
        kernels_.kv_write(kv, layer, slots[r], k.data + size_t(r) * k.cols, v + size_t(r) * k.cols);
  });
}

// -- attention
// ------------------------------------------------------------------------------------------------

void Engine::plan_attention(AttentionPlan& plan, const Attention& a, const BatchView& b) {
  plan.share(a, b, pool_.size());
  const size_t dim = a.kv.head_dim, rows = AttentionPlan::rows_of(a);
  for (const AttentionPlan::Merge& merge : plan.merges)
    for (const AttentionPlan::Run& run : {merge.shared, merge.own})
      for (AttnItem* item = &plan.items[run.first]; item < &plan.items[run.first] + run.count; item++)
        if (!item->partial)
          item->partial = arena_.take<float>(size_t(item->rows) * a.group() * state_floats(dim));
  plan.scratch.clear();
  for (int i = 0; i < pool_.size(); i++) {
    AttnScratch s;
    s.q = arena_.take<float>(rows * dim);
    s.scores = arena_.take<float>(rows * kScoreStride);
    s.partial = arena_.take<float>(rows * state_floats(dim));
    s.state = arena_.take<float>(rows * state_floats(dim));
    s.ktile = arena_.take<float>(dim * kTokenTile);
    s.begins = arena_.take<int>(rows);
    s.limits = arena_.take<int>(rows);
    plan.scratch.push_back(s);
  }
}

void Engine::run_attention(const AttentionPlan& plan, const Attention& a) {
  const AttnItem* items = plan.items.data();
  pool_.split(int(plan.shares.size()) - 1, 1, [&](int share, int, int thread) {
    for (int i = plan.shares[share]; i < plan.shares[share + 1]; i++)
      kernels_.attend(a, items[i], i + 1 < int(plan.items.size()) ? items + i + 1 : nullptr,
                      plan.scratch[thread]);
  });
  pool_.split(int(plan.merges.size()), 1, [&](int i, int, int) {
    const auto& [shared, own] = plan.merges[i];
    kernels_.merge(a, items + shared.first, shared.count, items + own.first, own.count);
  });
}

void Engine::attention(const float* q, const KVView& kv, int layer, const BatchView& b,
                       const AttentionShape& shape, float* out) {
  std::lock_guard lock(one_call_);
  arena_.reset();
  const Attention a{kv, layer, shape, b.table_width, q, out, b.positions, b.table};
  plan_attention(plan_, a, b);
  run_attention(plan_, a);
}

// -- elementwise
// ----------------------------------------------------------------------------------------------

void Engine::act_mul(Rows gate, const float* up, float* out) {
  std::lock_guard lock(one_call_);
  each_row(gate, [&](int r, const float* row) {
    const size_t at = size_t(r) * gate.cols;
    kernels_.silu_mul(row, up + at, gate.cols, out + at);
  });
}

void Engine::activate(Rows x, Act act, float* out) {
  std::lock_guard lock(one_call_);
  each_row(x,
           [&](int r, const float* row) { kernels_.activate(act, row, x.cols, out + size_t(r) * x.cols); });
}

void Engine::soft_cap(Rows x, float cap, float* out) {
  std::lock_guard lock(one_call_);
  each_row(x,
           [&](int r, const float* row) { kernels_.soft_cap(row, cap, x.cols, out + size_t(r) * x.cols); });
}

void Engine::mul(Rows x, const float* y, float* out) {
  kernels_.mul(x.data, y, size_t(x.count) * x.cols, out);
}

void Engine::clamped_swiglu(Rows gate, const float* up, float* out) {
  std::lock_guard lock(one_call_);
  each_row(gate, [&](int r, const float* row) {
    const size_t at = size_t(r) * gate.cols;
    kernels_.clamped_swiglu(row, up + at, gate.cols, out + at);
  });
}

void Engine::route(Rows x, int k, bool normalise, bool sigmoid, int32_t* ids, float* weights) {
  std::lock_guard lock(one_call_);
  each_row(x, [&](int r, const float* row) {
    kernels_.route(row, x.cols, k, normalise, sigmoid, ids + size_t(r) * k, weights + size_t(r) * k);
  });
}

void Engine::add_rows(Rows y, const int32_t* rows, const float* weights, float* x) {
  std::lock_guard lock(one_call_);
  each_row(y, [&](int r, const float* row) {
    kernels_.add_scaled(row, weights[r], y.cols, x + size_t(rows[r]) * y.cols);
  });
}

void Engine::add(Rows x, const float* y, float* out) {
  kernels_.add(x.data, y, size_t(x.count) * x.cols, out);
}

// -- composites: one entry into the pool, phases between barriers
// ---------------------------------------------

void Engine::normed(const float* x, const float* weight, const float* bias, float eps, int n,
                    float* out) const {
  bias ? kernels_.layer_norm(x, weight, bias, eps, n, out) : kernels_.norm(x, weight, eps, n, out);
}

// Norms of the rows of x, or these where there is no norm, in every form that `to` has room for. `scratch`
// holds a row for each thread.
void Engine::take_normed(Rows x, const float* weight, const float* bias, float eps, float* scratch,
                         const Acts& to) {
  pool_.split(x.count, grain_of(x.count, pool_.size()), [&](int r0, int r1, int thread) {
    float* h = scratch + size_t(thread) * x.cols;
    for (int r = r0; r < r1; r++) {
      const float* row = x.data + size_t(r) * x.cols;
      if (weight) normed(row, weight, bias, eps, x.cols, h);
      activate(to, r, weight ? h : row);
    }
  });
}

// x += residual * norm(y), where there is a norm; y, of which each rank has its part, is overwritten.
void Engine::add_behind(Rows x, float* y, const float* norm, const LayerView& l) {
  if (ranks_) ranks_->sum(y, size_t(x.count) * x.cols);
  each_row(x, [&](int r, float* row) {
    float* h = y + size_t(r) * x.cols;
    if (norm) kernels_.norm(h, norm, l.eps, x.cols, h);
    for (int i = 0; l.residual != 1 && i < x.cols; i++) h[i] *= l.residual;
    kernels_.add(row, h, x.cols, row);
  });
}

void Engine::attention_block(Rows x, const LayerView& l, const KVView& kv, int index, const BatchView& b) {
  std::lock_guard lock(one_call_);
  attend(x, l, kv, index, b, nullptr);
}

// With `only` K and V are those of all rows, the rest is done for the wanted ones.
void Engine::attend(Rows x, const LayerView& l, const KVView& kv, int index, const BatchView& b,
                    const Wanted* only, const Adapted& adapted) {
  if (l.latent.q_rope) return attend_latent(x, l, kv, index, b, only);
  arena_.reset();
  const BatchView& mine = only ? only->batch : b;
  const Rows to{only ? only->out : x.data, mine.tokens, x.cols};
  const int rows = x.count, kept = to.count, threads = pool_.size();
  const int q_cols = l.shape.heads * l.head_dim, kv_cols = l.kv_heads * l.head_dim;
  const Segments* kept_adapters = only ? adapted.wanted : adapted.all;
  const Lora in_lora = take_lora(adapted.all, adapted.layer, LoraInput::Qkv, 0, rows);
  const Lora q_lora = only ? take_lora(adapted.wanted, adapted.layer, LoraInput::Qkv, 0, kept) : in_lora;
  const Lora o_lora = take_lora(kept_adapters, adapted.layer, LoraInput::O, 0, kept);
  const unsigned more = in_lora.width ? kFloat : 0u, q_form = kernels_.form(*l.q) | more;
  const unsigned kv_forms = kernels_.form(*l.k) | kernels_.form(*l.v) | more;
  const Acts in = take_acts(rows, x.cols, only ? kv_forms : kv_forms | q_form, l.attn_order);
  const Acts q_in = only ? take_acts(kept, x.cols, q_form, l.attn_order) : in;
  const Acts mid = take_acts(kept, q_cols, kernels_.form(*l.o), l.o->order);
  float* q = arena_.take<float>(size_t(kept) * q_cols);
  float* k = arena_.take<float>(size_t(rows) * kv_cols);
  float* v = arena_.take<float>(size_t(rows) * kv_cols);
  float* o = arena_.take<float>(size_t(kept) * q_cols);
  float* before = arena_.take<float>(size_t(threads) * x.cols);
  const bool apart = l.attn_post_norm || l.residual != 1 || ranks_;
  float* behind = apart ? arena_.take<float>(size_t(kept) * x.cols) : nullptr;
  const Product qkv[] = {
      {l.q, {q, q_cols, l.q_bias}}, {l.k, {k, kv_cols, l.k_bias}}, {l.v, {v, kv_cols, l.v_bias}}};
  const Product back{l.o, {behind ? behind : to.data, x.cols, l.o_bias, behind ? Write::Store : Write::Add}};

  const auto prepare = [&](Rows from, const Acts& acts) {
    take_normed(from, l.attn_norm, l.attn_norm_bias, l.eps, before, acts);
  };
  const auto rotate = [&](float* at, int heads, const float* norm, int position) {
    const int normed = l.wide_norm ? heads * l.head_dim : l.head_dim;
    for (int c = 0; norm && c < heads * l.head_dim; c += normed)
      kernels_.norm(at + c, norm, l.eps, normed, at + c);
    const size_t p = size_t(position) * l.rope_half;
    kernels_.rope(at, heads, l.head_dim, l.cos + p, l.sin + p, l.rope_half, l.interleaved);
  };
  prepare(x, in);
  if (only) {
    prepare(to, q_in);
    first(q_lora, q_in.f32, x.cols);
    products(q_in, kept, qkv, 1);
  }
  first(in_lora, in.f32, x.cols);
  products(in, rows, qkv + (only ? 1 : 0), only ? 2 : 3);
  second(q_lora, 0, q, q_cols), second(in_lora, 1, k, kv_cols), second(in_lora, 2, v, kv_cols);
  run_items();
  pool_.split(rows + kept, grain_of(rows + kept, threads), [&](int i0, int i1, int) {
    for (int i = i0; i < i1; i++) {
      if (i < kept) {
        float* at = q + size_t(i) * q_cols;
        rotate(at, l.shape.heads, l.q_norm, mine.positions[i]);
        for (int c = 0; l.temper && c < q_cols; c++) at[c] *= l.temper[mine.positions[i]];
        continue;
      }
      const int r = i - kept;
      rotate(k + size_t(r) * kv_cols, l.kv_heads, l.k_norm, b.positions[r]);
      if (b.slots[r] >= 0)
        kernels_.kv_write(kv, index, b.slots[r], k + size_t(r) * kv_cols, v + size_t(r) * kv_cols);
    }
  });
  if (kept == 0) return;
  const Attention a{kv, index, l.shape, mine.table_width, q, o, mine.positions, mine.table};
  plan_attention(plan_, a, mine);
  run_attention(plan_, a);
  pool_.split(kept, grain_of(kept, threads), [&](int r0, int r1, int) {
    for (int r = r0; r < r1; r++) activate(mid, r, o + size_t(r) * q_cols);
  });
  first(o_lora, o, q_cols);
  products(mid, kept, &back, 1);
  second(o_lora, 0, back.to.out, x.cols);
  run_items();
  if (behind) add_behind(to, behind, l.attn_post_norm, l);
}

void Engine::mlp_block(Rows x, const LayerView& l) {
  std::lock_guard lock(one_call_);
  feed_forward(x, l);
}

void Engine::feed_forward(Rows x, const LayerView& l, const Segments* adapters, int layer) {
  if (!l.experts.router) return dense(x, l, adapters, layer);
  for (int start = 0; start < x.count; start += kExpertRows) {
    arena_.reset();
    experts_slice({x.data + size_t(start) * x.cols, std::min(kExpertRows, x.count - start), x.cols}, l);
  }
}

void Engine::add_experts(Rows x, const float* h, const ExpertsView& e, const int32_t* ids,
                         const float* weights) {
  std::lock_guard lock(one_call_);
  for (int start = 0; start < x.count; start += kExpertRows) {
    arena_.reset();
    const size_t at = size_t(start) * x.cols, pair = size_t(start) * e.top_k;
    const Rows slice{x.data + at, std::min(kExpertRows, x.count - start), x.cols};
    const float* seen = h + at;
    if (h == x.data) {  // they are written to before all experts have seen them
      float* copy = arena_.take<float>(size_t(slice.count) * x.cols);
      std::copy_n(seen, size_t(slice.count) * x.cols, copy);
      seen = copy;
    }
    mix_experts(slice, seen, e, ids ? ids + pair : nullptr, ids ? weights + pair : nullptr);
  }
}

void Engine::dense(Rows all, const LayerView& l, const Segments* adapters, int layer) {
  const int inner = l.up->n;
  for (int start = 0; start < all.count; start += kRowSlice) {
    arena_.reset();
    const int rows = std::min(kRowSlice, all.count - start);
    const Rows x{all.data + size_t(start) * all.cols, rows, all.cols};
    const Lora in_lora = take_lora(adapters, layer, LoraInput::Mlp, start, rows);
    const Lora down_lora = take_lora(adapters, layer, LoraInput::Down, start, rows);
    const unsigned forms = kernels_.form(*l.up) | (l.gate ? kernels_.form(*l.gate) : 0);
    const Acts in = take_acts(rows, x.cols, forms | (in_lora.width ? kFloat : 0u), l.mlp_order);
    const Acts mid = take_acts(rows, inner, kernels_.form(*l.down) | (down_lora.width ? kFloat : 0u));
    float* before = arena_.take<float>(size_t(pool_.size()) * x.cols);
    const bool apart = l.mlp_post_norm || l.residual != 1 || ranks_;
    float* behind = apart ? arena_.take<float>(size_t(rows) * x.cols) : nullptr;
    take_normed(x, l.mlp_norm, l.mlp_norm_bias, l.eps, before, in);
    first(in_lora, in.f32, x.cols);
    run_items();
    dense_slice(x, in, mid, behind, l, in_lora, down_lora);
  }
}

// x += what the MLP makes of the activations; `behind` has room for it where it is not added at once.
void Engine::dense_slice(Rows x, const Acts& in, const Acts& mid, float* behind, const LayerView& l,
                         const Lora& in_lora, const Lora& down_lora) {
  const int rows = x.count, inner = l.up->n, panels = l.up->panels();
  const Deltas deltas = take_deltas(in_lora, inner);
  run_items();
  const Hidden half{l.gate, l.up, l.up_bias, l.act, nullptr, {deltas.of[0], deltas.of[1]}};
  const int grain = panel_grain(panels, pool_.size()), pieces = (panels + grain - 1) / grain;
  pool_.split(pieces, 1, [&](int i, int, int) {
    const int p0 = piece_of(i, pieces, rows, pool_.size()) * grain;
    kernels_.hidden(half, in, 0, rows, p0, std::min(p0 + grain, panels), mid);
  });
  const Product back{l.down,
                     {behind ? behind : x.data, x.cols, l.down_bias, behind ? Write::Store : Write::Add}};
  first(down_lora, mid.f32, inner);
  products(mid, rows, &back, 1);
  second(down_lora, 0, back.to.out, x.cols);
  run_items();
  if (behind) add_behind(x, behind, l.mlp_post_norm, l);
}

// f(rows of an expert, first panel, end) for all of them, as one phase. Matrices have as many panels. Each
// thread has experts that follow each other; near the end of one it asks for the weights of the next,
// of(expert).
template <class Of, class F>
void Engine::each_expert(const std::vector<ExpertRows>& list, int panels, const Of& of, const F& f) {
  const int grain = 2 * std::max(1, panels / 2 / pool_.size()), pieces = (panels + grain - 1) / grain;
  const int count = int(list.size()) * pieces;
  pool_.split(count, 1, [&](int i, int, int) {
    i = piece_of(i, count, 1, pool_.size());
    const int p0 = i % pieces * grain, p1 = std::min(p0 + grain, panels);
    const ExpertRows &mine = list[i / pieces], *next = &list[std::min(i + 1, count - 1) / pieces];
    if (next == &mine) return f(mine, p0, p1);
    const int cut = std::max(p0, (p1 - 1) / 2 * 2);
    if (p0 < cut) f(mine, p0, cut);
    for (const Matrix* m : of(next->expert))
      for (size_t at = 0; m && at < std::min(kAsked, m->panel_bytes * m->panels()); at += 64)
        __builtin_prefetch(m->data + at, 0, 2);
    f(mine, cut, p1);
  });
}

// Row i of `to` is row rows[i] of `from`; both have the same forms.
void Engine::gather(const Acts& from, const int* rows, int count, const Acts& to) {
  const auto copy = [](const auto* source, size_t a, auto* target, size_t b, size_t n) {
    using T = std::remove_const_t<std::remove_reference_t<decltype(*source)>>;
    if (source) std::memcpy(const_cast<T*>(target) + b, source + a, n * sizeof(T));
  };
  if (from.f32)
    pool_.split(count, grain_of(count, pool_.size()), [&](int r0, int r1, int) {
      for (int r = r0; r < r1; r++)
        copy(from.f32, size_t(rows[r]) * from.k, to.f32, size_t(r) * to.k, from.k);
    });
  const int groups = from.scale ? from.k / kGroup : 0;
  pool_.split(groups, grain_of(groups, pool_.size()), [&](int g0, int g1, int) {
    for (int g = g0; g < g1; g++)
      for (int term = 0; term < from.terms(); term++)
        for (int r = 0; r < count; r++) {
          const size_t a = from.at(rows[r] + term * from.rows, g), b = to.at(r + term * to.rows, g);
          copy(from.q8, a * kGroup, to.q8, b * kGroup, kGroup);
          copy(from.q16, a * kGroup, to.q16, b * kGroup, kGroup);
          copy(from.scale, a, to.scale, b, 1), copy(from.sum, a, to.sum, b, 1);
          copy(from.offset, a, to.offset, b, 1), copy(from.half, a, to.half, b, 1);
          if (term) continue;
          copy(from.words, from.words_at(rows[r], g), to.words, to.words_at(r, g), from.words_at(1, 0));
          copy(from.whole, a, to.whole, b, 1);
        }
  });
}

void Engine::experts_slice(Rows x, const LayerView& l) {
  const int d = x.cols;
  Acts shared_in, shared_mid;
  float* behind = nullptr;
  if (l.up) {
    const unsigned forms = kernels_.form(*l.up) | (l.gate ? kernels_.form(*l.gate) : 0);
    shared_in = take_acts(x.count, d, forms, l.mlp_order);
    shared_mid = take_acts(x.count, l.up->n, kernels_.form(*l.down));
    if (l.mlp_post_norm || l.residual != 1) behind = arena_.take<float>(size_t(x.count) * d);
  }
  // Of each rank its part of what is added, in one sum with that of a shared MLP, unless that has more behind
  // it than the sum.
  const Rows part{ranks_ ? arena_.take<float>(size_t(x.count) * d) : x.data, x.count, d};
  float* h = arena_.take<float>(size_t(x.count) * d);
  each_row(x, [&](int r, const float* row) {
    float* to = h + size_t(r) * d;
    if (l.mlp_norm)
      normed(row, l.mlp_norm, l.mlp_norm_bias, l.eps, d, to);
    else
      std::copy_n(row, d, to);
    if (l.up) activate(shared_in, r, to);
  });
  if (ranks_) std::fill_n(part.data, size_t(part.count) * d, 0.0f);
  if (l.up) dense_slice(behind ? x : part, shared_in, shared_mid, behind, l, {}, {});
  mix_experts(part, h, l.experts, nullptr, nullptr);
  if (!ranks_) return;
  ranks_->sum(part.data, size_t(part.count) * d);
  each_row(x, [&](int r, float* row) { kernels_.add(row, part.data + size_t(r) * d, d, row); });
}

// Every pair of a row and an expert it chose is a row of the products; pairs lie expert by expert, and are
// computed in parts of at most kPairs.
void Engine::mix_experts(Rows x, const float* h, const ExpertsView& e, const int32_t* ids,
                         const float* weights) {
  const int experts = int(e.up.size()), k = e.top_k, d = x.cols, inner = e.up[0]->n, pairs = x.count * k;
  const int room = std::min(pairs, kPairs);
  unsigned in_forms = 0, mid_forms = 0;
  for (const auto* list : {&e.gate, &e.up})
    for (const Matrix* m : *list) in_forms |= kernels_.form(*m);
  for (const Matrix* m : e.down) mid_forms |= kernels_.form(*m);
  if (x.count < kWordsFrom) in_forms &= ~kWords, mid_forms &= ~kWords;
  Acts once, to_router;  // of each row
  if (!e.weigh_input) once = take_acts(x.count, d, in_forms & ~kFloat);
  if (in_forms & kFloat) once.k = d, once.f32 = h;
  const Rows rows{const_cast<float*>(h), x.count, d};
  if (!ids) {
    const unsigned form = kernels_.form(*e.router);
    to_router = take_acts(x.count, d, form & ~kFloat);
    if (form & kFloat) to_router.f32 = h;
    float* scores = arena_.take<float>(size_t(x.count) * experts);
    float* chosen_weights = arena_.take<float>(pairs);
    int32_t* chosen = arena_.take<int32_t>(pairs);
    if (to_router.scale) each_row(rows, [&](int r, const float* row) { activate(to_router, r, row); });
    const Product route{e.router, {scores, experts, e.router_bias}};
    products(to_router, x.count, &route, 1);
    each_row(rows, [&](int r, const float*) {
      float* mine = chosen_weights + size_t(r) * k;
      kernels_.route(scores + size_t(r) * experts, experts, k, e.normalise, e.sigmoid, chosen + size_t(r) * k,
                     mine);
      for (int i = 0; e.scale != 1 && i < k; i++) mine[i] *= e.scale;
    });
    ids = chosen, weights = chosen_weights;
  }
  if (once.scale) each_row(rows, [&](int r, const float* row) { activate(once, r, row); });

  int* place = arena_.take<int>(pairs);         // of pair row * k + i among those sorted by expert
  int* sorted = arena_.take<int>(pairs);        // the pair at each place, at last its row
  int* starts = arena_.take<int>(experts + 1);  // first place of each expert
  int* added = arena_.take<int>(x.count);       // how many experts of a row are
  std::fill(starts, starts + experts + 1, 0), std::fill_n(added, x.count, 0);
  for (int p = 0; p < pairs; p++) starts[ids[p] + 1]++;
  for (int i = 0; i < experts; i++) starts[i + 1] += starts[i];
  for (int p = 0; p < pairs; p++) place[p] = starts[ids[p]]++, sorted[place[p]] = p;
  for (int i = experts; i > 0; i--) starts[i] = starts[i - 1];
  starts[0] = 0;

  const Acts in = take_acts(room, d, in_forms), mid = take_acts(room, inner, mid_forms);
  float* out = arena_.take<float>(size_t(room) * d);
  float* weighed = e.weigh_input ? arena_.take<float>(size_t(pool_.size()) * d) : nullptr;
  const auto bias = [](const std::vector<const float*>& list, int i) {
    return list.empty() ? nullptr : list[i];
  };
  const auto gate = [&](int i) { return e.gate.empty() ? nullptr : e.gate[i]; };
  for (int first = 0, end; first < experts; first = end) {
    for (end = first + 1; end < experts && starts[end + 1] - starts[first] <= kPairs;) end++;
    const int base = starts[first], count = starts[end] - base;
    experts_.clear();
    for (int i = first; i < end; i++)
      if (starts[i] < starts[i + 1]) experts_.push_back({i, starts[i] - base, starts[i + 1] - base});
    if (weighed)
      pool_.split(count, grain_of(count, pool_.size()), [&](int i0, int i1, int thread) {
        float* to = weighed + size_t(thread) * d;
        for (int i = i0; i < i1; i++) {
          const int p = sorted[base + i];
          for (int c = 0; c < d; c++) to[c] = h[size_t(p / k) * d + c] * weights[p];
          activate(in, i, to);
        }
      });
    for (int i = 0; i < count && !weighed; i++) sorted[base + i] /= k;
    if (!weighed) gather(once, sorted + base, count, in);
    each_expert(
        experts_, e.up[0]->panels(), [&](int i) { return std::array{e.up[i], gate(i)}; },
        [&](const ExpertRows& r, int p0, int p1) {
          const int i = r.expert;
          kernels_.hidden({gate(i), e.up[i], bias(e.up_bias, i), e.act, bias(e.gate_bias, i)}, in, r.begin,
                          r.end, p0, p1, mid);
        });
    each_expert(
        experts_, e.down[0]->panels(), [&](int i) { return std::array{e.down[i]}; },
        [&](const ExpertRows& r, int p0, int p1) {
          kernels_.gemm(*e.down[r.expert], mid, r.begin, r.end, p0, p1,
                        {out, d, bias(e.down_bias, r.expert)});
        });
    each_row(x, [&](int r, float* row) {  // in ascending order of experts, as the ids of a row are
      for (int& i = added[r]; i < k && ids[size_t(r) * k + i] < end; i++) {
        const size_t p = size_t(r) * k + i;
        kernels_.add_scaled(out + size_t(place[p] - base) * d, weighed ? 1.0f : weights[p], d, row);
      }
    });
  }
}

void Engine::logits(Rows x, const HeadView& head, float* out, const AdapterView* const* adapters) {
  std::lock_guard lock(one_call_);
  arena_.reset();
  const int v = head.matrix.n;
  const Lora lora = take_lora(group(segments_, adapters, x.count), -1, LoraInput::Qkv, 0, x.count);
  const Acts in = take_acts(x.count, x.cols, kernels_.form(head.matrix) | (lora.width ? kFloat : 0u));
  float* before = arena_.take<float>(size_t(pool_.size()) * x.cols);
  const Product product{&head.matrix, {out, v}};
  take_normed(x, head.norm, head.norm_bias, head.eps, before, in);
  first(lora, in.f32, x.cols);
  products(in, x.count, &product, 1);
  second(lora, 0, out, v);
  run_items();
  if (head.soft_cap > 0)
    each_row({out, x.count, v}, [&](int, float* row) { kernels_.soft_cap(row, head.soft_cap, v, row); });
}

}  // namespace pt
