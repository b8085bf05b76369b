// Recurrent layers on all threads. Work is divided by sequences, heads and columns; none of it changes bits.
#include <algorithm>

#include "ops.h"

namespace pt {

void Engine::conv_rows(const RecurrentPlan& plan, ConvRows c) {
  std::lock_guard lock(one_call_);
  constexpr int kWidth = 512;  // channels of an item
  c.view = plan.view, c.layer = plan.layer, c.type = plan.type, c.pieces = plan.chunks.data();
  const int slices = (c.view.channels + kWidth - 1) / kWidth, count = int(plan.sequences.size()) * slices;
  pool_.split(count, grain_of(count, pool_.size()), [&](int i0, int i1, int) {
    for (int i = i0; i < i1; i++) {
      const int at = i % slices * kWidth;
      kernels_.conv(c, plan.sequences[i / slices], at, std::min(at + kWidth, c.view.channels));
    }
  });
}

void Engine::linear_rows(RecurrentPlan& plan, Linear l) {
  std::lock_guard lock(one_call_);
  arena_.reset();
  const RecurrentView& v = l.view = plan.view;
  l.layer = plan.layer, l.type = plan.type, l.pieces = plan.chunks.data();
  size_t floats = 0;
  for (ChunkRows& p : plan.chunks) p.work = floats, floats += l.work_floats(p) * v.key_heads;
  l.work = arena_.take<float>(floats);
  float* zeros = arena_.take<float>(v.head());
  std::fill_n(zeros, v.head(), 0.0f);
  l.zeros = zeros;
  const int threads = pool_.size(), blocks = v.value_dim / kStateColumns;
  std::vector<LinearScratch> scratch(threads);
  for (LinearScratch& s : scratch)
    s.state = arena_.take<float>(v.head()), s.weighed = arena_.take<float>(size_t(v.key_dim) * kChunk);
  each_head(int(plan.chunks.size()), v.key_heads,
            [&](int p, int head) { kernels_.linear_products(l, plan.chunks[p], head); });
  const int heads = int(plan.sequences.size()) * v.value_heads;
  int width = (blocks + 1) / 2 * 2;  // blocks of an item: pairs, as few as keep all threads at work
  while (width > 2 && heads * ((blocks + width - 1) / width) < 2 * threads) width = (width / 2 + 1) / 2 * 2;
  const int parts = (blocks + width - 1) / width, count = heads * parts;
  const auto state_of = [&](int i) {
    const RecurrentSequence& s = plan.sequences[i / parts / v.value_heads];
    const float* state = s.read < 0 ? zeros : v.state(l.layer, s.read, i / parts % v.value_heads);
    return state + size_t(i % parts * width) * kStateColumns * v.key_dim;
  };
  pool_.split(count, grain_of(count, threads), [&](int i0, int i1, int thread) {
    for (int i = i0; i < i1; i++) {
      const int block = i % parts * width;
      const LinearItem item{plan.sequences[i / parts / v.value_heads], i / parts % v.value_heads, block,
                            std::min(block + width, blocks), state_of(std::min(i + 1, count - 1))};
      kernels_.linear_rows(l, item, scratch[thread]);
    }
  });
}

void Engine::l2norm(Strided x, Rows out, int head_dim, float eps, float scale) {
  std::lock_guard lock(one_call_);
  each_row(out, [&](int r, float* to) {
    for (int c = 0; c < out.cols; c += head_dim) kernels_.l2norm(x.row(r) + c, head_dim, eps, scale, to + c);
  });
}

void Engine::linear_gates(const Gates& f, Strided a, Strided b, int rows, float* g, float* beta) {
  std::lock_guard lock(one_call_);
  each_row({g, rows, f.heads}, [&](int r, float* to) {
    kernels_.gates(f, a.row(r), b.data ? b.row(r) : nullptr, to, beta + size_t(r) * f.heads);
  });
}

void Engine::gated_norm(const GatedNorm& f, Strided x, Strided gate, Rows out) {
  std::lock_guard lock(one_call_);
  each_row(out, [&](int r, float* to) { kernels_.gated_norm(f, x.row(r), gate.row(r), to); });
}

void Engine::gate_mul(Strided x, Strided gate, Rows out) {
  std::lock_guard lock(one_call_);
  each_row(out, [&](int r, float* to) { kernels_.gate_mul(x.row(r), gate.row(r), out.cols, to); });
}

}  // namespace pt
