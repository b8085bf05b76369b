// The Python module: checks shapes and ranges (memory safety ends here), hands raw pointers to Engine without
// the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <sched.h>

#include <algorithm>
#include <climits>
#include <optional>
#include <stdexcept>

#include "bind_adapters.h"
#include "bind_comm.h"
#include "bind_recurrent.h"
#include "checksum.h"
#include "limits.h"
#include "ops.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <class T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Mat = Array<float, 2>;
using ConstMat = Array<const float, 2>;
using Vec = Array<const float, 1>;
using Ints = Array<const int32_t, 1>;
using ConstInts2 = Array<const int32_t, 2>;
using Words = Array<const uint64_t, 2>;

void check(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

pt::Rows rows(const Mat& x) { return {x.data(), int(x.shape(0)), int(x.shape(1))}; }
pt::Rows rows(const ConstMat& x) { return {const_cast<float*>(x.data()), int(x.shape(0)), int(x.shape(1))}; }

void check_range(const Ints& a, int64_t low, int64_t high, const char* what) {
  for (size_t i = 0; i < a.size(); i++) check(a(i) >= low && a(i) < high, what);
}

// A decoder layer that keeps the Python objects of its weights alive.
struct Layer {
  pt::LayerView view{};
  std::vector<nb::object> owners;
};

// A mixture of experts, and its parts.
struct Experts {
  pt::ExpertsView view{};
  nb::tuple owners;
};

// A decoder below its head that does the same.
struct Stack {
  pt::StackView view{};
  int positions = INT_MAX;  // that every layer has tables for
  std::vector<nb::object> owners;
};

// The arrays of one batch, checked against the KV storage.
struct Batch {
  Ints positions, query_start, context_len, slots;
  ConstInts2 table;

  pt::BatchView view(const pt::KVView& kv, int64_t count) const {
    const int64_t tokens = int64_t(positions.size()), sequences = int64_t(query_start.size()) - 1;
    const int64_t width = int64_t(table.shape(1)), room = width * kv.block_size;
    check(tokens == count && sequences >= 0, "rows, positions and query_start do not match");
    check(int64_t(slots.size()) == tokens, "slots: one for each row");
    check(int64_t(table.shape(0)) == sequences, "block_table: one row for each sequence");
    check(int64_t(context_len.size()) == sequences, "context_len: one for each sequence");
    check_range(positions, 0, room, "positions: beyond the block table");
    check_range(slots, -1, int64_t(kv.blocks) * kv.block_size, "slots: beyond the KV storage");
    check(query_start(0) == 0 && query_start(sequences) == tokens, "query_start: must span all rows");
    for (int64_t s = 0; s < sequences; s++) {
      check(query_start(s) <= query_start(s + 1), "query_start: must not decrease");
      const int64_t used = (int64_t(context_len(s)) + kv.block_size - 1) / kv.block_size;
      check(used <= width, "context_len: beyond the block table");
      for (int64_t b = 0; b < used; b++)
        check(table(s, b) >= 0 && table(s, b) < kv.blocks, "block_table: no such block");
      for (int64_t r = query_start(s); r < query_start(s + 1); r++)
        check(positions(r) < context_len(s), "positions: beyond context_len");
    }
    return {positions.data(), query_start.data(), table.data(), slots.data(),
            int(tokens),      int(sequences),     int(width)};
  }
};

// Each of 0 .. k-1 once.
bool is_order(const int32_t* order, int k) {
  std::vector<bool> seen(size_t(k), false);
  for (int i = 0; i < k; i++) {
    if (order[i] < 0 || order[i] >= k || seen[size_t(order[i])]) return false;
    seen[size_t(order[i])] = true;
  }
  return true;
}

// Whether these columns lie in the same order, null: as inputs do. Floats have none: they are not looked at.
const int32_t* same_order(std::initializer_list<const pt::Matrix*> list, const char* what) {
  const pt::Matrix* first = nullptr;
  for (const pt::Matrix* m : list) {
    if (!m || m->kind < pt::Kind::Q8) continue;
    if (!first) first = m;
    check(!m->order == !first->order && (!m->order || std::equal(m->order, m->order + m->k, first->order)),
          what);
  }
  return first ? first->order : nullptr;
}

void in_place(const pt::Matrix* m, const char* what) { check(!m || !m->order, what); }

std::unique_ptr<pt::Weight> pack(pt::Engine& e, int source, Array<const uint8_t, 1> data, int n, int k,
                                 int bits, std::optional<Ints> order) {
  check(source >= 0 && source < pt::kSourceCount, "weight: no such kind");
  const pt::SourceFormat f = pt::kSources[source];
  check(n > 0 && k > 0 && k % f.values == 0, "weight: shape does not fit its kind");
  check(data.size() == size_t(n) * (k / f.values) * f.bytes, "weight: wrong number of bytes");
  if (order)
    check(f.kind >= pt::Kind::Q8 && int(order->size()) == k && is_order(order->data(), k),
          "weight: its columns are in no order");
  nb::gil_scoped_release release;
  return e.pack(pt::Source(source), data.data(), n, k, bits, order ? order->data() : nullptr);
}

// A packed matrix that lies in a file, and the sum of its bytes.
nb::tuple fetch(pt::Engine& e, int kind, int bits, int n, int k, bool ordered, int fd, size_t offset) {
  check(bits == 8 || bits == 12 || bits == 15, "weight: no such number of bits");
  check(kind >= 0 && kind < pt::kKinds, "weight: no such kind");
  const bool floats = pt::Kind(kind) <= pt::Kind::BF16;
  const int step = floats ? 1 : pt::in_blocks(pt::Kind(kind)) ? pt::kBlock * pt::kGroup : pt::kGroup;
  check(n > 0 && k > 0 && k % step == 0, "weight: shape does not fit its kind");
  std::unique_ptr<pt::Weight> w;
  uint64_t sum = 0;
  {
    nb::gil_scoped_release release;
    w = e.fetch(pt::Kind(kind), bits, n, k, ordered, fd, offset, sum);
  }
  check(!ordered || (!floats && is_order(w->matrix.order, k)), "weight: its columns are in no order");
  return nb::make_tuple(std::move(w), sum);
}

// Zeroed, or what lies in the file `fd` from `offset` on, if there is one.
std::unique_ptr<pt::KVStore> alloc_kv(int layers, int blocks, int block_size, int kv_heads, int head_dim,
                                      int type, int fd, size_t offset, bool latent) {
  check(layers >= 0 && blocks > 0 && block_size > 0 && block_size <= 256 && kv_heads > 0, "KV: bad shape");
  check(head_dim > 0 && head_dim % 8 == 0 && type >= 0 && type <= int(pt::KVType::F8),
        "KV: head_dim must be a multiple of 8");
  auto kv = std::make_unique<pt::KVStore>();
  kv->view = {nullptr, layers, blocks, block_size, kv_heads, head_dim, pt::KVType(type), latent};
  const size_t bytes = kv->view.nbytes() + pt::kOverread;
  kv->memory = fd < 0 ? pt::Buffer(bytes) : pt::Buffer(fd, offset, bytes);
  kv->view.data = kv->memory.data();
  return kv;
}

void block_sums(const pt::KVStore& kv, Ints blocks, Array<const uint64_t, 1> seeds, int threads,
                Array<uint64_t, 1> sums) {
  check(blocks.size() == seeds.size() && blocks.size() == sums.size(), "block_sums: one for each block");
  check_range(blocks, 0, kv.view.blocks, "block: no such block");
  nb::gil_scoped_release release;
  pt::block_sums(kv.view, blocks.data(), seeds.data(), blocks.size(), threads, sums.data());
}

// Of plain rows of bytes, as `block_sums` of the same bytes.
void row_sums(Array<const uint8_t, 2> rows, Array<const uint64_t, 1> seeds, Array<uint64_t, 1> sums) {
  const size_t count = rows.shape(0), bytes = rows.shape(1);
  check(seeds.size() == count && sums.size() == count, "row_sums: one for each row");
  nb::gil_scoped_release release;
  for (size_t i = 0; i < count; i++)
    sums.data()[i] = pt::xxh64(rows.data() + i * bytes, bytes, seeds.data()[i]);
}

pt::Act act_of(int act, pt::Act last = pt::Act::Relu) {
  check(act >= 0 && act <= int(last), "act: no such activation");
  return pt::Act(act);
}

std::vector<const pt::Matrix*> matrices(nb::handle tuple) {
  std::vector<const pt::Matrix*> list;
  for (nb::handle w : nb::cast<nb::tuple>(tuple)) list.push_back(&nb::cast<const pt::Weight&>(w).matrix);
  return list;
}

// Vectors of n numbers; none, or one for each of `count`.
std::vector<const float*> vectors(nb::handle tuple, size_t count, int n) {
  std::vector<const float*> list;
  for (nb::handle w : nb::cast<nb::tuple>(tuple)) {
    const Vec v = nb::cast<Vec>(w, false);
    check(int(v.size()) == n, "experts: a bias of another length");
    list.push_back(v.data());
  }
  check(list.empty() || list.size() == count, "experts: a bias is missing");
  return list;
}

// From (router, gates, ups, downs, top_k, normalise, sigmoid, scale, weigh_input, router_bias, gate_biases,
// up_biases, down_biases, act).
std::unique_ptr<Experts> make_experts(nb::tuple t) {
  check(t.size() == 14, "experts: fourteen parts");
  auto made = std::make_unique<Experts>();
  pt::ExpertsView& e = made->view;
  made->owners = t, e.router = &nb::cast<const pt::Weight&>(t[0]).matrix;
  e.gate = matrices(t[1]), e.up = matrices(t[2]), e.down = matrices(t[3]);
  e.top_k = nb::cast<int>(t[4]), e.normalise = nb::cast<bool>(t[5]), e.sigmoid = nb::cast<bool>(t[6]);
  e.scale = nb::cast<float>(t[7]), e.weigh_input = nb::cast<bool>(t[8]);
  e.act = act_of(nb::cast<int>(t[13]), pt::Act::SquaredRelu);
  const size_t count = e.up.size();
  if (!t[9].is_none()) {
    const Vec bias = nb::cast<Vec>(t[9], false);
    check(bias.size() == count, "experts: a bias of another length");
    e.router_bias = bias.data();
  }
  check(count > 0 && e.down.size() == count, "experts: one is incomplete");
  check(e.gate.size() == (e.gate.empty() ? 0 : count), "experts: a gate is missing");
  check(!e.gate.empty() || e.act != pt::Act::ClampedSwiglu, "experts: an activation that wants a gate");
  check(e.router->n == int(count), "router: does not fit the experts");
  check(e.top_k > 0 && e.top_k <= int(count), "experts: top_k of them must be there");
  const int inner = e.up[0]->n, hidden = e.router->k;
  in_place(e.router, "router: columns in an order of their own");
  const auto each = [&](const std::vector<const pt::Matrix*>& list, int n, int k) {
    for (const pt::Matrix* m : list) {
      in_place(m, "experts: columns in an order of their own");
      check(m->n == n && m->k == k, "experts: shapes differ");
    }
  };
  each(e.gate, inner, hidden), each(e.up, inner, hidden), each(e.down, hidden, inner);
  e.gate_bias = vectors(t[10], e.gate.size(), inner), e.up_bias = vectors(t[11], count, inner);
  e.down_bias = vectors(t[12], count, hidden);
  return made;
}

// ids and weights: of each row, or none, where the router chooses.
void add_experts(pt::Engine& e, Mat x, ConstMat h, const Experts& experts, std::optional<ConstInts2> ids,
                 std::optional<ConstMat> weights) {
  const pt::ExpertsView& view = experts.view;
  const size_t count = x.shape(0), k = size_t(view.top_k);
  check(int(x.shape(1)) == view.router->k && h.shape(0) == count && h.shape(1) == x.shape(1),
        "experts: rows of another shape");
  check(bool(ids) == bool(weights), "experts: ids and weights");
  if (ids)
    check(
        ids->shape(0) == count && ids->shape(1) == k && weights->shape(0) == count && weights->shape(1) == k,
        "experts: ids and weights for each row");
  for (size_t i = 0; ids && i < count * k; i++) {
    const int32_t id = ids->data()[i];
    check(id >= 0 && id < int(view.up.size()), "experts: no such expert");
    check(i % k == 0 || ids->data()[i - 1] < id, "experts: ids of a row ascend");
  }
  nb::gil_scoped_release release;
  e.add_experts(rows(x), h.data(), view, ids ? ids->data() : nullptr, weights ? weights->data() : nullptr);
}

// A latent KV given as (q_rope, k_rope, norm, k_ups, v_ups), which has to fit the layer.
pt::LatentView latent_of(nb::tuple t, const pt::LayerView& l) {
  check(t.size() == 5, "latent: five parts");
  const Vec norm = nb::cast<Vec>(t[2], false);
  pt::LatentView m{&nb::cast<const pt::Weight&>(t[0]).matrix, &nb::cast<const pt::Weight&>(t[1]).matrix,
                   norm.data(), matrices(t[3]), matrices(t[4])};
  const int hidden = l.q->k, heads = l.shape.heads, rank = l.k->n, turned = 2 * l.rope_half;
  check(int(norm.size()) == rank && l.k->k == hidden && l.head_dim == rank + turned, "latent: k or its norm");
  check(m.k_rope->n == turned && m.k_rope->k == hidden, "latent: k_rope does not fit the rotary table");
  check(m.q_rope->n == heads * turned && m.q_rope->k == hidden, "latent: q_rope does not fit");
  check(int(m.k_up.size()) == heads && int(m.v_up.size()) == heads, "latent: matrices for each head");
  const int plain = m.k_up[0]->k, value = m.v_up[0]->n;
  for (const pt::Matrix* w : {l.q, l.k, l.o, m.q_rope, m.k_rope})
    in_place(w, "latent: columns in an order of their own");
  check(l.q->n == heads * plain && l.o->k == heads * value, "latent: heads do not fit q and o");
  for (int h = 0; h < heads; h++) {
    check(m.k_up[h]->n == rank && m.k_up[h]->k == plain, "latent: k_up of another shape");
    check(m.v_up[h]->n == value && m.v_up[h]->k == rank, "latent: v_up of another shape");
  }
  return m;
}

std::unique_ptr<Layer> make_layer(nb::dict d) {
  auto l = std::make_unique<Layer>();
  const auto keep = [&](const char* key) {
    l->owners.push_back(nb::borrow(d[key]));
    return l->owners.back();
  };
  const auto matrix = [&](const char* key, int n, int k) -> const pt::Matrix* {
    nb::object o = keep(key);
    if (o.is_none()) return nullptr;
    const pt::Matrix* m = &nb::cast<const pt::Weight&>(o).matrix;
    check((n == 0 || m->n == n) && (k == 0 || m->k == k), key);
    return m;
  };
  const auto vector = [&](const char* key, size_t n) -> const float* {
    nb::object o = keep(key);
    if (o.is_none()) return nullptr;
    Vec v = nb::cast<Vec>(o, false);
    check(v.size() == n, key);
    return v.data();
  };
  pt::LayerView& v = l->view;
  const int heads = nb::cast<int>(d["heads"]);
  v.shape = {heads,
             nb::cast<float>(d["scale"]),
             nb::cast<int>(d["window"]),
             nb::cast<float>(d["soft_cap"]),
             vector("slopes", heads),
             nb::cast<bool>(d["chunked"]),
             vector("sinks", heads)};
  v.wide_norm = nb::cast<bool>(d["wide_norm"]), v.residual = nb::cast<float>(d["residual"]);
  v.kv_heads = nb::cast<int>(d["kv_heads"]), v.head_dim = nb::cast<int>(d["head_dim"]);
  v.eps = nb::cast<float>(d["eps"]), v.interleaved = nb::cast<bool>(d["interleaved"]);
  v.act = act_of(nb::cast<int>(d["act"]), pt::Act::SquaredRelu);
  check(v.kv_heads > 0 && heads % v.kv_heads == 0, "heads: not a multiple of kv_heads");
  const int q_cols = heads * v.head_dim, kv_cols = v.kv_heads * v.head_dim;
  const nb::object latent = keep("latent");
  const bool plain = latent.is_none();  // else the latent's own check says what fits
  v.q = matrix("q", plain ? q_cols : 0, 0);
  check(v.q, "q: missing");
  const int hidden = v.q->k;
  v.k = matrix("k", plain ? kv_cols : 0, hidden), v.v = matrix("v", kv_cols, hidden);
  v.o = matrix("o", hidden, plain ? q_cols : 0);
  check(v.k && (v.v || !plain) && v.o, "k, v, o: missing");
  v.up = matrix("up", 0, hidden);
  const int inner = v.up ? v.up->n : 0;
  v.gate = matrix("gate", inner, hidden), v.down = matrix("down", hidden, inner);
  check(!v.up == !v.down, "up, down: one is missing");
  v.attn_order = same_order({v.q, v.k, v.v}, "q, k, v: columns in different orders");
  v.mlp_order = same_order({v.gate, v.up}, "gate, up: columns in different orders");
  in_place(v.down, "down: columns in an order of their own");
  v.o_bias = vector("o_bias", hidden), v.up_bias = vector("up_bias", inner);
  v.down_bias = vector("down_bias", hidden);
  v.attn_norm_bias = vector("attn_norm_bias", hidden), v.mlp_norm_bias = vector("mlp_norm_bias", hidden);
  v.attn_post_norm = vector("attn_post_norm", hidden), v.mlp_post_norm = vector("mlp_post_norm", hidden);
  v.attn_norm = vector("attn_norm", hidden), v.mlp_norm = vector("mlp_norm", hidden);
  check((v.attn_norm || v.attn_post_norm) && (v.mlp_norm || v.mlp_post_norm), "norms: missing");
  v.q_norm = vector("q_norm", v.wide_norm ? q_cols : v.head_dim);
  v.k_norm = vector("k_norm", v.wide_norm ? kv_cols : v.head_dim);
  v.q_bias = vector("q_bias", q_cols), v.k_bias = vector("k_bias", kv_cols),
  v.v_bias = vector("v_bias", kv_cols);
  ConstMat cos = nb::cast<ConstMat>(keep("cos"), false), sin = nb::cast<ConstMat>(keep("sin"), false);
  check(cos.shape(0) == sin.shape(0) && cos.shape(1) == sin.shape(1), "rope: cos and sin differ in shape");
  check(int(cos.shape(1)) * 2 <= v.head_dim, "rope: more dimensions than a head has");
  v.cos = cos.data(), v.sin = sin.data();
  v.rope_half = int(cos.shape(1)), v.positions = v.rope_half ? int(cos.shape(0)) : INT_MAX;
  const nb::object temper = keep("temper");
  if (!temper.is_none()) {
    const Vec factors = nb::cast<Vec>(temper, false);
    v.temper = factors.data(), v.positions = std::min(v.positions, int(factors.size()));
  }
  if (!plain) v.latent = latent_of(nb::cast<nb::tuple>(latent), v);
  const nb::object experts = keep("experts");
  if (!experts.is_none()) {
    v.experts = nb::cast<const Experts&>(experts).view;
    check(v.experts.router->k == hidden, "experts: another width than the layer");
  }
  return l;
}

void linear(pt::Engine& e, ConstMat x, const pt::Weight& w, std::optional<Vec> bias, Mat out) {
  const pt::Matrix& m = w.matrix;
  check(int(x.shape(1)) == m.k && int(out.shape(1)) == m.n && x.shape(0) == out.shape(0),
        "linear: shapes differ");
  check(!bias || int(bias->size()) == m.n, "linear: bias has another length");
  nb::gil_scoped_release release;
  e.linear(rows(x), m, bias ? bias->data() : nullptr, out.data());
}

void rope(pt::Engine& e, Mat x, Ints positions, ConstMat cos, ConstMat sin, bool interleaved, int head_dim) {
  check(positions.size() == x.shape(0) && head_dim > 0 && x.shape(1) % head_dim == 0, "rope: shapes differ");
  check(cos.shape(0) == sin.shape(0) && cos.shape(1) == sin.shape(1), "rope: cos and sin differ in shape");
  check(int(cos.shape(1)) * 2 <= head_dim, "rope: more dimensions than a head has");
  check_range(positions, 0, int64_t(cos.shape(0)), "rope: position beyond the table");
  pt::LayerView l{};
  l.cos = cos.data(), l.sin = sin.data(), l.rope_half = int(cos.shape(1)), l.head_dim = head_dim;
  l.interleaved = interleaved;
  nb::gil_scoped_release release;
  e.rope(rows(x), positions.data(), l);
}

void kv_write(pt::Engine& e, const pt::KVStore& kv, int layer, ConstMat k, std::optional<ConstMat> v,
              Ints slots) {
  const pt::KVView& s = kv.view;
  check(layer >= 0 && layer < s.layers, "layer: no such layer");
  check(bool(v) != s.latent, "kv_write: values, or none with a latent KV");
  check(int(k.shape(1)) == s.kv_heads * s.head_dim && (!v || k.shape(1) == v->shape(1)),
        "kv_write: columns differ");
  check((!v || k.shape(0) == v->shape(0)) && k.shape(0) == slots.size(), "kv_write: rows differ");
  check_range(slots, -1, int64_t(s.blocks) * s.block_size, "slots: beyond the KV storage");
  nb::gil_scoped_release release;
  e.kv_write(s, layer, rows(k), v ? v->data() : nullptr, slots.data());
}

// The work of each share of a batch's attention, in the order in which threads take them.
std::vector<int64_t> attention_shares(const pt::KVStore& kv, const Batch& batch, int heads, int window,
                                      int threads) {
  check(heads > 0 && heads % kv.view.kv_heads == 0 && threads > 0, "attention_shares: heads or threads");
  const pt::BatchView b = batch.view(kv.view, int64_t(batch.positions.size()));
  const pt::Attention a{kv.view, 0,       {heads, 1.0f, window}, b.table_width,
                        nullptr, nullptr, b.positions,           b.table};
  pt::AttentionPlan plan;
  plan.share(a, b, threads);
  std::vector<int64_t> work(plan.shares.size() - 1);
  for (size_t s = 0; s < work.size(); s++)
    for (int i = plan.shares[s]; i < plan.shares[s + 1]; i++) work[s] += plan.items[i].work;
  return work;
}

void attention(pt::Engine& e, ConstMat q, const pt::KVStore& kv, int layer, const Batch& batch, int heads,
               float scale, int window, float soft_cap, std::optional<Vec> slopes, bool chunked,
               std::optional<Vec> sinks, Mat out) {
  const pt::KVView& s = kv.view;
  check(layer >= 0 && layer < s.layers, "layer: no such layer");
  check(heads % s.kv_heads == 0 && int(q.shape(1)) == heads * s.head_dim,
        "attention: heads do not fit the KV storage");
  check(q.shape(0) == out.shape(0) && q.shape(1) == out.shape(1), "attention: out has another shape");
  check(!slopes || int(slopes->size()) == heads, "slopes: one for each head");
  check(!sinks || int(sinks->size()) == heads, "sinks: one for each head");
  const pt::BatchView b = batch.view(s, int64_t(q.shape(0)));
  nb::gil_scoped_release release;
  const pt::AttentionShape shape{heads,
                                 scale,
                                 window,
                                 soft_cap,
                                 slopes ? slopes->data() : nullptr,
                                 chunked,
                                 sinks ? sinks->data() : nullptr};
  e.attention(q.data(), s, layer, b, shape, out.data());
}

void attention_block(pt::Engine& e, Mat x, const Layer& layer, const pt::KVStore& kv, int index,
                     const Batch& batch) {
  const pt::KVView& s = kv.view;
  const pt::LayerView& l = layer.view;
  check(index >= 0 && index < s.layers, "layer: no such layer");
  check(s.kv_heads == l.kv_heads && s.head_dim == l.head_dim && s.latent == bool(l.latent.q_rope),
        "attention_block: heads do not fit the KV storage");
  check(int(x.shape(1)) == l.q->k, "attention_block: x has another width");
  const pt::BatchView b = batch.view(s, int64_t(x.shape(0)));
  check_range(batch.positions, 0, l.positions, "positions: beyond the rotary table");
  nb::gil_scoped_release release;
  e.attention_block(rows(x), l, s, index, b);
}

// From (embed, positions, norm, norm_bias, scale, eps, layers, first, vocabulary).
std::unique_ptr<Stack> make_stack(nb::tuple parts) {
  auto s = std::make_unique<Stack>();
  for (nb::handle part : parts) s->owners.push_back(nb::borrow(part));
  const auto matrix = [&](int i) { return &nb::cast<const pt::Weight&>(parts[i]).matrix; };
  pt::StackView& v = s->view;
  v.embed = matrix(0), v.positions = parts[1].is_none() ? nullptr : matrix(1);
  in_place(v.embed, "embed: columns in an order of their own");
  in_place(v.positions, "positions: columns in an order of their own");
  check(!v.positions || v.positions->k == v.embed->k, "positions: another width than the embedding");
  const auto vector = [&](int i) -> const float* {
    if (parts[i].is_none()) return nullptr;
    const Vec w = nb::cast<Vec>(parts[i], false);
    check(int(w.size()) == v.embed->k, "embed_norm: has another width");
    return w.data();
  };
  v.norm = vector(2), v.norm_bias = vector(3);
  v.scale = nb::cast<float>(parts[4]), v.eps = nb::cast<float>(parts[5]);
  v.first = nb::cast<int>(parts[7]), v.vocabulary = nb::cast<int>(parts[8]);
  check(v.first >= 0 && v.first + v.embed->n <= v.vocabulary, "embed: beyond the vocabulary");
  for (nb::handle h : nb::cast<nb::list>(parts[6])) {
    const pt::LayerView& l = nb::cast<const Layer&>(h).view;
    check(l.q->k == v.embed->k && (l.up || l.experts.router), "layer: incomplete, or of another width");
    s->positions = std::min(s->positions, l.positions);
    v.layers.push_back(&l);
  }
  check(!v.layers.empty(), "layers: none");
  return s;
}

// The storage of the layers with a window, or of the others, and where a batch lies in it.
pt::Pages pages(const Stack& stack, const pt::KVStore* kv, const Batch& b, size_t count, bool windowed,
                bool all) {
  int used = 0;
  for (const pt::LayerView* l : stack.view.layers) {
    if (!all && (l->shape.window > 0) != windowed) continue;
    check(kv && used++ < kv->view.layers, "hidden: a layer without KV storage");
    check(kv->view.kv_heads == l->kv_heads && kv->view.head_dim == l->head_dim &&
              kv->view.latent == bool(l->latent.q_rope),
          "hidden: heads do not fit the KV storage");
  }
  if (kv) return {kv->view, b.view(kv->view, int64_t(count))};
  pt::Pages none{};  // nobody reads storage or tables
  none.batch.positions = b.positions.data(), none.batch.tokens = int(count);
  return none;
}

void hidden(pt::Engine& e, const Stack& stack, Ints tokens, Ints wanted, const pt::KVStore* kv,
            const Batch& batch, const pt::KVStore* recent_kv, const Batch* recent, Mat out,
            nb::object adapters) {
  const pt::StackView& s = stack.view;
  const int64_t count = int64_t(tokens.size());
  check(wanted.size() == out.shape(0) && int(out.shape(1)) == s.embed->k, "hidden: out has another shape");
  check_range(tokens, 0, s.vocabulary, "embed: no such token");
  check_range(wanted, 0, count, "logit_rows: no such row");
  const int64_t longest = std::min(stack.positions, s.positions ? s.positions->n : INT_MAX);
  check(batch.positions.size() == tokens.size(), "positions: one for each row");
  check_range(batch.positions, 0, longest, "positions: beyond the tables of positions");
  const pt::Pages whole = pages(stack, kv, batch, tokens.size(), false, !recent);
  const pt::Pages window = recent ? pages(stack, recent_kv, *recent, tokens.size(), true, false) : whole;
  const auto list = adapters_of(adapters, batch.query_start.size() - 1, &s, 0);
  nb::gil_scoped_release release;
  e.hidden(s, tokens.data(), whole, recent ? &window : nullptr, wanted.data(), rows(out),
           list.empty() ? nullptr : list.data());
}

// The output head as Python has it: (norm, norm_bias or None, eps, matrix, soft_cap).
pt::HeadView head_of(nb::tuple t, const ConstMat& x) {
  check(t.size() == 5, "head: five parts");
  const auto& weight = nb::cast<const pt::Weight&>(t[3]);
  const auto& matrix = weight.matrix;
  const auto vector = [&](nb::handle h) -> const float* {
    if (h.is_none()) return nullptr;
    const Vec v = nb::cast<Vec>(h, false);
    check(int(v.size()) == matrix.k, "head: the norm has another width");
    return v.data();
  };
  check(!t[0].is_none() && int(x.shape(1)) == matrix.k, "head: x has another width");
  in_place(&matrix, "head: columns in an order of their own");
  return {vector(t[0]), vector(t[1]), nb::cast<float>(t[2]), nb::cast<float>(t[4]), matrix, weight.longest};
}

// f(item) for each of a list or tuple; `room`(their number) before.
template <class Room, class F>
void each_item(PyObject* o, const char* what, const Room& room, const F& f) {
  const bool list = PyList_Check(o);
  check(list || PyTuple_Check(o), what);
  const Py_ssize_t count = list ? PyList_Size(o) : PyTuple_Size(o);
  room(size_t(count));
  for (Py_ssize_t i = 0; i < count; i++) f(list ? PyList_GetItem(o, i) : PyTuple_GetItem(o, i));
}
constexpr auto no_room = [](size_t) {};

// Edits of logits: for each row a list of (operation, ids, value or values), read with the interpreter's lock
// held. Ids are lists of Python's own integers: numpy would take several times as long to read these.
struct Edits {
  std::vector<pt::EditView> list;
  std::vector<int32_t> starts, ids;
  std::vector<float> values;

  Edits(nb::handle rows, int64_t vocabulary) {
    starts.push_back(0);
    each_item(rows.ptr(), "edits: a list for each row", no_room, [&](PyObject* row) {
      PyObject* before = nullptr;
      each_item(row, "edits: a list for each row", no_room,
                [&](PyObject* edit) { before = read(edit, before, vocabulary); });
      starts.push_back(int32_t(list.size()));
    });
  }

  pt::EditsView view() const {
    return {list.data(), starts.data(), ids.data(), values.data(), int(ids.size())};
  }

  // One edit; gives its ids. Where these are the very list of the edit before, they are not read again.
  PyObject* read(nb::handle edit, PyObject* before, int64_t vocabulary) {
    check(PyTuple_Check(edit.ptr()) && PyTuple_Size(edit.ptr()) == 3, "edits: operation, ids, values");
    const long operation = integer(PyTuple_GetItem(edit.ptr(), 0));
    check(operation >= 0 && operation < pt::kOperations, "edits: no such operation");
    pt::EditView e{pt::Operation(operation), int(ids.size()), 0, int(values.size())};
    PyObject *given = PyTuple_GetItem(edit.ptr(), 1), *value = PyTuple_GetItem(edit.ptr(), 2);
    const bool adds = e.operation == pt::Operation::Add;
    if (given == before && !adds && list.back().operation != pt::Operation::Add) {
      e.first = list.back().first, e.count = list.back().count;
    } else {
      const auto room = [&](size_t count) {
        if (ids.capacity() < ids.size() + count) ids.reserve(2 * (ids.size() + count));
      };
      each_item(given, "edits: ids are a list", room, [&](PyObject* id) {
        const long token = integer(id);
        if (token < 0 || token >= vocabulary) check(false, "edits: no such token");
        ids.push_back(int32_t(token));
      });
      e.count = int(ids.size()) - e.first;
    }
    if (adds) {
      each_item(value, "edits: values are a list", no_room,
                [&](PyObject* v) { values.push_back(number(v)); });
      check(int(values.size()) - e.first_value == e.count, "edits: a value for each id");
    } else {
      values.push_back(number(value));
    }
    list.push_back(e);
    return given;
  }

  static long integer(PyObject* o) {
    const long value = PyLong_AsLong(o);
    if (value == -1 && PyErr_Occurred()) throw nb::python_error();
    return value;
  }
  static float number(PyObject* o) {
    const double value = PyFloat_AsDouble(o);
    if (value == -1 && PyErr_Occurred()) throw nb::python_error();
    return float(value);
  }
};

// The logprobs that are wanted, as Python has them: (top, candidates, lse, of the chosen token, ids and
// values of the top, and of the candidates).
pt::LogprobsView logprobs_of(nb::tuple t, size_t rows, int vocabulary) {
  check(t.size() == 8, "logprobs: eight arrays");
  const auto ints = [&](int i) { return nb::cast<Array<int32_t, 1>>(t[i], false); };
  const auto floats = [&](int i) { return nb::cast<Array<float, 1>>(t[i], false); };
  const auto top = ints(0), candidates = ints(1);
  const auto lse = floats(2), logprob = floats(3);
  const auto top_ids = nb::cast<Array<int32_t, 2>>(t[4], false),
             ids = nb::cast<Array<int32_t, 2>>(t[6], false);
  const auto top_logprobs = nb::cast<Mat>(t[5], false), logprobs = nb::cast<Mat>(t[7], false);
  check(top.size() == rows && candidates.size() == rows && lse.size() == rows && logprob.size() == rows &&
            top_ids.shape(0) == rows && ids.shape(0) == rows && top_logprobs.shape(0) == rows &&
            logprobs.shape(0) == rows && top_ids.size() == top_logprobs.size() &&
            ids.size() == logprobs.size(),
        "logprobs: shapes differ");
  const int most_top = int(top_ids.shape(1)), most = int(ids.shape(1));
  check(most_top <= vocabulary && most <= vocabulary, "logprobs: more than there are tokens");
  for (size_t r = 0; r < rows; r++)
    check(top(r) >= -1 && top(r) <= most_top && candidates(r) >= 0 && candidates(r) <= most,
          "logprobs: more than there is room for");
  return {top.data(),     candidates.data(),   most_top,   most,           lse.data(), logprob.data(),
          top_ids.data(), top_logprobs.data(), ids.data(), logprobs.data()};
}

// Heads of adapters read rows of this width.
void check_width(const std::vector<const pt::AdapterView*>& adapters, int width) {
  for (const pt::AdapterView* a : adapters)
    check(!a || !a->head.a || a->head.k == width, "adapters: a head of another width");
}

void choose(pt::Engine& e, ConstMat x, nb::tuple head, Vec temperature, Ints top_k, Vec top_p, Vec min_p,
            Vec uniform, Array<int32_t, 1> ids, Array<float, 1> values, std::optional<Words> allowed,
            nb::object edits, nb::object logprobs, nb::object adapters) {
  const size_t n = x.shape(0);
  const pt::HeadView h = head_of(head, x);
  check(temperature.size() == n && top_k.size() == n && top_p.size() == n && min_p.size() == n &&
            uniform.size() == n && ids.size() == n && values.size() == n,
        "choose: one parameter for each row");
  check(!allowed || (allowed->shape(0) == n && int64_t(allowed->shape(1)) * 64 >= h.matrix.n),
        "choose: allowed has another shape");
  pt::Choosing c{};
  c.draw = {temperature.data(), top_p.data(), min_p.data(), uniform.data(), top_k.data()};
  if (allowed) c.allowed = {allowed->data(), int(allowed->shape(1))};
  std::optional<Edits> read;
  if (!edits.is_none()) {
    read.emplace(edits, h.matrix.n);
    check(read->starts.size() == n + 1, "edits: a list for each row");
    c.edits = read->view();
  }
  if (!logprobs.is_none()) c.logprobs = logprobs_of(nb::cast<nb::tuple>(logprobs), n, h.matrix.n);
  c.ids = ids.data(), c.values = values.data();
  const auto list = adapters_of(adapters, n, nullptr, h.matrix.n);
  check_width(list, h.matrix.k);
  nb::gil_scoped_release release;
  e.choose(rows(x), h, c, list.empty() ? nullptr : list.data());
}

std::vector<int32_t> flat(const std::vector<std::pair<int, int>>& pairs) {
  std::vector<int32_t> list;
  for (auto [from, to] : pairs) list.push_back(from), list.push_back(to);
  return list;
}

void check_blocks(const pt::KVView& kv, const std::vector<int32_t>& ids) {
  for (int32_t b : ids) check(b >= 0 && b < kv.blocks, "block: no such block");
}

}  // namespace

NB_MODULE(_native, m) {
  m.attr("build") = PT_BUILD;
  m.def("compiled_isas", &pt::compiled_isas);
  m.def("available_isas", &pt::available_isas);
  m.def("measure_limit", [](std::string isa, int what, int threads, size_t bytes, double seconds) {
    check(what >= 0 && what <= int(pt::Limit::Copy) && threads > 0, "measure_limit: no such limit");
    nb::gil_scoped_release release;
    return pt::measure_limit(isa, pt::Limit(what), threads, bytes, seconds);
  });

  nb::class_<pt::Weight>(m, "Weight")
      .def_prop_ro("shape", [](const pt::Weight& w) { return nb::make_tuple(w.matrix.n, w.matrix.k); })
      .def_prop_ro("kind", [](const pt::Weight& w) { return int(w.matrix.kind); })
      .def_prop_ro("bits", [](const pt::Weight& w) { return w.matrix.bits; })
      .def_prop_ro("ordered", [](const pt::Weight& w) { return w.matrix.order != nullptr; })
      .def_prop_ro("nbytes", &pt::Weight::nbytes);
  nb::class_<pt::KVStore>(m, "KV")
      .def_prop_ro("nbytes", [](const pt::KVStore& k) { return k.view.nbytes(); })
      .def("take_huge_pages",
           [](pt::KVStore& k, size_t bytes) {
             nb::gil_scoped_release release;
             k.memory.take_huge_pages(bytes);
           })
      // [blocks, bytes]: all layers of a block lie side by side
      .def_prop_ro(
          "memory",
          [](pt::KVStore& k) {
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>>(
                k.view.data, {size_t(k.view.blocks), k.view.block_bytes() * k.view.layers}, nb::handle());
          },
          nb::rv_policy::reference_internal);
  nb::class_<Layer>(m, "Layer");
  nb::class_<Experts>(m, "Experts");
  nb::class_<Stack>(m, "Stack");
  nb::class_<Batch>(m, "Batch")
      .def(
          "__init__",
          [](Batch* self, Ints positions, Ints query_start, Ints context_len, ConstInts2 table, Ints slots) {
            new (self) Batch{positions, query_start, context_len, slots, table};
          },
          nb::arg().noconvert(), nb::arg().noconvert(), nb::arg().noconvert(), nb::arg().noconvert(),
          nb::arg().noconvert());
  m.def("alloc_kv", &alloc_kv, "layers"_a, "blocks"_a, "block_size"_a, "kv_heads"_a, "head_dim"_a, "type"_a,
        "fd"_a = -1, "offset"_a = 0, "latent"_a = false);
  m.def("block_sums", &block_sums, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().noconvert());
  m.def("row_sums", &row_sums, nb::arg(), nb::arg(), nb::arg().noconvert());
  m.def("xxh64", [](nb::bytes data, uint64_t seed) {
    return pt::xxh64(reinterpret_cast<const uint8_t*>(data.c_str()), data.size(), seed);
  });
  m.def("attention_shares", &attention_shares);
  m.def("make_layer", &make_layer);
  m.def("make_experts", &make_experts);
  m.def("make_stack", &make_stack);
  bind_adapters(m);
  bind_recurrent(m);
  m.def(
      "make_adapter",
      [](const Stack& s, int kind, nb::list parts) { return make_adapter(s.view, kind, parts); },
      nb::keep_alive<0, 1>());

  bind_ranks(m);

  nb::class_<pt::Engine>(m, "Engine")
      .def(nb::init<int, std::string>(), "threads"_a, "isa"_a)
      .def("join", &pt::Engine::join, nb::keep_alive<1, 2>())
      .def("join_stages", &pt::Engine::join_stages, nb::keep_alive<1, 2>())
      .def_prop_ro("isa", &pt::Engine::isa)
      .def_prop_ro("threads", &pt::Engine::threads)
      .def("pin_threads",
           [](pt::Engine& e, const std::vector<int>& cores) {
             for (int core : cores) check(core >= 0 && core < CPU_SETSIZE, "pin_threads: no such core");
             e.pin_threads(cores);
           })
      .def("pack", &pack, "source"_a, "data"_a, "n"_a, "k"_a, "bits"_a, "order"_a = nb::none())
      .def("store",
           [](pt::Engine& e, const pt::Weight& w, int fd, size_t offset) {
             nb::gil_scoped_release release;
             return e.store(w, fd, offset);
           })
      .def("fetch", &fetch)
      .def("copy_blocks",
           [](pt::Engine& e, const pt::KVStore& kv, const std::vector<std::pair<int, int>>& pairs) {
             const auto list = flat(pairs);
             check_blocks(kv.view, list);
             nb::gil_scoped_release release;
             e.copy_blocks(kv.view, list.data(), int(pairs.size()));
           })
      .def("embed",
           [](pt::Engine& e, const pt::Weight& table, Ints tokens, Mat out) {
             check(out.shape(0) == tokens.size() && int(out.shape(1)) == table.matrix.k,
                   "embed: shapes differ");
             check_range(tokens, 0, table.matrix.n, "embed: no such token");
             in_place(&table.matrix, "embed: columns in an order of their own");
             nb::gil_scoped_release release;
             e.embed(table.matrix, tokens.data(), rows(out));
           })
      .def("norm",
           [](pt::Engine& e, ConstMat x, Vec weight, float eps, Mat out) {
             check(x.size() == out.size() && weight.size() == x.shape(1), "norm: shapes differ");
             nb::gil_scoped_release release;
             e.norm(rows(x), weight.data(), eps, out.data());
           })
      .def("linear", &linear, nb::arg(), nb::arg(), nb::arg().none(), nb::arg().noconvert())
      .def("rope", &rope, nb::arg().noconvert(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg())
      .def("kv_write", &kv_write, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg())
      .def("attention", &attention, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg().none(), nb::arg().noconvert())
      .def("clamped_swiglu",
           [](pt::Engine& e, ConstMat gate, ConstMat up, Mat out) {
             check(gate.shape(0) == up.shape(0) && gate.shape(1) == up.shape(1) && gate.size() == out.size(),
                   "clamped_swiglu: shapes differ");
             nb::gil_scoped_release release;
             e.clamped_swiglu(rows(gate), up.data(), out.data());
           })
      .def("head_linear",
           [](pt::Engine& e, ConstMat x, nb::tuple weights, Mat out) {
             const auto heads = matrices(weights);
             check(!heads.empty(), "head_linear: no heads");
             const int n = heads[0]->n, k = heads[0]->k;
             for (const pt::Matrix* m : heads)
               check(m->n == n && m->k == k && !m->order, "head_linear: heads differ");
             check(x.shape(1) == heads.size() * k && out.shape(1) == heads.size() * n &&
                       x.shape(0) == out.shape(0),
                   "head_linear: shapes differ");
             nb::gil_scoped_release release;
             e.head_linear(rows(x), heads, out.data());
           })
      .def("act_mul",
           [](pt::Engine& e, ConstMat gate, ConstMat up, Mat out) {
             check(gate.size() == up.size() && gate.size() == out.size(), "act_mul: shapes differ");
             nb::gil_scoped_release release;
             e.act_mul(rows(gate), up.data(), out.data());
           })
      .def("layer_norm",
           [](pt::Engine& e, ConstMat x, Vec weight, Vec bias, float eps, Mat out) {
             check(x.size() == out.size() && weight.size() == x.shape(1) && bias.size() == x.shape(1),
                   "layer_norm: shapes differ");
             nb::gil_scoped_release release;
             e.layer_norm(rows(x), weight.data(), bias.data(), eps, out.data());
           })
      .def("activate",
           [](pt::Engine& e, ConstMat x, int act, Mat out) {
             check(x.size() == out.size(), "activate: shapes differ");
             const pt::Act a = act_of(act);
             nb::gil_scoped_release release;
             e.activate(rows(x), a, out.data());
           })
      .def("soft_cap",
           [](pt::Engine& e, ConstMat x, float cap, Mat out) {
             check(x.size() == out.size(), "soft_cap: shapes differ");
             nb::gil_scoped_release release;
             e.soft_cap(rows(x), cap, out.data());
           })
      .def("route",
           [](pt::Engine& e, ConstMat x, bool normalise, bool sigmoid, Array<int32_t, 2> ids, Mat weights) {
             const int k = int(ids.shape(1));
             check(k >= 1 && size_t(k) <= x.shape(1) && ids.shape(0) == x.shape(0) &&
                       weights.shape(0) == x.shape(0) && int(weights.shape(1)) == k,
                   "route: shapes differ");
             nb::gil_scoped_release release;
             e.route(rows(x), k, normalise, sigmoid, ids.data(), weights.data());
           })
      .def("add_rows",
           [](pt::Engine& e, Mat x, ConstMat y, Ints to, Vec weights) {
             check(x.shape(1) == y.shape(1) && to.size() == y.shape(0) && weights.size() == y.shape(0),
                   "add_rows: shapes differ");
             check_range(to, 0, int64_t(x.shape(0)), "add_rows: no such row");
             nb::gil_scoped_release release;
             e.add_rows(rows(y), to.data(), weights.data(), x.data());
           })
      .def("mul",
           [](pt::Engine& e, ConstMat x, ConstMat y, Mat out) {
             check(x.size() == y.size() && x.size() == out.size(), "mul: shapes differ");
             nb::gil_scoped_release release;
             e.mul(rows(x), y.data(), out.data());
           })
      .def("add",
           [](pt::Engine& e, ConstMat x, ConstMat y, Mat out) {
             check(x.size() == y.size() && x.size() == out.size(), "add: shapes differ");
             nb::gil_scoped_release release;
             e.add(rows(x), y.data(), out.data());
           })
      .def("attention_block", &attention_block, nb::arg().noconvert(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg())
      .def(
          "mlp_block",
          [](pt::Engine& e, Mat x, const Layer& layer) {
            const pt::LayerView& l = layer.view;
            check((l.up || l.experts.router) && int(x.shape(1)) == l.q->k, "mlp_block: x has another width");
            nb::gil_scoped_release release;
            e.mlp_block(rows(x), l);
          },
          nb::arg().noconvert(), nb::arg())
      .def("add_experts", &add_experts, nb::arg().noconvert(), nb::arg(), nb::arg(), nb::arg().none(),
           nb::arg().none())
      .def(
          "logits",
          [](pt::Engine& e, ConstMat x, nb::tuple head, Mat out, nb::object adapters) {
            const pt::HeadView h = head_of(head, x);
            check(int(out.shape(1)) == h.matrix.n && out.shape(0) == x.shape(0),
                  "logits: out has another shape");
            const auto list = adapters_of(adapters, x.shape(0), nullptr, h.matrix.n);
            check_width(list, h.matrix.k);
            nb::gil_scoped_release release;
            e.logits(rows(x), h, out.data(), list.empty() ? nullptr : list.data());
          },
          "x"_a, "head"_a, "out"_a, "adapters"_a = nb::none())
      .def("hidden", &hidden, nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg().none(),
           nb::arg().none(), nb::arg().noconvert(), "adapters"_a = nb::none())
      .def("choose", &choose, "x"_a, "head"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "uniform"_a,
           "ids"_a, "values"_a, "allowed"_a = nb::none(), "edits"_a = nb::none(), "logprobs"_a = nb::none(),
           "adapters"_a = nb::none())
      .def("top_logprobs",
           [](pt::Engine& e, ConstMat logits, Array<float, 1> lse, Array<int32_t, 2> ids, Mat logprobs) {
             const int k = int(ids.shape(1));
             check(lse.size() == logits.shape(0) && ids.shape(0) == lse.size() &&
                       logprobs.size() == ids.size() && size_t(k) <= logits.shape(1),
                   "top_logprobs: shapes differ");
             nb::gil_scoped_release release;
             e.top_logprobs(rows(logits), k, lse.data(), ids.data(), logprobs.data());
           })
      .def("sample", [](pt::Engine& e, ConstMat logits, Vec temperature, Ints top_k, Vec top_p, Vec min_p,
                        Vec uniform, Array<int32_t, 1> out) {
        const size_t n = logits.shape(0);
        check(temperature.size() == n && top_k.size() == n && top_p.size() == n && min_p.size() == n &&
                  uniform.size() == n && out.size() == n,
              "sample: one parameter for each row");
        nb::gil_scoped_release release;
        e.sample(rows(logits), {temperature.data(), top_p.data(), min_p.data(), uniform.data(), top_k.data()},
                 out.data());
      });
}
