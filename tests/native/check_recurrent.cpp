// Recurrent layers: the same bits in one step, token by token, in odd pieces and on any threads, and outputs
// against the recurrence in double precision.
#include "checks.h"

namespace check {
namespace {

constexpr int kRows = 77, kKeys = 2, kValues = 4, kKeyDim = 24, kValueDim = 48, kTaps = 4;
constexpr int kChannels = 2 * kKeys * kKeyDim + kValues * kValueDim;

// A gated delta net (delta) or Mamba2, whose inputs are those of the convolution.
struct Mixer {
  bool delta;
  pt::KVType type;
  std::vector<float> x, taps, g, beta, skip;
  Mixer(bool delta, pt::KVType type) : delta(delta), type(type) {
    plain::Random dice(5);
    x = dice.normals(kRows * kChannels), taps = dice.normals(kTaps * kChannels), skip = dice.normals(kValues);
    for (float& v : taps) v *= 0.2f;
    for (int i = 0; i < kRows * kValues; i++) {
      g.push_back(float(-dice.uniform() * (i % 3 ? 0.2 : 3))), beta.push_back(float(dice.uniform()) / 4);
    }
  }

  // The outputs of one sequence that is cut into steps of so many rows.
  std::vector<float> run(pt::Engine& engine, const std::vector<int>& cuts) const {
    const int bytes = pt::kv_bytes(type), slots = 4;
    pt::RecurrentView v{nullptr, nullptr, slots,   2,       1,         kChannels,
                        kTaps,   kKeys,   kValues, kKeyDim, kValueDim, bytes};
    std::vector<uint8_t> states(v.slot_layer() * slots, 255), tail(v.block_layer() * 2, 255);
    v.states = states.data(), v.tail = tail.data();
    std::vector<float> y(x.size()), out(kRows * kValues * kValueDim);
    int done = 0;
    for (size_t cut = 0; done < kRows; cut++) {
      const int count = std::min(cuts[cut % cuts.size()], kRows - done), last = done + count - 1;
      pt::RecurrentPlan plan{v, type, 0, count, {}, {}};
      for (int p = done; p <= last;) {
        const int chunk = p / pt::kChunk, offset = p % pt::kChunk;
        const int rows = std::min(pt::kChunk - offset, last + 1 - p);
        const bool kept = chunk == done / pt::kChunk || chunk == last / pt::kChunk;
        const int write = offset + rows == pt::kChunk ? (chunk + 1) % slots : -1;
        plan.chunks.push_back({p - done, rows, offset, kept ? chunk % 2 : -1, write, 0});
        p += rows;
      }
      const int read = done < pt::kChunk ? -1 : done / pt::kChunk % slots;
      plan.sequences.push_back({0, int(plan.chunks.size()), read});
      pt::ConvRows c{};
      float* rows = &y[size_t(done) * kChannels];
      c.x = {&x[size_t(done) * kChannels], kChannels};
      c.weight = taps.data(), c.silu = true, c.out = rows;
      engine.conv_rows(plan, c);
      const int keys = kKeys * kKeyDim;
      for (int r = 0; delta && r < count; r++)
        engine.l2norm({rows + r * kChannels, 0}, {rows + r * kChannels, 1, 2 * keys}, kKeyDim, 1e-6f, 1);
      pt::Linear l{};
      l.delta = delta, l.skip = delta ? nullptr : skip.data();
      l.q = {rows, kChannels}, l.k = {rows + keys, kChannels}, l.v = {rows + 2 * keys, kChannels};
      l.g = &g[size_t(done) * kValues], l.beta = &beta[size_t(done) * kValues];
      l.out = &out[size_t(done) * kValues * kValueDim];
      engine.linear_rows(plan, l);
      done += count;
    }
    return out;
  }

  std::vector<double> plainly() const {
    std::vector<double> y(x.size()), state(kValues * kKeyDim * kValueDim), out;
    for (int r = 0; r < kRows; r++) {
      double* row = &y[size_t(r) * kChannels];
      for (int c = 0; c < kChannels; c++) {
        for (int t = 0; t < kTaps; t++)
          if (r - kTaps + 1 + t >= 0)
            row[c] += double(taps[t * kChannels + c]) * x[size_t(r - kTaps + 1 + t) * kChannels + c];
        row[c] /= 1 + std::exp(-row[c]);
      }
      for (int h = 0; delta && h < 2 * kKeys; h++) {
        double squares = 1e-6;
        for (int d = 0; d < kKeyDim; d++) squares += row[h * kKeyDim + d] * row[h * kKeyDim + d];
        for (int d = 0; d < kKeyDim; d++) row[h * kKeyDim + d] /= std::sqrt(squares);
      }
      for (int h = 0; h < kValues; h++) {
        const double *q = row + h / 2 * kKeyDim, *k = q + kKeys * kKeyDim;
        const double* v = row + 2 * kKeys * kKeyDim + h * kValueDim;
        for (int c = 0; c < kValueDim; c++) {
          double held = 0, sum = delta ? 0 : skip[h] * v[c];
          double* s = &state[size_t(h) * kKeyDim * kValueDim + c];
          for (int d = 0; d < kKeyDim; d++) {
            s[d * kValueDim] *= std::exp(double(g[r * kValues + h]));
            if (delta) held += k[d] * s[d * kValueDim];
          }
          const double u = beta[r * kValues + h] * (v[c] - held);
          for (int d = 0; d < kKeyDim; d++) s[d * kValueDim] += k[d] * u, sum += q[d] * s[d * kValueDim];
          out.push_back(sum);
        }
      }
    }
    return out;
  }
};

}  // namespace

void recurrent(Report& report) {
  for (const bool delta : {true, false})
    for (const pt::KVType type : {pt::KVType::F32, pt::KVType::F16, pt::KVType::BF16}) {
      const Mixer mixer(delta, type);
      const std::string name = std::string(delta ? "delta net" : "mamba2") + " in " +
                               (type == pt::KVType::F32   ? "fp32"
                                : type == pt::KVType::F16 ? "fp16"
                                                          : "bf16");
      const std::vector<float> whole = mixer.run(report.engine(), {kRows});
      const std::vector<double> exact = mixer.plainly();
      double most = 0, error = 0;
      for (size_t i = 0; i < exact.size(); i++) {
        most = std::max(most, std::fabs(exact[i])), error = std::max(error, std::fabs(exact[i] - whole[i]));
      }
      const double bound = type == pt::KVType::F32 ? 2e-6 : type == pt::KVType::F16 ? 2e-3 : 2e-2;
      report.error(name, error / most, bound);
      bool equal = true;
      for (const auto& engine : report.engines)
        for (const std::vector<int>& cuts : {std::vector<int>{kRows}, {1}, {3, 30, 1, 9}, {32}, {31, 2, 1}})
          equal &= same(mixer.run(*engine, cuts).data(), whole.data(), whole.size());
      report.equal(name + ": bits of any cuts and threads", equal);
    }
}

}  // namespace check
