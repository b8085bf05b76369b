// Attention over paged KV, and whole layers.
#include "checks.h"

namespace check {
namespace {

struct Case {
  const char* name;
  int heads, kv_heads, dim, block_size;
  pt::KVType type;
  int window = 0;
  float soft_cap = 0;
  bool slopes = false;
};

// One sequence of `length` tokens: queries, keys and values of all of them.
struct Tokens {
  Case c;
  int length;
  std::vector<float> q, k, v, slopes;
  std::vector<double> keys, values;  // as the KV type stores them
  pt::AttentionShape shape;

  Tokens(const Case& given, int n) : c(given), length(n) {
    plain::Random dice(31);
    q = dice.normals(size_t(n) * c.heads * c.dim);
    k = dice.normals(size_t(n) * c.kv_heads * c.dim), v = dice.normals(k.size());
    for (int i = 0; i < c.heads; i++) slopes.push_back(std::ldexp(1.0f, -i - 1));
    for (float& x : q) x *= 3;
    keys = stored(k), values = stored(v);
    shape = {c.heads, float(1 / std::sqrt(c.dim)), c.window, c.soft_cap, c.slopes ? slopes.data() : nullptr};
  }

  // int8 has a scale for each token and head.
  std::vector<double> stored(const std::vector<float>& x) const {
    std::vector<double> out;
    for (size_t i = 0; i < x.size(); i++) {
      const auto head = x.begin() + i / c.dim * c.dim;
      double peak = 0;
      for (int d = 0; c.type == pt::KVType::Int8 && d < c.dim; d++)
        peak = std::max(peak, double(std::fabs(head[d])));
      const double step = peak / 127;
      switch (c.type) {
        case pt::KVType::F32: out.push_back(x[i]); break;
        case pt::KVType::F16: out.push_back(plain::rounded_to_half(x[i])); break;
        case pt::KVType::BF16: out.push_back(plain::rounded_to_bf16(x[i])); break;
        case pt::KVType::F8: out.push_back(plain::rounded_to_e4m3(x[i])); break;
        case pt::KVType::Int8: out.push_back(std::nearbyint(x[i] / step) * step); break;
      }
    }
    return out;
  }

  double error(int position, const float* got) const {
    const int group = c.heads / c.kv_heads;
    double worst = 0;
    for (int h = 0; h < c.heads; h++) {
      const int from = shape.first_seen(position), cols = c.kv_heads * c.dim, at = h / group * c.dim;
      std::vector<double> p(position + 1), want(c.dim);
      double most = -INFINITY, total = 0;
      for (int j = from; j <= position; j++) {
        for (int d = 0; d < c.dim; d++)
          p[j] += double(q[(size_t(position) * c.heads + h) * c.dim + d]) * keys[size_t(j) * cols + at + d];
        p[j] *= shape.scale;
        if (c.soft_cap > 0) p[j] = c.soft_cap * std::tanh(p[j] / c.soft_cap);
        if (c.slopes) p[j] += slopes[h] * (j - position);
        most = std::max(most, p[j]);
      }
      for (int j = from; j <= position; j++) total += p[j] = std::exp(p[j] - most);
      for (int j = from; j <= position; j++)
        for (int d = 0; d < c.dim; d++) want[d] += p[j] / total * values[size_t(j) * cols + at + d];
      for (int d = 0; d < c.dim; d++) {
        const double e = std::fabs(got[h * c.dim + d] - want[d]);
        worst = e <= worst ? worst : e;
      }
    }
    return worst;
  }

  // The attention of positions first .. first+rows-1, beside other sequences if there is to be a crowd.
  std::vector<float> run(pt::Engine& e, int first, int rows, bool crowd) const {
    std::vector<std::pair<int, int>> before{{first + rows, first + rows}}, now{{first + rows, rows}};
    if (crowd) before.push_back({length, length}), now.push_back({length, 1});
    const fixture::Sequences history(before, c.block_size), batch(now, c.block_size);
    const auto kv = fixture::storage(batch.blocks, c.block_size, c.kv_heads, c.dim, c.type);
    const int cols = c.kv_heads * c.dim, wide = c.heads * c.dim;
    const auto write = [&](int count, const int32_t* slots) {
      e.kv_write(kv->view, 0, {const_cast<float*>(k.data()), count, cols}, v.data(), slots);
    };
    write(first + rows, history.slots.data());
    if (crowd) write(length, history.slots.data() + first + rows);
    std::vector<float> in(q.begin() + size_t(first) * wide, q.begin() + size_t(first + rows) * wide);
    if (crowd) in.insert(in.end(), q.end() - wide, q.end());
    std::vector<float> out(in.size());
    e.attention(in.data(), kv->view, 0, batch.view(), shape, out.data());
    out.resize(size_t(rows) * wide);
    return out;
  }
};

void attention_of(Report& report, const Case& c) {
  const Tokens t(c, 530);
  const size_t wide = size_t(c.heads) * c.dim;
  const std::vector<float> whole = t.run(report.engine(), 0, t.length, false);
  const int some[] = {0, 1, 7, 15, 16, 100, 255, 256, 257, 511, 512, 529};
  double prefill = 0, decode = 0;
  bool equal = true;
  for (int p : some) {
    prefill = std::max(prefill, t.error(p, whole.data() + p * wide));
    const std::vector<float> one = t.run(report.engine(), p, 1, false);
    decode = std::max(decode, t.error(p, one.data()));
  }
  for (auto& e : report.engines) {
    for (int p : {0, 16, 257, 529})
      equal &= same(t.run(*e, p, 1, p > 200).data(), whole.data() + p * wide, wide);
    for (const auto& [first, rows] : {std::pair{0, 530}, {0, 5}, {3, 40}, {250, 13}, {512, 18}})
      equal &= same(t.run(*e, first, rows, rows < 20).data(), whole.data() + first * wide, rows * wide);
  }
  report.error(std::string("prefill ") + c.name, prefill, 2e-6 * 4);
  report.error(std::string("decode ") + c.name, decode, 2e-6 * 4);
  report.equal(std::string("chunks, crowds, threads, ") + c.name, equal);
}

// A decoder layer of random weights, as Engine borrows it.
struct Layer {
  static constexpr int kHidden = 96, kInner = 160, kHeads = 6, kKvHeads = 2, kDim = 32, kExperts = 5,
                       kLength = 40;
  std::vector<float> norm, cos, sin;
  std::vector<std::unique_ptr<pt::Weight>> weights;
  pt::LayerView view{};

  Layer(pt::Engine& e, pt::Source source, bool experts) {
    plain::Random dice(41);
    norm = dice.normals(kHidden);
    for (int i = 0; i < kLength * kDim / 2; i++) {
      const double angle = (i / (kDim / 2)) * std::pow(10000.0, -2.0 * (i % (kDim / 2)) / kDim);
      cos.push_back(float(std::cos(angle))), sin.push_back(float(std::sin(angle)));
    }
    const auto matrix = [&](pt::Source s, int n, int k) {
      weights.push_back(fixture::packed(e, plain::Weights(s, n, k, weights.size() + 1)));
      return &weights.back()->matrix;
    };
    view.attn_norm = view.mlp_norm = norm.data(), view.cos = cos.data(), view.sin = sin.data();
    view.q = matrix(source, kHeads * kDim, kHidden), view.k = matrix(source, kKvHeads * kDim, kHidden);
    view.v = matrix(source, kKvHeads * kDim, kHidden), view.o = matrix(source, kHidden, kHeads * kDim);
    // weights of size 1: a scale that keeps the scores small, or softmax makes 1e-7 of a score 1e-4 of a row
    view.shape = {kHeads, float(1 / (std::sqrt(kDim) * kHidden))};
    view.kv_heads = kKvHeads, view.head_dim = kDim, view.rope_half = kDim / 2, view.positions = kLength;
    view.eps = 1e-5f, view.act = pt::Act::Silu;
    if (experts) {
      view.experts.router = matrix(pt::Source::F32, kExperts, kHidden);
      view.experts.top_k = 2, view.experts.normalise = true;
    }
    for (int i = 0; i < (experts ? kExperts : 1); i++) {
      view.gate = matrix(source, kInner, kHidden), view.up = matrix(source, kInner, kHidden);
      view.down = matrix(source, kHidden, kInner);
      if (!experts) continue;
      view.experts.gate.push_back(view.gate), view.experts.up.push_back(view.up);
      view.experts.down.push_back(view.down);
    }
  }

  // All tokens of one sequence, `chunk` at a time.
  std::vector<float> run(pt::Engine& e, std::vector<float> x, int chunk, pt::KVType type) const {
    const auto kv = fixture::storage((kLength + 15) / 16, 16, kKvHeads, kDim, type);
    for (int first = 0; first < kLength; first += chunk) {
      const int n = std::min(chunk, kLength - first);
      const fixture::Sequences batch({{first + n, n}}, 16);
      pt::BatchView b = batch.view();
      std::vector<int32_t> table((kLength + 15) / 16), slots(n);
      std::iota(table.begin(), table.end(), 0), std::iota(slots.begin(), slots.end(), first);
      b.table = table.data(), b.slots = slots.data();
      const pt::Rows rows{x.data() + size_t(first) * kHidden, n, kHidden};
      e.attention_block(rows, view, kv->view, 0, b);
      e.mlp_block(rows, view);
    }
    return x;
  }
};

}  // namespace

void attention(Report& report) {
  attention_of(report, {"fp16", 6, 2, 64, 16, pt::KVType::F16});
  attention_of(report, {"fp32", 6, 2, 64, 16, pt::KVType::F32});
  attention_of(report, {"int8", 6, 2, 64, 16, pt::KVType::Int8});
  attention_of(report, {"fp16, blocks of 7", 3, 1, 40, 7, pt::KVType::F16});
  attention_of(report, {"fp32, blocks of 1, 7 heads in a group", 7, 1, 8, 1, pt::KVType::F32});
  attention_of(report, {"int8, blocks of 5", 4, 2, 24, 5, pt::KVType::Int8});
  attention_of(report, {"bf16", 6, 2, 64, 16, pt::KVType::BF16});
  attention_of(report, {"fp8", 6, 2, 64, 16, pt::KVType::F8});
  attention_of(report, {"bf16, blocks of 7", 3, 1, 40, 7, pt::KVType::BF16});
  attention_of(report, {"fp8, blocks of 5", 4, 2, 24, 5, pt::KVType::F8});
  attention_of(report, {"fp16, window", 4, 2, 64, 32, pt::KVType::F16, 100});
  attention_of(report, {"fp16, soft cap and slopes", 4, 4, 64, 16, pt::KVType::F16, 0, 20, true});
}

void layers(Report& report) {
  pt::Engine portable(1, "portable");
  plain::Random dice(51);
  const std::vector<float> x = dice.normals(size_t(Layer::kLength) * Layer::kHidden);
  for (const auto& [source, name] :
       {std::pair{pt::Source::F32, "F32"}, {pt::Source::Q4_1, "Q4_1"}, {pt::Source::Q8_0, "Q8_0"}})
    for (bool experts : {false, true}) {
      // a key or value that falls to the other side of a half in 16 bits is an error of 1e-4 in a row
      const auto type = source == pt::Source::F32 ? pt::KVType::F32 : pt::KVType::F16;
      const Layer plain_layer(portable, source, experts);
      const std::vector<float> want = plain_layer.run(portable, x, Layer::kLength, type);
      std::vector<float> whole;
      bool equal = true;
      double worst = 0, size = 0;
      for (auto& e : report.engines) {
        const Layer layer(*e, source, experts);
        for (int chunk : {40, 1, 7}) {
          const std::vector<float> out = layer.run(*e, x, chunk, type);
          if (whole.empty()) whole = out;
          equal &= same(out.data(), whole.data(), whole.size());
        }
      }
      for (size_t i = 0; i < want.size(); i++) {
        worst = std::max(worst, double(std::fabs(whole[i] - want[i]))), size += double(want[i]) * want[i];
        if (std::isnan(whole[i])) worst = INFINITY;
      }
      const std::string what = std::string(experts ? "experts" : "layer") + " of " + name;
      // Rounded activations may fall to the other side of a half.
      report.error(what + ", against portable", worst / std::sqrt(size / double(want.size())),
                   source == pt::Source::F32 ? 2e-5 : 0.05);
      report.equal(what + ", chunks and threads", equal);
    }
}

}  // namespace check
