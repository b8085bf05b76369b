// What works on single rows, sampling, and the thread pool.
#include <functional>

#include "checks.h"

namespace check {
namespace {

// The largest error of got, in parts of |want| + floor.
double worst(const std::vector<float>& got, const std::function<double(int)>& want, double floor) {
  double most = 0;
  for (size_t i = 0; i < got.size(); i++) {
    const double w = want(int(i)), error = std::fabs(got[i] - w) / (std::fabs(w) + floor);
    most = error <= most ? most : error;
  }
  return most;
}

void norms(Report& report, int n) {
  plain::Random dice(uint64_t(n) + 11);
  const std::vector<float> x = dice.normals(n), weight = dice.normals(n), bias = dice.normals(n);
  std::vector<float> out(n);
  double mean = 0, squares = 0, variance = 0;
  for (float v : x) mean += v / double(n), squares += double(v) * v / n;
  for (float v : x) variance += (v - mean) * (v - mean) / n;
  const std::string name = " n=" + std::to_string(n);
  report.kernels().norm(x.data(), weight.data(), 1e-5f, n, out.data());
  const double eps = double(1e-5f);
  report.error("norm" + name,
               worst(out, [&](int i) { return x[i] * weight[i] / std::sqrt(squares + eps); }, 1e-6), 1e-6);
  report.kernels().layer_norm(x.data(), weight.data(), bias.data(), 1e-5f, n, out.data());
  const auto normed = [&](int i) { return (x[i] - mean) / std::sqrt(variance + eps) * weight[i] + bias[i]; };
  report.error("layer norm" + name, worst(out, normed, 1), 2e-6);
}

void activations(Report& report) {
  const int n = 4003;
  std::vector<float> x(n), up(n, 2.0f), out(n);
  for (int i = 0; i < n; i++) x[i] = float(i - n / 2) / 50;
  const auto& k = report.kernels();
  const auto silu = [&](int i) { return x[i] / (1 + std::exp(-double(x[i]))); };
  k.activate(pt::Act::Silu, x.data(), n, out.data());
  report.error("silu", worst(out, silu, 1e-30), 1e-6);
  k.silu_mul(x.data(), up.data(), n, out.data());
  report.error("silu times up", worst(out, [&](int i) { return 2 * silu(i); }, 1e-30), 1e-6);
  k.activate(pt::Act::Gelu, x.data(), n, out.data());
  const auto gelu = [&](int i) { return 0.5 * x[i] * std::erfc(-x[i] * std::sqrt(0.5)); };
  report.error("gelu", worst(out, gelu, 1e-4), 2e-6);
  k.activate(pt::Act::GeluTanh, x.data(), n, out.data());
  const auto tanh_gelu = [&](int i) {
    const double v = x[i], u = std::sqrt(2 / 3.14159265358979323846) * (v + 0.044715 * v * v * v);
    return v / (1 + std::exp(-2 * u));
  };
  report.error("gelu by tanh", worst(out, tanh_gelu, 1e-4), 2e-6);
  k.activate(pt::Act::Relu, x.data(), n, out.data());
  report.error("relu", worst(out, [&](int i) { return std::max(x[i], 0.0f); }, 1), 0);
  k.soft_cap(x.data(), 30, n, out.data());
  report.error("soft cap", worst(out, [&](int i) { return 30 * std::tanh(x[i] / 30.0); }, 1e-3), 1e-6);
}

void rotary(Report& report, bool interleaved) {
  constexpr int heads = 3, dim = 40, half = 16;
  plain::Random dice(5);
  const std::vector<float> x = dice.normals(heads * dim), angle = dice.normals(half);
  std::vector<float> cos(half), sin(half), out = x;
  for (int i = 0; i < half; i++) cos[i] = std::cos(angle[i]), sin[i] = std::sin(angle[i]);
  report.kernels().rope(out.data(), heads, dim, cos.data(), sin.data(), half, interleaved);
  const auto want = [&](int at) {
    const int i = at % dim, base = at - i;
    if (i >= 2 * half) return double(x[at]);
    const int pair = interleaved ? i / 2 : i % half;
    const double a = x[base + (interleaved ? 2 * pair : pair)],
                 b = x[base + (interleaved ? 2 * pair + 1 : pair + half)];
    const bool first = interleaved ? i % 2 == 0 : i < half;
    return first ? a * cos[pair] - b * sin[pair] : a * sin[pair] + b * cos[pair];
  };
  report.error(interleaved ? "rotary, interleaved" : "rotary, halves", worst(out, want, 1), 1e-6);
}

void routing(Report& report) {
  constexpr int experts = 17, k = 4;
  plain::Random dice(9);
  std::vector<float> logits = dice.normals(experts), weights(k);
  logits[3] = logits[11];
  std::vector<int> order(experts), ids(k);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
  std::sort(order.begin(), order.begin() + k);
  double all = 0, chosen = 0;
  for (float l : logits) all += std::exp(double(l));
  for (int i = 0; i < k; i++) chosen += std::exp(double(logits[order[i]]));
  for (bool normalise : {false, true}) {
    report.kernels().route(logits.data(), experts, k, normalise, false, ids.data(), weights.data());
    report.equal("experts chosen", std::equal(ids.begin(), ids.end(), order.begin()));
    const auto share = [&](int i) { return std::exp(double(logits[order[i]])) / (normalise ? chosen : all); };
    report.error("weights of experts", worst(weights, share, 0), 1e-6);
  }
}

// The token that `sample` defines, or -1 where a sum is too near its boundary for double to decide.
int sampled(const std::vector<float>& logits, float temperature, int top_k, float top_p, float min_p,
            float uniform) {
  const int v = int(logits.size());
  std::vector<int> order(v);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
  if (temperature <= 0) return order[0];
  const auto p = [&](int i) { return std::exp((double(logits[i]) - logits[order[0]]) / temperature); };
  constexpr double near = 1e-5;
  if (min_p > 0) {
    for (int i : order)
      if (std::fabs(p(i) - min_p) < near * min_p) return -1;
    order.erase(std::find_if(order.begin(), order.end(), [&](int i) { return p(i) < min_p; }), order.end());
  }
  if (top_k > 0 && top_k < int(order.size())) order.resize(size_t(top_k));
  const auto total = [&] {
    return std::accumulate(order.begin(), order.end(), 0.0, [&](double s, int i) { return s + p(i); });
  };
  if (top_p < 1) {
    const double target = total() * top_p;
    double sum = 0;
    for (size_t i = 0; i < order.size(); i++) {
      sum += p(order[i]);
      if (std::fabs(sum - target) < near * target) return -1;
      if (sum >= target) order.resize(i + 1);
    }
  }
  std::sort(order.begin(), order.end());
  const double target = uniform * total();
  double sum = 0;
  for (int i : order) {
    sum += p(i);
    if (std::fabs(sum - target) < near * total()) return -1;
    if (sum > target) return i;
  }
  return order.back();
}

}  // namespace

void rows(Report& report) {
  for (int n : {1, 7, 64, 576, 1001}) norms(report, n);
  activations(report);
  rotary(report, false);
  rotary(report, true);
  routing(report);
}

void sampling(Report& report) {
  constexpr int draws = 60;
  plain::Random dice(21);
  for (int v : {17, 1003}) {
    std::vector<float> logits(size_t(draws) * v), temperature, top_p, min_p, uniform;
    std::vector<int32_t> top_k, chosen(draws);
    for (float& l : logits) l = 4 * dice.normal();
    for (int i = 0; i < draws; i++) {
      logits[i * v + 3] = logits[i * v + 5];  // ties are broken by id
      temperature.push_back(i % 5 ? 0.5f + float(dice.uniform()) : 0.0f),
          uniform.push_back(float(dice.uniform()));
      top_k.push_back(i % 3 ? 0 : 1 + int(dice.bits() % 20)),
          top_p.push_back(i % 4 ? float(dice.uniform()) : 1.0f);
      min_p.push_back(i % 7 ? 0.0f : 0.05f);
    }
    int decided = 0, right = 0;
    bool equal = true;
    std::vector<int32_t> first;
    for (auto& e : report.engines) {
      e->sample({logits.data(), draws, v},
                {temperature.data(), top_p.data(), min_p.data(), uniform.data(), top_k.data()},
                chosen.data());
      if (first.empty()) first = chosen;
      equal &= first == chosen;
    }
    for (int i = 0; i < draws; i++) {
      const std::vector<float> row(logits.begin() + i * v, logits.begin() + (i + 1) * v);
      const int want = sampled(row, temperature[i], top_k[i], top_p[i], min_p[i], uniform[i]);
      decided += want >= 0, right += want == first[i];
    }
    const std::string name = " v=" + std::to_string(v);
    report.error("tokens drawn otherwise" + name, decided - right, 0);
    report.error("tokens too near a boundary" + name, draws - decided, draws / 10);
    report.equal("threads, tokens drawn" + name, equal);

    constexpr int k = 5;
    std::vector<float> lse(draws), logprobs(draws * k);
    std::vector<int32_t> ids(draws * k);
    report.engine().top_logprobs({logits.data(), draws, v}, k, lse.data(), ids.data(), logprobs.data());
    const auto log_total = [&](int i) {
      double sum = 0;
      for (int j = 0; j < v; j++) sum += std::exp(double(logits[i * v + j]));
      return std::log(sum);
    };
    report.error("log-sum-exp" + name, worst(lse, log_total, 1), 1e-6);
    const auto logprob = [&](int at) {
      const int i = at / k;
      std::vector<float> row(logits.begin() + i * v, logits.begin() + (i + 1) * v);
      std::nth_element(row.begin(), row.begin() + at % k, row.end(), std::greater<float>());
      return row[at % k] - log_total(i);
    };
    report.error("top logprobs" + name, worst(logprobs, logprob, 1), 1e-6);
  }
}

// Rows with NaN, infinities, or nothing else: the token is the first of the largest, NaN being the largest of
// all, and of logprobs there is nothing to tell.
void spoilt(Report& report) {
  constexpr int rows = 6, k = 7;
  plain::Random dice(22);
  for (int v : {9, 64, 1003}) {
    std::vector<float> logits(size_t(rows) * v), lse(rows), logprobs(rows * k);
    std::vector<int32_t> ids(rows * k), chosen(rows), top_k(rows);
    std::vector<float> temperature(rows, 1.0f), top_p(rows, 1.0f), min_p(rows), uniform(rows, 0.9f);
    for (float& l : logits) l = dice.normal();
    logits[v / 2] = NAN, logits[v + v - 1] = -NAN, logits[4 * v + v / 3] = INFINITY;
    for (int j = 0; j < v; j++) {
      logits[2 * v + j] = NAN, logits[3 * v + j] = -INFINITY;
      logits[5 * v + j] = j % 2 ? NAN : INFINITY;
    }
    const std::vector<int32_t> want{v / 2, v - 1, 0, 0, v / 3, 1};
    bool right = true, nothing = true;
    for (int options = 0; options < 4; options++) {
      std::fill(top_k.begin(), top_k.end(), options == 1 ? 3 : 0);
      std::fill(top_p.begin(), top_p.end(), options == 2 ? 0.5f : 1.0f);
      std::fill(min_p.begin(), min_p.end(), options == 3 ? 0.1f : 0.0f);
      report.engine().sample({logits.data(), rows, v},
                             {temperature.data(), top_p.data(), min_p.data(), uniform.data(), top_k.data()},
                             chosen.data());
      right &= chosen == want;
    }
    report.engine().top_logprobs({logits.data(), rows, v}, k, lse.data(), ids.data(), logprobs.data());
    for (float l : lse) nothing &= l != l;
    for (int32_t id : ids) nothing &= id == 0;
    const std::string name = " v=" + std::to_string(v);
    report.equal("tokens of spoilt rows" + name, right);
    report.equal("no logprobs of spoilt rows" + name, nothing);
  }
}

void pool(Report& report) {
  for (int threads : {1, 2, 3, 5, 8, 16, 31, 64}) {
    pt::Pool pool(threads);
    bool once = true;
    for (int round = 0; round < 300; round++) {
      const int count = 1 + round * 7 % 97, grain = 1 + round % 5;
      std::vector<int> seen(count);
      pool.split(count, grain, [&](int begin, int end, int thread) {
        for (int i = begin; i < end; i++) seen[i] += 1 + 1000 * (thread < 0 || thread >= threads);
      });
      for (int s : seen) once &= s == 1;
    }
    report.equal("each piece once, " + std::to_string(threads) + " threads", once);
  }
}

}  // namespace check
