// Products with weights of every format, and the rounding of activations.
#include <cstdio>

#include "checks.h"

namespace check {

Report::Report(const std::string& name) : isa(name) {
  if (name == "pool") return;
  for (int threads : {1, 2, 3, 7}) engines.push_back(std::make_unique<pt::Engine>(threads, isa));
}

void Report::error(const std::string& what, double error, double bound) {
  const bool good = error <= bound;
  std::printf("%-13s %-44s %9.2g (%.0e) %s\n", isa.c_str(), what.c_str(), error, bound,
              good ? "ok" : "FAILED");
  failures_ += !good;
}

void Report::equal(const std::string& what, bool equal) {
  std::printf("%-13s %-44s %s\n", isa.c_str(), what.c_str(), equal ? "equal" : "DIFFERS");
  failures_ += !equal;
}

namespace {

const char* const kNames[pt::kSourceCount] = {"F32",   "F16",   "BF16",  "Q8_0", "Q4_0", "Q4_1",   "Q5_0",
                                              "Q5_1",  "Q4_K",  "Q5_K",  "Q6_K", "Q3_K", "IQ4_NL", "IQ4_XS",
                                              "MXFP4", "TQ1_0", "TQ2_0", "Q4_W", "Q8_W", "T4_W",   "F8_W"};
constexpr int kRows = 75;  // some of the largest tiles, and a rest

// The largest error of x times w, in parts of what the terms of each sum add up to at most.
double product_error(const plain::Weights& w, const pt::Matrix& m, const fixture::Activations& a,
                     const float* out) {
  double worst = 0;
  for (int o = 0; o < w.n; o++) {
    const double largest = w.largest(o);
    for (int r = 0; r < kRows; r++) {
      double want = 0, size = 0;
      for (int i = 0; i < w.k; i++) {
        const double x = m.kind < pt::Kind::Q8 ? a.acts.f32[size_t(r) * w.k + i] : a.value(r, i);
        want += x * w.values[size_t(o) * w.k + i], size += std::fabs(x) * largest;
      }
      const double error = std::fabs(out[size_t(r) * w.n + o] - want) / size;
      worst = error <= worst ? worst : error;
    }
  }
  return worst;
}

// The bits that the activations of a matrix get here.
int used(const pt::Kernels& kernels, const pt::Matrix& m) {
  const unsigned form = kernels.form(m);
  return form & pt::kFifteen ? 15 : form & pt::kTwelve ? 12 : 8;
}

void product(Report& report, pt::Source source, int n, int k, int bits) {
  const plain::Weights w(source, n, k, uint64_t(source) * 1000 + k);
  plain::Random dice(7);
  const std::vector<float> x = dice.normals(size_t(kRows) * k);
  std::vector<float> whole(size_t(kRows) * n), part(whole.size());
  const auto packed = fixture::packed(report.engine(), w, bits);
  const std::string name = std::string(kNames[int(source)]) +
                           (bits == 8 ? "" : " " + std::to_string(bits) + " bits") +
                           " n=" + std::to_string(n) + " k=" + std::to_string(k);
  const auto run = [&](pt::Engine& e, const pt::Weight& weight, int row, int rows, float* out) {
    e.linear({const_cast<float*>(x.data()) + size_t(row) * k, rows, k}, weight.matrix, nullptr, out);
  };
  run(report.engine(), *packed, 0, kRows, whole.data());
  const fixture::Activations a(report.kernels(), x, k, used(report.kernels(), packed->matrix));
  report.error("product " + name, product_error(w, packed->matrix, a, whole.data()), 5e-7);

  if (report.isa.starts_with("amx")) {  // tiles make the same integers, and what follows is the same
    pt::Engine vnni(1, "avx512vnni");
    run(vnni, *fixture::packed(vnni, w, bits), 0, kRows, part.data());
    report.equal("bits of avx512vnni, product " + name, same(part.data(), whole.data(), whole.size()));
  }
  bool equal = true;
  const int most = report.isa.starts_with("amx") ? 64 : 13;  // which has tiles for many rows
  for (auto& e : report.engines) {
    const auto own = fixture::packed(*e, w, bits);
    run(*e, *own, 0, kRows, part.data());
    equal &= same(part.data(), whole.data(), whole.size());
    for (int rows = 1, row = 0; rows <= most;
         row = (row + rows) % (kRows - most), rows += rows < 13 ? 1 : 17) {
      run(*e, *own, row, rows, part.data());
      equal &= same(part.data(), whole.data() + size_t(row) * n, size_t(rows) * n);
    }
  }
  report.equal("rows and threads, product " + name, equal);

  std::vector<double> sum(k), expect(k);
  std::vector<float> row(k);
  double worst = 0;
  for (int o = 0; o < n; o++) {
    report.kernels().unpack_row(packed->matrix, o, row.data());
    for (int i = 0; i < k; i++)
      worst = std::max(worst, std::fabs(row[i] - w.values[size_t(o) * k + i]) / w.largest(o));
  }
  report.error("unpacked " + name, worst, 2e-7);
}

}  // namespace

void products(Report& report) {
  for (int s = 0; s < pt::kSourceCount; s++) {
    const int values = pt::kSources[s].values;
    for (const auto& [n, k] : {std::pair{16, values == 256 ? 256 : 32}, {41, values == 256 ? 768 : 288}}) {
      product(report, pt::Source(s), n, k, 8);
      for (int bits : {12, 15})
        if (pt::kSources[s].kind >= pt::Kind::Q8 && n > 16) product(report, pt::Source(s), n, k, bits);
    }
  }
  product(report, pt::Source::F32, 17, 33, 8);
  product(report, pt::Source::Q4_1, 100, 1536, 8);  // more rows than stay in the cache at once
}

void rounding(Report& report) {
  plain::Random dice(3);
  const int k = 96, rows = 20;
  std::vector<float> x = dice.normals(size_t(rows) * k);
  for (int i = 0; i < pt::kGroup; i++) x[i] = 0, x[pt::kGroup + i] *= 1e-30f, x[2 * pt::kGroup + i] *= 1e30f;
  for (int bits : {8, 12, 15}) {
    if (bits == 12 && report.isa != "avx512vnni") continue;  // the others have nothing cheaper than 15
    const fixture::Activations a(report.kernels(), x, k, bits);
    double worst = 0, sums = 0;
    for (int r = 0; r < rows; r++)
      for (int g = 0; g < k / pt::kGroup; g++) {
        double peak = 0, sum = 0, stored = 0;
        for (int i = g * pt::kGroup; i < (g + 1) * pt::kGroup; i++)
          peak = std::max(peak, double(std::fabs(x[r * k + i]))), sum += a.value(r, i);
        for (int i = g * pt::kGroup; i < (g + 1) * pt::kGroup; i++)
          worst = std::max(worst,
                           peak ? std::fabs(a.value(r, i) - x[r * k + i]) / peak : std::fabs(a.value(r, i)));
        for (int t = 0; t < (bits == 15 ? 2 : 1); t++) stored += a.sum[a.acts.at(t * rows + r, g)];
        if (peak) sums = std::max(sums, std::fabs(stored - sum) / (peak * pt::kGroup));
      }
    const std::string name = bits == 8 ? "" : ", " + std::to_string(bits) + " bits";
    report.error("rounded activations" + name, worst,
                 bits == 15   ? 1.01 / 127 / 256
                 : bits == 12 ? 0.5001 / 119 / 16
                              : 0.5001 / 127);
    report.error("sums of rounded activations" + name, sums, 1e-7);
  }

  bool equal = true;
  const int dim = 64, count = 65536 / dim;  // every fp16 number, and those between
  const auto kv = fixture::storage(count, 1, 1, dim, pt::KVType::F16);
  std::vector<float> in(dim);
  for (int t = 0; t < count; t++) {
    for (int i = 0; i < dim; i++) {
      const double v = plain::half_value(uint16_t(t * dim + i)), step = std::ldexp(std::fabs(v), -12);
      const bool finite = ((t * dim + i) & 0x7fff) < 0x7bff;
      in[i] = finite ? float(v + step * (i % 3 - 1)) : 0;
    }
    report.kernels().kv_write(kv->view, 0, t, in.data(), in.data());
    const uint8_t* stored = kv->view.v(0, t, 0);
    for (int i = 0; i < dim; i++) equal &= plain::half_at(stored + 2 * i) == plain::rounded_to_half(in[i]);
  }
  report.equal("all fp16 numbers, rounded and stored", equal);
}

}  // namespace check
