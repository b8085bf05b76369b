#include "bind_recurrent.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <map>
#include <optional>
#include <stdexcept>

#include "ops.h"

namespace nb = nanobind;

namespace {

template <class T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Vec = Array<const float, 1>;
using Mat = Array<float, 2>;
using Bytes = Array<uint8_t, 2>;
using Ints = Array<const int32_t, 1>;
using Ints2 = Array<const int32_t, 2>;
using Slice = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;  // columns of a matrix

void check(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(what);
}

pt::Strided strided(const Slice& x, size_t rows, int64_t columns, const char* what) {
  check(x.shape(0) == rows && int64_t(x.shape(1)) == columns, what);
  check(columns == 1 || x.stride(1) == 1, "recurrent: a row's numbers must be neighbours");
  return {x.data(), rows > 1 ? size_t(x.stride(0)) : 0};
}

pt::Rows rows(const Mat& x) { return {x.data(), int(x.shape(0)), int(x.shape(1))}; }

// sizes: layers, channels, kernel, key heads, value heads, key_dim, value_dim, number of the KV type.
pt::RecurrentView view_of(const Bytes& states, const Bytes& tail, nb::tuple sizes, pt::KVType& type) {
  int n[8];
  check(sizes.size() == 8, "recurrent: eight sizes");
  for (size_t i = 0; i < 8; i++) n[i] = nb::cast<int>(sizes[i]);
  type = pt::KVType(n[7]);
  check(type == pt::KVType::F16 || type == pt::KVType::F32 || type == pt::KVType::BF16,
        "recurrent: tails are float16, float32 or bfloat16");
  check(n[0] > 0 && n[1] > 0 && n[1] % 8 == 0 && n[2] > 1 && n[2] <= pt::kMaxConv,
        "recurrent: channels come in eights, and a convolution has 2 to 8 positions");
  check(n[3] >= 0 && n[4] >= n[3] && (n[3] ? n[4] % n[3] == 0 : n[4] == 0), "recurrent: heads do not fit");
  check(!n[3] || (n[5] > 0 && n[5] % 8 == 0 && n[6] > 0 && n[6] % pt::kStateColumns == 0),
        "recurrent: keys come in eights of numbers, values in sixteens");
  const pt::RecurrentView v{
      states.data(), tail.data(), int(states.shape(0)), int(tail.shape(0)), n[0], n[1], n[2], n[3], n[4],
      n[5],          n[6],        pt::kv_bytes(type)};
  check(states.shape(1) == v.slot_layer() * v.layers && tail.shape(1) == v.block_layer() * v.layers,
        "recurrent: slots or blocks of another size");
  return v;
}

std::unique_ptr<pt::RecurrentPlan> plan_of(Bytes states, Bytes tail, nb::tuple sizes, int layer,
                                           Ints positions, Ints starts, Ints read, Ints2 writes,
                                           Ints2 table) {
  auto plan = std::make_unique<pt::RecurrentPlan>();
  const pt::RecurrentView& v = plan->view = view_of(states, tail, sizes, plan->type);
  check(layer >= 0 && layer < v.layers, "layer: no such recurrent layer");
  const int64_t count = int64_t(starts.size()) - 1, total = int64_t(positions.size());
  plan->layer = layer, plan->rows = int(total);
  check(count >= 0 && starts(0) == 0 && starts(count) == total, "query_start: must span all rows");
  check(int64_t(read.size()) == count && int64_t(table.shape(0)) == count && table.shape(1) == 2,
        "state_read, tail_table: one for each sequence");
  check(writes.shape(1) == 3, "state_writes: sequence, chunk and slot");
  std::map<std::pair<int64_t, int64_t>, int> slots;  // by sequence and chunk
  std::vector<int> used;
  for (size_t i = 0; i < writes.shape(0); i++) {
    check(writes(i, 2) >= 0 && writes(i, 2) < v.slots, "state_writes: no such slot");
    slots[{writes(i, 0), writes(i, 1)}] = writes(i, 2), used.push_back(writes(i, 2));
  }
  std::sort(used.begin(), used.end());
  check(std::adjacent_find(used.begin(), used.end()) == used.end(), "state_writes: a slot twice");
  size_t written = 0;
  for (int64_t s = 0; s < count; s++) {
    check(starts(s) <= starts(s + 1), "query_start: must not decrease");
    if (starts(s) == starts(s + 1)) continue;
    const int first = positions(starts(s)), last = first + starts(s + 1) - starts(s) - 1;
    check(first >= 0 && read(s) >= -1 && read(s) < v.slots, "state_read: no such slot");
    check(read(s) >= 0 || first < pt::kChunk, "state_read: missing behind the first chunk");
    check(!std::binary_search(used.begin(), used.end(), read(s)), "state_writes: a slot that is read");
    pt::RecurrentSequence sequence{int(plan->chunks.size()), 0, read(s)};
    for (int p = first; p <= last;) {
      check(positions(starts(s) + p - first) == p, "positions: a sequence's must follow each other");
      const int chunk = p / pt::kChunk, offset = p % pt::kChunk;
      const int rows = std::min(pt::kChunk - offset, last + 1 - p);
      int block = -1, slot = -1;
      if (chunk == last / pt::kChunk) block = table(s, 1);
      if (chunk == first / pt::kChunk) block = table(s, 0);
      check(block >= -1 && block < v.blocks, "tail_table: no such block");
      check(block >= 0 || !offset, "tail_table: the rows before are missing");
      const auto found = slots.find({s, chunk + 1});
      if (found != slots.end() && offset + rows == pt::kChunk) slot = found->second, written++;
      plan->chunks.push_back({starts(s) + p - first, rows, offset, block, slot, 0});
      p += rows;
    }
    sequence.last = int(plan->chunks.size());
    plan->sequences.push_back(sequence);
  }
  check(written == writes.shape(0), "state_writes: a state that the step does not reach");
  return plan;
}

void conv_rows(pt::Engine& e, const pt::RecurrentPlan& plan, Slice x, Array<const float, 2> weight,
               std::optional<Vec> bias, bool silu, Mat out) {
  const size_t channels = size_t(plan.view.channels), count = size_t(plan.rows);
  check(int(weight.shape(0)) == plan.view.kernel && weight.shape(1) == channels, "conv_rows: weight");
  check(!bias || bias->size() == channels, "conv_rows: bias");
  check(out.shape(0) == count && out.shape(1) == channels, "conv_rows: shapes differ");
  pt::ConvRows c{};
  c.x = strided(x, count, plan.view.channels, "conv_rows: shapes differ");
  c.weight = weight.data(), c.bias = bias ? bias->data() : nullptr, c.silu = silu, c.out = out.data();
  nb::gil_scoped_release release;
  e.conv_rows(plan, c);
}

void linear_rows(pt::Engine& e, pt::RecurrentPlan& plan, Slice q, Slice k, Slice v, Array<const float, 2> g,
                 Array<const float, 2> beta, bool delta, bool tiled, std::optional<Vec> skip, Mat out) {
  const pt::RecurrentView& s = plan.view;
  const size_t count = size_t(plan.rows), heads = size_t(s.value_heads);
  const int keys = s.key_heads * s.key_dim, values = s.value_heads * s.value_dim;
  check(keys > 0, "linear_rows: these layers have no state");
  check(g.shape(0) == count && g.shape(1) == heads && beta.shape(0) == count && beta.shape(1) == heads,
        "linear_rows: g and beta have another shape");
  check(!skip || skip->size() == heads, "linear_rows: skip");
  check(out.shape(0) == count && int(out.shape(1)) == values, "linear_rows: shapes differ");
  pt::Linear l{};
  l.q = strided(q, count, keys, "linear_rows: shapes differ");
  l.k = strided(k, count, keys, "linear_rows: shapes differ");
  l.v = strided(v, count, values, "linear_rows: shapes differ");
  l.g = g.data(), l.beta = beta.data(), l.delta = delta, l.tiled = tiled;
  l.skip = skip ? skip->data() : nullptr, l.out = out.data();
  nb::gil_scoped_release release;
  e.linear_rows(plan, l);
}

void l2norm(pt::Engine& e, Slice x, int head_dim, float eps, float scale, Mat out) {
  check(head_dim > 0 && out.shape(1) % head_dim == 0, "l2norm: columns do not fit the heads");
  const pt::Strided from = strided(x, out.shape(0), int64_t(out.shape(1)), "l2norm: shapes differ");
  nb::gil_scoped_release release;
  e.l2norm(from, rows(out), head_dim, eps, scale);
}

void linear_gates(pt::Engine& e, Slice a, std::optional<Slice> b, Vec decay, Vec dt_bias, float low,
                  float high, Mat g, Mat beta) {
  const size_t count = g.shape(0), heads = g.shape(1);
  check(decay.size() == heads && dt_bias.size() == heads && beta.shape(0) == count && beta.shape(1) == heads,
        "linear_gates: shapes differ");
  const pt::Strided from = strided(a, count, int64_t(heads), "linear_gates: shapes differ");
  pt::Strided gate{};
  if (b) gate = strided(*b, count, int64_t(heads), "linear_gates: shapes differ");
  nb::gil_scoped_release release;
  const pt::Gates f{decay.data(), dt_bias.data(), low, high, int(heads)};
  e.linear_gates(f, from, gate, int(count), g.data(), beta.data());
}

void gated_norm(pt::Engine& e, Slice x, Slice gate, Vec weight, float eps, int group, bool gate_first,
                bool silu, Mat out) {
  const int columns = int(out.shape(1)), weights = int(weight.size());
  check(group > 0 && columns % group == 0 && (weights == group || weights == columns),
        "gated_norm: columns, groups and weight do not fit");
  const pt::Strided from = strided(x, out.shape(0), columns, "gated_norm: shapes differ");
  const pt::Strided by = strided(gate, out.shape(0), columns, "gated_norm: shapes differ");
  nb::gil_scoped_release release;
  e.gated_norm({weight.data(), eps, group, weights, columns, gate_first, silu}, from, by, rows(out));
}

void gate_mul(pt::Engine& e, Slice x, Slice gate, Mat out) {
  const pt::Strided from = strided(x, out.shape(0), int64_t(out.shape(1)), "gate_mul: shapes differ");
  const pt::Strided by = strided(gate, out.shape(0), int64_t(out.shape(1)), "gate_mul: shapes differ");
  nb::gil_scoped_release release;
  e.gate_mul(from, by, rows(out));
}

}  // namespace

void bind_recurrent(nb::module_& m) {
  nb::class_<pt::RecurrentPlan>(m, "RecurrentPlan");
  m.def("recurrent_plan", &plan_of, nb::arg().noconvert(), nb::arg().noconvert(), nb::arg(), nb::arg(),
        nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::keep_alive<0, 1>(),
        nb::keep_alive<0, 2>());
  m.def("conv_rows", &conv_rows, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(),
        nb::arg().noconvert());
  m.def("linear_rows", &linear_rows, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
        nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().noconvert());
  m.def("l2norm", &l2norm);
  m.def("linear_gates", &linear_gates, nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(),
        nb::arg(), nb::arg(), nb::arg().noconvert(), nb::arg().noconvert());
  m.def("gated_norm", &gated_norm);
  m.def("gate_mul", &gate_mul);
}
