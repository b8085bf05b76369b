// The layers of a whole step in one call; choose.cpp has the head.
#include <algorithm>

#include "ops.h"

namespace pt {

// The adapters of so many rows, grouped; null where none has one.
const Segments* Engine::group(Segments& to, const AdapterView* const* of_row, int rows) {
  if (!of_row) return nullptr;
  to.of_row.assign(of_row, of_row + rows);
  to.build();
  return to.list.empty() ? nullptr : &to;
}

void Engine::embed_rows(const StackView& s, const int32_t* tokens, const int32_t* positions, Rows x,
                        const Segments* adapters) {
  int widest = x.cols;
  if (adapters)
    for (const Segment& segment : adapters->list) widest = std::max(widest, segment.adapter->embed.k);
  float* more = step_arena_.take<float>(size_t(pool_.size()) * widest);
  const auto unpack = [&](int token, float* row) {
    const int mine = token - s.first;
    if (mine >= 0 && mine < s.embed->n)
      kernels_.unpack_row(*s.embed, mine, row);
    else
      std::fill_n(row, x.cols, 0.0f);
  };
  if (ranks_) {  // all but one have zeros
    pool_.split(x.count, grain_of(x.count, pool_.size()), [&](int t0, int t1, int) {
      for (int t = t0; t < t1; t++) unpack(tokens[t], x.data + size_t(t) * x.cols);
    });
    ranks_->sum(x.data, size_t(x.count) * x.cols);
  }
  pool_.split(x.count, grain_of(x.count, pool_.size()), [&](int t0, int t1, int thread) {
    float* at = more + size_t(thread) * widest;
    for (int t = t0; t < t1; t++) {
      float* row = x.data + size_t(t) * x.cols;
      if (!ranks_) unpack(tokens[t], row);
      if (adapters && adapters->of_row[t]) add_embedded(*adapters->of_row[t], tokens[t], at, row);
      if (s.scale != 1)
        for (int i = 0; i < x.cols; i++) row[i] *= s.scale;
      if (s.positions) {
        kernels_.unpack_row(*s.positions, positions[t], at);
        kernels_.add(row, at, x.cols, row);
      }
      if (s.norm) normed(row, s.norm, s.norm_bias, s.eps, x.cols, row);
    }
  });
}

void Engine::pass_rows(Rows x, int begin, int end) {
  const int size = stages_ ? stages_->size() : 0;
  for (int stage = begin; stage < end; stage++)
    stages_->pass((stage + 1) % size, (stage + 2) % size, x.data, size_t(x.count) * x.cols);
}

// Runs of wanted rows of one sequence become a sequence each.
Wanted Engine::take_wanted(const BatchView& b, const int32_t* rows, Rows out) {
  const int count = out.count;
  auto* positions = step_arena_.take<int32_t>(count);
  auto* starts = step_arena_.take<int32_t>(count + 1);
  auto* table = step_arena_.take<int32_t>(size_t(count) * b.table_width);
  int runs = 0, owner = -1;
  for (int i = 0; i < count; i++) {
    const int s =
        int(std::upper_bound(b.query_start, b.query_start + b.sequences + 1, rows[i]) - b.query_start) - 1;
    positions[i] = b.positions[rows[i]];
    if (s == owner) continue;
    owner = s, starts[runs] = i;
    std::copy_n(b.table + size_t(s) * b.table_width, b.table_width, table + size_t(runs++) * b.table_width);
  }
  starts[runs] = count;
  return {rows, {positions, starts, table, nullptr, count, runs, b.table_width}, out.data};
}

void Engine::hidden(const StackView& s, const int32_t* tokens, const Pages& whole, const Pages* recent,
                    const int32_t* wanted, Rows out, const AdapterView* const* adapters) {
  std::lock_guard lock(one_call_);
  step_arena_.reset();
  const int count = whole.batch.tokens, last = int(s.layers.size()) - 1;
  const int stages = stages_ ? stages_->size() : 1;
  const int stage = stages_ ? (stages_->rank() + stages - 1) % stages : 0;
  const bool ends = stage == stages - 1;
  bool all = ends && count == out.count;
  for (int i = 0; i < out.count && all; i++) all = wanted[i] == i;
  const Rows x{all ? out.data : step_arena_.take<float>(size_t(count) * out.cols), count, out.cols};
  const Segments *of_all = nullptr, *of_wanted = nullptr;
  if (adapters) {
    auto* of_row = step_arena_.take<const AdapterView*>(size_t(count) + size_t(out.count));
    const BatchView& b =
        recent ? recent->batch : whole.batch;  // where all layers have a window, whole is empty
    for (int q = 0; q < b.sequences; q++)
      std::fill(of_row + b.query_start[q], of_row + b.query_start[q + 1], adapters[q]);
    for (int i = 0; i < out.count; i++) of_row[count + i] = of_row[wanted[i]];
    of_all = group(segments_, of_row, count);
    if (of_all) of_wanted = group(wanted_segments_, of_row + count, out.count);
  }
  if (!stage) embed_rows(s, tokens, whole.batch.positions, x, of_all);
  pass_rows(x, 0, stage);
  int indexes[2] = {0, 0};  // layers so far that see everything, and that have a window
  for (int i = 0; i <= last; i++) {
    const LayerView& l = *s.layers[i];
    const bool mine = recent && l.shape.window > 0;
    const Pages& pages = mine ? *recent : whole;
    if (i < last || all || !ends) {
      attend(x, l, pages.kv, indexes[mine]++, pages.batch, nullptr, {of_all, of_wanted, i});
      feed_forward(x, l, of_all, i);
      continue;
    }
    for (int r = 0; r < out.count; r++)
      std::copy_n(x.data + size_t(wanted[r]) * x.cols, x.cols, out.data + size_t(r) * x.cols);
    const Wanted only = take_wanted(pages.batch, wanted, out);
    attend(x, l, pages.kv, indexes[mine]++, pages.batch, &only, {of_all, of_wanted, i});
    feed_forward(out, l, of_wanted, i);
  }
  pass_rows(x, stage, stages - 1);
}

}  // namespace pt
